"""Numbers of hardware: checks of those that users give, and the tables of facts that are shipped inside the package.

Checks. The numbers in accelerators, clusters, recipes and calibrations have bounds. One that cannot be is a
`HardwareError` that names the owner, the field and the value. Bounds are far outside anything that will be built, and
inside what floats can be multiplied and divided by without running over.

Tables (chips, networks, area, energy, calibrations). A table is read once (`packaged_table`). It cannot change while a
program runs and is handed out deeply frozen, so that keeping it is not visible. A cell with a source is a `Fact`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeAlias

from phaze.errors import HardwareError, shown

__all__ = [
    "LARGEST_BYTES",
    "LARGEST_COUNT",
    "LARGEST_REAL",
    "SMALLEST_REAL",
    "Fact",
    "Table",
    "fact_of",
    "fraction",
    "non_negative",
    "packaged_table",
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


Table: TypeAlias = Mapping[str, Any]
"""An object of a shipped JSON file. Its values are whatever the file says; those who read it know its keys."""


@cache
def packaged_table(name: str) -> Table:
    """The table ``data/NAME.json``."""
    text = resources.files("phaze.hardware.data").joinpath(f"{name}.json").read_text(encoding="utf-8")
    table: Table = _frozen(json.loads(text))
    return table


def _frozen(value: Any) -> Any:
    """A JSON value whose objects are read-only and whose lists are tuples."""
    if isinstance(value, dict):
        return MappingProxyType({key: _frozen(item) for key, item in value.items()})
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Fact:
    """One number, where it comes from, and whether that was checked (otherwise it is an estimate)."""

    value: float
    source: str
    is_verified: bool

    @property
    def status(self) -> str:
        """What it is called where people read."""
        return "fact" if self.is_verified else "estimate"


def fact_of(cell: Table) -> Fact:
    """The fact in a cell of a packaged table."""
    return Fact(cell["value"], cell["source"], cell["verified"])
