"""The strategies and stages that a placement problem offers, listed a second time, for verification: one by one.

`phaze.place` lists them as columns of numpy arrays, several in a row where it can. Here every combination is tried
against the rules, which are written out once more (`plain_strategies`, `are_offered_stages`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from phaze.parallelism import ALL_DEVICES, Parallelism, PipelineSchedule
from phaze.place import PlacementProblem
from phaze.verify.plain_pipeline import PlainStage

__all__ = ["are_offered_stages", "device_bytes", "is_offered_device_count", "plain_downsets", "plain_strategies"]


def plain_strategies(problem: PlacementProblem) -> Iterator[Parallelism]:
    """Every strategy that the choices, the target and the batch allow, and that the devices may suffice for."""
    copies = range(1, min(problem.cluster.device_count, problem.micro_batches) + 1)
    for tp, dp, (schedule, chunks) in itertools.product(problem.tp_degrees, copies, _schedules(problem)):
        replicas, micro_batches = dp * problem.cp, -(-problem.micro_batches // dp)
        if problem.choices.dp and dp not in problem.choices.dp:
            continue
        if problem.capabilities.needs_several_copies and replicas == 1:
            continue
        if problem.capabilities.needs_single_micro_batch and micro_batches > 1:
            continue
        if (problem.needs_even_micro_batches and problem.micro_batches % dp) or replicas % problem.ep:
            continue
        for pp in _depths(problem, schedule, chunks):
            needs_full = schedule in problem.capabilities.needs_micro_batches_per_stage
            if (needs_full and problem.micro_batches // dp < pp * chunks) or not _runs(schedule, pp, micro_batches):
                continue
            if replicas * pp * (1 if problem.capabilities.allows_mixed_tp else tp) > problem.cluster.device_count:
                continue
            for zero, shard in _sharding(problem, tp, replicas, schedule):
                yield Parallelism(
                    dp=dp,
                    cp=problem.cp,
                    ep=problem.ep,
                    tp=tp,
                    pp=pp,
                    zero=zero,
                    shard=shard,
                    schedule=schedule,
                    chunks=chunks,
                    offload=problem.offload,
                )


def _schedules(problem: PlacementProblem) -> list[tuple[PipelineSchedule, int]]:
    """Schedules with the numbers of stages that each device may have."""
    schedules = [(PipelineSchedule.NONE, 1)]
    for kind in problem.choices.schedule:
        if kind in problem.capabilities.schedules:
            chunk_counts = problem.choices.chunks if kind is PipelineSchedule.INTERLEAVED else (1,)
            if kind in (PipelineSchedule.ZERO_BUBBLE_V, PipelineSchedule.DUAL_PIPE_V):
                chunk_counts = (2,)
            schedules += [(kind, chunks) for chunks in chunk_counts]
    return schedules


def _runs(schedule: PipelineSchedule, pp: int, micro_batches: int) -> bool:
    """Whether a schedule has an order for so many microbatches on so many devices."""
    if schedule is PipelineSchedule.INTERLEAVED:
        return micro_batches % pp == 0
    return schedule is not PipelineSchedule.DUAL_PIPE_V or micro_batches >= 2 * pp


def _depths(problem: PlacementProblem, schedule: PipelineSchedule, chunks: int) -> list[int]:
    """Every pp that the layers and the choices allow."""
    most = len(problem.graph.layers) // chunks
    depths = [1] if schedule is PipelineSchedule.NONE else range(2, most + 1)
    return [pp for pp in depths if not problem.choices.pp or pp in problem.choices.pp]


def _sharding(
    problem: PlacementProblem, tp: int, replicas: int, schedule: PipelineSchedule
) -> Iterator[tuple[int, int | str]]:
    """ZeRO stages, and the devices over which each may divide states; a single copy has nothing to divide."""
    capabilities = problem.capabilities
    stages = sorted(
        zero
        for zero in problem.choices.zero
        if zero in capabilities.zero_stages
        and (schedule is PipelineSchedule.NONE or capabilities.supports(schedule, zero))
    )
    for zero in stages if replicas > 1 else stages[:1]:
        yield from ((zero, shard) for shard in (_shards(problem, tp, replicas, zero) if zero else [ALL_DEVICES]))


def _shards(problem: PlacementProblem, tp: int, replicas: int, zero: int) -> list[int | str]:
    """Every group over which ZeRO may shard: powers of two, as many as fill a level of the network, and all."""
    runs = problem.capabilities
    if problem.choices.shard is not None:
        # Groups that are asked for of a target that has none are priced all the same.
        return [
            size
            for size in problem.choices.shard
            if size in (ALL_DEVICES, replicas)
            or (
                replicas % int(size) == 0
                and (
                    not runs.allows_shard_groups or runs.runs_groups(int(size), zero=zero, cp=problem.cp, ep=problem.ep)
                )
            )
        ]
    if not runs.allows_shard_groups:
        return [ALL_DEVICES]
    levels = [level.size for level in problem.cluster.levels]
    blocks = [math.prod(levels[: depth + 1]) for depth in range(len(levels))]
    return [
        ALL_DEVICES,
        *(
            size
            for size in range(2, replicas)
            if replicas % size == 0
            and (size & (size - 1) == 0 or size * tp in blocks)
            and (size % problem.ep == 0 or problem.ep % size == 0)
            and runs.runs_groups(size, zero=zero, cp=problem.cp, ep=problem.ep)
        ),
    ]


def plain_downsets(problem: PlacementProblem, most: int) -> list[frozenset[int]]:
    """Every set of layers that may be placed before a cut, smaller ones first; nothing where there are too many."""
    layers = range(len(problem.graph.layers))
    needed: dict[int, set[int]] = {layer: set() for layer in layers}
    for flow in problem.graph.flows:
        for consumer in flow.consumers:
            needed[consumer].add(flow.producer)
    known: set[frozenset[int]] = {frozenset()}
    edge = known
    while edge:
        edge = {
            placed | {layer} for placed in edge for layer in layers if layer not in placed and needed[layer] <= placed
        } - known
        known = known | edge
        if len(known) > most:
            return []
    return sorted(known, key=lambda placed: (len(placed), sorted(placed)))


def are_offered_stages(problem: PlacementProblem, chunks: int, stages: Sequence[frozenset[int]]) -> bool:
    """Whether the target runs stages of these layers, and chunks are nearly equally long."""
    body = problem.graph.body
    if not problem.capabilities.allows_uneven_stages and len({sum(body[each] for each in s) for s in stages}) > 1:
        return False
    sizes = [len(stage) for stage in stages]
    is_uneven = max(sizes) > 1.5 * min(sizes) and sum(sizes) - len(sizes) > 2
    return chunks == 1 or (max(sizes) - min(sizes) <= 1 and not is_uneven)


def is_offered_device_count(problem: PlacementProblem, strategy: Parallelism, stages: Sequence[PlainStage]) -> bool:
    """Whether the devices of all stages are there, and none is left over where none may be idle."""
    places = range(strategy.pp)
    each = [max(stage.devices for stage in stages[place :: strategy.pp]) for place in places]
    used, device_count = strategy.replicas * sum(each), problem.cluster.device_count
    return used == device_count or (used < device_count and problem.capabilities.allows_idle_devices)


def device_bytes(chunks: Sequence[PlainStage], in_flight: Sequence[int]) -> float:
    """What a device needs for its chunks: all that they hold and stash, and the largest scratch."""
    held = sum(
        sum(chunk.held_bytes.values()) + count * chunk.stash_bytes
        for chunk, count in zip(chunks, in_flight, strict=True)
    )
    return held + max(chunk.scratch_bytes for chunk in chunks)
