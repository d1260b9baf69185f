"""The neighbours of an accelerator in its space: those that are a step away along one axis, or along two.

A step leads to the next value of one field and leaves all others as they are. In spaces whose vector lanes follow the
rows of an array, as in the paper's, a step along the rows moves the lanes, too, and lanes have no steps of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import numpy as np

from phaze.hardware import AcceleratorArray
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS

__all__ = ["DIRECTIONS", "axes", "neighbour", "neighbours"]

DIRECTIONS = ("up", "down")

_FIELDS = tuple(name for name in (*INTEGER_FIELDS, *REAL_FIELDS) if name != "hbm_bytes")


def axes(points: AcceleratorArray) -> list[str]:
    """The fields along which a space has steps."""
    return [
        name
        for name in _FIELDS
        if len(np.unique(getattr(points, name))) > 1 and not (name == "vector_lanes" and _lanes_follow_rows(points))
    ]


def neighbour(points: AcceleratorArray, point: int, field: str, direction: str) -> int | None:
    """The accelerator one step along a field; None where the space has none."""
    return _moved(points, point, {field: direction})


def neighbours(points: AcceleratorArray, point: int) -> list[int]:
    """Accelerators one step away along one axis, or up one axis and down another, as where fewer cores are larger."""
    fields = axes(points)
    single = [{field: direction} for field in fields for direction in DIRECTIONS]
    exchanges = [{grown: "up", shrunk: "down"} for grown, shrunk in permutations(fields, 2)]
    found = (_moved(points, point, steps) for steps in (*single, *exchanges))
    return [position for position in found if position is not None]


def _moved(points: AcceleratorArray, point: int, steps: Mapping[str, str]) -> int | None:
    """The accelerator some steps away, with equal values of all other fields; None where the space has none."""
    is_there = np.ones(len(points), dtype=np.bool_)
    follows = "tensor_rows" in steps and _lanes_follow_rows(points)
    for field in _FIELDS:
        column = getattr(points, field)
        if field in steps:
            values = np.unique(column)
            place = int(np.searchsorted(values, column[point])) + (1 if steps[field] == "up" else -1)
            if not 0 <= place < len(values):
                return None
            is_there &= column == values[place]
        elif not (follows and field == "vector_lanes"):
            is_there &= column == column[point]
    matching = np.flatnonzero(is_there)
    return int(matching[0]) if len(matching) else None


def _lanes_follow_rows(points: AcceleratorArray) -> bool:
    """Whether lanes are no axis of their own, because there are as many as an array has rows."""
    return bool((points.vector_lanes == points.tensor_rows).all())
