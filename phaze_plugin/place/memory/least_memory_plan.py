"""The plan that needs least memory, whatever its speed: if it does not fit, nothing does.

Strategies are looked at in the order of a lower bound on their peak over devices, until no bound is below the best peak
found. On chains the bound is the least capacity for which filling the devices from the front succeeds, with the leanest
recompute mode of every layer and without received tensors (`_filling_bounds`). On other graphs it is the mean over
devices, or what the largest layer needs (`_mean_and_largest_layer_bounds`).

For one strategy without chunks, the least peak is a bottleneck path over states (`_least_peak`):

    M_k(i) = min over stages i->j and modes of max(bytes at position k, M_(k+1)(j))

Interleaved pipelines (`_least_interleaved_peak`) are searched by the same branch and bound as for time, with bytes for
seconds: a device adds up what its chunks hold and stash, and takes the largest of their scratch. Under a pipeline of
which the first stages are chosen, every device ends with at least what it has and what the leanest rest, chosen for
that device alone, adds to it (`_InterleavedPeaks`).

Two or more pipelines never need more memory when there are more of them (they shard more and share the microbatches; a
single one needs no buffers), so that of each depth only dp = 1 and the largest dp are looked at (`_largest_dp`). 1F1B
never has more microbatches in flight than GPipe or zero-bubble (`_lean_schedules`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from phaze.hardware.field_checks import LARGEST_BYTES
from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.model.zero_sharding import ZeroSharding
from phaze.place.search.candidate_stages import CandidateStages
from phaze.place.search.parallelism_table import SCHEDULES, ParallelismTable, list_parallelisms
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.stage_search import StageSearch, best_stages
from phaze.place.simulation.pass_orders import in_flight

__all__ = ["LeastMemory", "least_memory"]

_BISECTIONS = 24
_SPLIT = SCHEDULES.index(PipelineSchedule.ZERO_BUBBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The plan: its degrees, the (index in the stage space, mode) of each stage, and the peak over devices."""

    parallelism: Parallelism
    stages: tuple[tuple[int, int], ...]
    peak_bytes: float


def least_memory(prepared: PreparedProblem, enough_bytes: float = 0.0) -> LeastMemory | None:
    """The plan with the least peak, or None if the devices cannot be divided in any allowed way.

    Given ``enough_bytes``, any plan that needs no more is as good, and None also says that there is none.
    """
    strategies = list_parallelisms(
        prepared.problem, prepared.space, prepared.stage_sums, prepared.network, prepared.update_s, checks_memory=False
    )
    strategies = _largest_dp(_lean_schedules(strategies), prepared.problem.cluster.device_count)
    floors = _floors(prepared, strategies)
    if prepared.space.is_chain:
        whole = strategies.chunks == 1
        floors[whole] = _filling_bounds(prepared, strategies.take(whole))
    best: LeastMemory | None = None
    for index in np.argsort(floors, kind="stable").tolist():
        if best is not None and (floors[index] >= best.peak_bytes or best.peak_bytes <= enough_bytes):
            break
        if enough_bytes and floors[index] > enough_bytes:
            return best if best is not None and best.peak_bytes <= enough_bytes else None
        limit = enough_bytes or (math.inf if best is None else best.peak_bytes)
        found = _least_peak(prepared, strategies.parallelism(index), limit)
        if found is not None and (best is None or found.peak_bytes < best.peak_bytes):
            best = found
    return best


def _lean_schedules(strategies: ParallelismTable) -> ParallelismTable:
    """Without gpipe and zero-bubble where 1f1b has the same ZeRO stage."""
    lean = strategies.schedule == SCHEDULES.index(PipelineSchedule.ONE_F_ONE_B)
    fat = np.isin(strategies.schedule, [SCHEDULES.index(PipelineSchedule.GPIPE), _SPLIT])
    return strategies.take(~fat | ~np.isin(strategies.zero, strategies.zero[lean]))


def _largest_dp(strategies: ParallelismTable, device_count: int) -> ParallelismTable:
    """Of choices that differ only in their pipelines, one and the most, with and without single devices."""
    wide = strategies.tp * strategies.pp * strategies.dp <= device_count
    alone = strategies.dp == 1
    same = (strategies.tp, strategies.pp, strategies.chunks, strategies.schedule, strategies.zero)
    key = np.stack([*same, wide, alone]).astype(np.int64)
    order = np.lexsort((-strategies.dp, *key))
    changes = np.any(np.diff(key[:, order], axis=1, prepend=-1) != 0, axis=0)
    return strategies.take(order[changes])


def _held_per_parameter(prepared: PreparedProblem, strategies: ParallelismTable) -> FloatArray:
    """Bytes that each trained parameter takes under each choice."""
    return ZeroSharding(prepared.problem.recipe, strategies.zero, strategies.dp).held_bytes_per_parameter


def _filling_bounds(prepared: PreparedProblem, strategies: ParallelismTable) -> FloatArray:
    """The least capacity into which the layers of a chain can be filled, by bisection."""
    layer_table = prepared.layer_table
    at = np.searchsorted(layer_table.tp_degrees, strategies.tp)
    held = layer_table.parameters[at].T * _held_per_parameter(prepared, strategies)
    stash, working = layer_table.stashed_bytes[at].T, layer_table.working_bytes[at].T
    buffers = layer_table.parameters[at].T * layer_table.sharding(strategies).buffer_bytes
    gpipe = strategies.schedule == SCHEDULES.index(PipelineSchedule.GPIPE)
    split = strategies.schedule == _SPLIT
    low = np.zeros(len(strategies))
    high = held.sum(axis=0) + strategies.rounds * stash.sum(axis=0) + working.max(axis=0) + buffers.max(axis=0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        used = np.ones(len(strategies), dtype=np.int64)
        full, stashed, peak, buffer = np.zeros((4, len(strategies)))
        for own, own_stash, own_working, own_buffer in zip(held, stash, working, buffers, strict=True):
            left = np.where(split, strategies.pp, np.maximum(strategies.pp - used + 1, 1))
            flight = np.where(gpipe, strategies.rounds, np.minimum(strategies.rounds, left))
            full, stashed = full + own, stashed + own_stash
            peak, buffer = np.maximum(peak, stashed + own_working), np.maximum(buffer, own_buffer)
            over = full + (flight - 1) * stashed + peak + buffer > middle
            used += over
            full, stashed = np.where(over, own, full), np.where(over, own_stash, stashed)
            peak, buffer = np.where(over, own_stash + own_working, peak), np.where(over, own_buffer, buffer)
        alone = (held + stash + working + buffers).max(axis=0) > middle
        fails = (used > strategies.pp) | alone
        low, high = np.where(fails, middle, low), np.where(fails, high, middle)
    return low * (1 - 1e-9)


def _floors(prepared: PreparedProblem, strategies: ParallelismTable) -> FloatArray:
    """A bound under the peak of each choice: the mean over devices, and the largest layer."""
    floors = np.zeros(len(strategies))
    held = _held_per_parameter(prepared, strategies)
    for tp, table in prepared.stage_sums.items():
        alone = prepared.space.sizes == 1
        whole = prepared.space.sizes == prepared.space.layers
        chosen = strategies.tp == tp
        each = held[chosen]
        stash, working = table.stashed_bytes.min(axis=0), table.working_bytes.min(axis=0)
        mean = each * table.parameters[whole].max() + stash[whole].max()
        single = np.multiply.outer(each, table.unshared_parameters[alone]) + (stash + working)[alone]
        floors[chosen] = np.maximum(mean / strategies.pp[chosen], _largest_layer(prepared, single, alone))
    return floors * (1 - 1e-9)


def _largest_layer(
    prepared: PreparedProblem, single: FloatArray, alone: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> FloatArray:
    """Per choice: the layer that needs most even where it needs least."""
    layers = prepared.space.inside[prepared.space.target[alone]] & ~prepared.space.inside[prepared.space.source[alone]]
    layer = layers.argmax(axis=1)
    least = np.full((len(single), prepared.space.layers), np.inf)
    for column, index in enumerate(layer.tolist()):
        least[:, index] = np.minimum(least[:, index], single[:, column])
    return np.asarray(least.max(axis=1))


def _least_peak(prepared: PreparedProblem, parallelism: Parallelism, limit_bytes: float) -> LeastMemory | None:
    """The plan of these degrees with the least peak, unless all exceed the limit."""
    needed, singles = prepared.singles(parallelism)
    if singles == -1:
        return None
    if parallelism.chunks > 1:
        peak, stages = (
            _least_interleaved_peak(prepared, parallelism, limit_bytes * (1 + 1e-9)) if not needed else (math.inf, ())
        )
        return LeastMemory(parallelism=parallelism, stages=stages, peak_bytes=peak) if stages else None
    listed = _stages_within(prepared, parallelism, limit_bytes)
    if not len(listed):
        return None
    table, space = prepared.stage_costs(parallelism, listed), prepared.space.take(listed)
    schedule = parallelism.schedule
    flight = in_flight(
        schedule, parallelism.pp, parallelism.micro_batches_per_pipeline(prepared.problem.micro_batches)
    )[:, 0].tolist()
    fixed, stash = table.memory.held_bytes + table.memory.scratch_bytes, table.memory.stashed_bytes
    is_single = table.devices < parallelism.tp
    first = np.searchsorted(space.source, np.arange(space.states + 1))
    starts = np.flatnonzero(np.diff(first))
    peaks = np.full((parallelism.pp + 1, needed + 1, space.states), np.inf)
    peaks[parallelism.pp, 0, -1] = 0.0
    for position in range(parallelism.pp - 1, -1, -1):
        cost = (fixed + flight[position] * stash).min(axis=0)
        for need in range(needed + 1):
            reached = np.maximum(cost, peaks[position + 1, np.maximum(need - is_single, 0), space.target])
            peaks[position, need, starts] = np.minimum.reduceat(reached, first[starts])
    peak = float(peaks[0, needed, 0])
    if math.isinf(peak):
        return None
    state, need, chosen = 0, needed, []
    for position in range(parallelism.pp):
        options = np.arange(first[state], first[state + 1])
        cost = fixed[:, options] + flight[position] * stash[:, options]
        after = peaks[position + 1, np.maximum(need - is_single[options], 0), space.target[options]]
        best = int(np.argmin(np.maximum(cost.min(axis=0), after)))
        stage = int(options[best])
        chosen.append((int(listed[stage]), int(cost[:, best].argmin())))
        state, need = int(space.target[stage]), int(max(need - is_single[stage], 0))
    return LeastMemory(parallelism=parallelism, stages=tuple(chosen), peak_bytes=peak)


def _stages_within(prepared: PreparedProblem, parallelism: Parallelism, limit_bytes: float) -> IntArray:
    """Stages that may need no more than the limit even with one microbatch in flight."""
    table = prepared.stage_sums[parallelism.tp]
    each = ZeroSharding(prepared.problem.recipe, parallelism.zero, parallelism.dp).held_bytes_per_parameter
    needs = each * table.unshared_parameters + table.stashed_bytes.min(axis=0) + table.working_bytes.min(axis=0)
    keep = needs <= limit_bytes * (1 + 1e-9)
    if not prepared.problem.capabilities.allows_uneven_stages:
        keep &= table.body_layers * parallelism.stages == table.body_layers.max()
    return np.flatnonzero(keep)


_NODES = 500


def _least_interleaved_peak(
    prepared: PreparedProblem, parallelism: Parallelism, limit_bytes: float
) -> tuple[float, tuple[tuple[int, int], ...]]:
    """The least peak below the limit that is found, with the (stage, mode) of each stage; infinite if there is none.

    The effort is limited: where chunks differ much and there are many, the peak may not be the very least.
    """
    roomy = replace(prepared.problem.cluster.accelerator, hbm_bytes=LARGEST_BYTES)
    candidates = prepared.with_cluster(replace(prepared.problem.cluster, accelerator=roomy)).candidates(
        parallelism, np.inf
    )
    bounds = _InterleavedPeaks(
        candidates,
        parallelism,
        parallelism.micro_batches_per_pipeline(prepared.problem.micro_batches),
        prepared.space.states,
    )
    search = StageSearch(
        candidates=candidates,
        bounds=bounds,
        simulated=bounds.peaks,
        estimated=bounds.peaks,
        stages=parallelism.stages,
        full=prepared.space.states - 1,
    )
    answer = best_stages(search, limit_bytes, _NODES)
    return answer.time_s, tuple((int(candidates.stage[pick]), int(candidates.mode[pick])) for pick in answer.picks)


class _InterleavedPeaks:
    """A row holds, per device, what it adds up and its largest scratch."""

    def __init__(self, candidates: CandidateStages, parallelism: Parallelism, rounds: int, states: int) -> None:
        self._candidates, self._devices = candidates, parallelism.pp
        flight = in_flight(PipelineSchedule.INTERLEAVED, parallelism.pp, rounds, parallelism.chunks)
        self._flight = flight.T.ravel()
        self._least_scratch = float(candidates.scratch_bytes.min(initial=np.inf))
        self._tables = np.full((parallelism.stages + 1, parallelism.pp, states), np.inf)
        self._tables[-1, :, -1] = 0.0
        for position in range(parallelism.stages - 1, -1, -1):
            added = self._tables[position + 1][:, candidates.target]
            added[position % parallelism.pp] += self.added(position, np.arange(len(candidates.mode)))
            self._tables[position] = candidates.least_by_source(added, states)

    def added(self, position: int, picks: IntArray) -> FloatArray:
        """What candidates at one position add to their device."""
        candidates = self._candidates
        return np.asarray(candidates.held_bytes[picks] + self._flight[position] * candidates.stashed_bytes[picks])

    def peaks(self, picks: IntArray) -> FloatArray:
        """Bytes of the fullest device of pipelines, given as candidates per (pipeline, stage)."""
        by_device = picks.reshape(len(picks), -1, self._devices)
        candidates, flight = self._candidates, self._flight.reshape(-1, self._devices)
        added = candidates.held_bytes[by_device] + flight * candidates.stashed_bytes[by_device]
        return np.asarray((added.sum(axis=1) + candidates.scratch_bytes[by_device].max(axis=1)).max(axis=1))

    @property
    def root(self) -> FloatArray:
        """Empty devices."""
        return np.concatenate([np.zeros(self._devices), np.full(self._devices, self._least_scratch)])

    def extend(
        self, row: FloatArray, position: int, picks: IntArray, needed: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows with the picks added to their device, and bounds under the peak."""
        del needed
        device = position % self._devices
        rows = np.repeat(row[None], len(picks), axis=0)
        rows[:, device] += self.added(position, picks)
        scratch = rows[:, self._devices + device]
        np.maximum(scratch, self._candidates.scratch_bytes[picks], out=scratch)
        rest = self._tables[position + 1][:, self._candidates.target[picks]].T
        return rows, (rows[:, : self._devices] + rows[:, self._devices :] + rest).max(axis=1)
