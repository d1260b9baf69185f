"""A plan as small pictures of a terminal: memory as a bar for each place, and the step as a row of letters for each.

Letters tell what colours tell as well, so that a terminal without colours shows the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from phaze.place.simulation.timeline import KINDS, EventKind
from phaze.plan.plan import Plan

__all__ = ["memory_picture", "timeline_picture"]

FloatArray = NDArray[np.float64]

_MOST_PLACES = 16
"""Places that are drawn: a pipeline of more fills the screen, and its places in the middle are alike."""

_BAR_COLUMNS = 50
"""Columns of a full device."""

_GIB = 2**30

_ITEMS = {
    "parameters": ("p", "blue"),
    "gradients": ("g", "cyan"),
    "optimizer": ("o", "magenta"),
    "activations": ("a", "yellow"),
    "working": ("w", "green"),
    "buffers": ("b", "red"),
    "reserved": ("r", "bright_black"),
}

_KINDS = {
    EventKind.FORWARD: ("F", "blue"),
    EventKind.BACKWARD: ("B", "yellow"),
    EventKind.WEIGHT: ("W", "magenta"),
    EventKind.RECOMPUTE: ("R", "cyan"),
    EventKind.RECEIVE: (">", "red"),
    EventKind.REDUCE: ("=", "red"),
    EventKind.UPDATE: ("U", "green"),
}

_IDLE = (".", "bright_black")


def _places(count: int) -> Iterable[int | None]:
    """The places to draw; None stands for those that are left out."""
    if count <= _MOST_PLACES:
        return range(count)
    return (*range(_MOST_PLACES // 2), None, *range(count - _MOST_PLACES // 2, count))


def memory_picture(plan: Plan) -> Text:
    """A bar for each place of the pipeline: what its devices hold, by item, against what they have."""
    by_place = {stage.place: stage for stage in plan.stages}
    capacity = plan.stages[0].memory_bytes["capacity"]
    scale = max(capacity, *(stage.memory_bytes["total"] for stage in plan.stages)) / _BAR_COLUMNS
    picture = Text()
    for place in _places(len(by_place)):
        if place is None:
            picture.append(f"{'...':>5}\n")
            continue
        memory, fit = by_place[place].memory_bytes, by_place[place].fit
        picture.append(f"{place:>5} ")
        drawn = _append_bar(picture, memory, scale)
        picture.append("·" * (_BAR_COLUMNS - drawn), style="bright_black")
        numbers = f" {memory['total'] / _GIB:.1f} of {memory['capacity'] / _GIB:.0f} GiB, {fit}\n"
        picture.append(numbers, style=None if fit == "fits" else "red")
    used = [item for item in _ITEMS if any(stage.memory_bytes.get(item, 0) > 0 for stage in plan.stages)]
    return picture.append_text(_legend({item: _ITEMS[item] for item in used}))


def _append_bar(picture: Text, memory: Mapping[str, float], scale: float) -> int:
    """Append the items of one device; ends are rounded, so that the bar is as long as its total."""
    end, drawn = 0.0, 0
    for item, (letter, colour) in _ITEMS.items():
        end += memory.get(item, 0.0)
        columns = round(end / scale) - drawn
        picture.append(letter * columns, style=f"black on {colour}")
        drawn += columns
    return drawn


def timeline_picture(plan: Plan) -> Text:
    """A row for each place of the pipeline; its columns are shared as its device shares its time."""
    timeline = plan.timeline()
    table, picture = timeline.table, Text()
    edges = np.linspace(0.0, timeline.time_s, _BAR_COLUMNS + 1)
    for place in _places(timeline.devices):
        if place is None:
            picture.append(f"{'...':>5}\n")
            continue
        mine = table.device == place
        busy = np.zeros((len(KINDS), _BAR_COLUMNS))
        for kind in range(len(KINDS)):
            chosen = mine & (table.kind == kind)
            busy[kind] = np.diff(_busy_before(edges, table.start_s[chosen], table.end_s[chosen]))
        idle = np.diff(edges) - busy.sum(axis=0)
        picture.append(f"{place:>5} ")
        for number in _shared_columns(np.vstack([busy, idle])):
            letter, colour = _KINDS[KINDS[number]] if number < len(KINDS) else _IDLE
            picture.append(letter, style=f"black on {colour}" if number < len(KINDS) else colour)
        picture.append("\n")
    used = {KINDS[number] for number in np.unique(table.kind).tolist()}
    shown = {str(kind): marks for kind, marks in _KINDS.items() if kind in used}
    return picture.append_text(_legend({**shown, "idle": _IDLE}))


def _shared_columns(seconds: FloatArray) -> list[int]:
    """The kind that each column of [kind, column] shows: the one that was shown too little so far."""
    owed = np.zeros(len(seconds))
    shown = []
    for column in seconds.T:
        owed += column
        shown.append(int(owed.argmax()))
        owed[shown[-1]] -= column.sum()
    return shown


def _busy_before(edges: FloatArray, starts: FloatArray, ends: FloatArray) -> FloatArray:
    """Busy seconds before each edge, of intervals in order that do not overlap."""
    if not len(starts):
        return np.zeros(len(edges))
    finished = np.concatenate([[0.0], np.cumsum(ends - starts)])
    last = np.maximum(np.searchsorted(starts, edges, side="right") - 1, 0)
    return finished[last] + np.clip(edges - starts[last], 0.0, (ends - starts)[last])


def _legend(entries: Mapping[str, tuple[str, str]]) -> Text:
    legend = Text("      ")
    for name, (letter, colour) in entries.items():
        legend.append(letter, style=f"black on {colour}" if name != "idle" else colour)
        legend.append(f" {name}  ")
    return legend
