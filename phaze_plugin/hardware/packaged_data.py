"""Tables that are shipped inside the package (chips, networks, area, energy, calibrations), and the facts in them.

A table is read once. It cannot change while a program runs and is handed out deeply frozen, so that keeping it is not
visible. A cell with a source is a `Fact`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, TypeAlias

__all__ = [
    "Fact",
    "Table",
    "fact_of",
    "packaged_table",
]

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
