"""Rules of views, slices, concatenations, barriers and random bits: what moves elements without computing with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phaze.frontends.stablehlo.symbols import (
    Broadcast,
    Call,
    Constant,
    Stack,
    Tensor,
    Unsupported,
    Value,
    Values,
    is_constant,
    is_empty,
)
from phaze.ir import Dim, Factor, FactorKind, OpKind, Rule
from phaze.ir.graph_builder import concatenate_rule, elementwise_rule, slice_rule, transpose_rule

__all__ = ["DATA_MOVEMENT"]


def _reshape(call: Call) -> Values:
    return (call.recorder.reshape(call.values[0], call.out_shape(), call.scope),)


def _bitcast(call: Call) -> Values:
    """HLO's bitcast: the same memory in another shape. One that changes the element type is not known."""
    if call.values[0].dtype != call.out_dtype():
        raise Unsupported
    return _reshape(call)


def _broadcast_in_dim(call: Call) -> Values:
    """A broadcast that is only remembered; one that only adds dimensions of size 1 is a reshape."""
    value, into, shape = call.values[0], call.integers("broadcast_dimensions"), call.out_shape()
    dtype = value.dtype
    if isinstance(value, Broadcast):
        composed = tuple(into[dim] for dim in value.into)
        return (Broadcast(value.source, composed, shape, dtype),)
    larger = [size for size in value.shape if size != 1]
    if larger == [size for size in shape if size != 1] and list(into) == sorted(into):
        return (call.recorder.reshape(value, shape, call.scope, "broadcast_in_dim"),)
    if isinstance(value, Stack):
        value = call.recorder.tensor(value, call.scope)
    return (Broadcast(value, into, shape, dtype),)


def _transpose(call: Call) -> Values:
    order = call.integers("permutation")
    value = call.values[0]
    if order == tuple(range(len(order))):
        return (value,)
    if isinstance(value, Stack):
        inner = tuple(dim - (dim > value.dim) for dim in order if dim != value.dim)
        slots = tuple(_transposed(call, slot, inner) for slot in value.slots)
        return (Stack(slots, call.out_shape(), value.dtype, value.loop, order.index(value.dim)),)
    return (_transposed(call, value, order),)


def _transposed(call: Call, value: Value, order: tuple[int, ...]) -> Value:
    """A value with its dimensions in this order."""
    shape = tuple(value.shape[dim] for dim in order)
    if order == tuple(range(len(order))):
        return value
    if isinstance(value, Constant):
        return call.recorder.constant(("transpose", value.number, order), shape, value.dtype, value.value)
    if isinstance(value, Broadcast):
        return Broadcast(value.source, tuple(order.index(dim) for dim in value.into), shape, value.dtype)
    rule, source = transpose_rule(value.shape, order), call.recorder.id(value, call.scope)
    (result,) = call.recorder.emit(
        OpKind.VIEW, "transpose", rule, (source,), (value.dtype,), call.scope, call.operation.name
    )
    return Tensor(result, shape, value.dtype)


def _slice(call: Call) -> Values:
    """A slice. One of several equal parts of a dimension is selected: the dimension is made of (parts, part)."""
    value, shape = call.values[0], call.out_shape()
    start, limit, strides = (call.integers(name) for name in ("start_indices", "limit_indices", "strides"))
    if shape == value.shape:
        return (value,)
    if isinstance(value, Stack) and value.without(shape) == value.slot_shape and strides[value.dim] == 1:
        slots = value.slots[start[value.dim] : limit[value.dim]]
        if len(slots) == 1:
            return (call.recorder.reshape(slots[0], shape, call.scope),)
        return (replace(value, slots=slots, shape=shape),)
    x = call.id(0)
    sliced = [dim for dim, size in enumerate(shape) if size != value.shape[dim]]
    if len(sliced) == 1 and strides[sliced[0]] == 1 and shape[sliced[0]] > 1:
        dim = sliced[0]
        whole, part = value.shape[dim], shape[dim]
        if whole % part == 0 and start[dim] % part == 0:
            return _select_part(call, x, dim, whole // part, start[dim] // part)
    attributes = {"start": start[sliced[0]]} if len(sliced) == 1 else None
    return call.emit(OpKind.VIEW, "slice", slice_rule(value.shape, shape), x, attributes=attributes)


def _select_part(call: Call, x: str, sliced: int, count: int, index: int) -> Values:
    """Part number `index` of `count` equal parts of the dimension `sliced`."""
    shape = call.out_shape()
    dims = tuple(Dim((f"d{i}",)) for i in range(len(shape)))
    operand = tuple(Dim(("c", *dim.factors)) if i == sliced else dim for i, dim in enumerate(dims))
    factors = tuple(Factor(f"d{i}", size) for i, size in enumerate(shape))
    rule = Rule((operand,), (dims,), (Factor("c", count, FactorKind.WHOLE), *factors))
    return call.emit(OpKind.VIEW, "select", rule, x, attributes={"index": index})


def _concatenate(call: Call) -> Values:
    """Tensors one after another; equal ones are stacked, so that the dimension is made of (parts, part)."""
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
    """A tensor inside a larger one, or a slice of it where the padding is negative."""
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
    """Elements in the reverse order of some dimensions, which are needed whole."""
    shape, flipped = call.shape(0), call.integers("dimensions")
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    factors = tuple(
        Factor(f"d{i}", size, FactorKind.WHOLE if i in flipped else FactorKind.FREE) for i, size in enumerate(shape)
    )
    return call.emit(OpKind.COPY, "flip", Rule((dims,), (dims,), factors), call.id(0))


def _copy(call: Call) -> Values:
    """A copy of a compiler, whose layouts are ignored: the same value."""
    return (call.values[0],)


def _barrier(call: Call) -> Values:
    """The same values behind a barrier. What is computed from them is never merged with what was computed before."""
    results: list[Value] = []
    for value in call.values:
        if is_constant(value) or is_empty(value):
            results.append(value)
            continue
        if isinstance(value, Stack):
            slots = tuple(_behind_barrier(call, slot) for slot in value.slots)
            results.append(replace(value, slots=slots))
            continue
        results.append(_behind_barrier(call, value))
    return tuple(results)


def _behind_barrier(call: Call, value: Value) -> Tensor:
    source = call.recorder.id(value, call.scope)
    rule = elementwise_rule(value.shape, value.shape)
    (result,) = call.recorder.emit(
        OpKind.VIEW, "barrier", rule, (source,), (value.dtype,), call.scope, call.name, is_pure=False
    )
    return Tensor(result, value.shape, value.dtype)


def _random(call: Call) -> Values:
    """Random bits drawn from a state. The results are the new state, where it is asked for, and the bits."""
    shapes = [call.out_shape(index) for index in range(len(call.operation.types))]
    state = tuple(Dim((f"s{index}",)) for index in range(len(call.shape(0))))
    factors = [Factor(f"s{index}", size, FactorKind.WHOLE) for index, size in enumerate(call.shape(0))]
    bits = tuple(Dim((f"d{index}",)) for index in range(len(shapes[-1])))
    factors += [Factor(f"d{index}", size) for index, size in enumerate(shapes[-1])]
    results = (state, bits) if len(shapes) == 2 else (bits,)
    return call.emit(OpKind.COPY, "random", Rule((state,), results, tuple(factors)), call.id(0))


DATA_MOVEMENT: dict[str, Callable[[Call], Values]] = {
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
