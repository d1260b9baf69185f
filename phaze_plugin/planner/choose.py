"""The best strategy over all microbatch sizes: slice, place, keep the best, and a bound under all of them.

Every microbatch size has its own placement problem. The best time so far is handed to the next one, which then only
looks for better; what it leaves unlooked is bounded from below by that time. When the clock or the user ends the work,
sizes that were not looked at are bounded by the least that any plan takes: the matrix products at peak on all devices.
Schedules and placements get half of the requested gap each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phaze.errors import PlanError
from phaze.hardware import Cluster
from phaze.ir import Graph, Phase, RecomputeMode
from phaze.place import (
    Ground,
    Placement,
    PlacementProblem,
    PlacementResult,
    PlacementStatus,
    evaluate_placement,
    find_placement,
)
from phaze.place.levers import explain_infeasibility
from phaze.planner.limits import Limits, degrees_of
from phaze.planner.profiles import ProfileOptions
from phaze.planner.request import Request
from phaze.planner.slices import Slices, slice_model
from phaze.planner.watch import TimeLimitError, Watch

__all__ = ["Answer", "Candidate", "choose", "least_time_s", "placement_problem", "priced", "step_flops"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One microbatch size: its slices, its placement problem and what was found."""

    slices: Slices
    problem: PlacementProblem
    result: PlacementResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The best placement, where it was found, all sizes that were looked at, and a bound under every plan.

    `placement` is the least-memory one where nothing fits.
    """

    placement: Placement
    candidate: Candidate
    candidates: tuple[Candidate, ...]
    bound_s: float
    is_interrupted: bool = False

    @property
    def is_feasible(self) -> bool:
        """Whether something fits."""
        return self.candidate.result.best is not None


def choose(request: Request, limits: Limits, watch: Watch) -> Answer:
    """Look at every microbatch size within the limits.

    Raises PlanError if nothing was found before the time was over.
    """
    sizes = [size for size in request.micro_batch_sizes if limits.micro_batch_size in (None, size)]
    watch.expect(len(sizes))
    watch.best_step_time_s = None
    options = ProfileOptions(gap=request.gap / 2, prices=request.prices)
    candidates: list[Candidate] = []
    is_interrupted = False
    for size in sizes:
        try:
            candidates.append(_candidate(request, limits, size, watch, options, candidates))
        except (TimeLimitError, KeyboardInterrupt) as error:
            if not any(one.result.best for one in candidates):
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise PlanError(
                    f"nothing was found within {watch.time_limit_s} s; allow more time, or fewer microbatch sizes and "
                    "tensor widths."
                ) from error
            is_interrupted = True
            break
        watch.step()
    answer = _best(candidates)
    if is_interrupted:
        answer = replace(answer, bound_s=min(answer.bound_s, least_time_s(request)), is_interrupted=True)
    return answer


def _candidate(
    request: Request,
    limits: Limits,
    size: int,
    watch: Watch,
    options: ProfileOptions,
    before: Sequence[Candidate],
) -> Candidate:
    widths = request.tensor_widths if limits.tp is None else (limits.tp,)
    slices = slice_model(request, size, watch, widths=widths, sequence_parallel=limits.sequence, options=options)
    if not slices.sharded:
        raise PlanError(f"the model cannot be sliced as asked. {' '.join(slices.refused.values())}")
    problem = limits.narrow(placement_problem(request, slices))
    watch.report(f"microbatch {size}: placing layers on {request.cluster.device_count} devices")
    smaller = [(one.slices.micro_batch_size, one.problem) for one in before if not one.result.best]
    best_s = watch.best_step_time_s
    result = find_placement(
        problem,
        top=1,
        smaller_micro_batches=smaller,
        cutoff_s=math.inf if best_s is None else best_s,
        gap=request.gap / 2,
    )
    if result.best is not None:
        watch.best_step_time_s = result.best.time_s
    return Candidate(slices=slices, problem=problem, result=result)


def placement_problem(request: Request, slices: Slices, cluster: Cluster | None = None) -> PlacementProblem:
    """The placement problem of one microbatch size, on the request's cluster or another one."""
    return PlacementProblem(
        graph=slices.placement,
        profiles=slices.profiles,
        cluster=cluster or request.cluster,
        micro_batches=request.global_batch_size // slices.micro_batch_size,
        recipe=request.recipe,
        capabilities=request.capabilities,
        calibration=request.calibration,
    )


def _best(candidates: Sequence[Candidate]) -> Answer:
    """The fastest that fits; where nothing does, the one that needs least memory."""
    fitting = [one for one in candidates if one.result.best is not None]
    bound_s = min(one.result.bound_s for one in candidates)
    if fitting:
        best = min(fitting, key=lambda one: one.result.best.time_s)  # type: ignore[union-attr]
        assert best.result.best is not None
        placement = best.result.best
    else:
        best, placement = _least_memory(candidates)
        bound_s = placement.time_s
    return Answer(placement=placement, candidate=best, candidates=tuple(candidates), bound_s=bound_s)


def _least_memory(candidates: Sequence[Candidate]) -> tuple[Candidate, Placement]:
    found = []
    for one in candidates:
        reasons = one.result.infeasibility
        if reasons is not None and reasons.least is not None:
            found.append((max(memory.total_bytes for memory in reasons.least.memory), one, reasons.least))
    if not found:
        reasons = candidates[0].result.infeasibility
        raise PlanError(f"no plan is possible: {reasons or candidates[0].result.status}")
    _, best, placement = min(found, key=lambda row: row[0])
    return best, placement


def priced(request: Request, limits: Limits, watch: Watch) -> Answer:
    """Exactly the strategy of limits that leave nothing open, whether it fits or not."""
    assert limits.micro_batch_size is not None
    assert limits.tp is not None
    watch.expect(1)
    slices = slice_model(
        request, limits.micro_batch_size, watch, widths=(limits.tp,), sequence_parallel=limits.sequence
    )
    if not slices.sharded:
        raise PlanError(f"the model cannot be sliced as asked. {' '.join(slices.refused.values())}")
    problem = placement_problem(request, slices)
    ground = Ground.of(problem)
    placement = evaluate_placement(ground, degrees_of(limits), _cut(slices.graph, limits))
    watch.step()
    is_fitting = all(memory.total_bytes <= problem.usable_bytes for memory in placement.memory)
    result = PlacementResult(
        status=PlacementStatus.WITHIN if is_fitting else PlacementStatus.INFEASIBLE,
        best=placement if is_fitting else None,
        alternatives=(),
        bound_s=placement.time_s,
        infeasibility=None if is_fitting else explain_infeasibility(ground),
        choices=1,
        nodes=0,
        simulated=1,
    )
    candidate = Candidate(slices=slices, problem=problem, result=result)
    return Answer(placement=placement, candidate=candidate, candidates=(candidate,), bound_s=placement.time_s)


def _cut(graph: Graph, limits: Limits) -> list[tuple[tuple[int, ...], RecomputeMode]]:
    """Stages of so many layers each, in order."""
    assert limits.stages is not None
    layers = len(graph.layers)
    if sum(limits.stages) != layers:
        raise PlanError(f"strategy has stages of {sum(limits.stages)} layers; the model has {layers}.")
    modes = limits.recompute or (RecomputeMode.NONE,)
    cut, first = [], 0
    for index, count in enumerate(limits.stages):
        mode = modes[index] if len(modes) > 1 else modes[0]
        cut.append((tuple(range(first, first + count)), mode))
        first += count
    return cut


def step_flops(request: Request) -> float:
    """Matrix flops of one step: forward and backward of the whole batch, nothing recomputed."""
    graph = request.graph
    once = graph.matmul_flops(Phase.FORWARD) + graph.matmul_flops(Phase.BACKWARD)
    return once / graph.micro_batch_size * request.global_batch_size


def least_time_s(request: Request) -> float:
    """What no plan beats: the matrix products at peak on all devices."""
    accelerator = request.cluster.accelerator
    return step_flops(request) / (
        accelerator.peak_flops_per_s(request.recipe.compute_dtype) * request.cluster.device_count
    )
