"""Checks that a field of a hardware value can exist; the message names the owner, the field and the value."""

from __future__ import annotations

import math
from numbers import Integral, Real

from phaze.errors import HardwareError

__all__ = ["LARGEST_BYTES", "LARGEST_COUNT", "fraction", "non_negative", "positive", "positive_integer"]

LARGEST_COUNT = 2**20
"""Of cores, rows, columns and lanes: products of three still fit 64 bits."""

LARGEST_BYTES = 2**50


def positive_integer(owner: str, field: str, value: object, most: int = LARGEST_BYTES) -> int:
    """``value`` as an int of at least 1 and at most ``most``.

    Raises:
        HardwareError: it is not a whole number, or outside.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= most:
        raise HardwareError(f"{owner}: {field} is {value!r}; expected a whole number from 1 to {most}.")
    return int(value)


def positive(owner: str, field: str, value: object) -> float:
    """``value`` as a finite float above 0.

    Raises:
        HardwareError: it is not a number, not finite, zero or negative.
    """
    if _number(owner, field, value) <= 0:
        raise HardwareError(f"{owner}: {field} is {value!r}; expected a number above 0.")
    return _number(owner, field, value)


def non_negative(owner: str, field: str, value: object) -> float:
    """``value`` as a finite float of at least 0.

    Raises:
        HardwareError: it is not a number, not finite, or negative.
    """
    if _number(owner, field, value) < 0:
        raise HardwareError(f"{owner}: {field} is {value!r}; expected a number of at least 0.")
    return _number(owner, field, value)


def fraction(owner: str, field: str, value: object) -> float:
    """``value`` as a float in (0, 1].

    Raises:
        HardwareError: it is outside.
    """
    if not 0 < _number(owner, field, value) <= 1:
        raise HardwareError(f"{owner}: {field} is {value!r}; expected a number above 0 and at most 1.")
    return _number(owner, field, value)


def _number(owner: str, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise HardwareError(f"{owner}: {field} is {value!r}; expected a finite number.")
    return float(value)
