"""A strategy whose stages are given: every way to fill in what it leaves open is priced, and the fastest is taken.

Where recompute is open, all stages have the same mode. The bound is that of the quickest of these ways, with the lower
bounds of the layers' schedules for their times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from phaze.capabilities import PipelineSchedule
from phaze.errors import PlacementError, PlanError, ShardError
from phaze.ir import Graph
from phaze.parallelism import NO_SCHEDULE, Limits, degrees_of
from phaze.place import Ground, Placement, PlacementProblem, PlacementResult, PlacementStatus, evaluate_placement
from phaze.place.memory.remedies import explain_infeasibility
from phaze.planner.progress import Watch
from phaze.planner.strategy_search import Answer, Candidate, graph_at, nearest_width, placement_problem
from phaze.profile.model_profiles import Slices, profile_options, schedule_slices, slice_model
from phaze.question import Request

__all__ = ["priced"]


def priced(request: Request, limits: Limits, watch: Watch) -> Answer:
    """The fastest strategy with these stages that fits; where none does, the fastest as if memory were no limit."""
    sizes = limits.sizes(request.micro_batch_sizes, request.global_batch_size)
    widths = request.tensor_widths if limits.tp is None else (limits.tp,)
    watch.expect(len(sizes) * len(widths))
    found: list[tuple[bool, float, float, Placement, Slices, Ground]] = []
    refused: dict[int, str] = {}
    unrunnable = ""
    for size, width in product(sizes, widths):
        watch.report(f"microbatch {size}: pricing stages sliced {width} ways")
        try:
            model = slice_model(request, graph_at(request, size), width, limits.sequence)
        except ShardError as error:
            refused[width] = str(error)
            continue
        slices = schedule_slices(model, profile_options(request, limits.modes))
        problem, cut = placement_problem(request, slices), _cut(slices.graph, limits)
        ground = Ground.of(problem)
        least = ground.with_bounds()
        for filled in _filled(limits, problem, width):
            modes = filled.recompute or ()
            stages = [(layers, modes[index % len(modes)]) for index, layers in enumerate(cut)]
            try:
                placement = evaluate_placement(ground, degrees_of(filled), stages)
                bound_s = evaluate_placement(least, degrees_of(filled), stages).time_s
            except PlacementError as error:  # one of the ways to fill it in does not run
                unrunnable = str(error)
                continue
            is_over = any(memory.total_bytes > problem.usable_bytes for memory in placement.memory)
            found.append((is_over, placement.time_s, bound_s, placement, slices, ground))
        watch.step()
    if not found:
        is_sliced = len(refused) < len(widths)
        raise PlanError(unrunnable or _nothing(request, limits, sizes[0], max(widths), {} if is_sliced else refused))
    is_over, time_s, _, placement, slices, ground = min(found, key=lambda row: row[:2])
    bound_s = min(time_s, *(row[2] for row in found if row[0] == is_over))
    result = PlacementResult(
        status=PlacementStatus.INFEASIBLE if is_over else PlacementStatus.WITHIN,
        best=None if is_over else placement,
        alternatives=(),
        bound_s=bound_s,
        infeasibility=explain_infeasibility(ground) if is_over else None,
        choices=len(found),
        nodes=0,
        simulated=len(found),
    )
    candidate = Candidate(slices=slices, problem=ground.problem, result=result)
    return Answer(placement=placement, candidate=candidate, candidates=(candidate,), refused=refused, bound_s=bound_s)


def _cut(graph: Graph, limits: Limits) -> list[tuple[int, ...]]:
    """Stages of so many layers each, in order."""
    assert limits.stages is not None
    layers = len(graph.layers)
    if sum(limits.stages) != layers:
        raise PlanError(f"strategy has stages of {sum(limits.stages)} layers; the model has {layers}.")
    firsts = [sum(limits.stages[:index]) for index in range(len(limits.stages))]
    return [tuple(range(first, first + count)) for first, count in zip(firsts, limits.stages, strict=True)]


def _filled(limits: Limits, problem: PlacementProblem, width: int) -> Iterator[Limits]:
    """The limits with every choice of what they leave open that the target runs; what is given is kept."""
    count = len(limits.stages or ())
    modes = [(mode,) for mode in problem.recompute_modes] if limits.recompute is None else [limits.recompute]
    for chunks in (number for number in range(1, count + 1) if count % number == 0):
        pp = count // chunks
        if limits.pp not in (None, pp) or limits.chunks not in (None, chunks):
            continue
        most = problem.cluster.device_count // (pp * width)
        copies = [dp for dp in range(1, most + 1) if problem.micro_batches % dp == 0]
        for dp in copies if limits.dp is None else [limits.dp] if limits.dp <= most else []:
            for schedule, zero in _orders(limits, problem, pp, chunks, dp):
                for recompute in modes:
                    yield replace(
                        limits,
                        dp=dp,
                        tp=width,
                        pp=pp,
                        chunks=chunks,
                        schedule=schedule,
                        zero=zero,
                        recompute=recompute,
                    )


def _orders(limits: Limits, problem: PlacementProblem, pp: int, chunks: int, dp: int) -> Iterator[tuple[str, int]]:
    """Schedules and ZeRO stages."""
    capabilities = problem.capabilities
    kinds: list[str] = [NO_SCHEDULE] if pp == 1 else sorted(capabilities.schedules)
    zeros = sorted(capabilities.zero_stages) if dp > 1 else [0]
    kinds = kinds if limits.schedule is None else [limits.schedule]
    zeros = zeros if limits.zero is None else [limits.zero]
    for kind, zero in product(kinds, zeros):
        if (kind == NO_SCHEDULE) != (pp == 1) or (kind == PipelineSchedule.INTERLEAVED) != (chunks > 1):
            continue
        is_given = limits.zero is not None or limits.schedule is not None or kind == NO_SCHEDULE
        if is_given or capabilities.supports(PipelineSchedule(kind), zero):
            yield kind, zero


def _nothing(request: Request, limits: Limits, size: int, width: int, refused: dict[int, str]) -> str:
    if refused:
        offer = nearest_width(request, size, width, limits.sequence)
        return f"the model cannot be sliced as asked. {' '.join(refused.values())}{offer}"
    return (
        f"no strategy has {len(limits.stages or ())} stages as asked on {request.cluster.device_count} devices under "
        f"target {request.target}; leave out stages, or what is fixed beside them."
    )
