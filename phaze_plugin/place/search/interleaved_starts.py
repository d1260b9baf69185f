"""Good interleaved pipelines to start from: cuts with even shares of the work, and on each device the quickest modes.

The bounds of interleaved pipelines do not lead branch and bound to good ones quickly; but there are few cuts worth a
look, since chunks have n or n+1 layers. `interleaved_start` tries cuts whose longer chunks follow each other
(`_runs_of_longer_chunks`), and one that a dynamic program evens out where layers differ (`_even_cut`). Given a cut, the
memory of a device couples only its own chunks: `_ModeChooser` tries all their recompute modes on all devices at once.
The best pipeline by its longest path is then improved by making another chunk the longer one (`_shifted_cuts`), as long
as that helps.
"""

from __future__ import annotations

import itertools

import numpy as np

from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.stage_search import Pipeline, StageSearch
from phaze.tolerances import CLAIM_MARGIN

__all__ = ["interleaved_start"]

_IMPROVEMENTS = 8
"""How often a longer chunk is shifted at most. Each time costs one batch of estimates; the changes end earlier where
none helps."""

_ESTIMATED_AT_ONCE = 24
"""How many pipelines are estimated of those that a round offers: the shortest by their longest path. That path comes
within a percent of the simulated time, so that the best pipeline is rarely farther down the list."""

_PROMISING = 1.1
"""A start up to this much slower than the cutoff is worth changes; of a slower one, estimates would be spent with
little hope."""

_CLOSE = 1.01
"""A start whose estimate is within this factor of the cutoff is worth a simulation, since an estimate may err a little
in either direction."""

_MOST_MODE_CHOICES = 100
"""So many ways to choose the modes of a device's chunks are all tried (three modes of four chunks: 81). Of more, only
those are tried in which no later chunk recomputes more than an earlier one, which has more microbatches in flight."""


def interleaved_start(
    search: StageSearch, bounds: InterleavedBounds, cutoff_s: float, is_chain: bool
) -> tuple[Pipeline, ...]:
    """A good interleaved pipeline, if one that fits is found and does not stay clearly above the cutoff."""
    chooser = _ModeChooser(bounds)
    even_cut = _even_cut(bounds)
    cuts = np.zeros((0, bounds.stages + 1), dtype=np.int64) if even_cut is None else even_cut[None]
    if is_chain:
        cuts = np.concatenate([cuts, _runs_of_longer_chunks(search.last_state, bounds.stages)])
    pipelines = chooser.pipelines(cuts)
    if not len(pipelines):
        return ()
    times = search.estimated(pipelines)
    best, time_s = pipelines[int(times.argmin())], float(times.min())
    for _ in range(_IMPROVEMENTS if is_chain and time_s < _PROMISING * cutoff_s else 0):
        pipelines = chooser.pipelines(_shifted_cuts(bounds, best))
        if not len(pipelines):
            break
        times = search.estimated(pipelines)
        if times.min() >= time_s * (1 - CLAIM_MARGIN):
            break
        best, time_s = pipelines[int(times.argmin())], float(times.min())
    return (tuple(best.tolist()),) if time_s < _CLOSE * cutoff_s else ()


class _ModeChooser:
    """The quickest modes that fit for the chunks of every device, given where they begin and end."""

    def __init__(self, bounds: InterleavedBounds) -> None:
        self._bounds, candidates = bounds, bounds.candidates
        self._states, self._modes = len(candidates.first) - 1, int(candidates.mode.max(initial=0)) + 1
        keys = self._keys(candidates.source, candidates.target) + candidates.mode
        self._order = np.argsort(keys)
        self._sorted_keys = keys[self._order]
        chunks = bounds.stages // bounds.pp
        if self._modes**chunks <= _MOST_MODE_CHOICES:
            choices = list(itertools.product(range(self._modes), repeat=chunks))
        else:
            choices = list(itertools.combinations_with_replacement(range(self._modes - 1, -1, -1), chunks))
        self._choices = np.array(choices).T  # per (chunk, choice)

    def _keys(self, source: IntArray, target: IntArray) -> IntArray:
        """A number for every pair of states; modes count on from it."""
        return np.asarray((source * self._states + target) * self._modes)

    def pipelines(self, cuts: IntArray) -> IntArray:
        """Of cuts as states per (cut, boundary): the most promising ones that fit, as candidates per (cut, stage)."""
        bounds, candidates = self._bounds, self._bounds.candidates
        if not len(cuts) or not len(self._order):
            return np.zeros((0, bounds.stages), dtype=np.int64)
        keys = self._keys(cuts[:, :-1], cuts[:, 1:])[..., None] + np.arange(self._modes)
        place = np.minimum(np.searchsorted(self._sorted_keys, keys), len(self._order) - 1)
        is_known = self._sorted_keys[place] == keys
        shape = (len(cuts), -1, bounds.pp, self._modes)
        option, is_known = self._order[place].reshape(shape), is_known.reshape(shape)
        seconds = held = scratch = np.zeros(1)
        for chunk, modes in enumerate(self._choices):
            members = option[:, chunk][..., modes]
            through = np.where(is_known[:, chunk][..., modes], bounds.through_s[members], np.inf)
            # Of equal sums the one with the shorter first chunk fills the pipeline sooner.
            seconds = seconds + through * (bounds.micro_batches + (chunk == 0))
            held = held + candidates.held_bytes[members]
            held = held + bounds.in_flight[:, chunk, None] * candidates.stashed_bytes[members]
            scratch = np.maximum(scratch, candidates.scratch_bytes[members])
        seconds = np.where(held + scratch <= bounds.usable_bytes, seconds, np.inf)
        chosen = seconds.argmin(axis=2)
        fits = np.isfinite(np.take_along_axis(seconds, chosen[..., None], axis=2)).all(axis=(1, 2))
        modes_of = self._choices[:, chosen].transpose(1, 0, 2)  # per (cut, chunk, device)
        pipelines = np.take_along_axis(option, modes_of[..., None], axis=3).reshape(len(cuts), bounds.stages)[fits]
        return pipelines[np.argsort(self._longest_path_s(pipelines), kind="stable")[:_ESTIMATED_AT_ONCE]]

    def _longest_path_s(self, pipelines: IntArray) -> FloatArray:
        """The longest of paths (1) of `device_choice_bounds.py` for each pipeline, but for what follows it."""
        bounds = self._bounds
        through = bounds.through_s[pipelines].reshape(len(pipelines), bounds.stages // bounds.pp, bounds.pp)
        before = np.cumsum(through[:, 0], axis=1) - through[:, 0]
        return np.asarray((before + bounds.micro_batches * through.sum(axis=1)).max(axis=1))


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
