"""Functions of every element. Numbers known beforehand are no operands; repeated ones are read where they came from."""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.stablehlo.symbols import Call, Constant, Spread, Stack, Unsupported, Value, Values
from phaze.ir import Dim, Dims, Factor, OpKind, Rule

__all__ = ["ELEMENTWISE"]

_NAMES = {
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
    if any(isinstance(value, Stack) for value in call.values):
        apart = _by_slots(call)
        if apart is not None:
            return apart
    same = _unchanged(call)
    if same is not None:
        return (same,)
    function = _function(call)
    shape = call.out_shape()
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    inputs: list[str] = []
    operands: list[Dims] = []
    for index, value in enumerate(call.values):
        if call.is_splat(index):
            continue
        tensor_id, read = _operand(call, value, dims)
        if tensor_id in inputs and operands[inputs.index(tensor_id)] == read and function in ("multiply", "square"):
            function = "square"
            continue
        inputs.append(tensor_id)
        operands.append(read)
    factors = tuple(Factor(f"d{index}", size) for index, size in enumerate(shape))
    rule = Rule(tuple(operands), (dims,), factors)
    return call.emit(OpKind.ELEMENTWISE, function, rule, *inputs)


def _operand(call: Call, value: Value, dims: Dims) -> tuple[str, Dims]:
    """The tensor to read for an operand, and its dimensions among those of the result."""
    if isinstance(value, Spread):
        source = value.source
        pairs = zip(value.into, source.shape, strict=True)
        read = tuple(dims[place] if size == value.shape[place] else Dim() for place, size in pairs)
        return _unwrapped(call, call.recorder.id(source, call.scope), read)
    if value.shape and value.shape != call.out_shape():
        raise Unsupported
    return _unwrapped(call, call.recorder.id(value, call.scope), dims if value.shape else ())


def _unwrapped(call: Call, tensor_id: str, read: Dims) -> tuple[str, Dims]:
    """What a tensor with dimensions of 1 put in or taken out is a view of, with the dimensions of that."""
    source = call.recorder.without_units(tensor_id)
    if source == tensor_id:
        return tensor_id, read
    tensors = call.recorder.builder.tensors
    significant = iter([dim for dim, size in zip(read, tensors[tensor_id].shape, strict=True) if size != 1])
    return source, tuple(Dim() if size == 1 else next(significant) for size in tensors[source].shape)


def _unchanged(call: Call) -> Value | None:
    """The operand that the result equals: x + 0, x - 0, x * 1, x / 1, a cast to its own type."""
    if call.name == "convert" and call.values[0].dtype == call.out_dtype():
        return call.values[0]
    neutral = {"add": 0, "subtract": 0, "multiply": 1, "divide": 1}.get(call.name)
    if neutral is None or len(call.values) != 2:
        return None
    for index in (1, 0) if call.name in ("add", "multiply") else (1,):
        value = call.values[index]
        if isinstance(value, Constant) and value.value is not None and value.value == neutral:
            return call.values[1 - index]
    return None


def _function(call: Call) -> str:
    """What the IR calls the function; with one number among two operands it is a function of the other.

    The number itself is not kept: many (the count behind a mean) follow the batch.
    """
    name = _NAMES.get(call.name, call.name)
    known = [value.value for value in call.values if isinstance(value, Constant) and value.value is not None]
    if len(call.values) != 2 or len(known) != 1:
        return name
    number, is_first = known[0], call.is_splat(0)
    if name == "power":
        return "square" if number == 2 and not is_first else name
    if name == "maximum":
        return "relu" if number == 0 else "clamp"
    if name == "divide":
        return "reciprocal" if is_first else "scale"
    return {"add": "add_constant", "subtract": "add_constant", "multiply": "scale", "minimum": "clamp"}.get(name, name)


def _by_slots(call: Call) -> Values | None:
    """Stacks of one length element by element: slot by slot. None where an operand is no stack and no number."""
    shape = call.out_shape()
    count = next(len(value.slots) for value in call.values if isinstance(value, Stack))
    columns: list[list[Value]] = []
    for value in call.values:
        if isinstance(value, Stack):
            columns.append(list(value.slots))
        elif isinstance(value, Constant) and value.value is not None:
            small = call.recorder.constant("", shape[1:] if value.shape else (), value.dtype, value.value)
            columns.append([small] * count)
        elif isinstance(value, Spread) and not value.source.shape:
            columns.append([Spread(value.source, (), shape[1:], value.dtype)] * count)
        else:
            return None
    if any(len(column) != count for column in columns):
        return None
    operation = call.operation
    small_type = type(operation.types[0])(shape[1:], operation.types[0].element)
    part = type(operation)(
        operation.name,
        operation.operands,
        operation.results,
        (small_type,),
        operation.attributes,
        operation.regions,
        operation.scope,
    )
    slots: list[Value] = []
    for values in zip(*columns, strict=True):
        if all(isinstance(value, Constant) for value in values):
            key = (operation.name, tuple(value.number for value in values if isinstance(value, Constant)))
            slots.append(call.recorder.constant(key, shape[1:], call.out_dtype()))
        else:
            slots.append(_elementwise(Call(part, values, call.recorder, call.scope))[0])
    loops = [value.loop for value in call.values if isinstance(value, Stack)]
    return (Stack(tuple(slots), shape, call.out_dtype(), loops[0]),)


def _bitcast(call: Call) -> Values:
    if call.shape(0) != call.out_shape():
        raise Unsupported
    return (call.values[0],) if call.values[0].dtype == call.out_dtype() else _elementwise(call)


_PLAIN = (
    "abs add and atan2 cbrt ceil compare complex convert cosine count_leading_zeros divide exponential "
    "exponential_minus_one floor imag is_finite log log_plus_one logistic maximum minimum multiply negate not or "
    "popcnt power real reduce_precision remainder round_nearest_afz round_nearest_even rsqrt select shift_left "
    "shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan tanh xor clamp "
    "acos acosh asin asinh atan atanh bessel_i1e conj cosh digamma erf erf_inv erfc is_inf is_neg_inf is_pos_inf "
    "lgamma next_after polygamma sinh square zeta uniform_quantize uniform_dequantize erf_inv stochastic_convert"
)

ELEMENTWISE: dict[str, Callable[[Call], Values]] = {
    **dict.fromkeys(_PLAIN.split(), _elementwise),
    "bitcast_convert": _bitcast,
}
