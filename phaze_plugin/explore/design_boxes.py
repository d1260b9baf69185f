"""Sets of accelerators that are bounded together: a corner each, and how they are cut in two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phaze.explore.design_bounds import Cell, FloatArray, IntArray, Rows

__all__ = ["Box", "Swept", "cut_box", "pollution"]


@dataclass(frozen=True, slots=True, eq=False)
class Swept:
    """A cell with its rows."""

    cell: Cell
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Box:
    """Some accelerators, by their index in the space, ascending; `bounds_s` is under the step time of each, by cell.

    The name says how the box was cut out: a 0 for the lower part, a 1 for the upper one.
    """

    name: str
    points: IntArray
    bounds_s: FloatArray

    def __len__(self) -> int:
        """How many accelerators."""
        return len(self.points)


def pollution(box: Box, point: int, cells: list[Swept], is_open: list[bool]) -> float:
    """How far the corner lies below the row of one accelerator of the box, as a part of it; the worst open cell."""
    found = [0.0]
    for swept, is_wanted in zip(cells, is_open, strict=True):
        if is_wanted:
            rows, weights = swept.rows.seconds, _weights(swept)
            own = float((rows[point] * weights).sum())
            found.append(1 - float((rows[box.points].min(axis=0) * weights).sum()) / own)
    return max(found)


def cut_box(box: Box, point: int, cells: list[Swept], is_open: list[bool]) -> tuple[IntArray, IntArray]:
    """Two parts: accelerators that pull one number of the corner far below that of `point`, and the others.

    The number is that of an open cell whose distance costs most seconds, so that one of the parts gets a higher corner
    there, and the other one elsewhere. Where the corner is that accelerator's own row, the number with the widest
    spread is cut. Each part has at least one accelerator; those with equal rows are cut by their order.
    """
    best: tuple[float, FloatArray, float] | None = None
    for swept, is_wanted in zip(cells, is_open, strict=True):
        if not is_wanted:
            continue
        rows, weights = swept.rows.seconds[box.points], _weights(swept)
        own = swept.rows.seconds[point]
        total = max(float((own * weights).sum()), 1e-300)
        lost = (own - rows.min(axis=0)) * weights / total
        spread = (rows.max(axis=0) - rows.min(axis=0)) * weights / total
        at = int(lost.argmax())
        level = 0.5 * float(own[at] + rows[:, at].min())
        if lost[at] <= 1e-9:
            at = int(spread.argmax())
            level = float(np.sqrt(max(float(rows[:, at].min()), 1e-12) * float(rows[:, at].max())))
        worth = float(lost[at]) if lost[at] > 1e-9 else 1e-9 * min(float(spread[at]), 1.0)
        if worth > 0 and (best is None or worth > best[0]):
            best = (worth, rows[:, at], level)
    if best is not None:
        _, values, level = best
        is_low = values <= level
        if is_low.all() or not is_low.any():
            is_low = values < values.max()
        if is_low.any() and not is_low.all():
            return box.points[is_low], box.points[~is_low]
    half = len(box) // 2
    return box.points[:half], box.points[half:]


def _weights(swept: Swept) -> FloatArray:
    """How many layers each number of a row counts for; what is computed again counts little."""
    layers = [layer.key for layer in swept.cell.problem.graph.layers]
    passes = {"forward": 1.0, "to_inputs": 1.0, "to_weights": 1.0}
    return np.array([layers.count(key) * passes.get(name, 0.05) for key, name in swept.cell.numbers])
