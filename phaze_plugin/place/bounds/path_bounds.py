"""Lower bounds on the step time by paths through the simulation: of whole strategies, and of partly chosen pipelines.

Whole strategies have closed forms for their time and memory, from sums over all layers of the model
(`ClosedFormBounds`). Of GPipe, 1F1B and zero-bubble also pipelines are bounded of which only the first stages are
chosen (`StageBounds`, further below).

Let m be the microbatches per pipeline, S = pp, and W the seconds of one microbatch through all layers, with transfers
and ZeRO's collectives at the fastest link. Every simulated time is at least

    GPipe             W + (m-1) W/S
    1F1B              (m+S-1) W/S if m > S
                      W m u,  u = (1-q)/(1-q^S), q = 1 - 1/m
                      W + W/h, h the sum over s of 1 / (m-1 - (min(m, S-s) - 1)/2)
    eager 1F1B        the same without the first, with 2 (S-s) - 1 for S-s
    zero-bubble       m W/S
                      A m u with A the seconds without weight gradients and u as for 1F1B
                      (m+S-1) A/S + (m-S)(m-S-1)/(S(m-2)) (W-A) if m > S
    ZB-V, DualPipeV   the larger of A and m W/S
    interleaved, v    W (m u - (v-1)/v (S u - 1)),  u = (1-q)/(1-q^S), q = 1 - 1/(v m)

(`ClosedFormBounds._path_s`; `_geometric` is m u and `_harmonic` is 1/h), and for all of them the mean over devices of m
times a device's share plus its update and unhidden reduction (`ClosedFormBounds._after_last_backward_s`). What all
stages hold together is at least `ClosedFormBounds.least_bytes`.

The bounds of 1F1B are the optima, over all ways to divide W into t_0..t_(S-1), of the largest over s of a path of
those below: t_0 + .. + t_(s-1) + 2 (t_(s+1) + .. + t_(S-1)) + (m-S+s+1) t_s, for which equal stages
are best; t_0 + .. + t_(s-1) + m t_s; and W + (m-1) t_s - (min(m, S-s) - 1) t_s/2. The bound of interleaved schedules is
a weighted mean of paths, one for every device r and chunk c. Such a path reaches that stage with the first microbatch,
stays on the device, and returns with the last one: it takes the seconds of all earlier stages plus m times the
device's, less S times those of the device's earlier chunks. With weights u q^(S-1-r) / v no second of any stage counts
less than the factor above.

Partly chosen pipelines. Every bound is the length of a path that the simulation must follow. What the stages not yet
chosen add to it is the least of any choice, each quantity by itself. Let F, B and W be the seconds of a stage's
forward, backward and split-off weight passes, t = F + B, m the microbatches per pipeline and S the number of stages. A
chosen pipeline takes at least

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

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.model.network_prices import Network
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray, StageSpace
from phaze.place.model.stage_sums import StageSums
from phaze.place.model.zero_sharding import DataDegrees, DataShares
from phaze.place.search.candidate_stages import CandidateStages
from phaze.place.simulation.pass_orders import in_flight

__all__ = ["ClosedFormBounds", "PathBounds", "PeakBounds", "StageBounds"]

_JUST_ABOVE_ONE = 1.0 + 1e-15
"""The least number of microbatches in `_geometric`: with exactly one, its logarithm would be that of 0."""

_LEAST_SLOPE = 1e-9
"""The least divisor in `_harmonic`, where a single microbatch would divide by 0; its result is not used there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passes:
    """Seconds of one microbatch through all layers, per strategy.

    Attributes:
        fused: forward, backward and transfers, with the weights' part inside backward (W).
        without_weights: the same without the weights' part (A).
        split: the same with the weights' part as a pass of its own (W of zero-bubble).
    """

    fused: FloatArray
    without_weights: FloatArray
    split: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedFormBounds:
    """Bounds at one tp and ZeRO stage, for many degrees of data parallelism.

    Attributes:
        problem: what is placed.
        sums: sums over stages, of which only the stage that is the whole model is read.
        degrees: dp and ZeRO's groups, of each strategy.
        parameters: parameters of the whole model on one tensor-parallel rank, dense ones and experts apart, frozen
            ones behind them, with what is held and moved of them.
        whole_model: the stage that holds everything.
        s_per_byte: seconds per byte on the fastest link.
        least_cut_s: seconds of the smallest boundary between stages on that link.
    """

    problem: PlacementProblem
    sums: StageSums
    degrees: DataDegrees
    parameters: tuple[tuple[DataShares, float], ...]
    whole_model: int
    s_per_byte: float
    least_cut_s: float

    @classmethod
    def of(
        cls,
        problem: PlacementProblem,
        space: StageSpace,
        sums: StageSums,
        network: Network,
        degrees: DataDegrees,
    ) -> ClosedFormBounds:
        """The bounds of a problem."""
        cuts = sums.received_bytes[space.source > 0]
        whole_model = int(np.flatnonzero((space.source == 0) & (space.target == space.states - 1))[0])
        parameters = (float(kind.parameters[whole_model]) for kind in sums.kinds(problem.ep, problem.has_frozen))
        return cls(
            problem=problem,
            sums=sums,
            degrees=degrees,
            parameters=tuple(zip(degrees.shares(problem), parameters, strict=True)),
            whole_model=whole_model,
            s_per_byte=network.least_s_per_byte,
            least_cut_s=float(cuts.min(initial=np.inf)) * network.least_s_per_byte if len(cuts) else 0.0,
        )

    def least_bytes(self) -> FloatArray:
        """What all stages of a pipeline hold together at least."""
        held = sum(kind.sharding.held_bytes_per_parameter * parameters for kind, parameters in self.parameters)
        stash = float(self.sums.stashed_bytes[:, self.whole_model].min())
        return np.asarray(held + self.sums.table_bytes[self.whole_model] + stash)

    def time_bound_s(self, schedule: PipelineSchedule, chunks: int, pp: IntArray, update_s: float) -> FloatArray:
        """The bound of each number of copies with its pipeline depth; ``update_s`` is that of one parameter."""
        forward, backward_input, weight = (
            float(seconds[:, self.whole_model].min())
            for seconds in (self.sums.forward_s, self.sums.backward_input_s, self.sums.backward_weight_s)
        )
        gathered, scattered = np.zeros((2, len(pp)))
        for kind, parameters in self.parameters:
            moved_s = kind.within * parameters * self.s_per_byte
            gathered += moved_s * kind.sharding.gathered_bytes_per_pass
            scattered += moved_s * kind.sharding.scattered_bytes_per_backward
        cuts = pp * chunks - (2 if schedule.is_v_shaped else 1)  # nothing is sent where a V turns
        transfers = 2 * cuts * self.least_cut_s
        run = self._overlapped(forward, gathered)
        without_weights = run + self._overlapped(backward_input, gathered) + transfers
        passes = _Passes(
            fused=run + self._overlapped(backward_input + weight, gathered + scattered) + transfers,
            without_weights=without_weights,
            split=without_weights + self._overlapped(weight, scattered),
        )
        micro_batches = (-(-self.problem.micro_batches // self.degrees.dp)).astype(float)
        path = self._path_s(schedule, chunks, pp, micro_batches, passes)
        total = passes.split if schedule.splits_backward else passes.fused
        # Chunks of a device hide each other's reductions: of interleaved ones nothing is certain to be exposed.
        hidden = backward_input + weight if chunks == 1 else np.inf
        mean = (micro_batches * total + self._after_last_backward_s(update_s, hidden)) / pp
        return np.asarray(np.maximum(path, mean))

    def _overlapped(self, layers_s: float, collectives_s: FloatArray) -> FloatArray:
        """A pass of all layers and the collectives behind it: the longer, and what of the shorter is not hidden."""
        hidden = self.problem.calibration.hidden_share * np.minimum(layers_s, collectives_s)
        return np.asarray(layers_s + collectives_s - hidden)

    @staticmethod
    def _path_s(
        schedule: PipelineSchedule, chunks: int, pp: IntArray, micro_batches: FloatArray, passes: _Passes
    ) -> FloatArray:
        """The bound of the schedule's own paths."""
        fused = passes.fused
        match schedule:
            case PipelineSchedule.NONE:
                return fused * micro_batches
            case PipelineSchedule.GPIPE:
                return np.asarray(fused + (micro_batches - 1) * fused / pp)
            case PipelineSchedule.ONE_F_ONE_B:
                even = np.where(micro_batches > pp, (micro_batches + pp - 1) / pp, 0.0)
                uneven = np.maximum(_geometric(micro_batches, pp), 1 + _harmonic(micro_batches, pp))
                return np.asarray(fused * np.maximum(even, uneven))
            case PipelineSchedule.EAGER:
                ahead = _harmonic(micro_batches, pp, forwards_ahead=2)
                return np.asarray(fused * np.maximum(_geometric(micro_batches, pp), 1 + ahead))
            case PipelineSchedule.ZERO_BUBBLE:
                without_weights, split = passes.without_weights, passes.split
                share = (micro_batches - pp) * (micro_batches - pp - 1) / (pp * np.maximum(micro_batches - 2, 1))
                even = (micro_batches + pp - 1) / pp * without_weights + share * (split - without_weights)
                path = np.maximum(micro_batches * split / pp, without_weights * _geometric(micro_batches, pp))
                return np.maximum(path, np.where(micro_batches > pp, even, 0.0))
            case PipelineSchedule.ZERO_BUBBLE_V | PipelineSchedule.DUAL_PIPE_V:
                return np.asarray(np.maximum(passes.without_weights, micro_batches * passes.split / pp))
            case PipelineSchedule.INTERLEAVED:
                u = _geometric(micro_batches * chunks, pp) / (micro_batches * chunks)
                return np.asarray(fused * (micro_batches * u - (chunks - 1) / chunks * (pp * u - 1)))

    def _after_last_backward_s(self, update_s: float, hidden_s: float) -> FloatArray:
        """Update, gather and the reduction that backward cannot hide, summed over stages."""
        finish, reduced = np.zeros((2, len(self.degrees.dp)))
        for kind, parameters in self.parameters:
            sharding, sent_s = kind.sharding, parameters * self.s_per_byte
            finish += parameters * update_s * sharding.recipe.trains / sharding.optimizer_shards
            finish += kind.within * sent_s * sharding.gathered_bytes_per_batch
            reduced += kind.reduced * sent_s * sharding.recipe.reduction_bytes
        return np.asarray(finish + np.maximum(reduced - hidden_s, 0.0))


def _geometric(micro_batches: FloatArray, pp: IntArray) -> FloatArray:
    """m u for m microbatches: 1 / (1 - (1 - 1/m)^S)."""
    return np.asarray(1.0 / -np.expm1(pp * np.log1p(-1.0 / np.maximum(micro_batches, _JUST_ABOVE_ONE))))


def _harmonic(micro_batches: FloatArray, pp: IntArray, forwards_ahead: int = 1) -> FloatArray:
    """1/h: the least largest excess of stages that add up to 1.

    Before its first backward a device runs `forwards_ahead` forwards for every stage behind it.
    """
    distinct, which = np.unique(micro_batches, return_inverse=True)
    stages_behind = np.arange(int(pp.max(initial=1)))
    early = np.minimum(distinct[:, None], forwards_ahead * stages_behind + 1) - 1
    slope = np.maximum(distinct[:, None] - 1 - early / 2, _LEAST_SLOPE)
    inverse = np.cumsum(1 / slope, axis=1)[which, pp - 1]
    return np.where(micro_batches > 1, 1 / inverse, 0.0)


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
