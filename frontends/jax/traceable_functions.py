"""Turn a JAX function, a linen or an nnx module, with its inputs, into a function of flat arrays that can be traced.

A `TraceableFunction` takes one value for every array among the arguments (a leaf of their pytrees). What is no array (a
flag, a number of Python, a text) keeps the value that the caller gave.

A loss is traced as if its author had not said what backward computes again (`keeping_everything`): that is for a plan
to say. `jax.checkpoint` is an equation that calls another trace, under a policy of what is kept. With the policy that
keeps everything, and without the barriers that stop a compiler from undoing the rest, a loss is lowered as it is
without it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend import core

from phaze.errors import ImportModelError, PhazeError
from phaze.frontends.jax import LINEN_MODULE, NNX_MODULE, NNX_OBJECT, NNX_OPTIMIZER, class_names
from phaze.frontends.stablehlo.name_scopes import path_keys

__all__ = ["CHECKPOINTS", "Leaf", "TraceableFunction", "as_traceable", "explaining_failures", "keeping_everything"]

MOST_ERROR_LINES = 3
"""How many lines of a model's own error are passed on: JAX explains at length what went wrong in the first."""

MOST_ERROR_CHARACTERS = 500
"""Where these lines are cut."""

_NNX_SUFFIXES = ("value", "raw_value", "_value")
"""Last words of paths that nnx adds to a variable's own."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array among the arguments: its dotted path, the number of its argument, and its shape and type."""

    name: str
    argument: int
    spec: jax.ShapeDtypeStruct


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceableFunction:
    """A function of leaves: `call(values)` takes a value for each. `is_module` where it is made of a flax module."""

    name: str
    leaves: tuple[Leaf, ...]
    call: Callable[[list[Any]], Any]
    is_module: bool = False


def as_traceable(model: Any, inputs: object, options: Mapping[str, object]) -> TraceableFunction:
    """The function inside a model, and its arguments as the caller gives them."""
    names = class_names(model)
    if LINEN_MODULE in names:
        return _from_linen(model, inputs, options)
    if NNX_MODULE in names:
        return _from_nnx(model, inputs, options)
    for option in ("loss_fn", "targets"):
        if options.get(option) is not None:
            raise ImportModelError(f"{option} goes with linen and nnx modules; a function computes its own loss.")
    args, kwargs = _arguments(model, inputs)
    if not kwargs and any(NNX_OPTIMIZER in class_names(value) for value in args):
        return _from_nnx_step(model, args)
    return _traceable(_name(model), model, args, kwargs, _argument_names(model, args, kwargs))


_RETURN_ARRAYS = (
    ". It returns something that is no array, as steps of Equinox do whose modules have functions in them: let it take "
    "and return the arrays alone (params, static = equinox.partition(model, equinox.is_array)) and combine both inside."
)
"""What helps where a function returns a tree with other things than arrays."""


@contextlib.contextmanager
def explaining_failures(what: str) -> Iterator[None]:
    """Turn an error of the model's own code into an ImportModelError that names `what` was traced."""
    try:
        yield
    except PhazeError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        text = " ".join(lines[:MOST_ERROR_LINES])[:MOST_ERROR_CHARACTERS]
        hint = _RETURN_ARRAYS if "is not a valid JAX type" in text else ""
        raise ImportModelError(
            f"{what} failed while Phaze traced it on shapes: {type(error).__name__}: {text}{hint}"
        ) from error


def _name(model: Any) -> str:
    while isinstance(model, partial):
        model = model.func
    return str(getattr(model, "__name__", type(model).__name__))


def _arguments(model: Any, inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as positional arguments and keywords."""
    if inputs is None:
        raise ImportModelError(
            f"{_name(model)} needs its arguments: pass inputs, a tuple of arrays, ShapeDtypeStructs or pytrees of them "
            "(or a dict of keywords)."
        )
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _argument_names(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of positional arguments, then of keywords."""
    try:
        signature = inspect.signature(function)
        signature.bind(*args, **kwargs)
        names = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except TypeError as error:
        raise ImportModelError(
            f"the inputs do not fit {_name(function)}: {error}. Pass a tuple of its arguments or a dict of keywords."
        ) from None
    except ValueError:  # a built-in function without a signature
        names = []
    positional = [names[index] if index < len(names) else f"argument{index}" for index in range(len(args))]
    return [*positional, *kwargs]


def _traceable(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: list[str],
    *,
    is_module: bool = False,
) -> TraceableFunction:
    """A function of the arrays among these arguments; `names` are those of the arguments, keywords last."""
    flat, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    leaves: list[Leaf] = []
    fixed: list[Any] = []
    is_leaf: list[bool] = []
    for path, value in flat:
        spec = _spec(value)
        is_leaf.append(spec is not None)
        fixed.append(value if spec is None else None)
        if spec is not None:
            number = path[1].idx if hasattr(path[1], "idx") else len(args) + list(kwargs).index(path[1].key)
            leaves.append(Leaf(_leaf_name(names[number], path[2:], leaves), number, spec))

    def call(values: list[Any]) -> Any:
        remaining = iter(values)
        merged = [next(remaining) if varies else value for varies, value in zip(is_leaf, fixed, strict=True)]
        given, keywords = jax.tree_util.tree_unflatten(tree, merged)
        return function(*given, **keywords)

    return TraceableFunction(name=name, leaves=tuple(leaves), call=call, is_module=is_module)


def _leaf_name(argument: str, path: tuple[Any, ...], earlier: list[Leaf]) -> str:
    """The dotted path of a leaf: its argument, then the keys of the pytree; a number behind it where it is taken."""
    words = [argument, *path_keys(jax.tree_util.keystr(path))]
    while len(words) > 1 and words[-1] in _NNX_SUFFIXES:
        words.pop()
    name = ".".join(words)
    return name if all(leaf.name != name for leaf in earlier) else f"{name}.{len(earlier)}"


def _spec(value: Any) -> jax.ShapeDtypeStruct | None:
    """Shape and type of an array; None for what stays as it is (a flag, a number of Python, a text)."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return None
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    if any(not isinstance(size, int) for size in value.shape):
        raise ImportModelError(f"an input has the dynamic shape {value.shape}; pass fixed sizes.")
    return jax.ShapeDtypeStruct(tuple(value.shape), value.dtype)


def _specs(tree: Any) -> Any:
    """A pytree with shapes in place of its arrays."""

    def spec_or_value(value: Any) -> Any:
        spec = _spec(value)
        return value if spec is None else spec

    return jax.tree_util.tree_map(spec_or_value, tree)


def _from_linen(model: Any, inputs: object, options: Mapping[str, object]) -> TraceableFunction:
    """`objective(params, state, key, *inputs)`; collections other than params are state, and may be written."""
    args, kwargs = _arguments(model, inputs)
    key = jax.eval_shape(lambda: jax.random.key(0))
    unnamed = ["" for _ in (*args, *kwargs)]
    initializer = _traceable(type(model).__name__, _initializer(model), args, kwargs, unnamed)
    with explaining_failures(f"{type(model).__name__}.init"):
        variables = jax.eval_shape(initializer.call, [leaf.spec for leaf in initializer.leaves])
    parameters = variables["params"]
    state = {name: value for name, value in variables.items() if name != "params"}

    def objective(params: Any, state: Any, key: Any, targets: Any, *given: Any, **keywords: Any) -> Any:
        variables = {"params": params, **state}
        output = model.apply(
            variables, *given, rngs={"dropout": key}, mutable=list(state) if state else False, **keywords
        )
        return _loss(output[0] if state else output, targets, options)

    names = ["params", "state", "key", "targets", *_argument_names(model.__call__, args, kwargs)]
    given = (parameters, state, key, options.get("targets"), *args)
    return _traceable(type(model).__name__, objective, given, kwargs, names, is_module=True)


def _initializer(model: Any) -> Callable[..., Any]:
    def initialize(*args: Any, **kwargs: Any) -> Any:
        key = jax.random.key(0)
        return model.init({"params": key, "dropout": key}, *args, **kwargs)

    return initialize


def _from_nnx(model: Any, inputs: object, options: Mapping[str, object]) -> TraceableFunction:
    """`objective(params, rest, *inputs)`; what is no Param (random state, statistics) is `rest`."""
    from flax import nnx  # here and not above: flax is optional, and JAX functions need none

    args, kwargs = _arguments(model, inputs)
    definition, parameters, rest = nnx.split(model, nnx.Param, ...)

    def objective(params: Any, rest: Any, targets: Any, *given: Any, **keywords: Any) -> Any:
        return _loss(nnx.merge(definition, params, rest)(*given, **keywords), targets, options)

    names = ["params", "rest", "targets", *_argument_names(model, args, kwargs)]
    given = (_specs(parameters), _specs(rest), options.get("targets"), *args)
    return _traceable(type(model).__name__, objective, given, kwargs, names, is_module=True)


def _from_nnx_step(model: Any, args: tuple[Any, ...]) -> TraceableFunction:
    """A step that changes a model and an optimizer of nnx in place, as one of (state, *batch) that returns the state.

    The state has the arrays of all objects of nnx among the arguments, the first module's under "model".
    """
    from flax import nnx  # here and not above: flax is optional, and JAX functions need none

    names = _argument_names(model, args, {})
    objects = {place: value for place, value in enumerate(args) if NNX_OBJECT in class_names(value)}
    first_module = next((place for place, value in objects.items() if NNX_MODULE in class_names(value)), None)
    keys = {place: "model" if place == first_module else f"object{place}" for place in objects}
    definition, state = nnx.split({keys[place]: value for place, value in objects.items()})

    def step(state: Any, *others: Any) -> Any:
        merged, remaining = nnx.merge(definition, state), iter(others)
        result = model(*(merged[keys[place]] if place in keys else next(remaining) for place in range(len(args))))
        return nnx.state(merged), result

    others = [place for place in range(len(args)) if place not in keys]
    given = (_specs(state), *(args[place] for place in others))
    return _traceable(_name(model), step, given, {}, ["state", *(names[place] for place in others)])


def _loss(output: Any, targets: Any, options: Mapping[str, object]) -> Any:
    loss_fn: Any = options.get("loss_fn")
    if loss_fn is None:
        return output
    return loss_fn(output) if targets is None else loss_fn(output, targets)


CHECKPOINTS = frozenset({"remat2", "checkpoint"})
"""The primitives of `jax.checkpoint`, by name, in different versions of JAX."""


def keeping_everything(function: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
    """The function of these arguments without what its checkpoints drop; itself where it has none."""
    closed, output = jax.make_jaxpr(function, return_shape=True)(*specs)
    changed = _changed(closed.jaxpr)
    if changed is closed.jaxpr:
        return function
    run = core.jaxpr_as_fun(core.ClosedJaxpr(changed, closed.consts))
    structure = jax.tree_util.tree_structure(output)

    def keeping(*arguments: Any) -> Any:
        return jax.tree_util.tree_unflatten(structure, run(*jax.tree_util.tree_leaves(arguments)))

    return keeping


def _changed(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The same trace with checkpoints that keep everything; itself where there are none inside of it."""
    equations = []
    for equation in jaxpr.eqns:
        params = {name: _changed_value(value) for name, value in equation.params.items()}
        if str(equation.primitive) in CHECKPOINTS:
            params |= {"policy": jax.checkpoint_policies.everything_saveable, "prevent_cse": False}
        is_same = all(params[name] is value for name, value in equation.params.items())
        equations.append(equation if is_same else equation.replace(params=params))
    if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=equations)


def _changed_value(value: Any) -> Any:
    """A parameter of an equation, with the traces in it changed."""
    if isinstance(value, core.ClosedJaxpr):
        changed = _changed(value.jaxpr)
        return value if changed is value.jaxpr else core.ClosedJaxpr(changed, value.consts)
    if isinstance(value, core.Jaxpr):
        return _changed(value)
    if isinstance(value, tuple) and any(isinstance(item, core.ClosedJaxpr | core.Jaxpr) for item in value):
        items = tuple(_changed_value(item) for item in value)
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return value
