"""The recompute modes of the chunks of interleaved pipelines, given a cut: where each chunk begins and ends.

The memory of a device couples only its own chunks, and a simulated time never falls when a stage takes longer.
`ModeChooser.choose` takes on each device of many cuts the modes that fit and take least, and bounds each cut by path
(1) of `device_choice_bounds.py` with chunk 0. `ModeChooser.best_modes` looks for the best modes of one cut, device by
device: the chunks of all others take the least in every part that they could take, which makes the simulated time a
bound; what is not below the best time is dropped, and when every device has its modes the simulated time is that of a
pipeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.stage_search import Pipeline, StageSearch
from phaze.place.simulation.event_simulation import StageTimes
from phaze.tolerances import BOUND_MARGIN

__all__ = ["ChosenModes", "ModeChooser"]

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
