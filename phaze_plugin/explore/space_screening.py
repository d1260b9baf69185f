"""Screening: what provably cannot be the best leaves a large space before it is swept.

A *cell* is a set of accelerators with the same numbers of cores, rows and columns. Its *corner* has the most lanes,
buffer, HBM bandwidth, clock and rates of the cell. By the laws of the cost model (`tests/cost/test_laws.py`), with
equal cores each op takes no longer on the corner than on any accelerator of the cell, alone or spread, so that the
least step of the corner,

    all microbatches of all layers, on all devices, without a pause     (`design_bounds.least_steps_s`)

is under every step of every accelerator of the cell, and one price bounds them all. Cells are bounded coarsely first,
then cut along lanes and buffers, then into single accelerators; at each level those whose bound exceeds the value of a
real design by no more than the gap are closed (`_Screen.close`). That design is the best of the few accelerators with
the highest bounds, which the caller's `try_points` searches exactly.

A cell of several accelerators is bounded by its steps only, never by the parts of a backward pass: the part for weights
is what the whole leaves beside the part for inputs, and both shrink with the corner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from phaze.errors import ShardError
from phaze.explore.design_bounds import (
    FloatArray,
    IntArray,
    SlicedModel,
    SweepTask,
    least_steps_s,
    slice_model,
    sweep_tasks,
)
from phaze.explore.executors import Workers
from phaze.explore.objectives import Metric
from phaze.explore.search_question import SearchQuestion
from phaze.hardware import AcceleratorArray
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS, areas_mm2
from phaze.tolerances import EQUAL_DESIGNS, EQUAL_RESULTS

__all__ = ["SCREENED_FROM", "ClosedCells", "ScreenedSpace", "can_screen", "screen_space"]

SCREENED_FROM = 50_000
"""Spaces with fewer accelerators are swept at once, which takes seconds; the paper's has 29,360."""

_LEVELS = (
    ("tensor_cores", "tensor_rows", "tensor_cols", "vector_cores"),
    ("vector_lanes", "buffer_bytes"),
    ("hbm_bytes", "hbm_bandwidth_bytes_per_s", "clock_hz"),
)
"""The fields that cells agree in, level by level; at the last level, accelerators that agree in all stay together."""

_TRIED_CELLS_POINTS = 512
_TRIED_POINTS = 12
"""Accelerators of the best cells that are bounded alone, and how many of them are searched for the first design. Few
make a weaker first design, and more cells stay open; many take longer than what they close."""

_CORNERS_AT_ONCE = 1 << 13
"""Corners that a task prices: enough to fill numpy's loops, few enough that workers share the cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedCells:
    """Accelerators that one level of the screening closed, and the bound that none of their values exceeds."""

    level: int
    points: int
    bound: float
    least_area_mm2: float
    most_area_mm2: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScreenedSpace:
    """What is left of a space.

    Attributes:
        kept: positions of the accelerators that may still be the best, ascending.
        first: the position of a good design among those that are kept.
        closed: what was closed, level by level.
    """

    kept: IntArray
    first: int
    closed: tuple[ClosedCells, ...]

    @property
    def bound(self) -> float:
        """No accelerator that was closed has a higher value."""
        return max((cells.bound for cells in self.closed), default=0.0)


def can_screen(question: SearchQuestion) -> bool:
    """Whether the objective follows from the step time and the area of one model."""
    return len(question.questions) == 1 and not question.counts_energy


def screen_space(
    question: SearchQuestion,
    workers: Workers,
    try_points: Callable[[IntArray], tuple[float, int]],
    report: Callable[[str], object],
) -> ScreenedSpace | None:
    """Leave out what provably is not the best; None where the model cannot be sliced, which the search explains.

    `try_points` searches a few accelerators, given by their positions, and returns the best value with its position.
    """
    sliced = [model for model in workers.run(_slice_or_refuse, sweep_tasks(question)) if model is not None]
    if not sliced:
        return None
    report(f"slicings of {question.names[0]}")
    screen = _Screen(question=question, workers=workers, sliced=sliced, areas=areas_mm2(question.points), report=report)
    kept = np.arange(len(question.points))
    cells = screen.cells(kept, 0)
    values = screen.cell_bounds(kept, cells)
    value, first = try_points(screen.promising(kept, cells, values))
    for level in range(len(_LEVELS)):
        if level:
            cells = screen.cells(kept, level)
            values = screen.cell_bounds(kept, cells)
        kept = screen.close(kept, values[cells], level, value, first)
        report(f"screening level {level + 1} of {len(_LEVELS)}: {len(kept):,} accelerators left")
    return ScreenedSpace(kept=kept, first=first, closed=tuple(screen.closed))


def _slice_or_refuse(task: SweepTask) -> SlicedModel | None:
    try:
        return slice_model(replace(task, question=replace(task.question, points=task.question.points.take([0]))))
    except ShardError:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _CornerTask:
    """Corners to price on one slicing."""

    sliced: SlicedModel
    corners: AcceleratorArray


def _price_corners(task: _CornerTask) -> FloatArray:
    return least_steps_s(task.sliced, task.corners)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Screen:
    """Bounds and closes cells of a space."""

    question: SearchQuestion
    workers: Workers
    sliced: Sequence[SlicedModel]
    areas: FloatArray
    report: Callable[[str], object]
    closed: list[ClosedCells] = field(default_factory=list)

    def cells(self, points: IntArray, level: int) -> IntArray:
        """The number of the cell that each of some accelerators belongs to."""
        names = [name for fields in _LEVELS[: level + 1] for name in fields]
        cell_of = np.zeros(len(points), dtype=np.int64)
        for name in names:  # a mixed number whose digits are the places of the values, made small at every step
            places = np.unique(getattr(self.question.points, name)[points], return_inverse=True)[1]
            cell_of = np.unique(cell_of * (int(places.max(initial=0)) + 1) + places, return_inverse=True)[1]
        return cell_of

    def cell_bounds(self, points: IntArray, cell_of: IntArray) -> FloatArray:
        """The highest value that an accelerator of each cell may have."""
        order = np.argsort(cell_of, kind="stable")
        starts = np.flatnonzero(np.diff(cell_of[order], prepend=-1))
        corners = _corners(self.question.points, points[order], starts)
        step_s = self._least_steps(corners)
        samples = self.question.questions[0].global_batch_size
        values = samples / step_s
        if self.question.metric is Metric.PER_AREA:
            values = values / np.minimum.reduceat(self.areas[points[order]], starts)
        return np.asarray(values)

    def _least_steps(self, corners: AcceleratorArray) -> FloatArray:
        """The least step of each corner over all slicings."""
        parts = [
            np.arange(start, min(start + _CORNERS_AT_ONCE, len(corners)))
            for start in range(0, len(corners), _CORNERS_AT_ONCE)
        ]
        tasks = [_CornerTask(sliced, corners.take(part)) for part in parts for sliced in self.sliced]
        priced = self.workers.run(
            _price_corners, tasks, lambda index, _: self.report(f"cells, task {index + 1} of {len(tasks)}")
        )
        count = len(self.sliced)
        return np.concatenate([np.min(priced[index : index + count], axis=0) for index in range(0, len(priced), count)])

    def promising(self, points: IntArray, cell_of: IntArray, values: FloatArray) -> IntArray:
        """A few accelerators with the highest bounds of their own, out of the cells with the highest bounds."""
        best_cells = np.lexsort((points, -values[cell_of]))[:_TRIED_CELLS_POINTS]
        some = np.sort(points[best_cells])
        alone = self.cell_bounds(some, np.arange(len(some)))
        return np.sort(some[np.lexsort((self.areas[some], -alone))[:_TRIED_POINTS]])

    def close(self, points: IntArray, bounds: FloatArray, level: int, value: float, first: int) -> IntArray:
        """The accelerators that may exceed a value by more than the gap, and the design that has it."""
        gap = self.question.gap * (1 - EQUAL_RESULTS)
        is_closed = (bounds <= value * (1 + gap if gap else 1 - EQUAL_DESIGNS)) & (points != first)
        if is_closed.any():
            areas = self.areas[points[is_closed]]
            self.closed.append(
                ClosedCells(
                    level=level,
                    points=int(is_closed.sum()),
                    bound=float(bounds[is_closed].max()),
                    least_area_mm2=float(areas.min()),
                    most_area_mm2=float(areas.max()),
                )
            )
        kept: IntArray = points[~is_closed]
        return kept


def _corners(points: AcceleratorArray, ordered: IntArray, starts: IntArray) -> AcceleratorArray:
    """Accelerators with the most of every field over each run of positions that begins at a start."""
    fields = {
        name: np.maximum.reduceat(getattr(points, name)[ordered], starts) for name in (*INTEGER_FIELDS, *REAL_FIELDS)
    }
    rates = np.maximum.reduceat(points.rates[ordered], starts, axis=0)
    return AcceleratorArray(names=("corner",) * len(starts), rates=rates, **fields)
