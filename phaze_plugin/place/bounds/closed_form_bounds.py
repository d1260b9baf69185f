"""Cheap bounds under the time of all plans with the same degrees.

With m microbatches per pipeline, S devices per pipeline and W the seconds of one microbatch through all layers
(transfers and ZeRO's collectives included, at the fastest link), every simulated time is at least

    gpipe             W + (m-1) W/S
    1f1b              (m+S-1) W/S if m > S
                      W m u,  u = (1-q)/(1-q^S), q = 1 - 1/m
                      W + W/h, h the sum over s of 1 / (m-1 - (min(m, S-s) - 1)/2)
    zero-bubble       m W/S
                      A m u with A the seconds without weight gradients and u as for 1f1b
                      (m+S-1) A/S + (m-S)(m-S-1)/(S(m-2)) (W-A) if m > S
    interleaved, v    W (m u - (v-1)/v (S u - 1)),  u = (1-q)/(1-q^S), q = 1 - 1/(v m)

and for all of them the mean over devices of m times a device's share plus its update and unhidden reduction.

The bounds of 1f1b are the optima, over all ways to divide W into t_0..t_(S-1), of the largest over s of a path of
`bounds.py`: t_0 + .. + t_(s-1) + 2 (t_(s+1) + .. + t_(S-1)) + (m-S+s+1) t_s, for which equal stages are best;
t_0 + .. + t_(s-1) + m t_s; and W + (m-1) t_s - (min(m, S-s) - 1) t_s/2. That of interleaved schedules weighs, for every
device r and chunk c, the path that reaches that stage with the first microbatch, stays on the device, and returns with
the last one: the seconds of all earlier stages plus m times the device's, less S times those of the device's earlier
chunks. With weights u q^(S-1-r) / v no second of any stage counts less than the factor above.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phaze.parallelism import PipelineSchedule
from phaze.place.model.network_prices import Network
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import FloatArray, IntArray, StageSpace
from phaze.place.model.stage_sums import StageSums
from phaze.place.model.zero_sharding import ZeroSharding

__all__ = ["ClosedFormBounds"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedFormBounds:
    """Sums over all layers at one width and ZeRO stage, for many numbers of pipelines.

    `whole` is the stage that holds everything, `s_per_byte` belongs to the fastest link, `least_cut_s` to the smallest
    boundary on it.
    """

    problem: PlacementProblem
    table: StageSums
    zero: int
    dp: IntArray
    whole: int
    s_per_byte: float
    least_cut_s: float

    @classmethod
    def of(
        cls,
        problem: PlacementProblem,
        space: StageSpace,
        table: StageSums,
        network: Network,
        zero: int,
        dp: IntArray,
    ) -> ClosedFormBounds:
        """The sums of a problem."""
        cuts = table.received_bytes[space.source > 0]
        return cls(
            problem=problem,
            table=table,
            zero=zero,
            dp=dp,
            whole=int(np.flatnonzero((space.source == 0) & (space.target == space.states - 1))[0]),
            s_per_byte=network.least_s_per_byte,
            least_cut_s=float(cuts.min(initial=np.inf)) * network.least_s_per_byte if len(cuts) else 0.0,
        )

    @property
    def sharding(self) -> ZeroSharding:
        """What the ZeRO stage holds and moves, per number of pipelines."""
        return ZeroSharding(self.problem.recipe, self.zero, self.dp)

    @property
    def parameters(self) -> float:
        """Trained parameters of the whole model on one tensor rank."""
        return float(self.table.parameters[self.whole])

    def least_bytes(self) -> FloatArray:
        """What all stages of a pipeline hold together at least."""
        held = self.sharding.held_bytes_per_parameter
        stash = float(self.table.stashed_bytes[:, self.whole].min())
        return np.asarray(held * self.parameters + self.table.frozen_bytes[self.whole] + stash)

    def time_bound_s(self, schedule: PipelineSchedule, chunks: int, devices: IntArray, update_s: float) -> FloatArray:
        """The bound of each number of pipelines with its number of devices."""
        forward, backward_input, weight = (
            float(seconds[:, self.whole].min())
            for seconds in (self.table.forward_s, self.table.backward_input_s, self.table.backward_weight_s)
        )
        gathered = self._moved(self.sharding.gathered_bytes_per_pass)
        scattered = self._moved(self.sharding.scattered_bytes_per_backward)
        transfers = 2 * (devices * chunks - 1) * self.least_cut_s
        run = np.maximum(forward, gathered)
        fused = run + np.maximum(backward_input + weight, gathered + scattered) + transfers
        without_weights = run + np.maximum(backward_input, gathered) + transfers
        split = without_weights + np.maximum(weight, scattered)
        rounds = (-(-self.problem.micro_batches // self.dp)).astype(float)
        match schedule:
            case PipelineSchedule.NONE:
                path, total = fused * rounds, fused
            case PipelineSchedule.GPIPE:
                path, total = fused + (rounds - 1) * fused / devices, fused
            case PipelineSchedule.ONE_F_ONE_B:
                even = np.where(rounds > devices, (rounds + devices - 1) / devices, 0.0)
                path = fused * np.maximum(even, np.maximum(_lead(rounds, devices), 1 + _peak(rounds, devices)))
                total = fused
            case PipelineSchedule.ZERO_BUBBLE:
                spread = (rounds - devices) * (rounds - devices - 1) / (devices * np.maximum(rounds - 2, 1))
                even = (rounds + devices - 1) / devices * without_weights + spread * (split - without_weights)
                path = np.maximum(rounds * split / devices, without_weights * _lead(rounds, devices))
                path = np.maximum(path, np.where(rounds > devices, even, 0.0))
                total = split
            case _:
                u = _lead(rounds * chunks, devices) / (rounds * chunks)
                path = fused * (rounds * u - (chunks - 1) / chunks * (devices * u - 1))
                total = fused
        hidden = backward_input + weight if chunks == 1 else np.inf
        return np.asarray(np.maximum(path, (rounds * total + self._after(update_s, hidden)) / devices))

    def _moved(self, bytes_each: FloatArray) -> FloatArray:
        """Seconds of one gather or scatter of all parameters."""
        return np.asarray((1 - 1 / self.dp) * (bytes_each * self.parameters * self.s_per_byte))

    def _after(self, update_s: float, backward_s: float) -> FloatArray:
        """Update, gather and the reduction that backward cannot hide, summed over stages."""
        sharding = self.sharding
        update = self.parameters * update_s / sharding.optimizer_shards
        gather = self._moved(sharding.gathered_bytes_per_batch)
        # An all-reduce moves as much as a reduce-scatter and an all-gather.
        reduced = self._moved(2 * sharding.all_reduced_bytes_per_batch + sharding.scattered_bytes_per_batch)
        return np.asarray(update + gather + np.maximum(reduced - backward_s, 0.0))


def _lead(rounds: FloatArray, devices: IntArray) -> FloatArray:
    """m u for m rounds: 1 / (1 - (1 - 1/m)^S)."""
    return np.asarray(1.0 / -np.expm1(devices * np.log1p(-1.0 / np.maximum(rounds, 1.0 + 1e-15))))


def _peak(rounds: FloatArray, devices: IntArray) -> FloatArray:
    """1/h: the least largest e of stages that add up to 1."""
    distinct, which = np.unique(rounds, return_inverse=True)
    behind = np.arange(int(devices.max(initial=1)))
    early = np.minimum(distinct[:, None], behind + 1) - 1
    slope = np.maximum(distinct[:, None] - 1 - early / 2, 1e-9)
    inverse = np.cumsum(1 / slope, axis=1)[which, devices - 1]
    return np.where(rounds > 1, 1 / inverse, 0.0)
