"""The best stages for one choice of degrees: branch and bound over candidates, simulating what survives.

Pipelines are extended stage by stage, the most promising first. What a bound proves slower than the best simulated time
(or than a given cutoff) is dropped; complete pipelines are simulated together. Work is counted in nodes, never in
seconds: the same input gives the same answer. If nodes run out, the answer says how low the unexplored bounds were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from phaze.place.bounds.partial_pipeline_bounds import StageBounds
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.candidate_stages import Candidates

__all__ = ["TOLERANCE", "SplitAnswer", "SplitSearch", "best_split"]

TOLERANCE = 1e-11
"""Relative difference below which two times count as equal."""

_LEAVES_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitSearch:
    """What is searched.

    Attributes:
        candidates: stages to choose from.
        bounds: bounds under what they make.
        simulated: seconds per batch of pipelines given as candidates per (pipeline, stage).
        estimated: the same in a few microbatches, extended to all; near the simulated seconds, but no bound.
        stages: how many to choose.
        full: the state in which every layer is placed.
        needed: stages that must take a single device.
        singles: exactly how many may, or None.
    """

    candidates: Candidates
    bounds: StageBounds
    simulated: Callable[[IntArray], FloatArray]
    estimated: Callable[[IntArray], FloatArray]
    stages: int
    full: int
    needed: int = 0
    singles: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAnswer:
    """The best pipeline found.

    Attributes:
        time_s: its simulated seconds; infinite if none beats the cutoff.
        picks: its candidates.
        bound_s: nothing else is faster than the smaller of this and `time_s`.
        nodes: pipelines that were extended.
        simulated: pipelines that were simulated.
    """

    time_s: float
    picks: tuple[int, ...]
    bound_s: float
    nodes: int
    simulated: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Best:
    """The best so far, and pipelines that wait to be simulated."""

    time_s: float
    cutoff_s: float
    gap: float
    picks: tuple[int, ...] = ()
    waiting: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    simulated: int = 0
    open_s: float = math.inf

    @property
    def limit_s(self) -> float:
        """What a bound must stay below."""
        return min(self.time_s, self.cutoff_s) * (1 - max(self.gap, TOLERANCE))

    def is_out(self, bound_s: float) -> bool:
        """Whether a bound is too high to go on from; it is remembered, since the gap may have decided."""
        if bound_s < self.limit_s:
            return False
        self.open_s = min(self.open_s, bound_s)
        return True


def best_split(
    search: SplitSearch,
    cutoff_s: float,
    node_limit: int,
    seeds: tuple[tuple[int, ...], ...] = (),
    gap: float = 0.0,
) -> SplitAnswer:
    """The fastest pipeline below the cutoff (to a part of its time), starting from pipelines that are already known."""
    best = _Best(time_s=math.inf, cutoff_s=cutoff_s, gap=gap, waiting=[(0.0, seed) for seed in seeds])
    _flush(search, best)
    stack: list[tuple[float, int, int, FloatArray, tuple[int, ...]]] = [
        (-math.inf, 0, search.needed, search.bounds.root, ())
    ]
    nodes = 0
    while stack:
        bound, state, need, row, picks = stack.pop()
        if best.is_out(bound):
            continue
        if len(picks) == search.stages:
            best.waiting.append((bound, picks))
            if len(best.waiting) >= (_LEAVES_AT_ONCE if best.simulated else 1):
                _flush(search, best)
            continue
        if nodes >= node_limit:
            best.open_s = min(best.open_s, bound)
            continue
        nodes += 1
        stack += _children(search, state, need, row, picks, best)
    _flush(search, best)
    is_proven = best.open_s >= min(best.time_s, cutoff_s) * (1 - TOLERANCE)
    return SplitAnswer(
        time_s=best.time_s,
        picks=best.picks,
        bound_s=best.time_s if is_proven else max(best.open_s, 0.0),
        nodes=nodes,
        simulated=best.simulated,
    )


def _children(
    search: SplitSearch, state: int, need: int, row: FloatArray, picks: tuple[int, ...], best: _Best
) -> list[tuple[float, int, int, FloatArray, tuple[int, ...]]]:
    """The pipeline with one more stage each, the most promising last."""
    candidates = search.candidates
    options = np.arange(candidates.first[state], candidates.first[state + 1])
    if not len(options):
        return []
    needed = np.maximum(need - candidates.is_single[options], 0)
    rows, bound = search.bounds.extend(row, len(picks), options, needed)
    if len(picks) + 1 == search.stages:
        bound = np.where((candidates.target[options] == search.full) & (needed == 0), bound, np.inf)
    if search.singles is not None:
        singles = candidates.is_single[list(picks)].sum() + candidates.is_single[options]
        left = search.stages - len(picks) - 1
        bound = np.where((singles <= search.singles) & (singles + left >= search.singles), bound, np.inf)
    is_kept = bound < best.limit_s
    if best.gap:
        best.is_out(float(bound[~is_kept].min(initial=math.inf)))
    chosen = np.flatnonzero(is_kept)
    chosen = chosen[np.argsort(-bound[chosen], kind="stable")]
    return [
        (
            float(bound[index]),
            int(candidates.target[options[index]]),
            int(needed[index]),
            rows[index],
            (*picks, int(options[index])),
        )
        for index in chosen
    ]


def _flush(search: SplitSearch, best: _Best) -> None:
    """Simulate what waits and keep the fastest."""
    waiting = [picks for bound, picks in best.waiting if not best.is_out(bound)]
    best.waiting = []
    if not waiting:
        return
    times = search.simulated(np.array(waiting))
    best.simulated += len(waiting)
    index = int(np.argmin(times))
    if times[index] < best.time_s:
        best.time_s, best.picks = float(times[index]), waiting[index]
