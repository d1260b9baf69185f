"""The sensitivity of a design: what one step along each axis of the space would change, either way."""

from __future__ import annotations

from collections.abc import Iterator

from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.design_neighbours import DIRECTIONS, axes, neighbour
from phaze.explore.search_result import SensitivityRow

__all__ = ["sensitivity_rows"]


def sensitivity_rows(best_first: BestFirstSearch) -> Iterator[SensitivityRow]:
    """A row for each axis and direction, each neighbour evaluated to the end with the largest memory."""
    points, best = best_first.question.points, best_first.state.best
    assert best is not None
    for field in axes(points):
        for direction in DIRECTIONS:
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
