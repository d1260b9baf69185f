"""Views, and operations that move elements without computing with them."""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.stablehlo.symbols import (
    Call,
    Constant,
    Spread,
    Stack,
    Tensor,
    Unsupported,
    Values,
    is_constant,
    is_empty,
)
from phaze.ir import Dim, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import concatenate_rule, elementwise_rule, slice_rule, transpose_rule

__all__ = ["MOVING"]


def _reshape(call: Call) -> Values:
    return (call.recorder.reshape(call.values[0], call.out_shape(), call.scope),)


def _bitcast(call: Call) -> Values:
    """HLO's bitcast: the same memory in another shape."""
    if call.values[0].dtype != call.out_dtype():
        raise Unsupported
    return _reshape(call)


def _broadcast_in_dim(call: Call) -> Values:
    value, into, shape = call.values[0], call.integers("broadcast_dimensions"), call.out_shape()
    dtype = value.dtype
    if isinstance(value, Spread):
        composed = tuple(into[place] for place in value.into)
        return (Spread(value.source, composed, shape, dtype),)
    kept = [size for size in value.shape if size != 1]
    if kept == [size for size in shape if size != 1] and list(into) == sorted(into):
        return (call.recorder.reshape(value, shape, call.scope, "broadcast_in_dim"),)
    if isinstance(value, Stack):
        value = call.recorder.tensor(value, call.scope)
    return (Spread(value, into, shape, dtype),)


def _transpose(call: Call) -> Values:
    order = call.integers("permutation")
    value = call.values[0]
    if order == tuple(range(len(order))):
        return (value,)
    if isinstance(value, Spread):
        places = [order.index(place) for place in value.into]
        return (Spread(value.source, tuple(places), call.out_shape(), value.dtype),)
    return call.emit(OpKind.VIEW, "transpose", transpose_rule(value.shape, order), call.id(0))


def _slice(call: Call) -> Values:
    """A part of a tensor. A part of equal parts is one of them: its dimension is (parts, part)."""
    value, shape = call.values[0], call.out_shape()
    start, limit, strides = (call.integers(name) for name in ("start_indices", "limit_indices", "strides"))
    if shape == value.shape:
        return (value,)
    if isinstance(value, Stack) and shape[1:] == value.shape[1:] and strides[0] == 1:
        slots = value.slots[start[0] : limit[0]]
        if len(slots) == 1:
            return (call.recorder.reshape(slots[0], shape, call.scope),)
        return (Stack(slots, shape, value.dtype, value.loop),)
    x = call.id(0)
    cut = [index for index, size in enumerate(shape) if size != value.shape[index]]
    if len(cut) == 1 and strides[cut[0]] == 1 and shape[cut[0]] > 1:
        at = cut[0]
        whole, part = value.shape[at], shape[at]
        if whole % part == 0 and start[at] % part == 0:
            return _part(call, x, at, whole // part, start[at] // part)
    attributes = {"start": start[cut[0]]} if len(cut) == 1 else None
    return call.emit(OpKind.VIEW, "slice", slice_rule(value.shape, shape), x, attributes=attributes)


def _part(call: Call, x: str, at: int, count: int, index: int) -> Values:
    shape = call.out_shape()
    dims = tuple(Dim((f"d{place}",)) for place in range(len(shape)))
    operand = tuple(Dim(("c", *dim.factors)) if place == at else dim for place, dim in enumerate(dims))
    factors = tuple(Factor(f"d{place}", size) for place, size in enumerate(shape))
    rule = Rule((operand,), (dims,), (Factor("c", count, FactorKind.WHOLE), *factors))
    return call.emit(OpKind.VIEW, "select", rule, x, attributes={"index": index})


def _concatenate(call: Call) -> Values:
    along = call.attribute("dimension")
    parts = [index for index, value in enumerate(call.values) if not is_empty(value)]
    if len(parts) == 1:
        return (call.values[parts[0]],)
    if not isinstance(along, int):
        raise Unsupported
    shapes = [call.shape(index) for index in parts]
    inputs = [call.id(index) for index in parts]
    if len({shape[along] for shape in shapes}) > 1:
        return call.emit(OpKind.COPY, "concatenate", concatenate_rule(shapes, along), *inputs)
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shapes[0])))
    joined = tuple(Dim(("c", *dim.factors)) if index == along else dim for index, dim in enumerate(dims))
    factors = tuple(Factor(f"d{index}", size) for index, size in enumerate(shapes[0]))
    rule = Rule((dims,) * len(inputs), (joined,), (Factor("c", len(inputs), FactorKind.WHOLE), *factors))
    return call.emit(OpKind.COPY, "stack", rule, *inputs)


def _pad(call: Call) -> Values:
    """A tensor inside a larger one, or a part of it where the padding is negative."""
    value, shape = call.values[0], call.out_shape()
    if value.shape == shape and not any(call.integers("edge_padding_low")):
        return (value,)
    x = call.id(0)
    pairs = list(zip(value.shape, shape, strict=True))
    if all(size <= larger for size, larger in pairs):
        rule = slice_rule(shape, value.shape)
        return call.emit(OpKind.COPY, "pad", Rule(rule.results, rule.operands, rule.factors), x)
    if all(size >= smaller for size, smaller in pairs):
        return call.emit(OpKind.VIEW, "slice", slice_rule(value.shape, shape), x)
    raise Unsupported


def _reverse(call: Call) -> Values:
    shape, moved = call.shape(0), call.integers("dimensions")
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    factors = tuple(
        Factor(f"d{i}", size, FactorKind.WHOLE if i in moved else FactorKind.FREE) for i, size in enumerate(shape)
    )
    return call.emit(OpKind.COPY, "flip", Rule((dims,), (dims,), factors), call.id(0))


def _copy(call: Call) -> Values:
    return (call.values[0],)


def _barrier(call: Call) -> Values:
    """The same values, not to be merged with others: what is computed from them again is computed again."""
    found = []
    for value in call.values:
        if is_constant(value) or is_empty(value):
            found.append(value)
            continue
        if isinstance(value, Stack):
            slots = tuple(_behind(call, slot) for slot in value.slots)
            found.append(Stack(slots, value.shape, value.dtype, value.loop))
            continue
        found.append(_behind(call, value))
    return tuple(found)


def _behind(call: Call, value: object) -> Tensor:
    assert isinstance(value, Tensor | Spread | Stack | Constant)
    source = call.recorder.id(value, call.scope)
    rule = elementwise_rule(value.shape, value.shape)
    (made,) = call.recorder.emit(
        OpKind.VIEW, "barrier", rule, (source,), (value.dtype,), call.scope, call.name, is_pure=False
    )
    return Tensor(made, value.shape, value.dtype)


def _random(call: Call) -> Values:
    """Random bits from a state: the new state, and the bits."""
    shapes = [call.out_shape(index) for index in range(len(call.operation.types))]
    state = tuple(Dim((f"s{index}",)) for index in range(len(call.shape(0))))
    factors = [Factor(f"s{index}", size, FactorKind.WHOLE) for index, size in enumerate(call.shape(0))]
    bits = tuple(Dim((f"d{index}",)) for index in range(len(shapes[-1])))
    factors += [Factor(f"d{index}", size) for index, size in enumerate(shapes[-1])]
    results = (state, bits) if len(shapes) == 2 else (bits,)
    return call.emit(OpKind.COPY, "random", Rule((state,), results, tuple(factors)), call.id(0))


MOVING: dict[str, Callable[[Call], Values]] = {
    "reshape": _reshape,
    "bitcast": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "broadcast": _broadcast_in_dim,
    "transpose": _transpose,
    "slice": _slice,
    "concatenate": _concatenate,
    "pad": _pad,
    "reverse": _reverse,
    "copy": _copy,
    "optimization_barrier": _barrier,
    "rng_bit_generator": _random,
}
