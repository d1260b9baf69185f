"""Check that the shape of an instruction follows from those of its operands, so that damaged text is not believed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from phaze.frontends.hlo.hlo_text import HloTextError, Instruction, Shape

__all__ = ["check_shapes"]

_ELEMENTWISE_OPCODES = """
abs add and atan2 cbrt ceil clz compare complex convert cosine count-leading-zeros divide erf exponential
exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt
power real reduce-precision remainder round-nearest-afz round-nearest-even rsqrt shift-left shift-right-arithmetic
shift-right-logical sign sine sqrt subtract tan tanh xor copy
"""

_ELEMENTWISE = frozenset(_ELEMENTWISE_OPCODES.split())


def check_shapes(instruction: Instruction, shapes: Sequence[Shape]) -> None:
    """Raise HloTextError where the result cannot have the shape that the text gives it."""
    if instruction.shape.parts is not None or any(shape.parts is not None for shape in shapes):
        return
    if any(-1 in shape.dims for shape in (*shapes, instruction.shape)):
        return
    check = _elementwise if instruction.opcode in _ELEMENTWISE else _CHECKS.get(instruction.opcode)
    try:
        is_right = check is None or check(instruction, shapes)
    except (IndexError, ValueError):
        is_right = False
    if not is_right:
        given = ", ".join(_text(shape) for shape in shapes)
        raise HloTextError(
            f"line {instruction.line}: {instruction.opcode} of {given} cannot give {_text(instruction.shape)}."
        )


def _text(shape: Shape) -> str:
    return f"{shape.element}[{','.join(map(str, shape.dims))}]"


def _elementwise(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    return bool(shapes) and all(shape.dims == instruction.shape.dims for shape in shapes)


def _select(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    condition, *sides = shapes
    return all(side.dims == instruction.shape.dims for side in sides) and condition.dims in ((), instruction.shape.dims)


def _clamp(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    return shapes[1].dims == instruction.shape.dims


def _reshape(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    return math.prod(shapes[0].dims) == math.prod(instruction.shape.dims)


def _broadcast(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    into = instruction.integers("dimensions")
    return len(into) == len(shapes[0].dims) and all(
        size in (1, instruction.shape.dims[dim]) for size, dim in zip(shapes[0].dims, into, strict=True)
    )


def _transpose(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    order = instruction.integers("dimensions")
    dims = shapes[0].dims
    return sorted(order) == list(range(len(dims))) and tuple(dims[dim] for dim in order) == instruction.shape.dims


def _dot(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    left, right = shapes[:2]
    batch = instruction.integers("lhs_batch_dims"), instruction.integers("rhs_batch_dims")
    summed = instruction.integers("lhs_contracting_dims"), instruction.integers("rhs_contracting_dims")
    for pairs in (batch, summed):
        if len(pairs[0]) != len(pairs[1]):
            return False
        if any(left.dims[a] != right.dims[b] for a, b in zip(*pairs, strict=True)):
            return False
    free = [size for dim, size in enumerate(left.dims) if dim not in (*batch[0], *summed[0])]
    free += [size for dim, size in enumerate(right.dims) if dim not in (*batch[1], *summed[1])]
    return tuple([left.dims[dim] for dim in batch[0]] + free) == instruction.shape.dims


def _concatenate(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    (along,) = instruction.integers("dimensions")
    whole = list(shapes[0].dims)
    whole[along] = sum(shape.dims[along] for shape in shapes)
    return tuple(whole) == instruction.shape.dims


def _reduce(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    reduced = instruction.integers("dimensions")
    left = tuple(size for dim, size in enumerate(shapes[0].dims) if dim not in reduced)
    return all(dim < len(shapes[0].dims) for dim in reduced) and left == instruction.shape.dims


def _slice(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    given = instruction.integers("slice")
    rank = len(shapes[0].dims)
    if rank == 0 or len(given) not in (2 * rank, 3 * rank):
        return rank == 0
    step = len(given) // rank
    for dim in range(rank):
        start, limit = given[dim * step], given[dim * step + 1]
        stride = given[dim * step + 2] if step == 3 else 1
        if not 0 <= start <= limit <= shapes[0].dims[dim] or stride < 1:
            return False
        if -(-(limit - start) // stride) != instruction.shape.dims[dim]:
            return False
    return True


def _dynamic_slice(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    sizes = instruction.integers("dynamic_slice_sizes")
    fits = all(size <= whole for size, whole in zip(sizes, shapes[0].dims, strict=True))
    return fits and sizes == instruction.shape.dims


def _dynamic_update_slice(instruction: Instruction, shapes: Sequence[Shape]) -> bool:
    fits = all(size <= whole for size, whole in zip(shapes[1].dims, shapes[0].dims, strict=True))
    return fits and shapes[0].dims == instruction.shape.dims


_CHECKS: dict[str, Callable[[Instruction, Sequence[Shape]], bool]] = {
    "select": _select,
    "clamp": _clamp,
    "reshape": _reshape,
    "broadcast": _broadcast,
    "transpose": _transpose,
    "dot": _dot,
    "concatenate": _concatenate,
    "reduce": _reduce,
    "slice": _slice,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
}
