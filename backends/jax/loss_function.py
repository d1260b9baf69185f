"""The user's model as a loss function of flat parameters and a flat batch, and how that batch is divided.

Functions, linen modules and nnx modules all become a `LossFunction`, with the names that plans give its parameters.
Data-parallel copies and microbatches divide a batch by its rows; each argument of the batch has a `BatchShare` that
says what of it one microbatch gets.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from phaze.errors import PhazeError, PlanError

__all__ = [
    "Arguments",
    "BatchShare",
    "LossFunction",
    "MicroBatches",
    "PyTree",
    "batch_share",
    "divide_batch",
    "is_a",
    "is_nnx_module",
    "path_words",
    "read_loss_function",
    "user_parameters",
]

PyTree: TypeAlias = Any
"""Nested containers of arrays (or of what stands for arrays), as JAX understands them: it has no narrower type."""

_NNX_WRAPPERS = ("value", "raw_value", "_value")
"""Last words that nnx adds to the path of a variable."""

_RAW_KEY_SHAPES = ((2,), (4,))
"""Shapes of random keys that are plain arrays: two words of threefry, four of rbg."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arguments:
    """Trees whose leaves are arrays that vary, and other values, which are part of the program.

    Attributes:
        structure: the tree of all leaves.
        specs: shape and type of each array that varies.
        fixed: the other values, by their place among all leaves.
    """

    structure: PyTreeDef
    specs: tuple[jax.ShapeDtypeStruct, ...]
    fixed: Mapping[int, object]

    def with_arrays(self, arrays: Sequence[object]) -> PyTree:
        """The trees, with these arrays in their places."""
        remaining = iter(arrays)
        count = len(self.specs) + len(self.fixed)
        leaves = [self.fixed[place] if place in self.fixed else next(remaining) for place in range(count)]
        return jax.tree.unflatten(self.structure, leaves)

    def arrays_of(self, given: PyTree, what: str) -> list[jax.Array]:
        """The arrays that vary among given ones; raises PlanError where they are not what was planned.

        `what` begins the message: "the batch has".
        """
        leaves, structure = jax.tree.flatten(given)
        if structure != self.structure:
            raise PlanError(f"{what} the structure {structure}; the plan was made for {self.structure}.")
        for place, value in self.fixed.items():
            if not _is_same(leaves[place], value):
                raise PlanError(f"{what} {leaves[place]!r} where the inputs of the plan had {value!r}.")
        return [leaf for place, leaf in enumerate(leaves) if place not in self.fixed]


def _is_same(value: object, planned: object) -> bool:
    """Whether a value that is part of the program is the planned one; of arrays, numbers count."""
    if hasattr(planned, "shape"):
        return bool(jnp.shape(value) == jnp.shape(planned) and np.array_equal(value, planned))  # type: ignore[arg-type]
    return type(value) is type(planned) and bool(value == planned)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossFunction:
    """`loss(parameters, batch)` of flat lists, and what puts the lists together again.

    Attributes:
        loss: the scalar loss.
        names: the dotted path of each parameter, as plans name it.
        structure: the tree of the user's parameters, without what is not trained.
        arguments: the user's parameters: floating point arrays are trained, all else in their tree is fixed.
        batch: the other arguments; their arrays vary.
    """

    loss: Callable[[Sequence[jax.Array], Sequence[jax.Array]], jax.Array]
    names: tuple[str, ...]
    structure: PyTreeDef
    arguments: Arguments
    batch: Arguments

    @property
    def parameters(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and type of each parameter."""
        return self.arguments.specs


def read_loss_function(model: object, inputs: object, loss_fn: object = None, targets: object = None) -> LossFunction:
    """The loss inside a model that was planned with these inputs (arrays, or their shapes).

    `loss_fn` makes a loss of what a module returns, and of `targets`, where given: then a batch has them last.

    Raises PlanError for what has no loss that could be differentiated here: whole train steps, lowered functions.
    """
    if inputs is None:
        raise PlanError(
            "a JAX model is arranged for given shapes: pass inputs= as optimize took them, for example "
            "plan.apply(loss, inputs=(params, batch))."
        )
    if isinstance(inputs, Mapping) or not isinstance(inputs, tuple | list):
        raise PlanError(f"inputs is a {type(inputs).__name__}; expected a tuple of positional arguments.")
    batch = tuple(inputs) if targets is None else (*inputs, targets)
    if is_a(model, "flax.linen.module.Module"):
        parameters = _linen_parameters(model, inputs)
        return _loss_function(_with_loss(partial(_linen_loss, model), loss_fn, targets), "params", parameters, batch)
    if is_nnx_module(model):
        loss, parameters = _nnx_loss(model)
        return _loss_function(_with_loss(loss, loss_fn, targets), "params", parameters, batch)
    if loss_fn is not None or targets is not None:
        raise PlanError(
            "loss_fn and targets go with modules of flax; a function computes its own loss: plan and apply one such as "
            "lambda params, x, y: loss_fn(model.apply({'params': params}, x), y)."
        )
    if hasattr(model, "compiler_ir") or not callable(model) or not inputs:
        raise PlanError(
            f"{type(model).__name__} cannot be arranged on a mesh; expected a loss function of (parameters, *batch) or "
            "a linen or nnx module that returns its loss."
        )
    return _loss_function(model, _first_argument_name(model), inputs[0], tuple(inputs[1:]))


def _with_loss(run: Callable[..., Any], loss_fn: Any, targets: object) -> Callable[..., Any]:
    """A module's function of (parameters, *inputs) with the loss of its output behind it."""
    if loss_fn is None:
        return run
    if targets is None:
        return lambda parameters, *batch: loss_fn(run(parameters, *batch))
    return lambda parameters, *batch: loss_fn(run(parameters, *batch[:-1]), batch[-1])


def _linen_loss(model: Any, parameters: PyTree, *batch: PyTree) -> jax.Array:
    return model.apply({"params": parameters}, *batch)


def _linen_parameters(model: Any, inputs: Sequence[PyTree]) -> PyTree:
    def initialize(*arguments: PyTree) -> PyTree:
        key = jax.random.key(0)
        return model.init({"params": key, "dropout": key}, *arguments)

    variables = jax.eval_shape(initialize, *inputs)
    _refuse_other_state(model, sorted(name for name in variables if name != "params"))
    _refuse_linen_noise(model, variables["params"], inputs)
    return variables["params"]


def _refuse_linen_noise(model: object, parameters: PyTree, inputs: Sequence[PyTree]) -> None:
    from flax.errors import InvalidRngError  # here, because only a model of flax brings flax along

    try:
        jax.eval_shape(partial(_linen_loss, model), parameters, *inputs)
    except InvalidRngError as error:
        raise PlanError(
            f"{type(model).__name__} draws random numbers (dropout), and a step here has no key for it; plan and apply "
            "a loss function that takes a key: lambda params, key, *batch: model.apply({'params': params}, *batch, "
            "rngs={'dropout': key})."
        ) from error


def _nnx_loss(model: object) -> tuple[Callable[..., jax.Array], PyTree]:
    """The module as a function of its parameters, and these parameters."""
    from flax import nnx  # here, because only a model of flax brings flax along

    definition, parameters, other_state = nnx.split(model, nnx.Param, ...)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(other_state)]
    _refuse_other_state(model, [".".join(re.findall(r"\w+", path)) for path in paths])
    return lambda given, *batch: nnx.merge(definition, given, other_state)(*batch), parameters


def _refuse_other_state(model: object, names: Sequence[str]) -> None:
    if names:
        raise PlanError(
            f"{type(model).__name__} keeps {', '.join(names)} beside its parameters, and a step here updates "
            "parameters only; pass a loss function that closes over them (with takes_mean=True where it takes means of "
            "a batch inside), or that takes a key as an argument."
        )


def _first_argument_name(function: Callable[..., object]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters))
    except (StopIteration, TypeError, ValueError):
        return "argument0"


def _loss_function(
    function: Callable[..., object], first_argument: str, parameters: PyTree, arguments: tuple[PyTree, ...]
) -> LossFunction:
    leaves_with_paths, _ = jax.tree_util.tree_flatten_with_path(parameters)
    if any("opt_state" in path_words(path) for path, _ in leaves_with_paths):
        raise PlanError(
            f"{first_argument} is a whole training state, and a loss is arranged by its parameters alone; plan "
            "and apply the whole step (state, batch) -> (state, metrics), or a loss of state.params."
        )
    trained = _arguments(parameters, _is_trained)
    if not trained.specs:
        raise PlanError(f"{first_argument} has no floating point array, so that there is nothing to train.")
    for path, leaf in leaves_with_paths:
        if isinstance(leaf, jax.ShapeDtypeStruct) and not _is_trained(leaf):
            name = f"{first_argument}{jax.tree_util.keystr(path)}"
            raise PlanError(f"{name} is not trained, and its value is part of the step; pass an array, not a shape.")
    batch = _arguments(arguments, _is_array)
    found_metrics: list[bool] = []

    def loss(flat_parameters: Sequence[jax.Array], flat_batch: Sequence[jax.Array]) -> jax.Array:
        result = function(trained.with_arrays(flat_parameters), *batch.with_arrays(flat_batch))
        if _has_metrics(result):
            found_metrics.append(True)
            result = result[0]  # type: ignore[index]
        if isinstance(result, tuple | list) or getattr(result, "shape", None) != ():
            raise PlanError(
                "the model returns more than a scalar loss, and no new state either; plan and apply the function that "
                "returns the loss alone, or a whole step that returns the state it was given, updated."
            )
        return result

    loss_function = LossFunction(
        loss=loss,
        names=tuple(
            ".".join((first_argument, *path_words(path))) for path, leaf in leaves_with_paths if _is_trained(leaf)
        ),
        structure=jax.tree.structure(jax.tree.map(lambda leaf: leaf if _is_trained(leaf) else None, parameters)),
        arguments=trained,
        batch=batch,
    )
    try:
        jax.eval_shape(loss, loss_function.parameters, batch.specs)
    except PhazeError:
        raise
    except Exception as error:
        raise PlanError(f"the loss failed while it was traced: {type(error).__name__}: {str(error)[:500]}") from error
    if found_metrics:
        _say_what_is_left_out()
    return loss_function


def _has_metrics(result: object) -> bool:
    """Whether a function returns a scalar loss and something beside it, as `jax.value_and_grad(has_aux=True)` takes."""
    return isinstance(result, tuple) and len(result) == 2 and getattr(result[0], "shape", None) == ()


def _say_what_is_left_out() -> None:
    """Warn of metrics that a loss returns: microbatches have metrics of their own, which nothing here joins."""
    warnings.warn(
        "the loss returns something beside it (has_aux), which a step here leaves out: it returns the state and the "
        "loss. Plan and apply a whole train step, which returns what it says.",
        UserWarning,
        stacklevel=2,
    )


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_trained(leaf: Any) -> bool:
    return _is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _arguments(trees: PyTree, varies: Callable[[object], bool]) -> Arguments:
    leaves, structure = jax.tree.flatten(trees)
    arrays = {place: leaf for place, leaf in enumerate(leaves) if varies(leaf)}
    return Arguments(
        structure=structure,
        specs=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arrays.values()),
        fixed={place: leaf for place, leaf in enumerate(leaves) if place not in arrays},
    )


def is_nnx_module(model: object) -> bool:
    """Whether this is a module of flax.nnx."""
    return is_a(model, "flax.nnx.module.Module")


def is_a(model: object, class_name: str) -> bool:
    """Whether a model is of a class, by the class's whole name: flax is imported for those who use it only."""
    return any(f"{kind.__module__}.{kind.__name__}" == class_name for kind in type(model).__mro__)


def user_parameters(given: PyTree) -> PyTree:
    """The tree of parameters in what users pass as such; nnx modules and what linen's `init` gives have it inside."""
    if is_nnx_module(given):
        from flax import nnx  # here, because only a model of flax brings flax along

        return nnx.state(given, nnx.Param)
    return given["params"] if isinstance(given, Mapping) and set(given) == {"params"} else given


def path_words(path: jax.tree_util.KeyPath) -> tuple[str, ...]:
    """The keys on the way to an array, as plans name them."""
    words = re.findall(r"\w+", jax.tree_util.keystr(path))
    while len(words) > 1 and words[-1] in _NNX_WRAPPERS:
        words.pop()
    return tuple(words)


class BatchShare(StrEnum):
    """What of an argument one microbatch gets: rows of its own, or all of it."""

    ROWS = "rows"
    WHOLE = "whole"


def batch_share(spec: jax.ShapeDtypeStruct, batch_size: int) -> BatchShare:
    """The share that an argument's type and first dimension tell; keys are whole (see `trace_rewriting.py`)."""
    is_key = jax.dtypes.issubdtype(spec.dtype, jax.dtypes.prng_key)
    is_raw_key = str(spec.dtype) == "uint32" and spec.shape in _RAW_KEY_SHAPES
    has_rows = spec.shape[:1] == (batch_size,) and not is_key and not is_raw_key
    return BatchShare.ROWS if has_rows else BatchShare.WHOLE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatches:
    """The batch of one data-parallel copy, cut into microbatches.

    Attributes:
        arguments: the arrays of the batch; those with rows have the shape (count, micro_batch_size, ...).
        shares: what of each argument a microbatch gets.
        count: how many microbatches there are.
        dtypes: the type in which the loss reads each argument; None for the type in which it comes.
        row_axes: the mesh axes that divide the rows, where the loss reads, behind its arguments, the number of its
            first row in the whole batch; None where it does not.
        totals: what else it reads, the same for all microbatches.
    """

    arguments: tuple[jax.Array, ...]
    shares: tuple[BatchShare, ...]
    count: int
    dtypes: tuple[DTypeLike | None, ...]
    row_axes: tuple[str, ...] | None
    totals: tuple[jax.Array, ...] = ()

    def arguments_of(self, number: jax.Array | int) -> list[jax.Array]:
        """The arguments of one microbatch."""
        arguments = []
        for argument, share, dtype in zip(self.arguments, self.shares, self.dtypes, strict=True):
            value = argument
            if share is BatchShare.ROWS:
                is_only_one = self.count == 1
                value = argument[0] if is_only_one else jax.lax.dynamic_index_in_dim(argument, number, keepdims=False)
            arguments.append(value if dtype is None else value.astype(dtype))
        return [*arguments, self._first_row(number), *self.totals] if self.row_axes else arguments

    def _first_row(self, number: jax.Array | int) -> jax.Array:
        rows = next(
            value.shape[1] for value, share in zip(self.arguments, self.shares, strict=True) if share is BatchShare.ROWS
        )
        micro_batch = jax.lax.axis_index(self.row_axes) * self.count + number
        return (micro_batch * rows).astype(jnp.uint32)


def divide_batch(
    arguments: Sequence[jax.Array],
    shares: Sequence[BatchShare],
    micro_batch_size: int,
    dtypes: Sequence[DTypeLike | None],
    *,
    row_axes: tuple[str, ...] | None,
) -> MicroBatches:
    """The part of a batch that one data-parallel copy has, in microbatches."""
    rows = next(value.shape[0] for value, share in zip(arguments, shares, strict=True) if share is BatchShare.ROWS)
    count = rows // micro_batch_size
    return MicroBatches(
        arguments=tuple(
            value.reshape(count, micro_batch_size, *value.shape[1:]) if share is BatchShare.ROWS else value
            for value, share in zip(arguments, shares, strict=True)
        ),
        shares=tuple(shares),
        count=count,
        dtypes=tuple(dtypes),
        row_axes=row_axes,
    )
