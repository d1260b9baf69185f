"""Fused parameters, such as query, key and value side by side: how a tensor is seen with one dimension as two.

The tensor axis cuts every part of a fused dimension: the columns of a fused projection are query, key and value side by
side, and each device has its heads of all three. No sharding of one dimension says so, but a sharding of two, (parts,
part), does. So a parameter that is stored like this, and what is made with it, keep that view through elementwise
equations and broadcasts until a split, a slice or a reshape separates the parts. Any other equation sees the tensor
flat, for which the compiler must gather it. Where the parts are heads, of which there are fewer than devices, each
device has a piece of every head; the compiler finds no way from that to whole heads, and is told to gather them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import jax
from jax.extend import core
from jax.sharding import PartitionSpec

from phaze.backends.jax.traced_loss import Equation, primitive_name, read_variables, run_equation

__all__ = ["FusedView", "join_parts", "separate_parts", "with_fused_views"]


_ELEMENTWISE = frozenset(
    {
        *("abs", "add", "add_any", "convert_element_type", "copy", "div", "erf", "exp", "integer_pow", "log"),
        *("logistic", "max", "min", "mul", "neg", "rsqrt", "select_n", "sqrt", "sub", "tanh"),
    }
)
"""Primitives that may run on views as they are, because they treat every element alike."""


_TAKES = frozenset({"slice", "dynamic_slice", "split", "gather"})
"""Primitives that take single parts."""


@dataclass(frozen=True, slots=True)
class FusedView:
    """The dimension, as the trace has it, that is seen as two: (parts, part)."""

    dim: int
    parts: int


def separate_parts(value: jax.Array, dim: int | None, parts: int) -> jax.Array:
    """A flat tensor, seen with its parts apart."""
    assert dim is not None
    return value.reshape(*value.shape[:dim], parts, -1, *value.shape[dim + 1 :])


def join_parts(value: jax.Array, dim: int) -> jax.Array:
    """A tensor that is seen with its parts apart, flat again."""
    return value.reshape(*value.shape[:dim], -1, *value.shape[dim + 2 :])


class _Effect(StrEnum):
    """What an equation does with operands that are views."""

    ELEMENTWISE = "elementwise"
    BROADCAST = "broadcast"
    SPLIT = "split"
    SLICE = "slice"
    RESHAPE = "reshape"
    HEADS = "heads"
    NEEDS_FLAT = "needs flat"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EquationOnViews:
    """An equation of which some operands are views (`views`, None for the others).

    It is an equation of the trace, unless its effect is NEEDS_FLAT: then it may also be one of ours.
    """

    equation: core.JaxprEqn
    views: tuple[FusedView | None, ...]
    effect: _Effect

    @property
    def invars(self) -> list[core.Var]:
        """The variables that the equation reads."""
        return list(self.equation.invars)

    @property
    def outvars(self) -> list[core.Var]:
        """The variables that the equation makes."""
        return list(self.equation.outvars)

    def run(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The equation's results, as views or separate parts where that is possible."""
        view = next(view for view in self.views if view is not None)
        match self.effect:
            case _Effect.ELEMENTWISE:
                return run_equation(self.equation, operands)
            case _Effect.BROADCAST:
                return [self._broadcast(operands[0], view)]
            case _Effect.SPLIT:
                return [part.squeeze(view.dim) for part in _parts(operands[0], view)]
            case _Effect.SLICE:
                number = self.equation.params["start_indices"][view.dim] // self._part_size(view)
                return [_parts(operands[0], view)[number].squeeze(view.dim)]
            case _Effect.RESHAPE:
                return [operands[0].reshape(self.equation.params["new_sizes"])]
            case _Effect.HEADS:
                whole = jax.lax.with_sharding_constraint(operands[0], PartitionSpec())
                return [whole.reshape(self.equation.params["new_sizes"])]
            case _Effect.NEEDS_FLAT:
                pairs = zip(operands, self.views, strict=True)
                flat = [value if its_view is None else join_parts(value, its_view.dim) for value, its_view in pairs]
                return run_equation(self.equation, flat)

    def _part_size(self, view: FusedView) -> int:
        return int(self.equation.invars[0].aval.shape[view.dim]) // view.parts

    def _broadcast(self, value: jax.Array, view: FusedView) -> jax.Array:
        dims, shape = self.equation.params["broadcast_dimensions"], list(self.equation.params["shape"])
        fused_dim = dims[view.dim]
        shape[fused_dim : fused_dim + 1] = [view.parts, shape[fused_dim] // view.parts]
        shifted_dims = [dim + (dim > fused_dim) for dim in dims]
        shifted_dims.insert(view.dim + 1, fused_dim + 1)
        return jax.lax.broadcast_in_dim(value, tuple(shape), tuple(shifted_dims))


def _parts(value: jax.Array, view: FusedView) -> list[jax.Array]:
    return [jax.lax.slice_in_dim(value, part, part + 1, axis=view.dim) for part in range(view.parts)]


def with_fused_views(equations: Sequence[Equation], viewed: Mapping[core.Var, FusedView]) -> list[Equation]:
    """The equations, each of which knows which of its operands are views, given the variables that enter as views."""
    views = dict(viewed)
    rewritten: list[Equation] = []
    for equation in equations:
        operand_views = tuple(
            None if isinstance(variable, core.Literal) else views.get(variable) for variable in equation.invars
        )
        if not views or all(view is None for view in operand_views):
            rewritten.append(equation)
            continue
        effect, result_view = _effect(equation, operand_views)
        if effect is _Effect.RESHAPE and _makes_heads(equation, operand_views, equations):
            effect = _Effect.HEADS
        if result_view is not None:
            views[equation.outvars[0]] = result_view
        rewritten.append(_EquationOnViews(equation=equation, views=operand_views, effect=effect))
    return rewritten


def _effect(equation: Equation, views: Sequence[FusedView | None]) -> tuple[_Effect, FusedView | None]:
    """What an equation does with views, and the view of its result where that is one."""
    if not isinstance(equation, core.JaxprEqn):
        return _Effect.NEEDS_FLAT, None
    name, params = primitive_name(equation), equation.params
    view = next(view for view in views if view is not None)
    shape, result_shape = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    operands = list(zip(equation.invars, views, strict=True))
    fused_size = max(variable.aval.shape[its_view.dim] for variable, its_view in operands if its_view)
    part_size = fused_size // view.parts
    is_alike = all(its_view == view or variable.aval.shape == () for variable, its_view in operands)
    if name in _ELEMENTWISE and is_alike:
        return _Effect.ELEMENTWISE, view
    if name == "broadcast_in_dim" and result_shape[params["broadcast_dimensions"][view.dim]] == part_size * view.parts:
        return _Effect.BROADCAST, FusedView(params["broadcast_dimensions"][view.dim], view.parts)
    if name == "split" and params["axis"] == view.dim and params["sizes"] == (part_size,) * view.parts:
        return _Effect.SPLIT, None
    if name == "slice" and params["strides"] is None and _takes_one_part(equation, view, part_size):
        return _Effect.SLICE, None
    is_plain_reshape = name == "reshape" and params["dimensions"] is None
    if is_plain_reshape and _separates_parts(shape, params["new_sizes"], view, part_size):
        return _Effect.RESHAPE, None
    return _Effect.NEEDS_FLAT, None


def _makes_heads(equation: Equation, views: Sequence[FusedView | None], equations: Sequence[Equation]) -> bool:
    """Whether a reshape leaves whole parts, none of which is taken alone afterwards: then they are heads."""
    view = next(view for view in views if view is not None)
    (source,), (result,) = equation.invars, equation.outvars
    leaves_parts_whole = len(result.aval.shape) == len(source.aval.shape) + 1
    readers = [reader for reader in equations if result in read_variables(reader)]
    taken_alone = any(
        primitive_name(reader) in _TAKES and reader.outvars[0].aval.shape[view.dim] < view.parts for reader in readers
    )
    return leaves_parts_whole and not taken_alone


def _takes_one_part(equation: core.JaxprEqn, view: FusedView, part_size: int) -> bool:
    """Whether a slice takes exactly one part, and all of the other dimensions."""
    shape = equation.invars[0].aval.shape
    starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
    other_dims = [dim for dim in range(len(shape)) if dim != view.dim]
    is_whole = all(starts[dim] == 0 and limits[dim] == shape[dim] for dim in other_dims)
    return is_whole and starts[view.dim] % part_size == 0 and limits[view.dim] - starts[view.dim] == part_size


def _separates_parts(shape: Sequence[int], sizes: Sequence[int], view: FusedView, part_size: int) -> bool:
    """Whether a reshape leaves what is in front alone, then has the parts, then divides one part."""
    before, after = tuple(shape[: view.dim]), math.prod(shape[view.dim + 1 :])
    behind = math.prod(sizes[view.dim + 1 :])
    return tuple(sizes[: view.dim]) == before and sizes[view.dim] == view.parts and behind == part_size * after
