"""Bounds under the simulated time of a pipeline of which only the first stages are chosen.

Every bound is the length of paths that the simulation must follow, completed by what the best choice of the remaining
stages (each quantity by itself) adds. With t = F + B, m rounds and S devices, for a chosen pipeline:

1f1b:         T >= F_0 + .. + F_(s-1) + c_s + B_q + .. + B_(s-1) + tail_q                       for all q <= s
              c_s = m t_s + the largest of 0, u - n min(F_s, B_s) and, if m > n + 1, 2 u - n t_s,
              with u = t_(s+1) + .. + t_(S-1) and n = min(m, S-s) - 1
zero-bubble:  the same with tail_q + min(m, q+1) W_q for tail_q and c_s = m t_s + the largest of
              max(0, m-1-s) W_s + max(0, u - n F_s)   and
              max(0, m-S) W_s + the largest of u - n min(F_s, B_s) and, if m > n + 1, 2 u - n t_s
gpipe:        T >= sum of t + (m-1) (largest F + largest B) + tail_0

c_s follows a stage that never waits once it began; or the first microbatch to the end and back to stage s, which has
meanwhile run at most min(m, S-s) forwards; or the last microbatch, mirrored; or both.

The remaining stages k.. enter by tables over states, filled from the end: R their least sum of t, and

    V_k(i) = min over stages i->j of max(c_k, t + V_(k+1)(j))                 c_k with R_(k+1)(j) for what lies behind
    P_k(i) = min over stages i->j of max(F + P_(k+1)(j), max(c_k, t + V_(k+1)(j)) + tail_k)

so that with f = F_0 + .. + F_(k-1) and b = max over q of (B_q + .. + B_(k-1) + tail_q) the paths through later stages
are at least f + b + V_k(i) and f + P_k(i). On a single device 1f1b's formula is exact.
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
    """Bounds of one choice of degrees. What the chosen stages contribute is a row of numbers."""

    @property
    def root(self) -> FloatArray:
        """The row of an empty pipeline."""

    def extend(
        self, row: FloatArray, position: int, picks: IntArray, needed: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows after adding each of ``picks`` at ``position``, and bounds under every pipeline that goes on from there.

        ``needed`` says how many stages on a single device each still needs; bounds are infinite where the rest cannot
        be placed.
        """


class PathBounds:
    """1f1b, zero-bubble and single stages."""

    def __init__(
        self, candidates: CandidateStages, parallelism: Parallelism, rounds: int, states: int, needed: int
    ) -> None:
        self._candidates, self._rounds, self._devices = candidates, rounds, parallelism.pp
        self._splits = parallelism.schedule is PipelineSchedule.ZERO_BUBBLE
        self._flight = _flight(parallelism, rounds)
        forward, backward = candidates.forward_s, candidates.backward_s
        shorter, through = np.minimum(forward, backward), forward + backward
        self._own = np.stack([forward, backward, candidates.weight_s, through, shorter, candidates.tail_s])
        count = parallelism.stages
        self._tables = np.full((3, count + 1, needed + 1, states), np.inf)
        self._tables[:, count, 0, -1] = 0.0
        for position in range(count - 1, -1, -1):
            blocked = np.where(candidates.most_in_flight >= self._flight[position], 0.0, np.inf)
            for need in range(needed + 1):
                behind = self._behind(position, _after(need, candidates.is_single) if needed else None)
                cost, tail = self._at(position, self._own, behind[2])
                values = np.empty((3, len(through)))
                np.maximum(cost, through + behind[0], out=values[0])
                np.maximum(forward + behind[1], values[0] + tail, out=values[1])
                np.add(through, behind[2], out=values[2])
                self._tables[:, position, need] = candidates.least_by_source(values + blocked, states)

    def _behind(self, position: int, needed: IntArray | None) -> FloatArray:
        """V, P and R behind every candidate at a position."""
        tables = self._tables[:, position + 1]
        if needed is None:
            return np.asarray(tables[:, 0].take(self._candidates.target, axis=1))
        return np.asarray(tables[:, needed, self._candidates.target])

    def _at(self, position: int, own: FloatArray, behind: FloatArray) -> tuple[FloatArray, FloatArray]:
        """c and tail of some candidates at one position, with the seconds behind each."""
        forward, _, weight, through, shorter, tail = own
        rounds = self._rounds
        early = min(rounds, self._devices - position) - 1
        waits = behind - early * shorter
        if rounds > early + 1:
            waits = np.maximum(waits, 2 * behind - early * through)
        if not self._splits:
            return rounds * through + np.maximum(0.0, waits), tail
        late = max(0, rounds - 1 - position) * weight
        between = max(0, rounds - self._devices) * weight
        waits = np.maximum(late + np.maximum(0.0, behind - early * forward), between + waits)
        return rounds * through + waits, tail + min(rounds, position + 1) * weight

    @property
    def root(self) -> FloatArray:
        """Nothing forward, nothing backward, no path."""
        return np.array([0.0, -np.inf, 0.0])

    def extend(
        self, row: FloatArray, position: int, picks: IntArray, needed: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows of forward seconds, of backward seconds with the tail, and of the longest known path."""
        forward, backward, known = row
        candidates, own = self._candidates, self._own[:, picks]
        rest, past, behind = self._tables[:, position + 1, needed, candidates.target[picks]]
        cost, tail = self._at(position, own, behind)
        latest = np.maximum(backward, tail)
        known = np.maximum(known, forward + cost + latest)
        forward = forward + own[0]
        backward = latest + own[1]
        bound = np.maximum(known, np.maximum(forward + backward + rest, forward + past))
        bound = np.where(candidates.most_in_flight[picks] >= self._flight[position], bound, np.inf)
        return np.stack([forward, backward, known], axis=1), bound


class PeakBounds:
    """Gpipe: sums and largest passes."""

    def __init__(
        self, candidates: CandidateStages, parallelism: Parallelism, rounds: int, states: int, needed: int
    ) -> None:
        self._candidates, self._rounds = candidates, rounds
        self._through = candidates.forward_s + candidates.backward_s
        self._fits = candidates.most_in_flight >= rounds
        count = parallelism.stages
        blocked = np.where(self._fits, 0.0, np.inf)
        parts = np.stack([self._through, candidates.forward_s, candidates.backward_s])
        self._tables = np.full((3, count + 1, needed + 1, states), np.inf)
        self._tables[:, count, 0, -1] = 0.0
        for position in range(count - 1, -1, -1):
            for need in range(needed + 1):
                after = _after(need, candidates.is_single)
                rest = self._tables[:, position + 1, after, candidates.target]
                values = np.concatenate([parts[:1] + rest[:1], np.maximum(parts[1:], rest[1:])]) + blocked
                self._tables[:, position, need] = candidates.least_by_source(values, states)

    @property
    def root(self) -> FloatArray:
        """No seconds, no passes, no tail."""
        return np.zeros(4)

    def extend(
        self, row: FloatArray, position: int, picks: IntArray, needed: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows of all seconds, the longest F, the longest B and the first stage's tail."""
        seconds, forward, backward, tail = row
        candidates = self._candidates
        through = seconds + self._through[picks]
        forward = np.maximum(forward, candidates.forward_s[picks])
        backward = np.maximum(backward, candidates.backward_s[picks])
        first = candidates.tail_s[picks] if position == 0 else np.full(len(picks), tail)
        rest = self._tables[:, position + 1, needed, candidates.target[picks]]
        possible = np.isfinite(rest[0]) & self._fits[picks]
        peaks = np.maximum(forward, rest[1]) + np.maximum(backward, rest[2])
        bound = through + rest[0] + (self._rounds - 1) * np.where(possible, peaks, 0.0) + first
        bound = np.where(possible, bound, np.inf)
        return np.stack([through, forward, backward, first], axis=1), bound


def _flight(parallelism: Parallelism, rounds: int) -> list[int]:
    """Microbatches in flight at each position."""
    if parallelism.schedule is PipelineSchedule.NONE:
        return [1]
    return [int(count) for count in in_flight(parallelism.schedule, parallelism.pp, rounds)[:, 0]]


def _after(need: int, is_single: BoolArray) -> IntArray:
    """Stages on a single device that are still needed after each candidate; more than needed are welcome."""
    return np.maximum(need - is_single.astype(np.int64), 0)
