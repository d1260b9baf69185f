"""Numbers that follow from numbers: what the counters and conditions of loops are computed from."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phaze.frontends.stablehlo.module import Operation, to_dtype
from phaze.frontends.stablehlo.symbols import Constant, Value

__all__ = ["computed", "frozen", "region_key"]

_COMPUTED: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "negate": operator.neg,
    "abs": abs,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "select": lambda condition, yes, no: yes if condition else no,
    "clamp": lambda least, x, most: min(max(least, x), most),
    "sign": lambda x: (x > 0) - (x < 0),
    **dict.fromkeys(("reshape", "broadcast_in_dim", "broadcast", "copy", "slice", "transpose", "bitcast"), lambda x: x),
}

_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def computed(operation: Operation, values: Sequence[Value]) -> bool | int | float | None:
    """The number that every element of a result is, where it follows from numbers."""
    name = operation.short_name
    if name == "constant":
        given = operation.attributes.get("value")
        return _constant_value(given) if isinstance(given, Mapping) else None
    if not values:
        return None
    known = [value.value if isinstance(value, Constant) else None for value in values]
    if any(value is None for value in known):
        return None
    try:
        if name == "compare":
            return _compared(operation, known)
        if name == "convert":
            return _converted(operation, known[0])
        if name == "not":
            return (not known[0]) if isinstance(known[0], bool) else ~known[0]  # type: ignore[operator]
        if name in ("divide", "remainder"):
            return _divided(name, known)
        result = _COMPUTED[name](*known) if name in _COMPUTED else None
        return result if result is None or isinstance(result, float) or abs(result) < 2**64 else None
    except (TypeError, OverflowError, ValueError):
        return None


def _constant_value(given: Mapping[str, Any]) -> bool | int | float | None:
    if "splat" in given:
        value: bool | int | float | None = given["splat"]
        return value
    values = given.get("values")
    return values[0] if isinstance(values, list) and len(values) == 1 else None


def _compared(operation: Operation, known: Sequence[Any]) -> bool | None:
    direction = operation.attributes.get("comparison_direction")
    words = str(direction.get("text") if isinstance(direction, Mapping) else direction).replace(">", " ").split()
    found = next((_COMPARED[word] for word in reversed(words) if word in _COMPARED), None)
    return None if found is None else found(known[0], known[1])


def _converted(operation: Operation, value: Any) -> bool | int | float:
    dtype = to_dtype(operation.types[0].element)
    if dtype.is_float:
        return float(value)
    return bool(value) if dtype.value == "bool" else int(value)


def _divided(name: str, known: Sequence[Any]) -> int | float | None:
    left, right = known
    if not right:
        return None
    if isinstance(left, int) and isinstance(right, int):
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if name == "divide" else left - right * quotient
    return float(left / right) if name == "divide" else None


def frozen(value: Any) -> object:
    """Attributes as a part of a key."""
    if isinstance(value, Mapping):
        return tuple(sorted((key, frozen(item)) for key, item in value.items()))
    if isinstance(value, list):
        return tuple(frozen(item) for item in value)
    return value if not isinstance(value, float) else repr(value)


def region_key(operation: Operation) -> object:
    """What the regions of an operation are made of, as a part of a key."""
    return tuple(tuple(inner.name for inner in region.operations) for region in operation.regions)
