"""The sensitivity of a design: what one step along each axis of the space would change, either way.

A neighbour has the next value of one field and equal values of all others. In spaces whose vector lanes follow the rows
of an array, as in the paper's, a step along the rows moves the lanes, too, and lanes have no steps of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.search_result import SensitivityRow
from phaze.hardware import AcceleratorArray
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS

__all__ = ["neighbour", "sensitivity_rows"]

_AXES = tuple(name for name in (*INTEGER_FIELDS, *REAL_FIELDS) if name != "hbm_bytes")


def sensitivity_rows(best_first: BestFirstSearch) -> Iterator[SensitivityRow]:
    """A row for each axis and direction, each neighbour evaluated to the end with the largest memory."""
    points, best = best_first.question.points, best_first.state.best
    assert best is not None
    for field in _AXES:
        if len(np.unique(getattr(points, field))) < 2 or (field == "vector_lanes" and _lanes_follow_rows(points)):
            continue
        for direction in ("up", "down"):
            point = neighbour(points, best.point, field, direction)
            value = None if point is None else best_first.tasks.value_of(point) or None
            yield SensitivityRow(
                field=field,
                direction=direction,
                name="" if point is None else points.names[point],
                area_mm2=None if point is None else float(best_first.state.areas_mm2[point]),
                value=value,
                change=None if value is None else value / best.value - 1,
            )


def neighbour(points: AcceleratorArray, point: int, field: str, direction: str) -> int | None:
    """The accelerator one step along a field; None where the space has none."""
    values = np.unique(getattr(points, field))
    place = int(np.searchsorted(values, getattr(points, field)[point])) + (1 if direction == "up" else -1)
    if not 0 <= place < len(values):
        return None
    is_there = getattr(points, field) == values[place]
    follows = field == "tensor_rows" and _lanes_follow_rows(points)
    for other in _AXES:
        if other != field and not (follows and other == "vector_lanes"):
            is_there &= getattr(points, other) == getattr(points, other)[point]
    matching = np.flatnonzero(is_there)
    return int(matching[0]) if len(matching) else None


def _lanes_follow_rows(points: AcceleratorArray) -> bool:
    """Whether lanes are no axis of their own, because there are as many as an array has rows."""
    return bool((points.vector_lanes == points.tensor_rows).all())
