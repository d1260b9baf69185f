"""Good interleaved pipelines to start from, found by hand: their bounds alone lead nowhere quickly."""

from __future__ import annotations

import numpy as np

from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.model.stage_space import IntArray
from phaze.place.search.candidate_stages import Candidates
from phaze.place.search.stage_branch_and_bound import SplitSearch

__all__ = ["warm_starts"]

_IMPROVEMENTS = 8
_PROMISING = 1.1
_CLOSE = 1.01


def warm_starts(search: SplitSearch, bounds: InterleavedBounds, cutoff_s: float) -> tuple[tuple[int, ...], ...]:
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


def _by_ends(candidates: Candidates) -> dict[tuple[int, int], list[int]]:
    """Candidates by their source and target."""
    options: dict[tuple[int, int], list[int]] = {}
    for index, ends in enumerate(zip(candidates.source.tolist(), candidates.target.tolist(), strict=True)):
        options.setdefault(ends, []).append(index)
    return options


def _neighbours(
    candidates: Candidates, picks: IntArray, options: dict[tuple[int, int], list[int]], places: set[int]
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
