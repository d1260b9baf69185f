"""The search for the best strategy over all microbatch sizes and values of tp: slice, bound, schedule, place, keep.

Every pair of a microbatch size and a tp is a placement problem of its own (`_Search.look_at`). The best step time so
far is handed to the next pair. If the bound of the next pair's slices (`least_step_s`) does not beat that time, the
pair is pruned and nothing of it is scheduled. Otherwise placement looks only for plans that are faster. Schedules are
solved to the requested gap and placements to half of it; the gap that is reached in all is measured afterwards. At
the end `_Search.polish` searches every pair briefly for plans that are better by less than the gap.

When the time limit or the user ends the work, the pairs that were not looked at are bounded by `least_time_s`: the
matrix products of the whole step at peak speed on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from phaze.errors import PlanError, ShardError
from phaze.hardware import Cluster, cast_graph
from phaze.ir import Graph, Phase
from phaze.parallelism import Choices
from phaze.place import (
    Placement,
    PlacementProblem,
    PlacementResult,
    PlacementStatus,
    PreparedProblem,
    SearchEffort,
    find_placement,
)
from phaze.place.search.parallelism_search import search_parallelisms
from phaze.place.simulation.placement import assemble
from phaze.planner.progress import TimeLimitError, Watch
from phaze.profile.layer_passes import ProfileOptions
from phaze.profile.model_profiles import (
    ModelProfiles,
    least_step_s,
    profile_model,
    profile_options,
    profiled_modes,
    slice_model,
)
from phaze.question import Question

__all__ = [
    "Answer",
    "Candidate",
    "Pruned",
    "choose",
    "graph_at",
    "least_time_s",
    "narrowed_problem",
    "nearest_tp",
    "placement_problem",
    "step_flops",
]

_POLISH = SearchEffort(nodes=60, nodes_per_strategy=30, strategies=20)
"""The effort of the last short search: about a hundredth of the first one, enough to take what lies beside the best."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One microbatch size and tp that was placed: its slices, its placement problem and the result."""

    slices: ModelProfiles
    problem: PlacementProblem
    result: PlacementResult


@dataclass(frozen=True, slots=True)
class Pruned:
    """A microbatch size and tp that was left out, because none of its plans takes less than `least_s` seconds."""

    micro_batch_size: int
    tp: int
    least_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The best placement with its slices, everything else that was looked at, and a lower bound on every plan's time.

    Where nothing fits, `placement` is the one that needs least memory. `refused` says by tp why the model cannot be
    sliced so many ways.
    """

    placement: Placement
    candidate: Candidate
    candidates: tuple[Candidate, ...]
    pruned: tuple[Pruned, ...] = ()
    refused: dict[int, str] = field(default_factory=dict)
    bound_s: float
    is_interrupted: bool = False

    @property
    def is_feasible(self) -> bool:
        """Whether something fits."""
        return self.candidate.result.best is not None


@dataclass(slots=True, kw_only=True)
class _Search:
    """The state of one search: what was placed, pruned and refused so far."""

    question: Question
    watch: Watch
    options: ProfileOptions
    candidates: list[Candidate] = field(default_factory=list)
    pruned: list[Pruned] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)

    @property
    def best_s(self) -> float:
        """The least step time so far."""
        results = [candidate.result for candidate in self.candidates]
        return min((result.best.time_s for result in results if result.best), default=math.inf)

    @property
    def bound_s(self) -> float:
        """What no plan beats that was placed or pruned so far."""
        placed = [candidate.result.bound_s for candidate in self.candidates]
        return min([*placed, *(pruned.least_s for pruned in self.pruned)], default=math.inf)

    def look_at(self, graph: Graph, tp: int) -> None:
        """Slice, bound, schedule and place one microbatch size and tp."""
        question, size = self.question, graph.micro_batch_size
        self.watch.report(f"microbatch {size}: slicing layers {tp} ways")
        try:
            model = slice_model(question, graph, tp)
        except ShardError as error:
            self.refused[tp] = str(error)
            return
        best_s = self.best_s
        if best_s < math.inf:
            least_s = least_step_s(question, model, self.options)
            if least_s >= best_s * (1 - question.gap / 2):
                self.pruned.append(Pruned(size, tp, least_s))
                return
        self.watch.report(f"microbatch {size}: scheduling layers sliced {tp} ways")
        slices = profile_model(model, self.options)
        self.watch.report(f"microbatch {size}: placing layers sliced {tp} ways")
        problem = narrowed_problem(question, slices)
        result = find_placement(problem, top=1, cutoff_s=best_s, gap=question.gap / 2)
        self.candidates.append(Candidate(slices=slices, problem=problem, result=result))
        if result.best is not None:
            self.watch.best_step_time_s = result.best.time_s

    def polish(self) -> None:
        """Look once more for what is better by less than the gap."""
        for index, candidate in enumerate(self.candidates):
            best_s = self.best_s
            if best_s == math.inf or candidate.result.bound_s >= best_s:
                continue
            prepared = PreparedProblem.of(candidate.problem)
            better = search_parallelisms(prepared, effort=_POLISH, cutoff_s=best_s).plans
            if better:
                placement = assemble(prepared, better[0].parallelism, better[0].stages)
                result = replace(candidate.result, best=placement, status=PlacementStatus.WITHIN)
                self.candidates[index] = replace(candidate, result=result)
                self.watch.best_step_time_s = placement.time_s


def choose(question: Question, watch: Watch) -> Answer:
    """Look at every microbatch size and tp that may be chosen.

    Raises PlanError if nothing was found before the time was over, or if nothing is possible.
    """
    sizes, degrees = question.micro_batch_sizes, question.tp_degrees
    watch.best_step_time_s, watch.bound_s = None, least_time_s(question)
    watch.expect(len(sizes) * len(degrees))
    search = _Search(question=question, watch=watch, options=profile_options(question, profiled_modes(question)))
    is_interrupted = False
    try:
        for graph in (graph_at(question, size) for size in sizes):
            for tp in degrees:
                search.look_at(graph, tp)
                watch.step()
        watch.bound_s = search.bound_s
        watch.report("looking for what is a little better")
        search.polish()
    except (TimeLimitError, KeyboardInterrupt) as error:
        if search.best_s == math.inf:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise PlanError(
                f"nothing was found within {watch.time_limit_s} s; allow more time, or offer fewer values of "
                "micro_batch_size and tp."
            ) from error
        is_interrupted = True
    if not search.candidates:
        offer = nearest_tp(question, sizes[0], max(degrees))
        raise PlanError(f"the model cannot be sliced as asked. {' '.join(search.refused.values())}{offer}")
    answer = replace(_best(search.candidates), pruned=tuple(search.pruned), refused=search.refused)
    bounds = [answer.bound_s]
    if answer.is_feasible:
        bounds += [pruned.least_s for pruned in search.pruned]
    if is_interrupted:
        bounds.append(least_time_s(question))
    return replace(answer, bound_s=min(bounds), is_interrupted=is_interrupted)


def nearest_tp(question: Question, size: int, tp: int) -> str:
    """The largest smaller tp that slices the model and divides the devices, as an offer."""
    for smaller in range(tp - 1, 0, -1):
        if question.cluster.device_count % smaller:
            continue
        try:
            slice_model(question, graph_at(question, size), smaller)
        except ShardError:
            continue
        return f" The nearest tp that runs is {smaller}: tp={smaller}."
    return ""


def graph_at(question: Question, size: int) -> Graph:
    """The model at a microbatch size, in the types of the precision recipe."""
    return cast_graph(question.graph.with_micro_batch(size), question.recipe)


def placement_problem(question: Question, slices: ModelProfiles, cluster: Cluster | None = None) -> PlacementProblem:
    """The placement problem of some slices, on the question's cluster or another one."""
    return PlacementProblem(
        graph=slices.placement,
        profiles=slices.profiles,
        cluster=cluster or question.cluster,
        micro_batches=question.global_batch_size // slices.micro_batch_size,
        recipe=question.recipe,
        capabilities=question.capabilities,
        choices=Choices(recompute=slices.modes),
        memory_margin=question.calibration.margin,
        calibration=question.calibration,
    )


def narrowed_problem(question: Question, slices: ModelProfiles) -> PlacementProblem:
    """The placement problem of some slices within what the question allows.

    A strategy that fixes tp fixes it for every stage, and one that fixes dp, tp or pp may leave devices idle.
    """
    fixed, capabilities = question.fixed, question.capabilities
    if "tp" in fixed:
        capabilities = replace(capabilities, allows_mixed_tp=False)
    if fixed.keys() & {"dp", "tp", "pp"}:
        capabilities = replace(capabilities, allows_idle_devices=True)
    return replace(placement_problem(question, slices), choices=question.choices, capabilities=capabilities)


def _best(candidates: Sequence[Candidate]) -> Answer:
    """The fastest that fits; where nothing does, the one that needs least memory."""
    fitting = [candidate for candidate in candidates if candidate.result.best is not None]
    bound_s = min(candidate.result.bound_s for candidate in candidates)
    if fitting:
        best = min(fitting, key=lambda candidate: candidate.result.best.time_s)  # type: ignore[union-attr]
        assert best.result.best is not None
        placement = best.result.best
    else:
        best, placement = _least_memory(candidates)
        bound_s = placement.time_s
    return Answer(placement=placement, candidate=best, candidates=tuple(candidates), bound_s=bound_s)


def _least_memory(candidates: Sequence[Candidate]) -> tuple[Candidate, Placement]:
    """The candidate whose least-memory placement has the lowest peak, with that placement."""
    lean = []
    for candidate in candidates:
        reasons = candidate.result.infeasibility
        if reasons is not None and reasons.least is not None:
            lean.append((max(memory.total_bytes for memory in reasons.least.memory), candidate, reasons.least))
    if not lean:
        reasons = candidates[0].result.infeasibility
        raise PlanError(f"no plan is possible: {reasons or candidates[0].result.status}")
    _, best, placement = min(lean, key=lambda row: row[0])
    return best, placement


def step_flops(question: Question) -> float:
    """Matrix flops of one step: forward and backward of the whole batch, without anything recomputed."""
    graph = question.graph
    once = graph.matmul_flops(Phase.FORWARD) + graph.matmul_flops(Phase.BACKWARD)
    return once / graph.micro_batch_size * question.global_batch_size


def least_time_s(question: Question) -> float:
    """Seconds that no plan beats: the matrix products of a step at peak speed on all devices."""
    accelerator = question.cluster.accelerator
    return step_flops(question) / (
        accelerator.peak_flops_per_s(question.recipe.compute_dtype) * question.cluster.device_count
    )
