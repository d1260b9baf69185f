"""The best stages of one strategy: branch and bound over candidate stages, simulating the pipelines that survive.

Pipelines are extended stage by stage, the most promising first (`best_stages`). A pipeline is dropped if its bound
proves it slower than the best simulated time, or than a given cutoff; complete pipelines are simulated together. Work
is counted in nodes (extended pipelines), never in seconds: the same input gives the same answer. If nodes run out, the
answer says how low the unexplored bounds were.

The bounds of interleaved pipelines are too loose to lead the search to good pipelines quickly. For them `warm_starts`
builds one by a dynamic program that evens out the stages, and improves it by local changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.bounds.partial_pipeline_bounds import StageBounds
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.candidate_stages import CandidateStages

__all__ = ["TOLERANCE", "StageSearch", "StageSearchAnswer", "best_stages", "warm_starts"]

TOLERANCE = 1e-11
"""Relative difference below which two times count as equal."""

_LEAVES_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSearch:
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

    candidates: CandidateStages
    bounds: StageBounds
    simulated: Callable[[IntArray], FloatArray]
    estimated: Callable[[IntArray], FloatArray]
    stages: int
    full: int
    needed: int = 0
    singles: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSearchAnswer:
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


def best_stages(
    search: StageSearch,
    cutoff_s: float,
    node_limit: int,
    seeds: tuple[tuple[int, ...], ...] = (),
    gap: float = 0.0,
) -> StageSearchAnswer:
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
    return StageSearchAnswer(
        time_s=best.time_s,
        picks=best.picks,
        bound_s=best.time_s if is_proven else max(best.open_s, 0.0),
        nodes=nodes,
        simulated=best.simulated,
    )


def _children(
    search: StageSearch, state: int, need: int, row: FloatArray, picks: tuple[int, ...], best: _Best
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


def _flush(search: StageSearch, best: _Best) -> None:
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


_IMPROVEMENTS = 8
_PROMISING = 1.1
_CLOSE = 1.01


def warm_starts(search: StageSearch, bounds: InterleavedBounds, cutoff_s: float) -> tuple[tuple[int, ...], ...]:
    """A good pipeline, if one is found: shares of the work as even as they come.

    If it comes near the cutoff, boundaries and modes of the busiest device's stages are changed one at a time as long
    as that helps. Times are estimates; what stays clearly above the cutoff is not worth a simulation.
    """
    starts = [
        pipeline for lean in (False, True) if (pipeline := _even_split(bounds, search.full + 1, lean)) is not None
    ]
    starts = [pipeline for pipeline in starts if bounds.fits(pipeline[None])[0]]
    if not starts:
        return ()
    times = search.estimated(np.array(starts))
    best, time_s = starts[int(times.argmin())], float(times.min())
    options = _by_ends(search.candidates)
    for _ in range(_IMPROVEMENTS if time_s < _PROMISING * cutoff_s else 0):
        near = _neighbours(search.candidates, best, options, bounds.busiest(best))
        near = near[bounds.fits(near)] if len(near) else near
        if not len(near):
            break
        times = search.estimated(near)
        if times.min() >= time_s * (1 - 1e-9):
            break
        best, time_s = near[int(times.argmin())], float(times.min())
    return (tuple(best.tolist()),) if time_s < _CLOSE * cutoff_s else ()


def _even_split(bounds: InterleavedBounds, states: int, lean: bool) -> IntArray | None:
    """Candidates of a pipeline whose largest share is least, of stages that fit a part of their device."""
    candidates = bounds.candidates
    every = np.arange(len(candidates.mode))
    share = bounds.usable * bounds.devices / bounds.stages
    fall = 1 - bounds.devices / (bounds.stages * bounds.rounds)
    tables = np.full((bounds.stages + 1, states), np.inf)
    tables[bounds.stages, -1] = 0.0
    for position in range(bounds.stages - 1, -1, -1):
        cost = bounds.through / fall ** (position % bounds.devices)
        if lean:
            cost = cost * (1 + np.maximum(bounds.bytes_of(position, every) / share - 1, 0.0) * 100)
        tables[position] = candidates.least_by_source(np.maximum(cost, tables[position + 1][candidates.target]), states)
    if not np.isfinite(tables[0, 0]):
        return None
    picks, state = [], 0
    for position in range(bounds.stages):
        options = np.arange(candidates.first[state], candidates.first[state + 1])
        cost = bounds.through[options] / fall ** (position % bounds.devices)
        if lean:
            cost = cost * (1 + np.maximum(bounds.bytes_of(position, options) / share - 1, 0.0) * 100)
        pick = options[int(np.argmin(np.maximum(cost, tables[position + 1][candidates.target[options]])))]
        picks.append(int(pick))
        state = int(candidates.target[pick])
    return np.array(picks)


def _by_ends(candidates: CandidateStages) -> dict[tuple[int, int], list[int]]:
    """Candidates by their source and target."""
    options: dict[tuple[int, int], list[int]] = {}
    for index, ends in enumerate(zip(candidates.source.tolist(), candidates.target.tolist(), strict=True)):
        options.setdefault(ends, []).append(index)
    return options


def _neighbours(
    candidates: CandidateStages, picks: IntArray, options: dict[tuple[int, int], list[int]], places: set[int]
) -> IntArray:
    """Pipelines that differ in one boundary by one state, or in the mode of one stage, at some of their stages."""
    near: list[list[int]] = []
    chosen = picks.tolist()
    for index, pick in enumerate(chosen):
        if index not in places and index + 1 not in places:
            continue
        source, target = int(candidates.source[pick]), int(candidates.target[pick])
        near += [[*chosen[:index], other, *chosen[index + 1 :]] for other in options[source, target] if other != pick]
        if index + 1 == len(chosen):
            break
        end = int(candidates.target[chosen[index + 1]])
        for moved in (target - 1, target + 1):
            for left in options.get((source, moved), ()):
                near += [
                    [*chosen[:index], left, right, *chosen[index + 2 :]] for right in options.get((moved, end), ())
                ]
    return np.array(near, dtype=np.int64).reshape(-1, len(chosen))
