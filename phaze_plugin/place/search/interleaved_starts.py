"""Interleaved pipelines cut by cut: a good pipeline to start from, and a bound where all cuts can be looked at.

Chunks have n or n+1 layers, so that a cut, which says where each chunk begins and ends, says which chunks are longer.

Where a chain has few cuts (`_all_cuts`), all of them are looked at. Those whose bound is above the cutoff are out. Of
the others the bounds are raised, the lowest first (`_raise_least`): by looking for the best modes of the cut, and then
by what the devices can choose on it (`InterleavedBounds.bound_of_cut_s`). Else the cuts are those whose longer chunks
follow each other (`_runs_of_longer_chunks`), and one that a dynamic program evens out where layers differ
(`_even_cut`); the best one is improved by making another chunk the longer one (`_shifted_cuts`) as long as that helps,
and nothing is proven.

The recompute modes of the chunks of a cut are chosen by `ModeChooser`. The memory of a device couples only its own
chunks, and a simulated time never falls when a stage takes longer. `ModeChooser.choose` takes on each device of many
cuts the modes that fit and take least, and bounds each cut by path (1) of `device_choice_bounds.py` with chunk 0.
`ModeChooser.best_modes` looks for the best modes of one cut, device by device: the chunks of all others take the least
in every part that they could take, which makes the simulated time a bound; what is not below the best time is dropped,
and when every device has its modes the simulated time is that of a pipeline.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.stage_search import Pipeline, StageSearch
from phaze.place.simulation.event_simulation import StageTimes
from phaze.tolerances import BOUND_MARGIN, CLAIM_MARGIN

__all__ = ["ChosenModes", "InterleavedStart", "ModeChooser", "interleaved_start"]

_MOST_MODE_CHOICES = 100
"""So many ways to choose the modes of a device's chunks are all tried (three modes of four chunks: 81). Of more, only
those are tried in which no later chunk recomputes more than an earlier one, which has more microbatches in flight."""

_NUMBERS_AT_ONCE = 1_000_000
"""How many numbers per quantity the cuts of one batch may have (8 MB)."""

_SIMULATED_PASSES = 400_000
"""How many passes `ModeChooser.best_modes` simulates at once at most, of all its pipelines together: some ten
milliseconds. Where there are more, it ends with what it has proven until then."""


@dataclass(frozen=True, slots=True)
class ChosenModes:
    """Cuts that fit with the quickest modes of every device, the lowest bound first.

    Attributes:
        pipelines: candidates per (cut, stage).
        bound_s: a bound under every pipeline of each cut, whatever its modes.
    """

    pipelines: IntArray
    bound_s: FloatArray


class ModeChooser:
    """The quickest modes that fit for the chunks of every device, given where they begin and end.

    Attributes:
        tries_all: whether all ways to choose the modes of a device are tried.
    """

    def __init__(self, bounds: InterleavedBounds) -> None:
        self._bounds, candidates = bounds, bounds.candidates
        self._states, self._modes = len(candidates.first) - 1, int(candidates.mode.max(initial=0)) + 1
        keys = self._keys(candidates.source, candidates.target) + candidates.mode
        self._order = np.argsort(keys)
        self._sorted_keys = keys[self._order]
        chunks = bounds.stages // bounds.pp
        self.tries_all = self._modes**chunks <= _MOST_MODE_CHOICES
        if self.tries_all:
            choices = list(itertools.product(range(self._modes), repeat=chunks))
        else:
            choices = list(itertools.combinations_with_replacement(range(self._modes - 1, -1, -1), chunks))
        self._choices = np.array(choices).T  # per (chunk, choice)

    def _keys(self, source: IntArray, target: IntArray) -> IntArray:
        """A number for every pair of states; modes count on from it."""
        return np.asarray((source * self._states + target) * self._modes)

    def choose(self, cuts: IntArray) -> ChosenModes:
        """The pipelines of cuts, given as states per (cut, boundary)."""
        bounds = self._bounds
        at_once = max(1, _NUMBERS_AT_ONCE // (bounds.pp * self._choices.shape[1]))
        parts = [self._choose(cuts[start : start + at_once]) for start in range(0, len(cuts), at_once)]
        parts = [part for part in parts if len(part.pipelines)]
        if not parts:
            return ChosenModes(np.zeros((0, bounds.stages), dtype=np.int64), np.zeros(0))
        bound_s = np.concatenate([part.bound_s for part in parts])
        order = np.argsort(bound_s, kind="stable")
        return ChosenModes(np.concatenate([part.pipelines for part in parts])[order], bound_s[order])

    def _choose(self, cuts: IntArray) -> ChosenModes:
        """The same for few cuts, in their own order."""
        bounds, candidates, pp = self._bounds, self._bounds.candidates, self._bounds.pp
        if not len(self._order):
            return ChosenModes(np.zeros((0, bounds.stages), dtype=np.int64), np.zeros(0))
        keys = self._keys(cuts[:, :-1], cuts[:, 1:])[..., None] + np.arange(self._modes)
        place = np.minimum(np.searchsorted(self._sorted_keys, keys), len(self._order) - 1)
        on_device = bounds.stages_of_devices
        option, is_known = self._order[place][:, on_device], (self._sorted_keys[place] == keys)[:, on_device]
        seconds = held = scratch = np.zeros((len(cuts), pp, self._choices.shape[1]))
        for chunk, modes in enumerate(self._choices):
            members = option[:, chunk][..., modes]
            through_s = bounds.through_s[members]
            through_s[:, -1] -= bounds.saved_s(int(on_device[chunk, -1])).sum(axis=0)[members[:, -1]]
            seconds = seconds + np.where(is_known[:, chunk][..., modes], through_s, np.inf)
            held = held + candidates.held_bytes[members]
            held = held + bounds.in_flight[:, chunk, None] * candidates.stashed_bytes[members]
            scratch = np.maximum(scratch, candidates.scratch_bytes[members])
        seconds = np.where(held + scratch <= bounds.usable_bytes, seconds, np.inf)
        before_s = candidates.forward_s if bounds.is_v_shaped else bounds.through_s
        first = np.where(np.isfinite(seconds), before_s[option[:, 0][..., self._choices[0]]], np.inf)
        # Of equal sums the one with the shorter first chunk fills the pipeline sooner.
        chosen = (bounds.micro_batches * seconds + first).argmin(axis=2)
        least = seconds.min(axis=2)
        fits = np.isfinite(least).all(axis=1)
        modes_of = self._choices[:, chosen].transpose(1, 0, 2)  # per (cut, chunk, device)
        pipelines = np.empty((len(cuts), bounds.stages), dtype=np.int64)
        pipelines[:, on_device] = np.take_along_axis(option, modes_of[..., None], axis=3)[..., 0]
        pipelines = pipelines[fits]
        least_first = first.min(axis=2)[fits]
        tail = candidates.exposed_s[option[:, 0]].min(axis=2)[fits]  # of every device, the same with all modes
        tail += (candidates.tie_s + candidates.finish_s)[pipelines[:, on_device]].sum(axis=1)
        tail = tail if bounds.is_v_shaped else tail[:, :1]  # a V does not end on its first device
        before = np.cumsum(least_first, axis=1) - least_first
        bound_s = (before + bounds.micro_batches * least[fits] + tail).max(axis=1)
        return ChosenModes(pipelines, bound_s * (1 - BOUND_MARGIN))

    def best_modes(
        self, search: StageSearch, pipeline: IntArray, best_s: float, gap: float
    ) -> tuple[float, Pipeline | None]:
        """A bound under the pipelines with the boundaries of this one, and one of them if it is below the best time."""
        bounds, seconds = self._bounds, search.timed
        assert seconds is not None  # pipelines of stages that have times
        fitting = [self._least_choices(pipeline, device) for device in range(bounds.pp)]
        through = [bounds.through_s[choices] for choices in fitting]
        more_s = [float(choices.sum(axis=1).min() - choices.min(axis=0).sum()) for choices in through]
        partial = np.empty((1, bounds.stages), dtype=np.int64)
        partial[:, bounds.stages_of_devices] = np.array([choices[0] for choices in fitting]).T
        times = self._least_times(fitting)
        bound_s, simulated_s = 0.0, np.zeros(1)
        for device in np.argsort(more_s)[::-1].tolist():
            choices = fitting[device]
            if len(partial) * len(choices) * bounds.micro_batches * bounds.stages * 2 > _SIMULATED_PASSES:
                return bound_s, None
            partial = np.repeat(partial, len(choices), axis=0)
            partial[:, bounds.stages_of_devices[:, device]] = np.tile(choices, (len(partial) // len(choices), 1))
            times = self._decided(times, partial, device, len(choices))
            simulated_s = seconds(times)
            bound_s = max(bound_s, float(simulated_s.min()) * (1 - BOUND_MARGIN))
            kept = np.flatnonzero(simulated_s < best_s * (1 - gap))
            if not len(kept):
                return bound_s, None
            partial, times, simulated_s = partial[kept], _taken(times, kept), simulated_s[kept]
        return bound_s, tuple(partial[int(simulated_s.argmin())].tolist())

    def _least_times(self, fitting: Sequence[IntArray]) -> StageTimes:
        """The least seconds that the chunks of every device have under any choice of their modes, one by one."""
        least = {
            kind.name: np.stack(
                [self._taken_s(kind.name, choices, device).min(axis=0) for device, choices in enumerate(fitting)]
            )[None]
            for kind in fields(StageTimes)
        }
        return StageTimes(**least)

    def _taken_s(self, name: str, chunks: IntArray, device: int) -> FloatArray:
        """Seconds of candidates as the chunks of a device, per (choice, chunk)."""
        bounds, seconds = self._bounds, np.array(getattr(self._bounds.candidates, name)[chunks])
        if bounds.is_v_shaped and device == bounds.pp - 1 and name in ("forward_s", "backward_s"):
            chunk, saved_s = (1, 0) if name == "forward_s" else (0, 1)
            seconds[:, chunk] -= bounds.candidates.saved_s[saved_s][chunks[:, chunk]]
        return seconds

    def _decided(self, times: StageTimes, partial: IntArray, device: int, count: int) -> StageTimes:
        """The times with one more device decided, in each of so many ways, as pipelines have it by now."""
        decided, own = {}, partial[:, self._bounds.stages_of_devices[:, device]]
        for kind in fields(StageTimes):
            decided[kind.name] = np.repeat(getattr(times, kind.name), count, axis=0)
            decided[kind.name][:, device] = self._taken_s(kind.name, own, device)
        return StageTimes(**decided)

    def _least_choices(self, pipeline: IntArray, device: int) -> IntArray:
        """Candidates per (choice, chunk) of the modes that fit the device and that no others beat in every chunk."""
        bounds, candidates = self._bounds, self._bounds.candidates
        own = pipeline[bounds.stages_of_devices[:, device]]
        keys = self._keys(candidates.source[own], candidates.target[own])[:, None] + np.arange(self._modes)
        place = np.minimum(np.searchsorted(self._sorted_keys, keys), len(self._order) - 1)
        is_known = (self._sorted_keys[place] == keys)[np.arange(len(own))[:, None], self._choices].all(axis=0)
        choices = self._order[place][np.arange(len(own))[:, None], self._choices].T[is_known]
        held = candidates.held_bytes[choices] + bounds.in_flight[device] * candidates.stashed_bytes[choices]
        fits = held.sum(axis=1) + candidates.scratch_bytes[choices].max(axis=1) <= bounds.usable_bytes
        choices = choices[fits]
        seconds = self._seconds(choices)
        beats = (seconds[:, None] <= seconds).all(axis=2) & (seconds[:, None] < seconds).any(axis=2)
        return np.asarray(choices[~beats.any(axis=0)])

    def _seconds(self, choices: IntArray) -> FloatArray:
        """What decides the simulated time, per (choice, chunk and quantity)."""
        candidates = self._bounds.candidates
        columns = (candidates.forward_s, candidates.backward_s, candidates.weight_s, candidates.exposed_s)
        return np.concatenate([column[choices] for column in columns], axis=1)


def _taken(times: StageTimes, pipelines: IntArray) -> StageTimes:
    """The times of some of the pipelines."""
    return StageTimes(**{kind.name: getattr(times, kind.name)[pipelines] for kind in fields(StageTimes)})


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
