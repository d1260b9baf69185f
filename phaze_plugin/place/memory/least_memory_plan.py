"""The plan that needs least memory, whatever its speed: if it does not fit, nothing does.

For each choice of degrees the least possible peak over devices is a bottleneck path over states,

    M_k(i) = min over stages i->j and modes of max(bytes at position k, M_(k+1)(j))

and choices are looked at in the order of a bound under it: on chains the least capacity for which filling the devices
from the front succeeds (received tensors left out, the leanest mode of every layer), otherwise the mean over devices
and the largest layer. Two or more pipelines never need more when there are more of them (they shard more and share the
microbatches; one needs no buffers), so that of each depth only one pipeline and the largest number are looked at; 1f1b
never has more in flight than gpipe or zero-bubble.
Interleaved pipelines are searched in `chunk_memory.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phaze.capabilities import PipelineSchedule
from phaze.place.memory.interleaved_least_memory import least_chunks
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.parallelism_table import SCHEDULES, Choices, Degrees, list_choices
from phaze.place.search.prepared_problem import Ground
from phaze.place.simulation.pass_orders import in_flight

__all__ = ["LeastMemory", "least_memory"]

_BISECTIONS = 24
_SPLIT = SCHEDULES.index(PipelineSchedule.ZERO_BUBBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The plan: its degrees, the (index in the stage space, mode) of each stage, and the peak over devices."""

    degrees: Degrees
    stages: tuple[tuple[int, int], ...]
    peak_bytes: float


def least_memory(ground: Ground, enough_bytes: float = 0.0) -> LeastMemory | None:
    """The plan with the least peak, or None if the devices cannot be divided in any allowed way.

    Given ``enough_bytes``, any plan that needs no more is as good, and None also says that there is none.
    """
    choices = list_choices(
        ground.problem, ground.space, ground.widths, ground.network, ground.update_s, checks_memory=False
    )
    choices = _most_pipelines(_lean_schedules(choices), ground.problem.cluster.device_count)
    floors = _floors(ground, choices)
    if ground.space.is_chain:
        whole = choices.chunks == 1
        floors[whole] = _packed_floors(ground, choices.take(whole))
    best: LeastMemory | None = None
    for index in np.argsort(floors, kind="stable").tolist():
        if best is not None and (floors[index] >= best.peak_bytes or best.peak_bytes <= enough_bytes):
            break
        if enough_bytes and floors[index] > enough_bytes:
            return best if best is not None and best.peak_bytes <= enough_bytes else None
        limit = enough_bytes or (math.inf if best is None else best.peak_bytes)
        found = _least_of(ground, choices.degrees(index), limit)
        if found is not None and (best is None or found.peak_bytes < best.peak_bytes):
            best = found
    return best


def _lean_schedules(choices: Choices) -> Choices:
    """Without gpipe and zero-bubble where 1f1b has the same ZeRO stage."""
    lean = choices.schedule == SCHEDULES.index(PipelineSchedule.ONE_F_ONE_B)
    fat = np.isin(choices.schedule, [SCHEDULES.index(PipelineSchedule.GPIPE), _SPLIT])
    return choices.take(~fat | ~np.isin(choices.zero_stage, choices.zero_stage[lean]))


def _most_pipelines(choices: Choices, device_count: int) -> Choices:
    """Of choices that differ only in their pipelines, one and the most, with and without single devices."""
    wide = choices.width * choices.devices * choices.pipelines <= device_count
    alone = choices.pipelines == 1
    same = (choices.width, choices.devices, choices.chunks, choices.schedule, choices.zero_stage)
    key = np.stack([*same, wide, alone]).astype(np.int64)
    order = np.lexsort((-choices.pipelines, *key))
    changes = np.any(np.diff(key[:, order], axis=1, prepend=-1) != 0, axis=0)
    return choices.take(order[changes])


def _held_per_parameter(ground: Ground, choices: Choices) -> FloatArray:
    """Bytes that each trained parameter takes under each choice."""
    recipe = ground.problem.recipe
    shards = [np.where(choices.zero_stage >= least, choices.pipelines, 1) for least in (1, 2, 3)]
    return np.asarray(
        recipe.optimizer_bytes / shards[0] + recipe.gradient_bytes / shards[1] + recipe.parameter_bytes / shards[2]
    )


def _packed_floors(ground: Ground, choices: Choices) -> FloatArray:
    """The least capacity into which the layers of a chain can be filled, by bisection."""
    packing = ground.packing
    at = np.searchsorted(packing.widths, choices.width)
    held = packing.parameters[at].T * _held_per_parameter(ground, choices)
    stash, working = packing.stashed_bytes[at].T, packing.working_bytes[at].T
    buffers = packing.parameters[at].T * packing.buffered_bytes(choices)
    gpipe = choices.schedule == SCHEDULES.index(PipelineSchedule.GPIPE)
    split = choices.schedule == _SPLIT
    low = np.zeros(len(choices))
    high = held.sum(axis=0) + choices.rounds * stash.sum(axis=0) + working.max(axis=0) + buffers.max(axis=0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        used = np.ones(len(choices), dtype=np.int64)
        full, stashed, peak, buffer = np.zeros((4, len(choices)))
        for own, own_stash, own_working, own_buffer in zip(held, stash, working, buffers, strict=True):
            left = np.where(split, choices.devices, np.maximum(choices.devices - used + 1, 1))
            flight = np.where(gpipe, choices.rounds, np.minimum(choices.rounds, left))
            full, stashed = full + own, stashed + own_stash
            peak, buffer = np.maximum(peak, stashed + own_working), np.maximum(buffer, own_buffer)
            over = full + (flight - 1) * stashed + peak + buffer > middle
            used += over
            full, stashed = np.where(over, own, full), np.where(over, own_stash, stashed)
            peak, buffer = np.where(over, own_stash + own_working, peak), np.where(over, own_buffer, buffer)
        alone = (held + stash + working + buffers).max(axis=0) > middle
        fails = (used > choices.devices) | alone
        low, high = np.where(fails, middle, low), np.where(fails, high, middle)
    return low * (1 - 1e-9)


def _floors(ground: Ground, choices: Choices) -> FloatArray:
    """A bound under the peak of each choice: the mean over devices, and the largest layer."""
    floors = np.zeros(len(choices))
    held = _held_per_parameter(ground, choices)
    for width, table in ground.widths.items():
        alone = ground.space.sizes == 1
        whole = ground.space.sizes == ground.space.layers
        chosen = choices.width == width
        each = held[chosen]
        stash, working = table.stashed_bytes.min(axis=0), table.working_bytes.min(axis=0)
        mean = each * table.parameters[whole].max() + stash[whole].max()
        single = np.multiply.outer(each, table.own_parameters[alone]) + (stash + working)[alone]
        floors[chosen] = np.maximum(mean / choices.devices[chosen], _largest_layer(ground, single, alone))
    return floors * (1 - 1e-9)


def _largest_layer(ground: Ground, single: FloatArray, alone: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> FloatArray:
    """Per choice: the layer that needs most even where it needs least."""
    layers = ground.space.inside[ground.space.target[alone]] & ~ground.space.inside[ground.space.source[alone]]
    layer = layers.argmax(axis=1)
    least = np.full((len(single), ground.space.layers), np.inf)
    for column, index in enumerate(layer.tolist()):
        least[:, index] = np.minimum(least[:, index], single[:, column])
    return np.asarray(least.max(axis=1))


def _least_of(ground: Ground, degrees: Degrees, limit_bytes: float) -> LeastMemory | None:
    """The plan of these degrees with the least peak, unless all exceed the limit."""
    needed, singles = ground.singles(degrees)
    if singles == -1:
        return None
    if degrees.chunks > 1:
        peak, stages = least_chunks(ground, degrees, limit_bytes * (1 + 1e-9)) if not needed else (math.inf, ())
        return LeastMemory(degrees=degrees, stages=stages, peak_bytes=peak) if stages else None
    listed = _stages_within(ground, degrees, limit_bytes)
    if not len(listed):
        return None
    table, space = ground.stage_table(degrees, listed), ground.space.take(listed)
    schedule = degrees.schedule or PipelineSchedule.ONE_F_ONE_B
    flight = in_flight(schedule, degrees.devices, degrees.rounds(ground.problem.micro_batches))[:, 0].tolist()
    fixed, stash = table.memory.held_bytes + table.memory.scratch_bytes, table.memory.stashed_bytes
    is_single = table.devices < degrees.width
    first = np.searchsorted(space.source, np.arange(space.states + 1))
    starts = np.flatnonzero(np.diff(first))
    peaks = np.full((degrees.devices + 1, needed + 1, space.states), np.inf)
    peaks[degrees.devices, 0, -1] = 0.0
    for position in range(degrees.devices - 1, -1, -1):
        cost = (fixed + flight[position] * stash).min(axis=0)
        for need in range(needed + 1):
            reached = np.maximum(cost, peaks[position + 1, np.maximum(need - is_single, 0), space.target])
            peaks[position, need, starts] = np.minimum.reduceat(reached, first[starts])
    peak = float(peaks[0, needed, 0])
    if math.isinf(peak):
        return None
    state, need, chosen = 0, needed, []
    for position in range(degrees.devices):
        options = np.arange(first[state], first[state + 1])
        cost = fixed[:, options] + flight[position] * stash[:, options]
        after = peaks[position + 1, np.maximum(need - is_single[options], 0), space.target[options]]
        best = int(np.argmin(np.maximum(cost.min(axis=0), after)))
        stage = int(options[best])
        chosen.append((int(listed[stage]), int(cost[:, best].argmin())))
        state, need = int(space.target[stage]), int(max(need - is_single[stage], 0))
    return LeastMemory(degrees=degrees, stages=tuple(chosen), peak_bytes=peak)


def _stages_within(ground: Ground, degrees: Degrees, limit_bytes: float) -> IntArray:
    """Stages that may need no more than the limit even with one microbatch in flight."""
    table, recipe = ground.widths[degrees.width], ground.problem.recipe
    shards = [degrees.pipelines if degrees.zero_stage >= least else 1 for least in (1, 2, 3)]
    each = recipe.optimizer_bytes / shards[0] + recipe.gradient_bytes / shards[1] + recipe.parameter_bytes / shards[2]
    needs = each * table.own_parameters + table.stashed_bytes.min(axis=0) + table.working_bytes.min(axis=0)
    keep = needs <= limit_bytes * (1 + 1e-9)
    if not ground.problem.capabilities.allows_uneven_stages:
        keep &= table.body_layers * degrees.stages == table.body_layers.max()
    return np.flatnonzero(keep)
