"""Fold operations on constants: numbers that follow from numbers, such as the counters and conditions of loops.

Only values of which all elements are one number are computed (`known_number`). Any other constant is known by how it is
made: two that are made in the same way get the same number from the recorder, and so are one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from phaze.frontends.stablehlo.module import Attribute, Operation
from phaze.frontends.stablehlo.symbols import (
    Broadcast,
    Constant,
    Number,
    Recorder,
    Shape,
    Value,
    Values,
    is_constant,
    is_empty,
)

__all__ = ["fold"]

LARGEST_INTEGER = 2**64
"""Integers of this size and more are not folded: the module's own would have wrapped around."""

_ARITHMETIC: dict[str, Callable[..., Number]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "negate": operator.neg,
    "square": lambda number: number * number,
    "abs": abs,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "select": lambda condition, yes, no: yes if condition else no,
    "clamp": lambda least, x, most: min(max(least, x), most),
    "sign": lambda x: (x > 0) - (x < 0),
    **dict.fromkeys(("reshape", "broadcast_in_dim", "broadcast", "copy", "slice", "transpose", "bitcast"), lambda x: x),
}

_COMPARISONS: dict[str, Callable[[Number, Number], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def fold(recorder: Recorder, operation: Operation, values: Values) -> Values:
    """The results of an operation that depends on no argument, or that are empty, as constants."""
    dimensions = operation.attributes.get("broadcast_dimensions")
    if operation.short_name == "broadcast_in_dim" and isinstance(dimensions, list):
        shape = operation.types[0].shape
        if not is_empty(values[0]) and 0 not in shape:
            into = tuple(dim for dim in dimensions if isinstance(dim, int))
            return (_folded_broadcast(recorder, values[0], shape, into),)
    # What is empty is the same whatever it is made of.
    keys = tuple(_constant_key(value) if is_constant(value) else None for value in values)
    results = []
    for index, kind in enumerate(operation.types):
        number = known_number(operation, values) if len(operation.types) == 1 and 0 not in kind.shape else None
        key: tuple[object, ...] = (
            operation.name,
            index,
            keys,
            _hashable(operation.attributes),
            _region_key(operation),
        )
        if operation.short_name == "rng":  # random numbers: no two are equal
            key = (*key, recorder.unique())
        results.append(recorder.constant(key, kind.shape, kind.dtype, number))
    return tuple(results)


def _folded_broadcast(recorder: Recorder, value: Value, shape: Shape, into: tuple[int, ...]) -> Value:
    """A repeated constant: a known number is the same number in another shape, anything else is read where it is."""
    if isinstance(value, Broadcast):
        into = tuple(into[dim] for dim in value.into)
        value = value.source
    assert isinstance(value, Constant)
    if value.value is not None:
        return recorder.constant("", shape, value.dtype, value.value)
    return Broadcast(value, into, shape, value.dtype)


def _constant_key(value: Value) -> object:
    if isinstance(value, Constant):
        return value.number
    assert isinstance(value, Broadcast)
    assert isinstance(value.source, Constant)
    return value.source.number, value.into, value.shape


def known_number(operation: Operation, values: Sequence[Value]) -> Number | None:
    """The number that every element of the result is; None where it does not follow from numbers."""
    name = operation.short_name
    if name == "constant":
        return _constant_number(operation.attributes.get("value"))
    operands = [value.value for value in values if isinstance(value, Constant) and value.value is not None]
    if not values or len(operands) != len(values):
        return None
    try:
        if name == "compare":
            return _compare(operation, operands)
        if name == "convert":
            return _convert(operation, operands[0])
        if name == "not":
            return (not operands[0]) if isinstance(operands[0], bool) else ~operands[0]  # type: ignore[operator]
        if name in ("divide", "remainder"):
            return _divide(name, operands)
        result = _ARITHMETIC[name](*operands) if name in _ARITHMETIC else None
        return result if result is None or isinstance(result, float) or abs(result) < LARGEST_INTEGER else None
    except (TypeError, OverflowError, ValueError):
        return None


def _constant_number(given: Attribute) -> Number | None:
    """The number that a `constant` operation holds, if it is one number."""
    if not isinstance(given, Mapping):
        return None
    if "splat" in given:
        number = given["splat"]
    else:
        values = given.get("values")
        number = values[0] if isinstance(values, list) and len(values) == 1 else None
    return number if isinstance(number, bool | int | float) else None


def _compare(operation: Operation, operands: Sequence[Number]) -> bool | None:
    """A comparison. Its direction is printed as `LT` or as `#stablehlo<comparison_direction LT>`."""
    direction = operation.attributes.get("comparison_direction")
    words = str(direction.get("text") if isinstance(direction, Mapping) else direction).replace(">", " ").split()
    comparison = next((_COMPARISONS[word] for word in reversed(words) if word in _COMPARISONS), None)
    return None if comparison is None else comparison(operands[0], operands[1])


def _convert(operation: Operation, operand: Number) -> Number:
    dtype = operation.types[0].dtype
    if dtype.is_float:
        return float(operand)
    return bool(operand) if dtype.value == "bool" else int(operand)


def _divide(name: str, operands: Sequence[Number]) -> int | float | None:
    """Division and remainder of integers round towards zero, as StableHLO says and Python does not."""
    left, right = operands
    if not right:
        return None
    if isinstance(left, int) and isinstance(right, int):
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if name == "divide" else left - right * quotient
    return float(left / right) if name == "divide" else None


def _hashable(attribute: object) -> object:
    """Attributes as a part of a key; floats by their text, so that a NaN equals itself."""
    if isinstance(attribute, Mapping):
        return tuple(sorted((key, _hashable(item)) for key, item in attribute.items()))
    if isinstance(attribute, list):
        return tuple(_hashable(item) for item in attribute)
    return attribute if not isinstance(attribute, float) else repr(attribute)


def _region_key(operation: Operation) -> object:
    """The names of the operations inside an operation, as a part of a key."""
    return tuple(tuple(inner.name for inner in region.operations) for region in operation.regions)
