"""A model as a loss of flat parameters and a flat batch, with the names that plans give its parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from phaze.errors import PlanError

__all__ = ["Model", "read_model"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """`loss(parameters, batch)` of flat lists; specs of both, and what puts the lists together again."""

    loss: Callable[[Sequence[Any], Sequence[Any]], Any]
    names: tuple[str, ...]
    parameters: tuple[Any, ...]
    parameter_tree: Any
    batch: tuple[Any, ...]
    batch_tree: Any


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
    if "flax.nnx.module.Module" in kinds or hasattr(model, "compiler_ir") or not callable(model):
        raise PlanError(
            f"{type(model).__name__} cannot be arranged on a mesh; expected a loss function of (parameters, *batch) or "
            "a linen module that returns its loss. An nnx module becomes such a function by nnx.split and nnx.merge."
        )
    return _model(model, _first_name(model), inputs[0], tuple(inputs[1:]))


def _linen_loss(model: Any, parameters: Any, *batch: Any) -> Any:
    return model.apply({"params": parameters}, *batch)


def _linen_parameters(model: Any, inputs: Sequence[Any]) -> Any:
    import jax

    variables = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    others = sorted(name for name in variables if name != "params")
    if others:
        raise PlanError(
            f"{type(model).__name__} keeps the collections {', '.join(others)} beside its parameters, and a step here "
            "updates parameters only; pass a loss function that closes over them."
        )
    return variables["params"]


def _first_name(function: Any) -> str:
    try:
        return next(iter(inspect.signature(function).parameters))
    except (StopIteration, TypeError, ValueError):
        return "argument0"


def _model(function: Callable[..., Any], first: str, parameters: Any, batch: tuple[Any, ...]) -> Model:
    import jax
    import jax.numpy as jnp

    named, tree = jax.tree_util.tree_flatten_with_path(parameters)
    leaves, batch_tree = jax.tree.flatten(batch)
    for path, leaf in named:
        if not hasattr(leaf, "shape") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise PlanError(f"{first}{jax.tree_util.keystr(path)} is no floating point array; a step trains such only.")

    def loss(own: Sequence[Any], given: Sequence[Any]) -> Any:
        found = function(jax.tree.unflatten(tree, own), *jax.tree.unflatten(batch_tree, given))
        if isinstance(found, tuple | list) or getattr(found, "shape", None) != ():
            raise PlanError(
                "the model returns more than a scalar loss; a plan of a whole train step is applied to its loss: plan "
                "and apply the function that returns the loss alone."
            )
        return found

    found = Model(
        loss=loss,
        names=tuple(".".join((first, *re.findall(r"\w+", jax.tree_util.keystr(path)))) for path, _ in named),
        parameters=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in named),
        parameter_tree=tree,
        batch=tuple(jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves),
        batch_tree=batch_tree,
    )
    jax.eval_shape(loss, found.parameters, found.batch)
    return found
