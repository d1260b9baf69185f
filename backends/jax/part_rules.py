"""What primitives of JAX do with a part of an operand along one of its dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax.extend import core

__all__ = [
    *("ALONG_ONE", "ELEMENTWISE", "MOVES", "REDUCTIONS", "bind", "local_shape", "moved_slice", "place_in_product"),
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
