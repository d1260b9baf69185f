"""Boxes: sets of accelerators that a search bounds together by their best case, and how a box is cut in two.

The best case of a box has the least seconds of every pass over its accelerators (see `design_bounds`). A box is cut so
that the best cases of the two parts come closer to real accelerators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phaze.explore.design_bounds import FORWARD, TO_INPUTS, TO_WEIGHTS, FloatArray, IntArray, SweptSlicing
from phaze.tolerances import CLAIM_MARGIN, NO_SECONDS

__all__ = ["DesignBox", "best_case_distance", "cut_box"]

_RECOMPUTE_WEIGHT = 0.05
"""How much a second of recomputation counts beside one of a pass when a box is cut. Few plans compute much again, so it
counts little; it only chooses where to cut."""

_ANY_SECONDS = 1e-300
"""A least total of seconds that keeps shares of it finite."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DesignBox:
    """Some accelerators of the space.

    Attributes:
        name: how the box was cut out of the space: a 0 for the lower part, a 1 for the upper one.
        points: positions of the accelerators in the space, ascending.
        bounds_s: lower bounds on the step time of each of them, by slicing.
    """

    name: str
    points: IntArray
    bounds_s: FloatArray

    def __len__(self) -> int:
        """How many accelerators."""
        return len(self.points)


def best_case_distance(box: DesignBox, point: int, slicings: Sequence[SweptSlicing], is_open: Sequence[bool]) -> float:
    """How far the best case of a box lies below one of its accelerators, as a share of that one's seconds.

    The slicing with the largest distance counts, of those that are open.
    """
    distances = [0.0]
    for swept, is_wanted in zip(slicings, is_open, strict=True):
        if is_wanted:
            pass_s, weights = swept.bounds.pass_s, _column_weights(swept)
            point_s = float((pass_s[point] * weights).sum())
            distances.append(1 - float((pass_s[box.points].min(axis=0) * weights).sum()) / point_s)
    return max(distances)


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A column along which a box may be cut: what the cut is worth, the column, and the level between the parts."""

    worth: float
    column_s: FloatArray
    level_s: float


def cut_box(
    box: DesignBox, point: int, slicings: Sequence[SweptSlicing], is_open: Sequence[bool]
) -> tuple[IntArray, IntArray]:
    """Two parts: accelerators that pull one column of the best case far below that of `point`, and the others.

    The column is the one of an open slicing whose distance costs most seconds, so that one of the parts gets a higher
    best case there, and the other one elsewhere. Where the best case is that accelerator's own row, the column with the
    widest spread is cut. Each part has at least one accelerator; those with equal rows are cut by their order.
    """
    best: _Cut | None = None
    for swept, is_wanted in zip(slicings, is_open, strict=True):
        if is_wanted:
            cut = _cut_of_slicing(box, point, swept)
            if cut.worth > 0 and (best is None or cut.worth > best.worth):
                best = cut
    if best is not None:
        is_low = best.column_s <= best.level_s
        if is_low.all() or not is_low.any():
            is_low = best.column_s < best.column_s.max()
        if is_low.any() and not is_low.all():
            return box.points[is_low], box.points[~is_low]
    half = len(box) // 2
    return box.points[:half], box.points[half:]


def _cut_of_slicing(box: DesignBox, point: int, swept: SweptSlicing) -> _Cut:
    """The column of one slicing at which a cut gains most."""
    box_s, weights = swept.bounds.pass_s[box.points], _column_weights(swept)
    point_s = swept.bounds.pass_s[point]
    total_s = max(float((point_s * weights).sum()), _ANY_SECONDS)
    lost = (point_s - box_s.min(axis=0)) * weights / total_s
    column = int(lost.argmax())
    if lost[column] > CLAIM_MARGIN:
        level_s = 0.5 * float(point_s[column] + box_s[:, column].min())
        return _Cut(float(lost[column]), box_s[:, column], level_s)
    spread = (box_s.max(axis=0) - box_s.min(axis=0)) * weights / total_s
    column = int(spread.argmax())
    level_s = float(np.sqrt(max(float(box_s[:, column].min()), NO_SECONDS) * float(box_s[:, column].max())))
    return _Cut(CLAIM_MARGIN * min(float(spread[column]), 1.0), box_s[:, column], level_s)


def _column_weights(swept: SweptSlicing) -> FloatArray:
    """How many layers each column counts for."""
    layers = [layer.key for layer in swept.slicing.problem.graph.layers]
    passes = (FORWARD, TO_INPUTS, TO_WEIGHTS)
    return np.array(
        [
            layers.count(column.layer_key) * (1.0 if column.pass_name in passes else _RECOMPUTE_WEIGHT)
            for column in swept.slicing.columns
        ]
    )
