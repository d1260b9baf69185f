"""All placements of a problem, tried one by one with the plain code of `phaze.verify`."""

import itertools
import math
from collections.abc import Iterator

from phaze.parallelism import Parallelism
from phaze.place.model.placement_problem import PlacementProblem
from phaze.verify.plain_pipeline import (
    PlainStage,
    are_offered_stages,
    device_bytes,
    is_offered_device_count,
    plain_in_flight,
    plain_simulation,
    plain_stages_of,
    plain_strategies,
)
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


def brute_force(problem: PlacementProblem, *, uses_bounds: bool = False) -> dict[Parallelism, float]:
    """The least simulated time of every strategy with which something fits, by trying everything.

    With `uses_bounds`, layers take what no schedule of theirs beats.
    """
    known_s: dict[tuple[object, ...], float] = {}
    times = {strategy: _least_time_s(problem, strategy, uses_bounds, known_s) for strategy in plain_strategies(problem)}
    return {strategy: time_s for strategy, time_s in times.items() if time_s < math.inf}


def _least_time_s(
    problem: PlacementProblem, strategy: Parallelism, uses_bounds: bool, known_s: dict[tuple[object, ...], float]
) -> float:
    """The least simulated time of all stages and recompute modes of one strategy; infinite if nothing fits."""
    pp, chunks = strategy.pp, strategy.chunks
    micro_batches = -(-problem.micro_batches // strategy.dp)
    name = str(strategy.schedule or "1f1b")
    allows_mixed_tp = problem.capabilities.allows_mixed_tp and chunks == 1
    costs = PlainCosts(problem, strategy, allows_mixed_tp, uses_bounds, known_s=known_s)
    flight = [
        [plain_in_flight(name, pp, micro_batches, chunks, device, chunk) for chunk in range(chunks)]
        for device in range(pp)
    ]
    on_devices = [plain_stages_of(name, pp, pp * chunks, device) for device in range(pp)]
    best = math.inf
    known: dict[tuple[frozenset[int], frozenset[int]], list[PlainStage]] = {}
    for parts in stage_partitions(problem, pp * chunks):
        if not are_offered_stages(problem, chunks, parts):
            continue
        keys = [(frozenset().union(*parts[:index]), part) for index, part in enumerate(parts)]
        for before, part in keys:
            if (before, part) not in known:
                known[before, part] = [costs.stage(set(before), set(part), mode) for mode in problem.choices.recompute]
        options = [known[key] for key in keys]
        if not is_offered_device_count(problem, strategy, [stages[0] for stages in options]):
            continue
        for stages in itertools.product(*options):
            held = [[stages[place] for place in places] for places in on_devices]
            if all(device_bytes(held[device], flight[device]) <= problem.usable_bytes for device in range(pp)):
                best = min(best, plain_simulation(name, pp, micro_batches, list(stages)))
    return best
