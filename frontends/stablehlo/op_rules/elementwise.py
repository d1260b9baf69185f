"""Rules of elementwise operations, and what the IR calls each function.

A number that is known beforehand is no operand. A broadcast operand is read where it came from, and never made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phaze.frontends.stablehlo.symbols import Broadcast, Call, Constant, Stack, Unsupported, Value, Values
from phaze.ir import Dim, Dims, DType, Factor, OpKind, Rule

__all__ = ["ELEMENTWISE"]

_FUNCTIONS = {
    "cosine": "cos",
    "convert": "cast",
    "exponential": "exp",
    "exponential_minus_one": "expm1",
    "is_finite": "is_finite",
    "log_plus_one": "log1p",
    "logistic": "sigmoid",
    "negate": "negative",
    "select": "where",
    "sine": "sin",
    "square": "square",
}


def _elementwise(call: Call) -> Values:
    """An op over the dimensions of the result; a product of a tensor with itself is its square."""
    if any(isinstance(value, Stack) for value in call.values):
        stack = _by_slots(call)
        if stack is not None:
            return (stack,)
    unchanged = _unchanged(call)
    if unchanged is not None:
        return (unchanged,)
    function = _function(call)
    shape = call.out_shape()
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    inputs: list[str] = []
    operands: list[Dims] = []
    for index, value in enumerate(call.values):
        if call.is_splat(index):
            continue
        tensor_id, operand = _operand(call, value, dims)
        if tensor_id in inputs and operands[inputs.index(tensor_id)] == operand and function in ("multiply", "square"):
            function = "square"
            continue
        inputs.append(tensor_id)
        operands.append(operand)
    factors = tuple(Factor(f"d{index}", size) for index, size in enumerate(shape))
    rule = Rule(tuple(operands), (dims,), factors)
    return call.emit(OpKind.ELEMENTWISE, function, rule, *inputs)


def _operand(call: Call, value: Value, dims: Dims) -> tuple[str, Dims]:
    """The tensor to read for an operand, and its dimensions among those of the result."""
    if isinstance(value, Broadcast):
        source = value.source
        pairs = zip(value.into, source.shape, strict=True)
        operand = tuple(dims[dim] if size == value.shape[dim] else Dim() for dim, size in pairs)
        return _without_units(call, call.recorder.id(source, call.scope), operand)
    if value.shape and value.shape != call.out_shape():
        raise Unsupported
    return _without_units(call, call.recorder.id(value, call.scope), dims if value.shape else ())


def _without_units(call: Call, tensor_id: str, operand: Dims) -> tuple[str, Dims]:
    """The tensor behind a view that only puts in or takes out dimensions of size 1, with its own dimensions."""
    source = call.recorder.without_units(tensor_id)
    if source == tensor_id:
        return tensor_id, operand
    tensors = call.recorder.builder.tensors
    larger = iter([dim for dim, size in zip(operand, tensors[tensor_id].shape, strict=True) if size != 1])
    return source, tuple(Dim() if size == 1 else next(larger) for size in tensors[source].shape)


_BITS = {DType.FLOAT32: (8, 23), DType.BFLOAT16: (8, 7), DType.FLOAT16: (5, 10), DType.FLOAT64: (11, 52)}
"""Bits of the exponent and of the mantissa."""


def _unchanged(call: Call) -> Value | None:
    """The operand that the result equals: x + 0, x - 0, x * 1, x / 1, a cast to its own type or precision."""
    if call.name == "convert" and call.values[0].dtype == call.out_dtype():
        return call.values[0]
    if call.name == "reduce_precision":  # as JAX marks what a policy keeps: to as many bits as there are
        bits = tuple(call.attribute(name) for name in ("exponent_bits", "mantissa_bits"))
        return call.values[0] if bits == _BITS.get(call.out_dtype()) else None
    neutral = {"add": 0, "subtract": 0, "multiply": 1, "divide": 1}.get(call.name)
    if neutral is None or len(call.values) != 2:
        return None
    for index in (1, 0) if call.name in ("add", "multiply") else (1,):
        value = call.values[index]
        if isinstance(value, Constant) and value.value is not None and value.value == neutral:
            return call.values[1 - index]
    return None


def _function(call: Call) -> str:
    """What the IR calls the function. With one known number among two operands it is a function of the other.

    The number itself is not kept: many numbers (the count behind a mean) follow the batch.
    """
    name = _FUNCTIONS.get(call.name, call.name)
    numbers = [value.value for value in call.values if isinstance(value, Constant) and value.value is not None]
    if len(call.values) != 2 or len(numbers) != 1:
        return name
    number, is_first = numbers[0], call.is_splat(0)
    if name == "power":
        return "square" if number == 2 and not is_first else name
    if name == "maximum":
        return "relu" if number == 0 else "clamp"
    if name == "divide":
        return "reciprocal" if is_first else "scale"
    return {"add": "add_constant", "subtract": "add_constant", "multiply": "scale", "minimum": "clamp"}.get(name, name)


def _by_slots(call: Call) -> Stack | None:
    """An elementwise operation on stacks of one length, slot by slot.

    None where an operand is neither a stack nor the same for all slots.
    """
    shape = call.out_shape()
    first = next(value for value in call.values if isinstance(value, Stack))
    count, slot_shape = len(first.slots), first.without(shape)
    columns: list[list[Value]] = []
    for value in call.values:
        if isinstance(value, Stack) and value.dim == first.dim:
            columns.append(list(value.slots))
        elif isinstance(value, Constant) and value.value is not None:
            number = call.recorder.constant("", slot_shape if value.shape else (), value.dtype, value.value)
            columns.append([number] * count)
        elif not value.shape:  # the predicate of a select
            columns.append([value] * count)
        elif isinstance(value, Constant):
            keys = [("slot", value.number, first.dim, index) for index in range(count)]
            columns.append([call.recorder.constant(key, slot_shape, value.dtype) for key in keys])
        elif isinstance(value, Broadcast) and first.dim not in value.into:
            into = tuple(dim - (dim > first.dim) for dim in value.into)
            columns.append([Broadcast(value.source, into, slot_shape, value.dtype)] * count)
        else:
            return None
    if any(len(column) != count for column in columns):
        return None
    operation = call.operation
    slot_operation = replace(operation, types=(replace(operation.types[0], shape=slot_shape),))
    slots: list[Value] = []
    for values in zip(*columns, strict=True):
        if all(isinstance(value, Constant) for value in values):
            key = (operation.name, tuple(value.number for value in values if isinstance(value, Constant)))
            slots.append(call.recorder.constant(key, slot_shape, call.out_dtype()))
        else:
            slots.append(_elementwise(replace(call, operation=slot_operation, values=values))[0])
    return Stack(tuple(slots), shape, call.out_dtype(), first.loop, first.dim)


def _bitcast_convert(call: Call) -> Values:
    """The same bits read as another type; rules where the size of elements changes are not known."""
    if call.shape(0) != call.out_shape():
        raise Unsupported
    return (call.values[0],) if call.values[0].dtype == call.out_dtype() else _elementwise(call)


_NAMES = (
    "abs add and atan2 cbrt ceil compare complex convert cosine count_leading_zeros divide exponential "
    "exponential_minus_one floor imag is_finite log log_plus_one logistic maximum minimum multiply negate not or "
    "popcnt power real reduce_precision remainder round_nearest_afz round_nearest_even rsqrt select shift_left "
    "shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan tanh xor clamp "
    "acos acosh asin asinh atan atanh bessel_i1e conj cosh digamma erf erf_inv erfc is_inf is_neg_inf is_pos_inf "
    "lgamma next_after polygamma sinh square zeta uniform_quantize uniform_dequantize erf_inv stochastic_convert"
)

ELEMENTWISE: dict[str, Callable[[Call], Values]] = {
    **dict.fromkeys(_NAMES.split(), _elementwise),
    "bitcast_convert": _bitcast_convert,
}
