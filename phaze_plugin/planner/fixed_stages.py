"""The price of a strategy whose stages the user gave: what it leaves open is filled in every way, the fastest wins.

Where recompute is open, all stages have the same mode. The bound is that of the quickest of these ways, with the lower
bounds of the layers' schedules for their times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

from phaze.errors import PlacementError, PlanError, ShardError
from phaze.ir import Graph, RecomputeMode
from phaze.json_documents import to_document
from phaze.parallelism import ALL_DEVICES, Parallelism, PipelineSchedule
from phaze.place import (
    Placement,
    PlacementProblem,
    PlacementResult,
    PlacementStatus,
    PreparedProblem,
    evaluate_placement,
)
from phaze.place.memory.remedies import explain_infeasibility
from phaze.place.model.zero_sharding import listed_shards
from phaze.plan.plan import Plan
from phaze.planner.candidate_slicings import least_time_s
from phaze.planner.progress import TimeLimitError, Watch, nothing_found
from phaze.planner.strategy_search import (
    Answer,
    Candidate,
    nearest_tp,
    placement_problem,
)
from phaze.profile.local_graphs import LocalGraphs
from phaze.profile.model_profiles import ModelProfiles, profile_model, profile_options, profiled_modes, slicings
from phaze.question import Question

__all__ = ["price_fixed_stages", "strategy_with_stages"]


def strategy_with_stages(plan: Plan) -> dict[str, object]:
    """The plan's strategy with how many layers each stage has, in the form that `phaze.evaluate` takes."""
    return {**to_document(plan.strategy), "stages": [len(stage.layers) for stage in plan.stages]}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PricedStages:
    """One way to fill in the strategy: its placement, whether it exceeds memory, and the bound under its time."""

    is_over: bool
    placement: Placement
    bound_s: float
    slices: ModelProfiles
    prepared: PreparedProblem


def price_fixed_stages(question: Question, watch: Watch) -> Answer:
    """The fastest strategy with these stages that fits; where none does, the fastest as if memory were no limit.

    Raises PlanError if nothing was priced before the time was over, or if nothing is possible.
    """
    pricing = _Pricing(question, watch)
    is_interrupted = False
    try:
        pricing.price_all()
    except (TimeLimitError, KeyboardInterrupt) as error:
        if not pricing.priced:
            raise nothing_found(watch, error) from error
        is_interrupted = True
    priced = pricing.priced
    if not priced:
        raise PlanError(pricing.why_nothing())
    best = min(priced, key=lambda way: (way.is_over, way.placement.time_s))
    bounds = [best.placement.time_s, *(way.bound_s for way in priced if way.is_over == best.is_over)]
    if is_interrupted:
        bounds.append(least_time_s(question))
    result = PlacementResult(
        status=PlacementStatus.INFEASIBLE if best.is_over else PlacementStatus.WITHIN,
        best=None if best.is_over else best.placement,
        alternatives=(),
        bound_s=min(bounds),
        explain=partial(explain_infeasibility, best.prepared) if best.is_over else None,
        strategies=len(priced),
        nodes=0,
        simulated=len(priced),
    )
    candidate = Candidate(slices=best.slices, problem=best.prepared.problem, result=result)
    return Answer(
        question=question,
        placement=best.placement,
        candidate=candidate,
        candidates=(candidate,),
        refused=pricing.refused,
        bound_s=min(bounds),
        is_interrupted=is_interrupted,
    )


@dataclass(slots=True, eq=False)
class _Pricing:
    """What was priced so far, and why the rest was not."""

    question: Question
    watch: Watch
    priced: list[_PricedStages] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unrunnable: str = ""

    def price_all(self) -> None:
        """Price every microbatch size, degree and slicing that the question offers."""
        question, graphs = self.question, LocalGraphs(self.question)
        listed = list(
            product(question.micro_batch_sizes, question.tp_degrees, question.cp_degrees, question.ep_degrees)
        )
        self.watch.expect(len(listed))
        for size, tp, cp, ep in listed:
            self.watch.report(f"microbatch {size}: pricing stages sliced {tp} ways")
            try:
                self._check_devices(tp, max(cp, ep))
                models = slicings(question, graphs.at(size, tp=tp, cp=cp, ep=ep), tp, cp=cp, ep=ep)
            except ShardError as error:
                self.refused[f"tp {tp}, cp {cp}, ep {ep}"] = str(error)
                models = ()
            for model in models:
                options = profile_options(self.question, profiled_modes(self.question))
                try:
                    for kept in question.choices.offload:
                        slices = replace(profile_model(model, options), offload=kept)
                        self.priced += _priced_ways(self.question, slices)
                except PlacementError as error:  # none of the ways to fill it in runs
                    self.unrunnable = str(error)
            self.watch.step()

    def _check_devices(self, tp: int, others: int) -> None:
        if tp * others > self.question.cluster.device_count:
            raise ShardError(f"tp {tp} and {others} devices beside it are more than the cluster has.")

    def why_nothing(self) -> str:
        """Why no strategy has these stages."""
        degrees, size = self.question.tp_degrees, self.question.micro_batch_sizes[0]
        is_sliced = len(self.refused) < len(degrees) * len(self.question.cp_degrees) * len(self.question.ep_degrees)
        refused = {} if is_sliced else self.refused
        return self.unrunnable or _nothing(self.question, size, max(degrees), refused)


def _priced_ways(question: Question, slices: ModelProfiles) -> list[_PricedStages]:
    """Every way to fill in the strategy on some slices; raises PlacementError where none of them runs."""
    problem, cut = placement_problem(question, slices), _cut(slices.graph, question)
    prepared = PreparedProblem.of(problem)
    with_bounds = prepared.with_bounds()
    priced: list[_PricedStages] = []
    refusal: PlacementError | None = None
    for parallelism, modes in _filled(question, problem, slices.tp):
        stages = [(layers, modes[index % len(modes)]) for index, layers in enumerate(cut)]
        try:
            placement = evaluate_placement(prepared, parallelism, stages)
            bound_s = evaluate_placement(with_bounds, parallelism, stages).time_s
        except PlacementError as error:
            refusal = error
            continue
        priced.append(
            _PricedStages(
                is_over=any(memory.total_bytes > problem.usable_bytes for memory in placement.memory),
                placement=placement,
                bound_s=bound_s,
                slices=slices,
                prepared=prepared,
            )
        )
    if refusal is not None and not priced:
        raise refusal
    return priced


def _cut(graph: Graph, question: Question) -> list[tuple[int, ...]]:
    """The layers of each stage, in order."""
    counts, layers = question.choices.stages or (), len(graph.layers)
    if sum(counts) != layers:
        raise PlanError(f"strategy has stages of {sum(counts)} layers; the model has {layers}.")
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    return [tuple(range(first, first + count)) for first, count in zip(firsts, counts, strict=True)]


def _filled(
    question: Question, problem: PlacementProblem, tp: int
) -> Iterator[tuple[Parallelism, tuple[RecomputeMode, ...]]]:
    """Every strategy that the target runs and that keeps what is given, with its recompute modes."""
    fixed, count = question.fixed, len(question.choices.stages or ())
    given_modes = fixed.get("recompute")
    modes = [(mode,) for mode in problem.choices.recompute] if given_modes is None else [given_modes]
    for chunks in (number for number in range(1, count + 1) if count % number == 0):
        pp = count // chunks
        if fixed.get("pp", pp) != pp or fixed.get("chunks", chunks) != chunks:
            continue
        most = problem.cluster.device_count // (pp * tp * problem.cp)
        copies = [dp for dp in range(1, most + 1) if problem.micro_batches % dp == 0]
        if question.choices.dp is not None:
            copies = [dp for dp in question.choices.dp if dp <= most]
        if problem.capabilities.needs_single_micro_batch:
            copies = [dp for dp in copies if dp == problem.micro_batches]
        for dp in copies:
            for schedule, zero in _schedules_and_zero(question, problem, pp, chunks, dp):
                for shard, recompute in product(_shards(question, problem, tp, dp, zero), modes):
                    assert isinstance(recompute, tuple)
                    parallelism = Parallelism(
                        dp=dp,
                        cp=problem.cp,
                        ep=problem.ep,
                        tp=tp,
                        pp=pp,
                        chunks=chunks,
                        schedule=schedule,
                        zero=zero,
                        shard=shard,
                        offload=problem.offload,
                    )
                    yield parallelism, recompute


def _shards(question: Question, problem: PlacementProblem, tp: int, dp: int, zero: int) -> list[int | str]:
    """Groups that ZeRO may shard over, as a search would offer them for one tp and dp."""
    replicas = dp * problem.cp
    sizes = listed_shards(problem.choosing(shard=question.choices.shard), tp, dp, 2, replicas, zero) if zero else []
    return [size if size < replicas else ALL_DEVICES for size in sizes] or ([ALL_DEVICES] if not zero else [])


def _schedules_and_zero(
    question: Question, problem: PlacementProblem, pp: int, chunks: int, dp: int
) -> Iterator[tuple[PipelineSchedule, int]]:
    """Schedules and ZeRO stages to try with so many devices, chunks and pipelines."""
    fixed, capabilities = question.fixed, problem.capabilities
    schedules = [PipelineSchedule.NONE] if pp == 1 else sorted(capabilities.schedules)
    zeros = sorted(capabilities.zero_stages) if dp * problem.cp > 1 else [0]
    if "schedule" in fixed:
        schedules = [PipelineSchedule(str(fixed["schedule"]))]
    if "zero" in fixed:
        zeros = [int(str(fixed["zero"]))]
    for schedule, zero in product(schedules, zeros):
        is_single = schedule is PipelineSchedule.NONE
        if is_single != (pp == 1) or schedule.has_chunks != (chunks > 1) or (schedule.is_v_shaped and chunks != 2):
            continue
        is_given = fixed.keys() & {"zero", "schedule"} or is_single
        is_run = capabilities.supports(schedule, zero)
        is_run &= capabilities.fills_stages(schedule, problem.micro_batches // dp, pp * chunks)
        if is_given or is_run:
            yield schedule, zero


def _nothing(question: Question, size: int, tp: int, refused: dict[str, str]) -> str:
    """Why there is no strategy with these stages."""
    if refused:
        return f"the model cannot be sliced as asked. {' '.join(refused.values())}{nearest_tp(question, size, tp)}"
    return (
        f"no strategy has {len(question.choices.stages or ())} stages as asked on {question.cluster.device_count} "
        f"devices under target {question.target}; leave out stages, or what is fixed beside them."
    )
