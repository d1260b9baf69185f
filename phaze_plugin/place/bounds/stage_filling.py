"""A quick proof that some degrees cannot beat a target, on chains: fill the stages from the front and count them.

With lead(p) the seconds of the layers before p, W the t of all layers and n = min(m, S-s) - 1, the s-th stage of a plan
that takes at most U, starting at layer p, has a recompute mode with which it satisfies

    m t' + tail <= U - lead_F(p)               t' with the weights' part also where it is split off
    m t + D <= U - z - lead_(F+B)(p)           D = max(0, m-1-s) W_s for zero-bubble, else 0
    (m-1) t + D - n F <= U - z - W             n = 0 for gpipe
    (m-n-2) t <= U - z - 2 W + lead_(F+B)(p)   if m > n + 1, and not for gpipe
    held bytes + (in flight - 1) * stash + peak + buffers <= usable bytes

where peak is the largest over layers of the stash up to one and its working set, tail is the update, the gather, and
what reductions exceed the backward that may hide them by (`StageSpace.exposed`), and z is what the first layer alone
adds to the tail of the first stage, to which these paths return. Every stage but the first receives at least what
crosses the cheapest cut, which belongs to its F; every stage but the last gets as much back, or recomputes longer,
which belongs to its B (before the last layer only as much of it counts as the layers to come take: the stage may yet be
the last). Other terms are sums over the stage's layers. A stage that starts later gives up at least as much as its
allowance shrinks: filling every stage as far as it goes gets farthest with each number of stages. If more than S are
needed, nothing with these degrees beats U.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phaze.parallelism import PipelineSchedule
from phaze.place.model.stage_space import BoolArray, FloatArray
from phaze.place.search.parallelism_table import SCHEDULES, ParallelismTable

__all__ = ["LayerTerms", "StageFilling"]

_SLACK = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTerms:
    """What each layer adds to a stage under each choice of degrees, per (layer, choice) unless said otherwise.

    Attributes:
        run_s: F.
        through_s: t, without recompute.
        weight_s: the weights' part where it is split off, else 0.
        finish_s: update, gather and reductions that nothing hides.
        reduced_s: reductions that backward may hide.
        hidden_s: backward that may hide them.
        held_bytes: parameters, gradients and optimizer state.
        buffer_bytes: of which a stage needs the largest.
        again_s: recompute, per (mode, layer, choice).
        stash_bytes: likewise.
        working_bytes: likewise.
        cut_s: receiving what crosses the cheapest cut, per choice.
    """

    run_s: FloatArray
    through_s: FloatArray
    weight_s: FloatArray
    finish_s: FloatArray
    reduced_s: FloatArray
    hidden_s: FloatArray
    held_bytes: FloatArray
    buffer_bytes: FloatArray
    again_s: FloatArray
    stash_bytes: FloatArray
    working_bytes: FloatArray
    cut_s: FloatArray


_THROUGH, _FORWARD, _WEIGHT, _FINISH, _LATE, _HELD, _MODES = range(7)


class StageFilling:
    """Stages to be filled, by choice, all of the same schedule.

    Of the stage at hand: sums and maxima over its layers, and what it may take.
    """

    def __init__(self, strategies: ParallelismTable, terms: LayerTerms, usable_bytes: float) -> None:
        self.terms, self.usable_bytes, self.modes = terms, usable_bytes * (1 + _SLACK), len(terms.again_s)
        self.schedule = SCHEDULES[int(strategies.schedule[0])]
        self.rounds, self.devices = strategies.rounds.astype(float), strategies.pp.astype(float)
        late = terms.reduced_s - terms.hidden_s
        sums = [terms.through_s, terms.run_s, terms.weight_s, terms.finish_s, late, terms.held_bytes]
        self.layer_sums = np.stack([*sums, *terms.again_s, *terms.stash_bytes])
        self.layer_peaks = terms.working_bytes + terms.stash_bytes
        self.whole_s = terms.through_s.sum(axis=0)
        self.to_come_s = np.minimum(self.whole_s - np.cumsum(terms.through_s, axis=0), terms.cut_s)
        self.to_come_s[-1] = 0.0

    def refuted(self, target_s: FloatArray) -> BoolArray:
        """Whether nothing with each of these degrees takes less than its target."""
        terms, count = self.terms, len(target_s)
        self.sums, self.peaks = np.zeros((len(self.layer_sums), count)), np.zeros((self.modes, count))
        self.buffer_bytes, self.exposed_s, self.lead_s = np.zeros(count), np.zeros(count), np.zeros((2, count))
        self.used, self.is_dead = np.ones(count), np.zeros(count, dtype=bool)
        end_s = target_s * (1 + _SLACK)
        self.ends_s = np.stack([end_s, end_s - terms.finish_s[0] - terms.reduced_s[0] - terms.weight_s[0]])
        self.caps_s = self.ends_s.copy()
        self.spare_s = self.ends_s[1] - self.whole_s - 2 * (self.devices - 1) * terms.cut_s
        for layer in range(len(terms.run_s)):
            self._add(layer)
        return np.asarray(self.is_dead | (self.used > self.devices))

    def _add(self, layer: int) -> None:
        """A layer to the stage, or to a new one where it would take too much."""
        own, cut_s, reduced_s = self.layer_sums[:, layer], self.terms.cut_s, self.terms.reduced_s[layer]
        peaks, buffer_bytes = self.layer_peaks[:, layer], self.terms.buffer_bytes[layer]
        np.maximum(self.peaks, self.sums[-self.modes :] + peaks, out=self.peaks)
        np.maximum(self.exposed_s, self.sums[_LATE] + reduced_s, out=self.exposed_s)
        self.sums += own
        np.maximum(self.buffer_bytes, buffer_bytes, out=self.buffer_bytes)
        over = self._is_over(layer)
        if over.any():
            self.used += over
            received = own.copy()
            received[[_THROUGH, _FORWARD]] += cut_s
            np.copyto(self.sums, received, where=over)
            np.copyto(self.exposed_s, reduced_s, where=over)
            np.copyto(self.peaks, peaks, where=over)
            np.copyto(self.buffer_bytes, buffer_bytes, where=over)
            self.lead_s[1] += over * cut_s
            np.copyto(self.caps_s, self.ends_s - self.lead_s, where=over)
            self.lead_s += over * cut_s
            self.is_dead |= over & self._is_over(layer)
        self.lead_s += own[[_FORWARD, _THROUGH]]

    def _is_over(self, layer: int) -> BoolArray:
        """Whether the stage takes too long or too much memory with every recompute mode."""
        left = np.minimum(self.rounds, np.maximum(self.devices - self.used + 1, 1))
        match self.schedule:
            case PipelineSchedule.GPIPE:
                flight = self.rounds
            case PipelineSchedule.ZERO_BUBBLE:
                flight = np.minimum(self.rounds, self.devices)
            case _:
                flight = left
        most_s = self._most_more_s(left - 1)
        over = self.to_come_s[layer] > most_s
        again, stash = self.sums[_MODES : _MODES + self.modes], self.sums[_MODES + self.modes :]
        room = self.usable_bytes - self.sums[_HELD] - self.buffer_bytes
        fails = np.ones(len(over), dtype=bool)
        for again_s, stashed, peak in zip(again, stash, self.peaks, strict=True):
            fails &= (again_s > most_s) | ((flight - 1) * stashed + peak > room)
        return np.asarray(over | fails)

    def _most_more_s(self, early: FloatArray) -> FloatArray:
        """How long the stage may recompute or wait for what it gets back, by each constraint in turn."""
        rounds, sums, stay_s, back_s, spare_s = self.rounds, self.sums, *self.caps_s, self.spare_s
        forward, weight = sums[_FORWARD], sums[_WEIGHT]
        stay_s = stay_s - sums[_FINISH] - self.exposed_s
        late = 0.0
        if self.schedule is PipelineSchedule.ZERO_BUBBLE:
            stay_s, late = stay_s - rounds * weight, np.maximum(rounds - self.used, 0) * weight
        most_s = np.minimum(stay_s, back_s - late) / rounds
        if self.schedule is PipelineSchedule.GPIPE:
            most_s = np.minimum(most_s, _over(spare_s, rounds - 1))
        else:
            most_s = np.minimum(most_s, _over(spare_s - late + early * forward, rounds - 1))
            twice = np.where(rounds > early + 1, _over(2 * spare_s - back_s, rounds - early - 2), np.inf)
            most_s = np.minimum(most_s, twice)
        return np.asarray(most_s - sums[_THROUGH])


def _over(seconds: FloatArray, times: FloatArray) -> FloatArray:
    """What may be taken so many times; none at all leaves room for anything, or for nothing."""
    return np.asarray(seconds / np.maximum(times, 1e-200))
