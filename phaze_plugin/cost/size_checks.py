"""Checks of the sizes that works are made of; a `CostError` names the owner, the size and the value."""

from __future__ import annotations

import math
from numbers import Integral

from phaze.errors import CostError, shown

__all__ = [
    "LARGEST_SIZE",
    "check_amounts",
    "check_sizes",
]

LARGEST_SIZE = 2**60
"""Sizes up to this stay exact in 64-bit integers, and are far above any tensor's."""


def check_sizes(owner: str, **sizes: object) -> None:
    """Refuse a size that is not a whole number of at least 1."""
    for name, value in sizes.items():
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_whole or not 1 <= int(value) <= LARGEST_SIZE:  # type: ignore[call-overload]
            raise CostError(f"{owner}: {name} is {shown(value)}; expected a whole number of at least 1.")


def check_amounts(owner: str, *, may_be_zero: bool = False, **amounts: float) -> None:
    """Refuse an amount that is not finite or is negative, and zero unless it may be that."""
    for name, value in amounts.items():
        if not (value >= 0 if may_be_zero else value > 0) or not math.isfinite(value):
            expected = "at least 0" if may_be_zero else "above 0"
            raise CostError(f"{owner}: {name} is {shown(value)}; expected a finite number {expected}.")
