"""What can be traced: a function with its arguments as shapes; linen and nnx modules become such functions."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from phaze.errors import ImportModelError, PhazeError
from phaze.frontends.stablehlo.name_scopes import tokens

__all__ = ["Leaf", "Source", "explained", "read_source"]

_WRAPPERS = ("value", "raw_value", "_value")
"""Last words of paths that nnx adds to a variable's own."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array among the arguments: its dotted path, the number of its argument, and its shape and type."""

    name: str
    argument: int
    spec: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A function of leaves: `call(values)` with a value for each leaf."""

    name: str
    leaves: tuple[Leaf, ...]
    call: Callable[[list[Any]], Any]
    is_module: bool = False


def read_source(model: Any, inputs: object, options: Mapping[str, object]) -> Source:
    """The function inside a model, and its arguments as the caller gives them."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__}
    if "flax.linen.module.Module" in kinds:
        return _linen(model, inputs, options)
    if "flax.nnx.module.Module" in kinds:
        return _nnx(model, inputs, options)
    for option in ("loss_fn", "targets"):
        if options.get(option) is not None:
            raise ImportModelError(f"{option} goes with linen and nnx modules; a function computes its own loss.")
    args, kwargs = _arguments(model, inputs)
    return _source(_name(model), model, args, kwargs, _argument_names(model, args, kwargs))


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Say what failed where a model's own code raises."""
    try:
        yield
    except PhazeError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ImportModelError(
            f"{what} failed while Phaze traced it on shapes: {type(error).__name__}: {' '.join(lines[:3])[:500]}"
        ) from error


def _name(model: Any) -> str:
    while isinstance(model, partial):
        model = model.func
    return str(getattr(model, "__name__", type(model).__name__))


def _arguments(model: Any, inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
        given = inspect.signature(function)
        given.bind(*args, **kwargs)
        names = [
            name
            for name, parameter in given.parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except TypeError as error:
        raise ImportModelError(
            f"the inputs do not fit {_name(function)}: {error}. Pass a tuple of its arguments or a dict of keywords."
        ) from None
    except ValueError:
        names = []
    numbered = [names[index] if index < len(names) else f"argument{index}" for index in range(len(args))]
    return [*numbered, *kwargs]


def _source(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: list[str],
    *,
    is_module: bool = False,
) -> Source:
    import jax

    flat, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    leaves: list[Leaf] = []
    fixed: list[Any] = []
    for path, value in flat:
        spec = _spec(value)
        fixed.append(value if spec is None else None)
        if spec is not None:
            number = path[1].idx if hasattr(path[1], "idx") else len(args) + list(kwargs).index(path[1].key)
            leaves.append(Leaf(_path_name(names[number], path[2:], leaves), number, spec))
    is_leaf = [_spec(value) is not None for _, value in flat]

    def call(values: list[Any]) -> Any:
        rest = iter(values)
        merged = [next(rest) if varies else value for varies, value in zip(is_leaf, fixed, strict=True)]
        given, keywords = jax.tree_util.tree_unflatten(tree, merged)
        return function(*given, **keywords)

    return Source(name=name, leaves=tuple(leaves), call=call, is_module=is_module)


def _path_name(first: str, path: Any, known: list[Leaf]) -> str:
    import jax

    words = [first, *tokens(jax.tree_util.keystr(path))]
    while len(words) > 1 and words[-1] in _WRAPPERS:
        words.pop()
    name = ".".join(words)
    return name if all(leaf.name != name for leaf in known) else f"{name}.{len(known)}"


def _spec(value: Any) -> Any:
    """Shape and type of an array; None for what stays as it is (a flag, a number of Python, a text)."""
    import jax

    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return None
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    if any(not isinstance(size, int) for size in value.shape):
        raise ImportModelError(f"an input has the dynamic shape {value.shape}; pass fixed sizes.")
    return jax.ShapeDtypeStruct(tuple(value.shape), value.dtype)


def _specs(tree: Any) -> Any:
    import jax

    return jax.tree_util.tree_map(lambda value: value if _spec(value) is None else _spec(value), tree)


def _linen(model: Any, inputs: object, options: Mapping[str, object]) -> Source:
    """`objective(params, state, key, *inputs)`; collections other than params are state, and may be written."""
    import jax

    args, kwargs = _arguments(model, inputs)
    key = jax.eval_shape(lambda: jax.random.key(0))
    inside = _source(type(model).__name__, _initializer(model), args, kwargs, ["" for _ in (*args, *kwargs)])
    with explained(f"{type(model).__name__}.init"):
        variables = jax.eval_shape(inside.call, [leaf.spec for leaf in inside.leaves])
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
    return _source(type(model).__name__, objective, given, kwargs, names, is_module=True)


def _initializer(model: Any) -> Callable[..., Any]:
    def initialize(*args: Any, **kwargs: Any) -> Any:
        import jax

        key = jax.random.key(0)
        return model.init({"params": key, "dropout": key}, *args, **kwargs)

    return initialize


def _nnx(model: Any, inputs: object, options: Mapping[str, object]) -> Source:
    """`objective(params, rest, *inputs)`; what is no Param (random state, statistics) is `rest`."""
    from flax import nnx

    args, kwargs = _arguments(model, inputs)
    definition, parameters, rest = nnx.split(model, nnx.Param, ...)

    def objective(params: Any, rest: Any, targets: Any, *given: Any, **keywords: Any) -> Any:
        return _loss(nnx.merge(definition, params, rest)(*given, **keywords), targets, options)

    names = ["params", "rest", "targets", *_argument_names(model, args, kwargs)]
    given = (_specs(parameters), _specs(rest), options.get("targets"), *args)
    return _source(type(model).__name__, objective, given, kwargs, names, is_module=True)


def _loss(output: Any, targets: Any, options: Mapping[str, object]) -> Any:
    loss_fn: Any = options.get("loss_fn")
    if loss_fn is None:
        return output
    return loss_fn(output) if targets is None else loss_fn(output, targets)
