"""Lower bounds on the step time of pipelines of which only the first stages are chosen (GPipe, 1F1B, zero-bubble).

Every bound is the length of a path that the simulation must follow. What the stages not yet chosen add to it is the
least of any choice, each quantity by itself. Let F, B and W be the seconds of a stage's forward, backward and split-off
weight passes, t = F + B, m the microbatches per pipeline and S the number of stages. A chosen pipeline takes at least

1F1B:         F_0 + .. + F_(s-1) + c_s + B_q + .. + B_(s-1) + tail_q                            for all q <= s
              c_s = m t_s + the largest of 0, u - n min(F_s, B_s) and, if m > n + 1, 2 u - n t_s,
              with u = t_(s+1) + .. + t_(S-1) and n = min(m, S-s) - 1
eager 1F1B:   the same with n = min(m, 2(S-s)-1) - 1
zero-bubble:  the same with tail_q + min(m, q+1) W_q for tail_q and c_s = m t_s + the largest of
              max(0, m-1-s) W_s + max(0, u - n F_s)   and
              max(0, m-S) W_s + the largest of u - n min(F_s, B_s) and, if m > n + 1, 2 u - n t_s
GPipe:        sum of t + (m-1) (largest F + largest B) + tail_0

c_s (`PathBounds._cost_and_tail`) follows a stage that never waits once it began; or the first microbatch to the end and
back to stage s, which has meanwhile run at most min(m, S-s) forwards; or the last microbatch, mirrored; or both.

`PathBounds` (1F1B, zero-bubble) knows the stages k.. that are not yet chosen by tables over states, filled from the
end. R is their least sum of t, and

    V_k(i) = min over stages i->j of max(c_k, t + V_(k+1)(j))                 c_k with R_(k+1)(j) for what lies behind
    P_k(i) = min over stages i->j of max(F + P_(k+1)(j), max(c_k, t + V_(k+1)(j)) + tail_k)

so that with f = F_0 + .. + F_(k-1) and b = max over q of (B_q + .. + B_(k-1) + tail_q) the paths through later stages
are at least f + b + V_k(i) and f + P_k(i) (`PathBounds.extend`). On a single stage 1F1B's formula is exact.
`PeakBounds` (GPipe) has tables of the least sum of t, the least largest F and the least largest B.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray
from phaze.place.search.candidate_stages import CandidateStages
from phaze.place.simulation.pass_orders import in_flight

__all__ = ["PathBounds", "PeakBounds", "StageBounds"]


class StageBounds(Protocol):
    """Bounds of partial pipelines under one strategy. What the chosen stages contribute is a row of numbers."""

    @property
    def root(self) -> FloatArray:
        """The row of an empty pipeline."""

    def extend(
        self, row: FloatArray, position: int, options: IntArray, singles_needed: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows after adding each option at ``position``, and bounds under every pipeline that goes on from there.

        Options are indices of candidate stages. ``singles_needed`` says, for each, how many of the stages to come must
        take a single device; bounds are infinite where the rest cannot be placed.
        """


class PathBounds:
    """Bounds for 1F1B, zero-bubble and single stages."""

    def __init__(
        self,
        candidates: CandidateStages,
        parallelism: Parallelism,
        micro_batches: int,
        states: int,
        singles_needed: int,
    ) -> None:
        self._candidates, self._micro_batches, self._pp = candidates, micro_batches, parallelism.pp
        self._splits_backward = parallelism.schedule is PipelineSchedule.ZERO_BUBBLE
        self._is_eager = parallelism.schedule is PipelineSchedule.EAGER
        self._in_flight = _in_flight_by_position(parallelism, micro_batches)
        forward, backward = candidates.forward_s, candidates.backward_s
        shorter, through = np.minimum(forward, backward), forward + backward
        # The rows that `_cost_and_tail` unpacks.
        self._seconds = np.stack([forward, backward, candidates.weight_s, through, shorter, candidates.tail_s])
        stages = parallelism.stages
        # V, P and R, per (stages chosen, single-device stages still needed, state).
        self._tables = np.full((3, stages + 1, singles_needed + 1, states), np.inf)
        self._tables[:, stages, 0, -1] = 0.0
        for position in range(stages - 1, -1, -1):
            blocked = np.where(candidates.most_in_flight >= self._in_flight[position], 0.0, np.inf)
            for needed in range(singles_needed + 1):
                needed_after = _needed_after(needed, candidates.is_single) if singles_needed else None
                value, path, rest = self._behind(position, needed_after)
                cost, tail = self._cost_and_tail(position, self._seconds, rest)
                values = np.empty((3, len(through)))
                np.maximum(cost, through + value, out=values[0])
                np.maximum(forward + path, values[0] + tail, out=values[1])
                np.add(through, rest, out=values[2])
                self._tables[:, position, needed] = candidates.least_by_source(values + blocked, states)

    def _behind(self, position: int, singles_needed: IntArray | None) -> FloatArray:
        """V, P and R behind every candidate at a position; None stands for no stage on a single device."""
        tables = self._tables[:, position + 1]
        if singles_needed is None:
            return np.asarray(tables[:, 0].take(self._candidates.target, axis=1))
        return np.asarray(tables[:, singles_needed, self._candidates.target])

    def _cost_and_tail(self, position: int, seconds: FloatArray, behind: FloatArray) -> tuple[FloatArray, FloatArray]:
        """c and tail of some candidates at one position, with the seconds t of all stages behind each."""
        forward, _, weight, through, shorter, tail = seconds
        micro_batches = self._micro_batches
        stages = self._pp - position
        early = min(micro_batches, 2 * stages - 1 if self._is_eager else stages) - 1
        waits = behind - early * shorter
        if micro_batches > early + 1:
            waits = np.maximum(waits, 2 * behind - early * through)
        if not self._splits_backward:
            return micro_batches * through + np.maximum(0.0, waits), tail
        late = max(0, micro_batches - 1 - position) * weight
        between = max(0, micro_batches - self._pp) * weight
        waits = np.maximum(late + np.maximum(0.0, behind - early * forward), between + waits)
        return micro_batches * through + waits, tail + min(micro_batches, position + 1) * weight

    @property
    def root(self) -> FloatArray:
        """No forward seconds, no backward seconds, no path."""
        return np.array([0.0, -np.inf, 0.0])

    def extend(
        self, row: FloatArray, position: int, options: IntArray, singles_needed: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows of forward seconds, of backward seconds with the tail, and of the longest known path."""
        forward, backward, known = row
        candidates, seconds = self._candidates, self._seconds[:, options]
        value, path, rest = self._tables[:, position + 1, singles_needed, candidates.target[options]]
        cost, tail = self._cost_and_tail(position, seconds, rest)
        latest = np.maximum(backward, tail)
        known = np.maximum(known, forward + cost + latest)
        forward = forward + candidates.forward_s[options]
        backward = latest + candidates.backward_s[options]
        bound = np.maximum(known, np.maximum(forward + backward + value, forward + path))
        bound = np.where(candidates.most_in_flight[options] >= self._in_flight[position], bound, np.inf)
        return np.stack([forward, backward, known], axis=1), bound


class PeakBounds:
    """Bounds for GPipe: sums and largest passes."""

    def __init__(
        self,
        candidates: CandidateStages,
        parallelism: Parallelism,
        micro_batches: int,
        states: int,
        singles_needed: int,
    ) -> None:
        self._candidates, self._micro_batches = candidates, micro_batches
        self._through_s = candidates.forward_s + candidates.backward_s
        self._fits = candidates.most_in_flight >= micro_batches
        stages = parallelism.stages
        blocked = np.where(self._fits, 0.0, np.inf)
        parts = np.stack([self._through_s, candidates.forward_s, candidates.backward_s])
        # Least sum of t, least largest F, least largest B, per (stages chosen, single-device stages needed, state).
        self._tables = np.full((3, stages + 1, singles_needed + 1, states), np.inf)
        self._tables[:, stages, 0, -1] = 0.0
        for position in range(stages - 1, -1, -1):
            for needed in range(singles_needed + 1):
                needed_after = _needed_after(needed, candidates.is_single)
                rest = self._tables[:, position + 1, needed_after, candidates.target]
                values = np.concatenate([parts[:1] + rest[:1], np.maximum(parts[1:], rest[1:])]) + blocked
                self._tables[:, position, needed] = candidates.least_by_source(values, states)

    @property
    def root(self) -> FloatArray:
        """No seconds, no passes, no tail."""
        return np.zeros(4)

    def extend(
        self, row: FloatArray, position: int, options: IntArray, singles_needed: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows of all seconds, the longest F, the longest B and the first stage's tail."""
        seconds, forward, backward, tail = row
        candidates = self._candidates
        through = seconds + self._through_s[options]
        forward = np.maximum(forward, candidates.forward_s[options])
        backward = np.maximum(backward, candidates.backward_s[options])
        first_tail = candidates.tail_s[options] if position == 0 else np.full(len(options), tail)
        rest = self._tables[:, position + 1, singles_needed, candidates.target[options]]
        rest_through, rest_forward, rest_backward = rest
        is_possible = np.isfinite(rest_through) & self._fits[options]
        peaks = np.maximum(forward, rest_forward) + np.maximum(backward, rest_backward)
        bound = through + rest_through + (self._micro_batches - 1) * np.where(is_possible, peaks, 0.0) + first_tail
        bound = np.where(is_possible, bound, np.inf)
        return np.stack([through, forward, backward, first_tail], axis=1), bound


def _in_flight_by_position(parallelism: Parallelism, micro_batches: int) -> list[int]:
    """Microbatches in flight at each position of the pipeline."""
    if parallelism.schedule is PipelineSchedule.NONE:
        return [1]
    return [int(count) for count in in_flight(parallelism.schedule, parallelism.pp, micro_batches)[:, 0]]


def _needed_after(singles_needed: int, is_single: BoolArray) -> IntArray:
    """Stages on a single device that are still needed after each candidate; more than needed are welcome."""
    return np.maximum(singles_needed - is_single.astype(np.int64), 0)
