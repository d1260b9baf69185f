"""The plan that needs least memory, whatever its speed: if it does not fit, nothing does.

Strategies are looked at in the order of a lower bound on their peak over devices, until no bound is below the best peak
found. On chains the bound is the least capacity for which filling the devices from the front succeeds, with the leanest
recompute mode of every layer and without received tensors (`_filling_bounds`). On other graphs it is the mean over
devices, or what the largest layer needs (`_mean_and_largest_layer_bounds`).

For one strategy without chunks, the least peak is a bottleneck path over states (`_least_bottleneck`):

    M_k(i) = min over stages i->j and modes of max(bytes at position k, M_(k+1)(j))

Interleaved pipelines (`_least_interleaved_peak`) are searched by the same branch and bound as for time, with bytes for
seconds: a device adds up what its chunks hold and stash, and takes the largest of their scratch. Under a pipeline of
which the first stages are chosen, every device ends with at least what it has and what the leanest rest, chosen for
that device alone, adds to it (`_InterleavedPeaks`).

Two or more pipelines never need more memory when there are more of them (they shard more and share the microbatches; a
single one needs no buffers), so that of each depth only dp = 1 and the largest dp are looked at, with the largest group
over which ZeRO may shard (`_largest_dp`). 1F1B
never has more microbatches in flight than GPipe or zero-bubble (`_lean_schedules`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from phaze.hardware.hardware_numbers import LARGEST_BYTES
from phaze.parallelism import ALL_DEVICES, Parallelism, PipelineSchedule
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray
from phaze.place.model.zero_sharding import ZeroSharding
from phaze.place.search.candidate_stages import CandidateStages
from phaze.place.search.parallelism_table import SCHEDULES, ParallelismTable, list_parallelisms
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.stage_search import SingleDeviceStages, StageSearch, best_stages
from phaze.place.simulation.pass_orders import in_flight, stages_of_devices
from phaze.tolerances import MEMORY_MARGIN

__all__ = ["LeastMemory", "least_memory"]

_BISECTIONS = 24
"""Bisections of the capacity in `_filling_bounds`: they leave 2^-24 of what the whole model needs (some
kilobytes), too little to change the order of strategies. Each costs one pass over all layers."""

_NODES = 500
"""Nodes of branch and bound for one interleaved strategy. More may find a smaller peak where chunks differ much, but
the least memory is asked for again by every remedy that is tried."""

_GPIPE = SCHEDULES.index(PipelineSchedule.GPIPE)
_ONE_F_ONE_B = SCHEDULES.index(PipelineSchedule.ONE_F_ONE_B)
_ZERO_BUBBLE = SCHEDULES.index(PipelineSchedule.ZERO_BUBBLE)
_EAGER = SCHEDULES.index(PipelineSchedule.EAGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The plan: its strategy, the (index in the stage space, mode) of each stage, and the peak over devices."""

    parallelism: Parallelism
    stages: tuple[tuple[int, int], ...]
    peak_bytes: float


def least_memory(prepared: PreparedProblem, enough_bytes: float = 0.0) -> LeastMemory | None:
    """The plan with the least peak, or None if the devices cannot be divided in any allowed way.

    Given ``enough_bytes``, any plan that needs no more is as good, and None also says that there is none.
    """
    problem = prepared.problem
    # The largest group needs least: where groups are not fixed, others need not be listed.
    listed = problem.choosing(shard=problem.choices.shard or (ALL_DEVICES,))
    strategies = list_parallelisms(
        listed, prepared.space, prepared.stage_sums, prepared.network, prepared.update_s, checks_memory=False
    )
    strategies = _largest_dp(_lean_schedules(strategies), problem)
    bounds = _mean_and_largest_layer_bounds(prepared, strategies)
    if prepared.space.is_chain:
        has_no_chunks = strategies.chunks == 1
        bounds[has_no_chunks] = _filling_bounds(prepared, strategies.take(has_no_chunks))
    best: LeastMemory | None = None
    for index in np.argsort(bounds, kind="stable").tolist():
        if best is not None and (bounds[index] >= best.peak_bytes or best.peak_bytes <= enough_bytes):
            break
        if enough_bytes and bounds[index] > enough_bytes:
            return best if best is not None and best.peak_bytes <= enough_bytes else None
        limit_bytes = enough_bytes or (math.inf if best is None else best.peak_bytes)
        plan = _least_peak(prepared, strategies.parallelism(index, prepared.problem), limit_bytes)
        if plan is not None and (best is None or plan.peak_bytes < best.peak_bytes):
            best = plan
    return best


def _lean_schedules(strategies: ParallelismTable) -> ParallelismTable:
    """Without GPipe, zero-bubble and eager 1F1B where 1F1B has the same ZeRO stage."""
    is_lean = strategies.schedule == _ONE_F_ONE_B
    needs_more = np.isin(strategies.schedule, [_GPIPE, _ZERO_BUBBLE, _EAGER])
    return strategies.take(~needs_more | ~np.isin(strategies.zero, strategies.zero[is_lean]))


def _largest_dp(strategies: ParallelismTable, problem: PlacementProblem) -> ParallelismTable:
    """Of strategies that differ only in dp: one copy and the most, with and without stages on single devices.

    Groups over which ZeRO shards grow with dp, unless they are fixed.
    """
    replicas = strategies.dp * problem.cp
    has_no_singles = strategies.tp * strategies.pp * replicas <= problem.cluster.device_count
    same = (strategies.tp, strategies.pp, strategies.chunks, strategies.schedule, strategies.zero)
    fixed_shard = strategies.shard if problem.choices.shard is not None else np.zeros_like(strategies.shard)
    key = np.stack([*same, fixed_shard, has_no_singles, replicas == 1]).astype(np.int64)
    order = np.lexsort((-strategies.dp, *key))
    is_new = np.any(np.diff(key[:, order], axis=1, prepend=-1) != 0, axis=0)
    return strategies.take(order[is_new])


def _filling_bounds(prepared: PreparedProblem, strategies: ParallelismTable) -> FloatArray:
    """The least capacity into which the layers of a chain can be filled from the front, by bisection."""
    layer_table, count = prepared.layer_table, len(strategies)
    tp_index = np.searchsorted(layer_table.tp_degrees, strategies.tp)
    held, buffers = layer_table.held_and_buffered_bytes(strategies)
    stash, working = layer_table.stashed_bytes[tp_index].T, layer_table.working_bytes[tp_index].T
    low = np.zeros(count)
    high = held.sum(axis=0) + strategies.micro_batches * stash.sum(axis=0) + working.max(axis=0) + buffers.max(axis=0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        used = _devices_filled(strategies, held, stash, working, buffers, middle)
        is_layer_over = (held + stash + working + buffers).max(axis=0) > middle
        fails = (used > strategies.pp) | is_layer_over
        low, high = np.where(fails, middle, low), np.where(fails, high, middle)
    return low * (1 - MEMORY_MARGIN)


def _devices_filled(
    strategies: ParallelismTable,
    held: FloatArray,
    stash: FloatArray,
    working: FloatArray,
    buffers: FloatArray,
    capacity: FloatArray,
) -> IntArray:
    """How many devices of a pipeline are used, per strategy, if each is filled up to its capacity; rows are layers."""
    is_gpipe, is_zero_bubble = strategies.schedule == _GPIPE, strategies.schedule == _ZERO_BUBBLE
    micro_batches, pp = strategies.micro_batches, strategies.pp
    used = np.ones(len(strategies), dtype=np.int64)
    full, stashed, peak, buffer = np.zeros((4, len(strategies)))
    for layer_held, layer_stash, layer_working, layer_buffer in zip(held, stash, working, buffers, strict=True):
        stages_left = np.where(is_zero_bubble, pp, np.maximum(pp - used + 1, 1))
        flight = np.where(is_gpipe, micro_batches, np.minimum(micro_batches, stages_left))
        full, stashed = full + layer_held, stashed + layer_stash
        peak, buffer = np.maximum(peak, stashed + layer_working), np.maximum(buffer, layer_buffer)
        over = full + (flight - 1) * stashed + peak + buffer > capacity
        used += over
        full, stashed = np.where(over, layer_held, full), np.where(over, layer_stash, stashed)
        peak, buffer = np.where(over, layer_stash + layer_working, peak), np.where(over, layer_buffer, buffer)
    return used


def _mean_and_largest_layer_bounds(prepared: PreparedProblem, strategies: ParallelismTable) -> FloatArray:
    """A bound under the peak of each strategy: the mean over devices, or what the largest layer needs by itself."""
    bounds = np.zeros(len(strategies))
    problem = prepared.problem
    held_each = [kind.held_bytes_per_parameter for kind in strategies.degrees.sharding(problem)]
    is_one_layer = prepared.space.sizes == 1
    is_whole_model = prepared.space.sizes == prepared.space.layers
    for tp, sums in prepared.stage_sums.items():
        has_tp = strategies.tp == tp
        stash, working = sums.stashed_bytes.min(axis=0), sums.working_bytes.min(axis=0)
        counts = sums.stage_local_kinds(problem.ep, problem.has_frozen)
        whole, single_layers = stash[is_whole_model].max(), (stash + working)[is_one_layer]
        for kind, held, count in zip(sums.kinds(problem.ep, problem.has_frozen), held_each, counts, strict=True):
            whole = whole + held[has_tp] * kind.parameters[is_whole_model].max()
            single_layers = single_layers + np.multiply.outer(held[has_tp], count[is_one_layer])
        largest = _largest_layer_bytes(prepared, single_layers, is_one_layer)
        bounds[has_tp] = np.maximum(whole / strategies.pp[has_tp], largest)
    return bounds * (1 - MEMORY_MARGIN)


def _largest_layer_bytes(prepared: PreparedProblem, single_layers: FloatArray, is_one_layer: BoolArray) -> FloatArray:
    """Per strategy: what the layer needs that needs most, even as the stage of one layer in which it needs least."""
    space = prepared.space
    members = space.inside[space.target[is_one_layer]] & ~space.inside[space.source[is_one_layer]]
    least = np.full((len(single_layers), space.layers), np.inf)
    for column, layer in enumerate(members.argmax(axis=1).tolist()):
        least[:, layer] = np.minimum(least[:, layer], single_layers[:, column])
    return np.asarray(least.max(axis=1))


def _least_peak(prepared: PreparedProblem, parallelism: Parallelism, limit_bytes: float) -> LeastMemory | None:
    """The plan of a strategy with the least peak, unless all exceed the limit."""
    singles = prepared.single_device_stages(parallelism)
    if singles is None:
        return None
    if parallelism.chunks > 1:
        return _least_interleaved_peak(prepared, parallelism, limit_bytes * (1 + MEMORY_MARGIN))
    return _least_bottleneck(prepared, parallelism, singles, limit_bytes)


def _least_bottleneck(
    prepared: PreparedProblem, parallelism: Parallelism, singles: SingleDeviceStages, limit_bytes: float
) -> LeastMemory | None:
    """M of the module's docstring, from the last stage to the first, and the stages that attain it.

    M has one more index: how many of the stages to come must still take a single device.
    """
    listed = _stages_within(prepared, parallelism, limit_bytes)
    if not len(listed):
        return None
    costs, space, pp = prepared.stage_costs(parallelism, listed), prepared.space.take(listed), parallelism.pp
    flight = in_flight(parallelism.schedule, pp, prepared.micro_batches(parallelism))[:, 0].tolist()
    fixed, stash = costs.memory.held_bytes + costs.memory.scratch_bytes, costs.memory.stashed_bytes
    is_single = costs.devices < parallelism.tp
    first = np.searchsorted(space.source, np.arange(space.states + 1))
    starts = np.flatnonzero(np.diff(first))
    peaks = np.full((pp + 1, singles.least + 1, space.states), np.inf)
    peaks[pp, 0, -1] = 0.0
    for position in range(pp - 1, -1, -1):
        needs = (fixed + flight[position] * stash).min(axis=0)
        for singles_needed in range(singles.least + 1):
            after = peaks[position + 1, np.maximum(singles_needed - is_single, 0), space.target]
            peaks[position, singles_needed, starts] = np.minimum.reduceat(np.maximum(needs, after), first[starts])
    peak = float(peaks[0, singles.least, 0])
    if math.isinf(peak):
        return None
    state, singles_needed, stages = 0, singles.least, []
    for position in range(pp):
        options = np.arange(first[state], first[state + 1])
        by_mode = fixed[:, options] + flight[position] * stash[:, options]
        after = peaks[position + 1, np.maximum(singles_needed - is_single[options], 0), space.target[options]]
        best = int(np.argmin(np.maximum(by_mode.min(axis=0), after)))
        stage = int(options[best])
        stages.append((int(listed[stage]), int(by_mode[:, best].argmin())))
        state, singles_needed = int(space.target[stage]), int(max(singles_needed - is_single[stage], 0))
    return LeastMemory(parallelism=parallelism, stages=tuple(stages), peak_bytes=peak)


def _stages_within(prepared: PreparedProblem, parallelism: Parallelism, limit_bytes: float) -> IntArray:
    """Stages that may need no more than the limit even with one microbatch in flight."""
    sums, problem = prepared.stage_sums[parallelism.tp], prepared.problem
    sharding = ZeroSharding(
        problem.device_recipe, parallelism.zero, parallelism.shard_devices, parallelism.shard_groups
    )
    counts = sums.stage_local_kinds(problem.ep, problem.has_frozen)
    needs = sums.stashed_bytes.min(axis=0) + sums.working_bytes.min(axis=0)
    for kind, count in zip(sharding.by_kind(problem.ep, problem.has_frozen), counts, strict=True):
        needs = needs + float(kind.held_bytes_per_parameter) * count
    keep = needs <= limit_bytes * (1 + MEMORY_MARGIN)
    if not problem.capabilities.allows_uneven_stages:
        keep &= sums.body_layers * parallelism.stages == sums.body_layers.max()
    return np.flatnonzero(keep)


def _least_interleaved_peak(
    prepared: PreparedProblem, parallelism: Parallelism, limit_bytes: float
) -> LeastMemory | None:
    """The interleaved plan with the least peak below the limit that is found.

    The effort is limited: where chunks differ much and there are many, the peak may not be the very least.
    """
    cluster = prepared.problem.cluster
    roomy = replace(cluster, accelerator=replace(cluster.accelerator, hbm_bytes=LARGEST_BYTES))
    candidates = prepared.with_cluster(roomy).candidates(parallelism, np.inf, keeps_all_modes=True)
    states = prepared.space.states
    bounds = _InterleavedPeaks(candidates, parallelism, prepared.micro_batches(parallelism), states)
    search = StageSearch(
        candidates=candidates,
        bounds=bounds,
        simulated=bounds.peaks,
        estimated=bounds.peaks,
        stages=parallelism.stages,
        last_state=states - 1,
    )
    answer = best_stages(search, limit_bytes, _NODES)  # its seconds are bytes here
    if not answer.pipeline:
        return None
    stages = candidates.stages_and_modes(answer.pipeline)
    return LeastMemory(parallelism=parallelism, stages=stages, peak_bytes=answer.time_s)


class _InterleavedPeaks:
    """Bounds under the peak of partial interleaved pipelines, as `StageBounds` wants them.

    A row holds two numbers per device: first, for all devices, the bytes that their chunks add up; then their largest
    scratch.
    """

    def __init__(self, candidates: CandidateStages, parallelism: Parallelism, micro_batches: int, states: int) -> None:
        self._candidates, self._pp = candidates, parallelism.pp
        self._stages_of_devices = stages_of_devices(parallelism.schedule, parallelism.pp, parallelism.chunks)
        flight = in_flight(parallelism.schedule, parallelism.pp, micro_batches, parallelism.chunks)
        self._in_flight = np.empty(parallelism.stages, dtype=np.int64)
        self._in_flight[self._stages_of_devices] = flight.T
        self._device_of = [
            parallelism.schedule.place_of(parallelism.pp, stage)[0] for stage in range(parallelism.stages)
        ]
        self._least_scratch = float(candidates.scratch_bytes.min(initial=np.inf))
        self._least_rest = np.full((parallelism.stages + 1, parallelism.pp, states), np.inf)
        self._least_rest[-1, :, -1] = 0.0
        for position in range(parallelism.stages - 1, -1, -1):
            added = self._least_rest[position + 1][:, candidates.target]
            added[self._device_of[position]] += self._added(position, np.arange(len(candidates.mode)))
            self._least_rest[position] = candidates.least_by_source(added, states)

    def _added(self, position: int, options: IntArray) -> FloatArray:
        """What candidates at one position add to their device."""
        candidates = self._candidates
        return np.asarray(
            candidates.held_bytes[options] + self._in_flight[position] * candidates.stashed_bytes[options]
        )

    def peaks(self, pipelines: IntArray) -> FloatArray:
        """Bytes of the fullest device of pipelines, given as candidates per (pipeline, stage)."""
        by_device = pipelines[:, self._stages_of_devices]
        candidates, flight = self._candidates, self._in_flight[self._stages_of_devices]
        added = candidates.held_bytes[by_device] + flight * candidates.stashed_bytes[by_device]
        return np.asarray((added.sum(axis=1) + candidates.scratch_bytes[by_device].max(axis=1)).max(axis=1))

    @property
    def root(self) -> FloatArray:
        """Empty devices."""
        return np.concatenate([np.zeros(self._pp), np.full(self._pp, self._least_scratch)])

    def extend(
        self, row: FloatArray, position: int, options: IntArray, singles_needed: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows with each option added to its device, and bounds under the peak; chunks have no single devices."""
        del singles_needed
        device = self._device_of[position]
        rows = np.repeat(row[None], len(options), axis=0)
        added, scratch = rows[:, : self._pp], rows[:, self._pp :]  # views into rows
        added[:, device] += self._added(position, options)
        np.maximum(scratch[:, device], self._candidates.scratch_bytes[options], out=scratch[:, device])
        rest = self._least_rest[position + 1][:, self._candidates.target[options]].T
        return rows, (added + scratch + rest).max(axis=1)
