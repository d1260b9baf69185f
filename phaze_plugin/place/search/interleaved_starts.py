"""Interleaved pipelines cut by cut: a good pipeline to start from, and a bound where all cuts can be looked at.

Chunks have n or n+1 layers, so that a cut says which chunks are longer; `interleaved_modes.py` chooses their modes.

Where a chain has few cuts (`_all_cuts`), all of them are looked at. Those whose bound is above the cutoff are out. Of
the others the bounds are raised, the lowest first (`_raise_least`): by looking for the best modes of the cut, and then
by what the devices can choose on it (`InterleavedBounds.bound_of_cut_s`). Else
the cuts are those whose longer chunks follow each other (`_runs_of_longer_chunks`), and one that a dynamic program
evens out where layers differ (`_even_cut`); the best one is improved by making another chunk the longer one
(`_shifted_cuts`) as long as that helps, and nothing is proven.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np

from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.model.stage_space import IntArray
from phaze.place.search.interleaved_modes import ChosenModes, ModeChooser
from phaze.place.search.stage_search import Pipeline, StageSearch
from phaze.tolerances import BOUND_MARGIN, CLAIM_MARGIN

__all__ = ["InterleavedStart", "interleaved_start"]

_MOST_CUTS = 10_000
"""The most cuts that are all looked at. A chain of blocks that are a multiple of its chunks, with two ends, has about
half the square of its chunks; more cuts take time in proportion."""

_MOST_CUTS_WITH_MODES = 1_200
"""The same where modes are to be chosen for each cut, which takes ten times as long."""

_IMPROVEMENTS = 8
"""How often a longer chunk is shifted at most. Each time costs one batch of estimates; the changes end earlier where
none helps."""

_ESTIMATED_AT_ONCE = 24
"""How many pipelines are estimated of those that a round offers: the shortest by their longest path. That path comes
within a percent of the simulated time, so that the best pipeline is rarely farther down the list."""

_RAISED_BOUNDS = 30
"""How often the lowest bound of a cut is raised at most. Each time takes some milliseconds; a cut that is not reached
keeps its lower bound."""

_PROMISING = 1.1
"""A start up to this much slower than the cutoff is worth changes; of a slower one, estimates would be spent with
little hope."""

_CLOSE = 1.01
"""A start whose estimate is within this factor of the cutoff is worth a simulation, since an estimate may err a little
in either direction."""


@dataclass(frozen=True, slots=True)
class InterleavedStart:
    """Pipelines that are worth a simulation, and a bound under all pipelines (0 where nothing is proven)."""

    pipelines: tuple[Pipeline, ...]
    bound_s: float = 0.0


def interleaved_start(
    search: StageSearch, bounds: InterleavedBounds, cutoff_s: float, gap: float, is_chain: bool
) -> InterleavedStart:
    """Good pipelines, if some that fit are found and do not stay clearly above the cutoff."""
    chooser, layers = ModeChooser(bounds), search.last_state
    most_cuts = _MOST_CUTS if bounds.has_one_mode else _MOST_CUTS_WITH_MODES
    if is_chain and math.comb(bounds.stages, layers % bounds.stages) <= most_cuts:
        chosen = chooser.choose(_all_cuts(layers, bounds.stages))
        if bounds.has_one_mode:
            return _simulate_all(search, chosen, cutoff_s, gap)
        start = _improved(search, bounds, chooser, chosen.pipelines, cutoff_s)
        return _raise_least(search, bounds, chooser, chosen, start, cutoff_s, gap) if chooser.tries_all else start
    even_cut = _even_cut(bounds)
    cuts = np.zeros((0, bounds.stages + 1), dtype=np.int64) if even_cut is None else even_cut[None]
    if is_chain:
        cuts = np.concatenate([cuts, _runs_of_longer_chunks(layers, bounds.stages)])
    return _improved(search, bounds, chooser, chooser.choose(cuts).pipelines, cutoff_s, shifts=is_chain)


def _improved(
    search: StageSearch,
    bounds: InterleavedBounds,
    chooser: ModeChooser,
    pipelines: IntArray,
    cutoff_s: float,
    shifts: bool = True,
) -> InterleavedStart:
    """The best of the first pipelines, with longer chunks shifted as long as that helps."""
    if not len(pipelines):
        return InterleavedStart(())
    pipelines = pipelines[:_ESTIMATED_AT_ONCE]
    times = search.estimated(pipelines)
    best, time_s = pipelines[int(times.argmin())], float(times.min())
    for _ in range(_IMPROVEMENTS if shifts and time_s < _PROMISING * cutoff_s else 0):
        pipelines = chooser.choose(_shifted_cuts(bounds, best)).pipelines[:_ESTIMATED_AT_ONCE]
        if not len(pipelines):
            break
        times = search.estimated(pipelines)
        if times.min() >= time_s * (1 - CLAIM_MARGIN):
            break
        best, time_s = pipelines[int(times.argmin())], float(times.min())
    return InterleavedStart((tuple(best.tolist()),) if time_s < _CLOSE * cutoff_s else ())


def _simulate_all(search: StageSearch, chosen: ChosenModes, cutoff_s: float, gap: float) -> InterleavedStart:
    """The best of pipelines with one mode: those whose bound is too high for the best time are left out."""
    time_s, simulated = math.inf, 0
    best: tuple[Pipeline, ...] = ()
    while simulated < len(chosen.bound_s) and chosen.bound_s[simulated] < min(cutoff_s, time_s) * (1 - gap):
        batch = chosen.pipelines[simulated : simulated + _ESTIMATED_AT_ONCE]
        times = search.simulated(batch)
        if times.min() < time_s:
            time_s, best = float(times.min()), (tuple(batch[int(times.argmin())].tolist()),)
        simulated += len(batch)
    left_s = float(chosen.bound_s[simulated:].min(initial=math.inf))
    return InterleavedStart(best, min(left_s, time_s) * (1 - BOUND_MARGIN))


def _raise_least(
    search: StageSearch,
    bounds: InterleavedBounds,
    chooser: ModeChooser,
    chosen: ChosenModes,
    start: InterleavedStart,
    cutoff_s: float,
    gap: float,
) -> InterleavedStart:
    """Raise the least bounds of cuts until they meet the best time but for the gap, or are as high as they get."""
    pipelines, time_s = start.pipelines, cutoff_s
    if pipelines:
        time_s = min(cutoff_s, float(search.simulated(np.array(pipelines)).min()))
    # How often a bound was raised stands behind it: a cut that cannot be raised again ends the search. Sorted: a heap.
    cuts = [(bound_s, 0, place) for place, bound_s in enumerate(chosen.bound_s.tolist())]
    for _ in range(_RAISED_BOUNDS):
        if not cuts or cuts[0][1] == 2 or cuts[0][0] >= time_s * (1 - gap):
            break
        bound_s, raised, place = cuts[0]
        if raised:
            higher_s = bounds.bound_of_cut_s(chosen.pipelines[place], bound_s, time_s)
        else:
            higher_s, better = chooser.best_modes(search, chosen.pipelines[place], time_s, gap)
            if better is not None:
                pipelines = (*pipelines, better)
                time_s = min(time_s, float(search.simulated(np.array([better]))[0]))
        heapq.heapreplace(cuts, (max(bound_s, higher_s), raised + 1, place))
    return InterleavedStart(pipelines, min(cuts[0][0], time_s) if cuts else math.inf)


def _all_cuts(layers: int, stages: int) -> IntArray:
    """All cuts of a chain into chunks of nearly equal length."""
    least, extra = divmod(layers, stages)
    longer = np.array(list(itertools.combinations(range(stages), extra)), dtype=np.int64)  # per (cut, longer chunk)
    lengths = np.full((len(longer), stages), least)
    np.add.at(lengths, (np.arange(len(longer))[:, None], longer), 1)
    return np.concatenate([np.zeros((len(lengths), 1), dtype=np.int64), np.cumsum(lengths, axis=1)], axis=1)


def _runs_of_longer_chunks(layers: int, stages: int) -> IntArray:
    """Cuts of a chain whose longer chunks follow each other, with and without the first and the last chunk."""
    least, extra = divmod(layers, stages)
    if extra == 0:
        return np.arange(stages + 1)[None] * least
    starts, longer = np.arange(stages), np.zeros((2, stages, stages), dtype=bool)
    run = np.arange(extra)
    longer[0, starts[:, None], (starts[:, None] + run) % stages] = True
    if extra >= 2 and stages > 2:
        longer[1, :, [0, -1]] = True
        longer[1, starts[:, None], 1 + (starts[:, None] + run[2:]) % (stages - 2)] = True
    kept = longer.reshape(-1, stages)
    kept = np.unique(kept[kept.sum(axis=1) == extra], axis=0)
    return np.concatenate([np.zeros((len(kept), 1), dtype=np.int64), np.cumsum(kept + least, axis=1)], axis=1)


def _even_cut(bounds: InterleavedBounds) -> IntArray | None:
    """The boundaries of a pipeline whose largest stage is as short as it can be, whether it fits or not.

    Stages of later devices count as longer: more of the pipeline lies before their first pass.
    """
    candidates = bounds.candidates
    states = len(candidates.first) - 1
    fall = 1 - bounds.pp / (bounds.stages * bounds.micro_batches)
    weights = fall ** -(np.arange(bounds.stages) % bounds.pp).astype(float)
    least = np.full((bounds.stages + 1, states), np.inf)
    least[bounds.stages, -1] = 0.0
    for position in range(bounds.stages - 1, -1, -1):
        largest = np.maximum(bounds.through_s * weights[position], least[position + 1][candidates.target])
        least[position] = candidates.least_by_source(largest, states)
    if not np.isfinite(least[0, 0]):
        return None
    cut = [0]
    for position in range(bounds.stages):
        options = np.arange(candidates.first[cut[-1]], candidates.first[cut[-1] + 1])
        largest = np.maximum(
            bounds.through_s[options] * weights[position], least[position + 1][candidates.target[options]]
        )
        cut.append(int(candidates.target[options[int(np.argmin(largest))]]))
    return np.array(cut)


def _shifted_cuts(bounds: InterleavedBounds, pipeline: IntArray) -> IntArray:
    """Cuts of a chain in which a longer chunk of the busiest device and a shorter chunk of another change lengths."""
    candidates = bounds.candidates
    cut = np.concatenate([candidates.source[pipeline], candidates.target[pipeline[-1:]]])
    lengths = np.diff(cut)
    busiest = bounds.positions_of_busiest_device(pipeline)
    cuts = []
    for longer in np.flatnonzero(lengths > lengths.min()).tolist():
        if longer not in busiest:
            continue
        for shorter in np.flatnonzero(lengths == lengths.min()).tolist():
            changed = lengths.copy()
            changed[[longer, shorter]] += [-1, 1]
            cuts.append(np.concatenate([[0], np.cumsum(changed)]))
    return np.array(cuts, dtype=np.int64).reshape(-1, len(cut))
