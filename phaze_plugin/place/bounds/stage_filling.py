"""A quick proof that a strategy cannot beat a target time: fill the stages of a chain from the front and count them.

Let m be the microbatches per pipeline, S the number of stages, F and t a stage's forward seconds and forward plus
backward seconds, lead(p) the seconds of the layers before layer p, W the t of all layers, and n = min(m, S-s) - 1
(n = min(m, 2(S-s)-1) - 1 in eager 1F1B).
Suppose that a plan takes at most U. Then its s-th stage, starting at layer p, has a recompute mode with which it
satisfies all of these (`StageFilling._most_more_s` solves the first four for what may be recomputed, and
`StageFilling._is_over` checks the last):

    (1)  m t' + tail <= U - lead_F(p)               t' with the weights' part also where it is split off
    (2)  m t + D <= U - z - lead_(F+B)(p)           D = max(0, m-1-s) W_s for zero-bubble, else 0
    (3)  (m-1) t + D - n F <= U - z - W             n = 0 for GPipe
    (4)  (m-n-2) t <= U - z - 2 W + lead_(F+B)(p)   if m > n + 1, and not for GPipe
    (5)  held bytes + (in flight - 1) * stash + peak + buffers <= usable bytes

Here peak is the largest over layers of the stash up to one and its working set. The tail is the update, the gather, and
what reductions exceed the backward that may hide them by (`StageSpace.exposed`). z is what the first layer alone adds
to the tail of the first stage, to which these paths return. Every stage but the first receives at least what crosses
the cheapest cut, which belongs to its F. Every stage but the last gets as much back, or recomputes longer, which
belongs to its B; before the last layer only as much of it counts as the layers to come take, since the stage may yet be
the last. What a layer must recompute because its own stash does not fit otherwise belongs to its t from the beginning
(`StageFilling._needed_recompute_s`). Other terms are sums over the stage's layers.

A stage that starts later gives up at least as much as its allowance shrinks: filling every stage as far as it goes gets
farthest with each number of stages. If more than S are needed, nothing with this strategy beats U
(`StageFilling.refuted`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from phaze.parallelism import PipelineSchedule
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray
from phaze.place.search.parallelism_table import SCHEDULES, ParallelismTable
from phaze.tolerances import GREEDY_MARGIN

__all__ = ["LayerTerms", "StageFilling", "copies_to_bisect"]

_LEAST_DIVISOR = 1e-200
"""Stands for a divisor of 0, so that a quotient is huge with the sign of its numerator and never NaN. It is far below
any count of passes, and large enough that a time over it stays finite."""

_FILLED_AT_ONCE = 512
"""So many strategies are filled in hardly twice the time of one, which numpy's calls take whatever they are given."""

_HALVINGS_AT_ONCE = (5, 3)
"""How many halvings of an interval are decided by one filling where strategies are few: 31 or 7 copies of each are
filled, for all points that a bisection may come to."""

_LAYERS_BETWEEN_LOOKS = 8
"""After so many layers it is asked whether all strategies are refuted already: often enough to end early, and seldom
enough to cost little beside the layers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTerms:
    """What a layer of each kind adds to a stage under each strategy, per (kind, strategy) unless said otherwise.

    Attributes:
        kind_of_layer: the kind of each layer, in order; the first kind is that of the first layer alone, the last kind
            that of the last one.
        counts: how many layers are of each kind.
        run_s: F.
        through_s: t, without recompute.
        weight_s: the weights' part where it is split off, else 0.
        finish_s: update, gather and reductions that nothing hides.
        reduced_s: reductions that backward may hide.
        hidden_s: backward that may hide them.
        held_bytes: parameters, gradients and optimizer state.
        buffer_bytes: of which a stage needs the largest.
        again_s: recompute, per (mode, kind, strategy).
        stash_bytes: likewise.
        working_bytes: likewise.
        hidden_elsewhere_s: backward of layers that are left out, which may hide reductions too, per strategy.
        cut_s: receiving what crosses the cheapest cut, per strategy.
    """

    kind_of_layer: IntArray
    counts: FloatArray
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
    hidden_elsewhere_s: FloatArray
    cut_s: FloatArray

    def over_model(self, values: FloatArray) -> FloatArray:
        """The sum of something over all layers, per strategy: the same whichever others stand beside it."""
        return np.asarray((self.counts[:, None] * values).sum(axis=0))

    def take(self, strategies: IntArray) -> LayerTerms:
        """The terms of some of the strategies."""
        by_layer = ("kind_of_layer", "counts")
        columns = {name: getattr(self, name)[..., strategies] for name in self.__slots__ if name not in by_layer}
        return replace(self, **columns)


class _Sums:
    """Sums over the layers of a stage in one array, so that a layer is added by one call, with a name for each row.

    The names are views: they change with the array. ``late_s`` is what reductions take beyond the backward that may
    hide them; ``again_s`` and ``stash_bytes`` have one row per recompute mode.
    """

    def __init__(self, rows: FloatArray, modes: int) -> None:
        self.rows = rows
        self.through_s, self.forward_s, self.weight_s, self.finish_s, self.late_s, self.held_bytes = rows[:6]
        self.again_s, self.stash_bytes = rows[6 : 6 + modes], rows[6 + modes :]

    @staticmethod
    def of_kinds(terms: LayerTerms) -> FloatArray:
        """The rows of a layer of every kind, per (kind, row, strategy)."""
        late = terms.reduced_s - terms.hidden_s
        per_layer = [terms.through_s, terms.run_s, terms.weight_s, terms.finish_s, late, terms.held_bytes]
        return np.stack([*per_layer, *terms.again_s, *terms.stash_bytes], axis=1)


class StageFilling:
    """Stages to be filled for many strategies at once, all of the same schedule.

    While it runs, it keeps for each strategy the sums and maxima over the layers of the stage that is being filled, and
    what that stage may take. What changes only where a stage begins is computed there (`_begin`).
    """

    def __init__(
        self, strategies: ParallelismTable, terms: LayerTerms, usable_bytes: float, layers_left_out: int = 0
    ) -> None:
        self.terms, self.usable_bytes, self.modes = terms, usable_bytes * (1 + GREEDY_MARGIN), len(terms.again_s)
        self.schedule = SCHEDULES[int(strategies.schedule[0])]
        self.micro_batches, self.pp = strategies.micro_batches.astype(float), strategies.pp.astype(float)
        self.further_micro_batches = np.maximum(self.micro_batches - 1, _LEAST_DIVISOR)
        # Before each stage there may be others that have only layers which are left out here.
        self.stages_between = layers_left_out
        self.layer_peaks = (terms.working_bytes + terms.stash_bytes).transpose(1, 0, 2).copy()  # per (kind, mode, ...)
        needed_s = self._needed_recompute_s()
        self.terms = terms = replace(terms, through_s=terms.through_s + needed_s, again_s=terms.again_s - needed_s)
        # What a stage gets back may be hidden by what it recomputes, which is charged already.
        self.returned_s = np.where(needed_s.any(axis=0), 0.0, terms.cut_s)
        self.layer_sums = _Sums.of_kinds(terms)
        self.leads_s = np.stack([terms.run_s, terms.through_s], axis=1)  # what each kind adds to `lead_s`
        self.whole_s = terms.over_model(terms.through_s)
        self.may_hide_elsewhere = bool(terms.hidden_elsewhere_s.any())

    def _needed_recompute_s(self) -> FloatArray:
        """What a layer of each kind recomputes at least, because with less its stash alone does not fit.

        Asked of schedules with equally many microbatches in flight on all stages. A layer that fits with no mode gets
        nothing: `_is_over` finds it.
        """
        terms = self.terms
        if self.schedule not in (PipelineSchedule.GPIPE, PipelineSchedule.ZERO_BUBBLE):
            return np.zeros_like(terms.through_s)
        flight = self.micro_batches
        if self.schedule is PipelineSchedule.ZERO_BUBBLE:
            flight = np.minimum(flight, self.pp)
        room = self.usable_bytes - terms.held_bytes - terms.buffer_bytes
        fits = (flight - 1) * terms.stash_bytes + self.layer_peaks.transpose(1, 0, 2) <= room
        least = np.where(fits, terms.again_s, np.inf).min(axis=0)
        return np.where(np.isfinite(least), least, 0.0)

    def refuted(self, target_s: FloatArray) -> BoolArray:
        """Whether nothing with each of these strategies takes less than its target."""
        terms, count = self.terms, len(target_s)
        self.sums = _Sums(np.zeros((self.layer_sums.shape[1], count)), self.modes)
        self.peaks = np.zeros((self.modes, count))
        self.buffer_bytes, self.exposed_s = np.zeros(count), np.zeros(count)
        self.lead_s = np.zeros((2, count))  # F, and F + B, of the layers before the next one
        self.used, self.is_dead = np.ones(count), np.zeros(count, dtype=bool)
        end_s = target_s * (1 + GREEDY_MARGIN)
        # U for constraint (1), and U - z for the others; what is left of both when a stage begins.
        exposed_s = np.maximum(terms.reduced_s[0] - terms.hidden_elsewhere_s, 0.0)
        self.ends_s = np.stack([end_s, end_s - terms.finish_s[0] - exposed_s - terms.weight_s[0]])
        self.left_s = self.ends_s.copy()
        self.spare_s = self.ends_s[1] - self.whole_s - (self.pp - 1) * (terms.cut_s + self.returned_s)
        self._begin()
        done_s, last = np.zeros(count), len(terms.kind_of_layer) - 1
        for layer, kind in enumerate(terms.kind_of_layer.tolist()):
            done_s += terms.through_s[kind]
            returns_s = np.minimum(self.whole_s - done_s, self.returned_s) if layer < last else np.zeros(count)
            self._add(kind, returns_s)
            if layer % _LAYERS_BETWEEN_LOOKS == 0 and (self.is_dead | (self.used > self.pp)).all():
                break
        return np.asarray(self.is_dead | (self.used > self.pp))

    def bisected(self, low: FloatArray, high: FloatArray, halvings: int) -> FloatArray:
        """The largest refuted time of each strategy that so many halvings of an interval come to, or its lower end.

        The strategies may stand here `copies_to_bisect` times, one copy behind the other. Each filling then asks for
        all points that the next few halvings may come to, which takes fewer fillings to the same end.
        """
        copies = self.micro_batches.size // max(len(low), 1)
        at_once = (copies + 1).bit_length() - 1
        while halvings > 0 and len(low):
            levels = _bisection_points(low, high, min(at_once, halvings))
            points = np.concatenate(levels)
            asked = np.concatenate([points, *[points[:1]] * (copies - len(points))])
            is_refuted = self.refuted(asked.ravel()).reshape(copies, -1)
            which, column, before = np.zeros(len(low), dtype=np.int64), np.arange(len(low)), 0
            for level in levels:
                fails, point = is_refuted[before + which, column], level[which, column]
                low, high = np.where(fails, point, low), np.where(fails, high, point)
                which, before = 2 * which + fails, before + len(level)
            halvings -= len(levels)
        return low

    def _add(self, kind: int, returns_s: FloatArray) -> None:
        """A layer to the stage, or to a new one where it would take too much; the stage gets back what it returns."""
        cut_s, reduced_s = self.terms.cut_s, self.terms.reduced_s[kind]
        layer_rows = self.layer_sums[kind]
        peaks, buffer_bytes = self.layer_peaks[kind], self.terms.buffer_bytes[kind]
        np.maximum(self.peaks, self.sums.stash_bytes + peaks, out=self.peaks)
        np.maximum(self.exposed_s, self.sums.late_s + reduced_s, out=self.exposed_s)
        self.sums.rows += layer_rows
        np.maximum(self.buffer_bytes, buffer_bytes, out=self.buffer_bytes)
        over = self._is_over(returns_s)
        if over.any():
            self.used += over
            begun = _Sums(layer_rows.copy(), self.modes)
            begun.through_s += cut_s
            begun.forward_s += cut_s
            np.copyto(self.sums.rows, begun.rows, where=over)
            np.copyto(self.exposed_s, reduced_s, where=over)
            np.copyto(self.peaks, peaks, where=over)
            np.copyto(self.buffer_bytes, buffer_bytes, where=over)
            # What the stage before gets back belongs to the way back only, before the stage begins.
            self.lead_s[1] += over * self.returned_s
            np.copyto(self.left_s, self.ends_s - self.lead_s, where=over)
            self.lead_s += over * cut_s
            self._begin()
            self.is_dead |= over & self._is_over(returns_s)
        self.lead_s += self.leads_s[kind]

    def _begin(self) -> None:
        """What of the constraints depends on where the stages begin: microbatches in flight, n, and constraint (4)."""
        micro_batches, later = self.micro_batches, np.maximum(self.pp - self.used + 1, 1)
        between = self.pp - self.used + 1 - self.stages_between
        if self.schedule is PipelineSchedule.EAGER:
            later, between = 2 * later - 1, 2 * between - 1
        stages_left = np.minimum(micro_batches, later)
        match self.schedule:
            case PipelineSchedule.GPIPE:
                flight = micro_batches
            case PipelineSchedule.ZERO_BUBBLE:
                flight = np.minimum(micro_batches, self.pp)
            case _:
                flight = np.maximum(np.minimum(stages_left, between), 1)
        self.kept_micro_batches = flight - 1
        self.early = stages_left - 1
        if self.schedule is PipelineSchedule.ZERO_BUBBLE:
            self.late_weights = np.maximum(micro_batches - self.used - self.stages_between, 0)
        if self.schedule is not PipelineSchedule.GPIPE:
            twice = _over(2 * self.spare_s - self.left_s[1], micro_batches - self.early - 2)
            self.most_twice_s = np.where(micro_batches > self.early + 1, twice, np.inf)

    def _is_over(self, returns_s: FloatArray) -> BoolArray:
        """Whether the stage takes too long or too much memory with every recompute mode."""
        sums, most_s = self.sums, self._most_more_s()
        room = self.usable_bytes - sums.held_bytes - self.buffer_bytes
        is_too_long = sums.again_s > most_s
        is_too_large = self.kept_micro_batches * sums.stash_bytes + self.peaks > room
        fails_by_mode = is_too_long | is_too_large
        fails = fails_by_mode[0]
        for fails_in_mode in fails_by_mode[1:]:  # several times as quick as `all` over so few rows
            fails = fails & fails_in_mode
        return np.asarray((returns_s > most_s) | fails)

    def _most_more_s(self) -> FloatArray:
        """How long the stage may recompute or wait for what it gets back, by constraints (1) to (4) in turn."""
        sums, (stay_s, return_s) = self.sums, self.left_s
        exposed_s, ahead_s = self.exposed_s, self.spare_s
        if self.may_hide_elsewhere:
            exposed_s = np.maximum(exposed_s - self.terms.hidden_elsewhere_s, 0.0)
        stay_s = stay_s - sums.finish_s - exposed_s
        if self.schedule is PipelineSchedule.ZERO_BUBBLE:
            late_s = self.late_weights * sums.weight_s
            stay_s, return_s, ahead_s = stay_s - self.micro_batches * sums.weight_s, return_s - late_s, ahead_s - late_s
        most_s = np.minimum(stay_s, return_s) / self.micro_batches
        if self.schedule is not PipelineSchedule.GPIPE:
            ahead_s = ahead_s + self.early * sums.forward_s
            most_s = np.minimum(most_s, self.most_twice_s)
        return np.asarray(np.minimum(most_s, ahead_s / self.further_micro_batches) - sums.through_s)


def copies_to_bisect(count: int) -> int:
    """How often each of so many strategies is filled at once for a bisection: 2^n - 1 times decide n halvings."""
    return next((2**n - 1 for n in _HALVINGS_AT_ONCE if count * (2**n - 1) <= _FILLED_AT_ONCE), 1)


def _bisection_points(low: FloatArray, high: FloatArray, halvings: int) -> list[FloatArray]:
    """The points that so many halvings of intervals may ask for, per (point, interval) for each halving."""
    ends, levels = [low, high], list[FloatArray]()
    for _ in range(halvings):
        middles = [(below + above) / 2 for below, above in pairwise(ends)]
        levels.append(np.stack(middles))
        ends = [end for pair in zip(ends, middles, strict=False) for end in pair] + [ends[-1]]
    return levels


def _over(seconds: FloatArray, times: FloatArray) -> FloatArray:
    """What may be taken so many times; none at all leaves room for anything, or for nothing."""
    return np.asarray(seconds / np.maximum(times, _LEAST_DIVISOR))
