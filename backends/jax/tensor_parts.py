"""What equations do with parts of tensors: with a part along one dimension, and with fused parts that lie side by side.

A part along one dimension. A device has a part of an operand, and rules by primitive say what part of the result that
gives (`ELEMENTWISE`, `REDUCTIONS`, `ALONG_ONE`, `MOVES`, `place_in_product`).

Fused parameters, such as query, key and value side by side, are seen with one dimension as two (`FusedView`). The
tensor axis cuts every part of a fused dimension: the columns of a fused projection are query, key and value side by
side, and each device has its heads of all three. No sharding of one dimension says so, but a sharding of two, (parts,
part), does. So a parameter that is stored like this, and what is made with it, keep that view through elementwise
equations and broadcasts until a split, a slice or a reshape separates the parts. Any other equation sees the tensor
flat, for which the compiler must gather it. Where the parts are heads, of which there are fewer than devices, each
device has a piece of every head; the compiler finds no way from that to whole heads, and is told to gather them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import jax
from jax.extend import core
from jax.sharding import PartitionSpec

from phaze.backends.jax.traced_loss import Equation, primitive_name, read_variables, run_equation

__all__ = [
    "ALONG_ONE",
    "ELEMENTWISE",
    "MOVES",
    "REDUCTIONS",
    "FusedView",
    "bind",
    "join_parts",
    "local_shape",
    "moved_slice",
    "place_in_product",
    "separate_parts",
    "with_fused_views",
]

ELEMENTWISE = frozenset(
    {
        *("abs", "add", "add_any", "and", "atan2", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos"),
        *("cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow"),
        *("is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter"),
        *("not", "optimization_barrier", "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign"),
        *("sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
    }
)
"""Primitives that treat every element alike. Operands are scalars or have the result's rank, and repeat where they have
the size 1."""

REDUCTIONS = ("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum")
"""Primitives that take the dimensions `axes` away."""

ALONG_ONE = {
    "cumsum": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumlogsumexp": "axis",
    "split": "axis",
    "sort": "dimension",
    "concatenate": "dimension",
}
"""Primitives that run along one dimension and keep all, with the name of the parameter that says which."""

_Move: TypeAlias = tuple[int, dict[str, object]]
"""The dimension of the result along which it is a part, and the parameters of the equation that a part changes."""


def bind(equation: core.JaxprEqn, operands: Sequence[jax.Array], **changes: object) -> list[jax.Array]:
    """The results of an equation on these operands, with some of its parameters changed."""
    primitive = equation.primitive
    results = primitive.bind(*operands, **primitive.get_bind_params({**equation.params, **changes}))
    return list(results) if primitive.multiple_results else [results]


def local_shape(shape: Sequence[int], dim: int | None, cp: int) -> tuple[int, ...]:
    """A shape of which each of cp devices has a part along a dimension, and the last of them the rest."""
    return tuple(-(-size // cp) if place == dim else size for place, size in enumerate(shape))


@dataclass(frozen=True, slots=True)
class _PlaceInProduct:
    """What a product does with a dimension of an operand: "contracted", "batched" (both with a number) or "free".

    `result_dim` is the dimension of the result that it becomes, where it becomes one.
    """

    kind: str
    number: int
    result_dim: int


def place_in_product(equation: core.JaxprEqn, side: int, dim: int) -> _PlaceInProduct:
    """What a product does with a dimension of its left (0) or right (1) operand."""
    contracted, batched = equation.params["dimension_numbers"]
    if dim in contracted[side]:
        return _PlaceInProduct("contracted", list(contracted[side]).index(dim), -1)
    if dim in batched[side]:
        number = list(batched[side]).index(dim)
        return _PlaceInProduct("batched", number, number)
    free = [
        [place for place in range(len(variable.aval.shape)) if place not in (*contracted[number], *batched[number])]
        for number, variable in enumerate(equation.invars)
    ]
    before = len(batched[0]) + (len(free[0]) if side == 1 else 0)
    return _PlaceInProduct("free", 0, before + free[side].index(dim))


def _broadcast(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    params, size = equation.params, equation.invars[0].aval.shape[dim]
    result_dim = params["broadcast_dimensions"][dim]
    is_repeated = params["shape"][result_dim] != size
    return None if is_repeated else (result_dim, {"shape": local_shape(params["shape"], result_dim, cp)})


def _reshape(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    """A part stays one where as much lies in front of its dimension as in front of a dimension of the result."""
    before, sizes = equation.invars[0].aval.shape, equation.params["new_sizes"]
    in_front = math.prod(before[:dim])
    # Where the last part is not full, only the dimension itself is.
    fitting = [
        place
        for place, size in enumerate(sizes)
        if math.prod(sizes[:place]) == in_front and size
        if size == before[dim] or size % cp == before[dim] % cp == 0
    ]
    if equation.params["dimensions"] is not None or not fitting:
        return None
    result_dim = next((place for place in fitting if sizes[place] == before[dim]), fitting[-1])
    return result_dim, {"new_sizes": local_shape(sizes, result_dim, cp)}


def _transpose(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    return list(equation.params["permutation"]).index(dim), {}


def _squeeze(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    return dim - sum(place < dim for place in equation.params["dimensions"]), {}


def _reduce(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    axes = equation.params["axes"]
    return None if dim in axes else (dim - sum(axis < dim for axis in axes), {})


def _largest(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    """`top_k`, which runs along the last dimension unless it says otherwise."""
    rank = len(equation.invars[0].aval.shape)
    return None if equation.params.get("axis", rank - 1) % rank == dim else (dim, {})


def moved_slice(equation: core.JaxprEqn, dim: int, cp: int) -> _Move | None:
    """A part stays one where the slice takes of every part what it has: all but some of the last positions."""
    params, size = equation.params, equation.invars[0].aval.shape[dim]
    stride = 1 if params["strides"] is None else params["strides"][dim]
    limit = params["limit_indices"][dim]
    if (params["start_indices"][dim], -(-limit // cp), stride) != (0, -(-size // cp), 1):
        return None
    return dim, {"limit_indices": local_shape(params["limit_indices"], dim, cp)}


MOVES: Mapping[str, Callable[[core.JaxprEqn, int, int], _Move | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": moved_slice,
    "top_k": _largest,
    **dict.fromkeys(REDUCTIONS, _reduce),
}
"""Primitives of one operand: what becomes of a part of it; None where the operand must be whole."""


_KEEP_VIEWS = frozenset(
    {
        *("abs", "add", "add_any", "convert_element_type", "copy", "div", "erf", "exp", "integer_pow", "log"),
        *("logistic", "max", "min", "mul", "neg", "rsqrt", "select_n", "sqrt", "sub", "tanh"),
    }
)
"""Primitives that may run on views as they are, because they treat every element alike."""


_TAKE_PARTS = frozenset({"slice", "dynamic_slice", "split", "gather"})
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
    if name in _KEEP_VIEWS and is_alike:
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
        primitive_name(reader) in _TAKE_PARTS and reader.outvars[0].aval.shape[view.dim] < view.parts
        for reader in readers
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
