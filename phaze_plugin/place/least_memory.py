"""The plan that needs least memory, whatever its speed: if it does not fit, nothing does.

For each choice of degrees the least possible peak over devices is a bottleneck path over states,

    M_k(i) = min over stages i->j and modes of max(bytes at position k, M_(k+1)(j))

and choices are looked at in the order of a bound under it: the mean over devices of what all hold together, and the
largest single layer. More pipelines never need more (they shard more and share the microbatches), so that of each depth
only the largest number of pipelines is looked at. Interleaved schedules keep more in flight than others and are left
out; a problem that allows no other schedule is answered for single stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phaze.capabilities import PipelineSchedule
from phaze.place.degrees import Choices, Degrees, list_choices
from phaze.place.ground import Ground
from phaze.place.orders import in_flight
from phaze.place.states import FloatArray

__all__ = ["LeastMemory", "least_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The plan: its degrees, the (index in the stage space, mode) of each stage, and the peak over devices."""

    degrees: Degrees
    stages: tuple[tuple[int, int], ...]
    peak_bytes: float


def least_memory(ground: Ground) -> LeastMemory | None:
    """The plan with the least peak, or None if the devices cannot be divided in any allowed way."""
    choices = list_choices(
        ground.problem, ground.space, ground.widths, ground.network, ground.update_s, checks_memory=False
    )
    choices = _most_pipelines(choices.take(choices.chunks == 1), ground.problem.cluster.device_count)
    floors = _floors(ground, choices)
    best: LeastMemory | None = None
    for index in np.argsort(floors, kind="stable").tolist():
        if best is not None and floors[index] >= best.peak_bytes:
            break
        found = _least_of(ground, choices.degrees(index))
        if found is not None and (best is None or found.peak_bytes < best.peak_bytes):
            best = found
    return best


def _most_pipelines(choices: Choices, device_count: int) -> Choices:
    """Of choices that differ only in their pipelines, the one with the most, with and without single devices."""
    wide = choices.width * choices.devices * choices.pipelines <= device_count
    key = np.stack([choices.width, choices.devices, choices.schedule, choices.zero_stage, wide.astype(np.int64)])
    order = np.lexsort((-choices.pipelines, *key))
    changes = np.any(np.diff(key[:, order], axis=1, prepend=-1) != 0, axis=0)
    return choices.take(order[changes])


def _floors(ground: Ground, choices: Choices) -> FloatArray:
    """A bound under the peak of each choice."""
    floors = np.zeros(len(choices))
    recipe = ground.problem.recipe
    for width, table in ground.widths.items():
        alone = ground.space.sizes == 1
        whole = ground.space.sizes == ground.space.layers
        chosen = choices.width == width
        copies = choices.pipelines[chosen]
        shards = [np.where(choices.zero_stage[chosen] >= least, copies, 1) for least in (1, 2, 3)]
        each = (
            recipe.optimizer_bytes / shards[0] + recipe.gradient_bytes / shards[1] + recipe.parameter_bytes / shards[2]
        )
        stash, working = table.stashed_bytes.min(axis=0), table.working_bytes.min(axis=0)
        mean = each * table.parameters[whole].max() + stash[whole].max()
        single = np.multiply.outer(each, table.parameters[alone]) + (stash + working)[alone]
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


def _least_of(ground: Ground, degrees: Degrees) -> LeastMemory | None:
    """The plan of these degrees with the least peak."""
    needed, singles = ground.singles(degrees)
    if singles == -1:
        return None
    table, space, problem = ground.stage_table(degrees), ground.space, ground.problem
    usable = np.ones(len(space.source), dtype=bool)
    if not problem.capabilities.allows_uneven_stages:
        body = ground.widths[degrees.width].body_layers
        usable = body * degrees.stages == body.max()
    rounds = degrees.rounds(problem.micro_batches)
    schedule = degrees.schedule or PipelineSchedule.ONE_F_ONE_B
    flight = in_flight(schedule, degrees.devices, rounds)[:, 0].tolist()
    fixed = table.memory.held_bytes + table.memory.scratch_bytes
    is_single = table.devices < degrees.width
    first = np.searchsorted(space.source, np.arange(space.states + 1))
    starts = np.flatnonzero(np.diff(first))
    peaks = np.full((degrees.devices + 1, needed + 1, space.states), np.inf)
    peaks[degrees.devices, 0, -1] = 0.0
    costs = []
    for position in range(degrees.devices - 1, -1, -1):
        own = fixed + flight[position] * table.memory.stashed_bytes
        costs.append(np.where(usable, own.min(axis=0), np.inf))
        for need in range(needed + 1):
            after = np.maximum(need - is_single, 0)
            reached = np.maximum(costs[-1], peaks[position + 1, after, space.target])
            peaks[position, need, starts] = np.minimum.reduceat(reached, first[starts])
    peak = float(peaks[0, needed, 0])
    if math.isinf(peak):
        return None
    state, need, chosen = 0, needed, []
    for position, cost in enumerate(reversed(costs)):
        options = np.arange(first[state], first[state + 1])
        after = np.maximum(need - is_single[options], 0)
        stage = int(options[np.argmin(np.maximum(cost[options], peaks[position + 1, after, space.target[options]]))])
        mode = int((fixed + flight[position] * table.memory.stashed_bytes)[:, stage].argmin())
        chosen.append((stage, mode))
        state, need = int(space.target[stage]), int(max(need - is_single[stage], 0))
    return LeastMemory(degrees=degrees, stages=tuple(chosen), peak_bytes=peak)
