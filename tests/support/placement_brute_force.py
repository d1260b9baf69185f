"""All placements of a problem, tried one by one with the plain code of `phaze.verify.plain_placement`."""

import itertools
import math
from collections.abc import Iterator

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.model.placement_problem import PlacementProblem
from phaze.verify.plain_pipeline import PlainStage, plain_in_flight, plain_simulation
from phaze.verify.plain_placement import PlainCosts

__all__ = ["brute_force", "stage_partitions"]


def stage_partitions(
    problem: PlacementProblem, parts: int, before: frozenset[int] = frozenset()
) -> Iterator[tuple[frozenset[int], ...]]:
    """Every way to cut the layers into so many stages in order, no tensor flowing backward."""
    layers = range(len(problem.graph.layers))
    rest = [layer for layer in layers if layer not in before]
    if parts == 0:
        if not rest:
            yield ()
        return
    for count in range(1, len(rest) - parts + 2):
        for chosen in itertools.combinations(rest, count):
            stage = frozenset(chosen)
            placed = before | stage
            if all(flow.producer in placed for flow in problem.graph.flows if set(flow.consumers) & stage):
                for later in stage_partitions(problem, parts - 1, placed):
                    yield (stage, *later)


def _has_even_stages(problem: PlacementProblem, stages: tuple[frozenset[int], ...]) -> bool:
    kinds = [layer.key.split("#")[0] for layer in problem.graph.layers]
    body = max(dict.fromkeys(kinds), key=kinds.count)
    counts = [sum(kinds[layer] == body for layer in stage) for stage in stages]
    return len(set(counts)) == 1


def _strategies(problem: PlacementProblem) -> Iterator[Parallelism]:
    """Every strategy that the choices, the target and the batch allow, whether the devices suffice or not."""
    capabilities, layers = problem.capabilities, len(problem.graph.layers)
    shapes: list[tuple[PipelineSchedule, int]] = [(PipelineSchedule.NONE, 1)]
    for kind in problem.choices.schedule:
        if kind in capabilities.schedules:
            shapes += [(kind, chunks) for chunks in (problem.choices.chunks if kind == "interleaved-1f1b" else (1,))]
    copies = range(1, min(problem.cluster.device_count, problem.micro_batches) + 1)
    for tp, dp, (schedule, chunks) in itertools.product(problem.tp_degrees, copies, shapes):
        zero_stages = [
            zero
            for zero in problem.choices.zero
            if zero in capabilities.zero_stages
            and (schedule is PipelineSchedule.NONE or capabilities.supports(schedule, zero))
        ]
        if problem.choices.dp and dp not in problem.choices.dp:
            continue
        if problem.needs_even_micro_batches and problem.micro_batches % dp:
            continue
        if dp * problem.cp % problem.ep:
            continue
        micro_batches = -(-problem.micro_batches // dp)
        for pp in [1] if schedule is PipelineSchedule.NONE else range(2, layers // chunks + 1):
            if problem.choices.pp and pp not in problem.choices.pp:
                continue
            if chunks > 1 and micro_batches % pp:
                continue
            # A single copy has nothing to shard: only the least ZeRO stage counts.
            copies_each = dp * problem.cp
            for zero in zero_stages if copies_each > 1 else sorted(zero_stages)[:1]:
                for shard in _shards(problem, tp, copies_each) if zero else ["all"]:
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
                    )


def _shards(problem: PlacementProblem, tp: int, copies: int) -> list[int | str]:
    """Every group over which ZeRO may shard: powers of two, as many as fill a level of the network, and all."""
    if problem.choices.shard is not None:
        return [size for size in problem.choices.shard if size == "all" or copies % int(size) == 0]
    if not problem.capabilities.allows_shard_groups:
        return ["all"]
    sizes: list[int | str] = ["all"]
    for size in range(2, copies):
        blocks = [math.prod(level.size for level in problem.cluster.levels[: depth + 1]) for depth in range(3)]
        is_offered = size & (size - 1) == 0 or size * tp in blocks
        is_even = size % problem.ep == 0 or problem.ep % size == 0
        if copies % size == 0 and is_offered and is_even:
            sizes.append(size)
    return sizes


def brute_force(problem: PlacementProblem) -> dict[Parallelism, float]:
    """The least simulated time of every strategy with which something fits, by trying everything."""
    times = {strategy: _least_time_s(problem, strategy) for strategy in _strategies(problem)}
    return {strategy: time_s for strategy, time_s in times.items() if time_s < math.inf}


def _least_time_s(problem: PlacementProblem, strategy: Parallelism) -> float:
    """The least simulated time of all stages and recompute modes of one strategy; infinite if nothing fits."""
    capabilities, device_count = problem.capabilities, problem.cluster.device_count
    pp, chunks = strategy.pp, strategy.chunks
    micro_batches = -(-problem.micro_batches // strategy.dp)
    name = str(strategy.schedule or "1f1b")
    mixed = capabilities.allows_mixed_tp and chunks == 1
    if not mixed and strategy.device_count > device_count:
        return math.inf
    costs = PlainCosts(problem, strategy, mixed)
    flight = [
        [plain_in_flight(name, pp, micro_batches, chunks, device, chunk) for chunk in range(chunks)]
        for device in range(pp)
    ]
    best = math.inf
    known: dict[tuple[frozenset[int], frozenset[int]], list[PlainStage]] = {}
    for parts in stage_partitions(problem, pp * chunks):
        if not _is_allowed(problem, strategy, parts):
            continue
        keys = [(frozenset().union(*parts[:index]), part) for index, part in enumerate(parts)]
        for before, part in keys:
            if (before, part) not in known:
                known[before, part] = [costs.stage(set(before), set(part), mode) for mode in problem.choices.recompute]
        options = [known[key] for key in keys]
        used = strategy.replicas * sum(
            max(options[index][0].devices for index in range(device, len(parts), pp)) for device in range(pp)
        )
        if used > device_count or (used < device_count and not capabilities.allows_idle_devices):
            continue
        for stages in itertools.product(*options):
            if all(_device_bytes(stages[device::pp], flight[device]) <= problem.usable_bytes for device in range(pp)):
                best = min(best, plain_simulation(name, pp, micro_batches, list(stages)))
    return best


def _is_allowed(problem: PlacementProblem, strategy: Parallelism, parts: tuple[frozenset[int], ...]) -> bool:
    """Whether the target runs stages of these layers, and chunks are nearly equally long."""
    if not problem.capabilities.allows_uneven_stages and not _has_even_stages(problem, parts):
        return False
    sizes = [len(part) for part in parts]
    is_uneven = max(sizes) > 1.5 * min(sizes) and sum(sizes) - len(sizes) > 2
    return strategy.chunks == 1 or (max(sizes) - min(sizes) <= 1 and not is_uneven)


def _device_bytes(chunks: tuple[PlainStage, ...], flight: list[int]) -> float:
    """What a device needs for its chunks: all that they hold and stash, and the largest scratch."""
    held = sum(
        sum(chunk.held_bytes.values()) + count * chunk.stash_bytes for chunk, count in zip(chunks, flight, strict=True)
    )
    return held + max(chunk.scratch_bytes for chunk in chunks)
