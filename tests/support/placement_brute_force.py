"""All placements of a problem, tried one by one with the plain code of `phaze.verify.plain_placement`."""

import itertools
import math
from collections.abc import Iterator

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.model.placement_problem import PlacementProblem
from phaze.verify.plain_placement import PlainCosts, PlainStage, plain_in_flight, plain_simulation

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
                for others in stage_partitions(problem, parts - 1, placed):
                    yield (stage, *others)


def _is_even(problem: PlacementProblem, stages: tuple[frozenset[int], ...]) -> bool:
    kinds = [layer.key.split("#")[0] for layer in problem.graph.layers]
    body = max(dict.fromkeys(kinds), key=kinds.count)
    counts = [sum(kinds[layer] == body for layer in stage) for stage in stages]
    return len(set(counts)) == 1


def brute_force(problem: PlacementProblem) -> dict[tuple[object, ...], float]:
    """The least simulated time of every strategy with which something fits, by trying everything."""
    capabilities, cluster = problem.capabilities, problem.cluster
    best_s: dict[tuple[object, ...], float] = {}
    shapes: list[tuple[PipelineSchedule, int]] = [(PipelineSchedule.NONE, 1)]
    for kind in problem.choices.schedule:
        if kind in capabilities.schedules:
            shapes += [(kind, chunks) for chunks in (problem.choices.chunks if kind == "interleaved-1f1b" else (1,))]
    layers = len(problem.graph.layers)
    for tp, d, zero, (schedule, chunks) in itertools.product(
        problem.tp_degrees, range(1, min(cluster.device_count, problem.micro_batches) + 1), problem.choices.zero, shapes
    ):
        if zero not in capabilities.zero_stages or (problem.choices.dp and d not in problem.choices.dp):
            continue
        stages = [
            allowed
            for allowed in problem.choices.zero
            if schedule is PipelineSchedule.NONE or capabilities.supports(schedule, allowed)
        ]
        if d == 1 and zero > min(set(stages) & capabilities.zero_stages, default=zero):
            continue
        if problem.needs_even_micro_batches and problem.micro_batches % d:
            continue
        if schedule is not PipelineSchedule.NONE and not capabilities.supports(schedule, zero):
            continue
        micro_batches = -(-problem.micro_batches // d)
        for devices in [1] if schedule is PipelineSchedule.NONE else range(2, layers // chunks + 1):
            if problem.choices.pp and devices not in problem.choices.pp:
                continue
            if chunks > 1 and micro_batches % devices:
                continue
            best = _best_of(problem, tp, d, zero, schedule, chunks, devices, micro_batches)
            if best < math.inf:
                best_s[tp, d, devices, chunks, schedule, zero] = best
    return best_s


def _best_of(
    problem: PlacementProblem,
    tp: int,
    d: int,
    zero: int,
    schedule: PipelineSchedule,
    chunks: int,
    devices: int,
    micro_batches: int,
) -> float:
    capabilities, cluster, layers = problem.capabilities, problem.cluster, len(problem.graph.layers)
    name = str(schedule or "1f1b")
    mixed = capabilities.allows_mixed_tp and chunks == 1
    parallelism = Parallelism(dp=d, tp=tp, pp=devices, zero=zero, schedule=schedule, chunks=chunks)
    costs = PlainCosts(problem, parallelism, mixed)
    flight = [
        [plain_in_flight(name, devices, micro_batches, chunks, device, chunk) for chunk in range(chunks)]
        for device in range(devices)
    ]
    best = math.inf
    if not mixed and d * tp * devices > cluster.device_count:
        return best
    stage_costs: dict[tuple[frozenset[int], frozenset[int]], list[PlainStage]] = {}
    for parts in stage_partitions(problem, devices * chunks):
        if not capabilities.allows_uneven_stages and not _is_even(problem, parts):
            continue
        sizes = [len(part) for part in parts]
        is_uneven = max(sizes) > 1.5 * min(sizes) and layers - len(sizes) > 2
        if chunks > 1 and (max(sizes) - min(sizes) > 1 or is_uneven):
            continue
        before = [frozenset().union(*parts[:index]) for index in range(len(parts))]
        for key in zip(before, parts, strict=True):
            if key not in stage_costs:
                stage_costs[key] = [costs.stage(set(key[0]), set(key[1]), mode) for mode in problem.choices.recompute]
        options = [stage_costs[key] for key in zip(before, parts, strict=True)]
        needs = d * sum(
            max(options[index][0].devices for index in range(device, len(parts), devices)) for device in range(devices)
        )
        if needs > cluster.device_count or (needs < cluster.device_count and not capabilities.allows_idle_devices):
            continue
        for stages in itertools.product(*options):
            if all(
                sum(
                    sum(stages[chunk * devices + device].held_bytes.values())
                    + flight[device][chunk] * stages[chunk * devices + device].stash_bytes
                    for chunk in range(chunks)
                )
                + max(stages[chunk * devices + device].scratch_bytes for chunk in range(chunks))
                <= problem.usable_bytes
                for device in range(devices)
            ):
                best = min(best, plain_simulation(name, devices, micro_batches, list(stages)))
    return best
