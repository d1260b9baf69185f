"""A model as a loss of flat parameters and a flat batch, with the names that plans give its parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from phaze.errors import PhazeError, PlanError

__all__ = ["Batch", "Model", "read_model"]

_WRAPPERS = ("value", "raw_value", "_value")
"""Last words of paths that nnx adds to a variable's own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The arguments behind the parameters: arrays, and values of Python, which are part of the program.

    `specs` has the shape and type of each array; `fixed` has the other values by place.
    """

    tree: Any
    specs: tuple[Any, ...]
    fixed: Mapping[int, Any]

    def whole(self, arrays: Sequence[Any]) -> Any:
        """The arguments with these arrays."""
        import jax

        rest = iter(arrays)
        count = len(self.specs) + len(self.fixed)
        leaves = [self.fixed[place] if place in self.fixed else next(rest) for place in range(count)]
        return jax.tree.unflatten(self.tree, leaves)

    def arrays(self, batch: Any) -> list[Any]:
        """The arrays among given arguments; raises PlanError where they are not what was planned."""
        import jax

        leaves, tree = jax.tree.flatten(batch)
        if tree != self.tree:
            raise PlanError(f"the batch has the structure {tree}; the plan was made for {self.tree}.")
        for place, value in self.fixed.items():
            if type(leaves[place]) is not type(value) or leaves[place] != value:
                raise PlanError(f"argument {leaves[place]!r} of the batch was {value!r} in the inputs of the plan.")
        return [leaf for place, leaf in enumerate(leaves) if place not in self.fixed]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """`loss(parameters, batch)` of flat lists, and what puts the lists together again."""

    loss: Callable[[Sequence[Any], Sequence[Any]], Any]
    names: tuple[str, ...]
    parameters: tuple[Any, ...]
    tree: Any
    batch: Batch


def read_model(model: Any, inputs: object) -> Model:
    """The loss inside a model that was planned with these inputs (arrays, or their shapes).

    Raises PlanError for what has no loss that could be differentiated here: whole train steps, lowered functions.
    """
    if inputs is None:
        raise PlanError(
            "a JAX model is arranged for given shapes: pass inputs= as optimize took them, for example "
            "plan.apply(loss, inputs=(params, batch))."
        )
    if isinstance(inputs, Mapping) or not isinstance(inputs, tuple | list):
        raise PlanError(f"inputs is a {type(inputs).__name__}; expected a tuple of positional arguments.")
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__}
    if "flax.linen.module.Module" in kinds:
        return _model(partial(_linen_loss, model), "params", _linen_parameters(model, inputs), tuple(inputs))
    if "flax.nnx.module.Module" in kinds:
        loss, parameters = _nnx_loss(model)
        return _model(loss, "params", parameters, tuple(inputs))
    if hasattr(model, "compiler_ir") or not callable(model) or not inputs:
        raise PlanError(
            f"{type(model).__name__} cannot be arranged on a mesh; expected a loss function of (parameters, *batch) or "
            "a linen or nnx module that returns its loss."
        )
    return _model(model, _first_name(model), inputs[0], tuple(inputs[1:]))


def _linen_loss(model: Any, parameters: Any, *batch: Any) -> Any:
    return model.apply({"params": parameters}, *batch)


def _linen_parameters(model: Any, inputs: Sequence[Any]) -> Any:
    import jax

    def initialize(*given: Any) -> Any:
        key = jax.random.key(0)
        return model.init({"params": key, "dropout": key}, *given)

    variables = jax.eval_shape(initialize, *inputs)
    _refuse_state(model, sorted(name for name in variables if name != "params"))
    _refuse_noise(model, variables["params"], inputs)
    return variables["params"]


def _refuse_noise(model: Any, parameters: Any, inputs: Sequence[Any]) -> None:
    import jax
    from flax.errors import InvalidRngError

    try:
        jax.eval_shape(partial(_linen_loss, model), parameters, *inputs)
    except InvalidRngError as error:
        raise PlanError(
            f"{type(model).__name__} draws random numbers (dropout), and a step here has no key for it; plan and apply "
            "a loss function that takes a key: lambda params, key, *batch: model.apply({'params': params}, *batch, "
            "rngs={'dropout': key})."
        ) from error


def _nnx_loss(model: Any) -> tuple[Callable[..., Any], Any]:
    """The module as a function of its parameters, and these."""
    import jax
    from flax import nnx

    definition, parameters, rest = nnx.split(model, nnx.Param, ...)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(rest)]
    _refuse_state(model, [".".join(re.findall(r"\w+", path)) for path in paths])
    return lambda own, *batch: nnx.merge(definition, own, rest)(*batch), parameters


def _refuse_state(model: Any, names: Sequence[str]) -> None:
    if names:
        raise PlanError(
            f"{type(model).__name__} keeps {', '.join(names)} beside its parameters, and a step here updates "
            "parameters only; pass a loss function that closes over them (with takes_mean=True where it takes means of "
            "a batch inside), or that takes a key as an argument."
        )


def _first_name(function: Any) -> str:
    try:
        return next(iter(inspect.signature(function).parameters))
    except (StopIteration, TypeError, ValueError):
        return "argument0"


def _model(function: Callable[..., Any], first: str, parameters: Any, arguments: tuple[Any, ...]) -> Model:
    import jax
    import jax.numpy as jnp

    named, tree = jax.tree_util.tree_flatten_with_path(parameters)
    batch = _batch(arguments)
    for path, leaf in named:
        if not hasattr(leaf, "shape") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise PlanError(f"{first}{jax.tree_util.keystr(path)} is no floating point array; a step trains such only.")

    def loss(own: Sequence[Any], given: Sequence[Any]) -> Any:
        found = function(jax.tree.unflatten(tree, own), *batch.whole(given))
        if isinstance(found, tuple | list) or getattr(found, "shape", None) != ():
            raise PlanError(
                "the model returns more than a scalar loss; a plan of a whole train step is applied to its loss: plan "
                "and apply the function that returns the loss alone."
            )
        return found

    found = Model(
        loss=loss,
        names=tuple(_name(first, path) for path, _ in named),
        parameters=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in named),
        tree=tree,
        batch=batch,
    )
    try:
        jax.eval_shape(loss, found.parameters, batch.specs)
    except PhazeError:
        raise
    except Exception as error:
        raise PlanError(f"the loss failed while it was traced: {type(error).__name__}: {str(error)[:500]}") from error
    return found


def _batch(arguments: tuple[Any, ...]) -> Batch:
    import jax

    leaves, tree = jax.tree.flatten(arguments)
    arrays = {place: leaf for place, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}
    return Batch(
        tree=tree,
        specs=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arrays.values()),
        fixed={place: leaf for place, leaf in enumerate(leaves) if place not in arrays},
    )


def _name(first: str, path: Any) -> str:
    import jax

    words = [first, *re.findall(r"\w+", jax.tree_util.keystr(path))]
    while len(words) > 1 and words[-1] in _WRAPPERS:
        words.pop()
    return ".".join(words)
