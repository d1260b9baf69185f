"""Checks of the numbers in accelerators, clusters, recipes and calibrations, and the largest ones that may be.

A number that cannot be is a `HardwareError` that names the owner, the field and the value.

Bounds are far outside anything that will be built, and inside what floats can be multiplied and divided by without
running over.
"""

from __future__ import annotations

import math
from numbers import Integral, Real

from phaze.errors import HardwareError, shown

__all__ = [
    "LARGEST_BYTES",
    "LARGEST_COUNT",
    "LARGEST_REAL",
    "SMALLEST_REAL",
    "fraction",
    "non_negative",
    "positive",
    "positive_integer",
]

LARGEST_COUNT = 2**20
"""Of cores, rows, columns and lanes: products of three still fit 64 bits."""

LARGEST_BYTES = 2**50
"""Of memories, and of any other whole number such as a count of devices: exact as a float."""

SMALLEST_REAL, LARGEST_REAL = 1e-9, 1e18
"""Of rates, clocks and bandwidths."""


def positive_integer(owner: str, field: str, value: object, most: int = LARGEST_BYTES) -> int:
    """``value`` as an int of at least 1 and at most ``most``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= most:
        raise HardwareError(f"{owner}: {field} is {shown(value)}; expected a whole number from 1 to {most}.")
    return int(value)


def positive(owner: str, field: str, value: object) -> float:
    """``value`` as a float from `SMALLEST_REAL` to `LARGEST_REAL`."""
    number = _number(owner, field, value)
    if not SMALLEST_REAL <= number <= LARGEST_REAL:
        expected = "a number above 0" if number <= 0 else f"{SMALLEST_REAL:g} to {LARGEST_REAL:g}"
        raise HardwareError(f"{owner}: {field} is {shown(value)}; expected {expected}.")
    return number


def non_negative(owner: str, field: str, value: object) -> float:
    """``value`` as a float from 0 to `LARGEST_REAL`."""
    number = _number(owner, field, value)
    if not 0 <= number <= LARGEST_REAL:
        raise HardwareError(
            f"{owner}: {field} is {shown(value)}; expected a number of at least 0 and at most {LARGEST_REAL:g}."
        )
    return number


def fraction(owner: str, field: str, value: object) -> float:
    """``value`` as a float from `SMALLEST_REAL` to 1."""
    number = _number(owner, field, value)
    if not SMALLEST_REAL <= number <= 1:
        raise HardwareError(f"{owner}: {field} is {shown(value)}; expected a number above 0 and at most 1.")
    return number


def _number(owner: str, field: str, value: object) -> float:
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not math.isfinite(number):
        raise HardwareError(f"{owner}: {field} is {shown(value)}; expected a finite number.")
    return number
