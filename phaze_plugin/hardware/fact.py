"""A number that was found somewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Fact", "fact_of"]


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


def fact_of(cell: Mapping[str, Any]) -> Fact:
    """The fact in a cell of a packaged table."""
    return Fact(cell["value"], cell["source"], cell["verified"])
