"""The search for the best strategy over all microbatch sizes, values of tp and slicings: slice, bound, schedule, place.

Every slicing of a microbatch size and a tp is a placement problem of its own (`candidate_slicings.py`). All are sliced,
and looked at in the order of an estimate (`_Search.look_at`). The best step time so far is handed to the next one:
where closed-form bounds prove that it is not beaten by more than the gap, the slicing is pruned and nothing of it is
searched. Otherwise its layers are scheduled, and placement looks only for plans that are faster. Schedules are solved
to the requested gap and placements to half of it; the gap that is reached in all is measured afterwards. At the end
`_Search.polish` searches what was placed briefly for plans that are better by less than the gap, and `_Search.settle`
gives the best strategy the stages that it gets when it is evaluated alone, so that both say the same of it.

When the time limit or the user ends the work, what was not looked at is bounded by `least_time_s`: the matrix products
of the whole step at peak speed on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from phaze.errors import PlanError, ShardError
from phaze.hardware import Cluster, cast_graph
from phaze.ir import Graph, Phase
from phaze.parallelism import Choices, Parallelism, PipelineSchedule
from phaze.place import (
    Placement,
    PlacementProblem,
    PlacementResult,
    PlacementStatus,
    PreparedProblem,
    SearchEffort,
    find_placement,
)
from phaze.place.model.network_prices import Network
from phaze.place.search.parallelism_search import search_parallelisms
from phaze.place.simulation.placement import assemble
from phaze.planner.candidate_slicings import CandidateSlicing, quick_profiles
from phaze.planner.offer_growth import next_size, next_tp, offering
from phaze.planner.progress import TimeLimitError, Watch
from phaze.profile.layer_passes import ProfileOptions
from phaze.profile.model_profiles import (
    ModelProfiles,
    dominates,
    profile_options,
    profiled_modes,
    sequence_parallel_of,
    slicings,
)
from phaze.question import DEFAULT_MICRO_BATCH_SIZES, DEFAULT_TP, Question
from phaze.shard import ShardingTables

__all__ = [
    "Answer",
    "Candidate",
    "Pruned",
    "choose",
    "graph_at",
    "least_time_s",
    "narrowed_problem",
    "nearest_tp",
    "nothing_found",
    "placement_problem",
    "step_flops",
    "strategy_problem",
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
    """A slicing that was left out, because none of its plans takes less than `least_s` seconds."""

    slicing: CandidateSlicing
    least_s: float

    def candidate(self, question: Question) -> Candidate:
        """The slicing as a candidate, scheduled and ready to be searched for plans that are slower than the best."""
        slices = self.slicing.scheduled(profile_options(question, profiled_modes(question)))
        result = PlacementResult(
            status=PlacementStatus.CUT_OFF,
            best=None,
            alternatives=(),
            bound_s=self.least_s,
            strategies=0,
            nodes=0,
            simulated=0,
        )
        return Candidate(slices=slices, problem=narrowed_problem(question, slices), result=result)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The best placement with its slices, everything else that was looked at, and a lower bound on every plan's time.

    Where nothing fits, `placement` is the one that needs least memory. `refused` says by tp why the model cannot be
    sliced so many ways. `question` names all microbatch sizes and tp that were looked at.
    """

    question: Question
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
    """The state of one search: what was placed, pruned and refused so far, and prices that serve all slicings."""

    question: Question
    watch: Watch
    options: ProfileOptions
    network: Network
    tables: ShardingTables = field(default_factory=ShardingTables)
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

    def look_at_all(self) -> None:
        """Look at every microbatch size and tp that is offered, and beyond while the largest one is the best.

        Default values come first, then further sizes and then further values of tp, one by one whether they are offered
        or grown, so that a question that names all of them is answered in the same order.
        """
        sizes, further_sizes = _divided(self.question.micro_batch_sizes, max(DEFAULT_MICRO_BATCH_SIZES))
        degrees, further_degrees = _divided(self.question.tp_degrees, max(DEFAULT_TP))
        self._look_at_each(sizes, degrees)
        for further_size in further_sizes:
            self._look_at_each((further_size,), degrees)
        while (size := next_size(self.question)) and self._has_best(micro_batch_size=size // 2):
            self.question = offering(self.question, micro_batch_size=size)
            self._look_at_each((size,), degrees)
        for tp in further_degrees:
            self._look_at_each(self.question.micro_batch_sizes, (tp,))
        while (wider := next_tp(self.question)) and self._has_best(tp=wider // 2):
            self.question = offering(self.question, tp=wider)
            self._look_at_each(self.question.micro_batch_sizes, (wider,))

    def _has_best(self, **wanted: int) -> bool:
        """Whether the best plan so far has a microbatch size or tp."""
        if self.best_s == math.inf:
            return False
        slices = self.candidates[min(range(len(self.candidates)), key=self._found_s)].slices
        return all(getattr(slices, name) == value for name, value in wanted.items())

    def _look_at_each(self, sizes: Sequence[int], degrees: Sequence[int]) -> None:
        """Slice all pairs of a microbatch size and a tp, and look at the slicings in the order of their estimates."""
        self.watch.expect(len(sizes) * len(degrees))
        waiting: list[CandidateSlicing] = []
        for graph in (graph_at(self.question, size) for size in sizes):
            for tp in degrees:
                waiting += self._sliced(graph, tp)
                self.watch.step()
        self.watch.expect(len(waiting))
        for slicing in sorted(waiting, key=lambda slicing: slicing.estimate_s):
            self.look_at(slicing)
            self.watch.step()

    def _sliced(self, graph: Graph, tp: int) -> list[CandidateSlicing]:
        """Every slicing of one microbatch size and tp."""
        self.watch.report(f"microbatch {graph.micro_batch_size}: slicing layers {tp} ways")
        try:
            models = slicings(self.question, graph, tp, self.tables)
        except ShardError as error:
            self.refused[tp] = str(error)
            return []
        profiles = [quick_profiles(model, self.options) for model in models]
        return [
            CandidateSlicing.of(slices, narrowed_problem(self.question, slices), self.network) for slices in profiles
        ]

    def look_at(self, slicing: CandidateSlicing) -> None:
        """Schedule and place one slicing, unless it cannot be better than what is known."""
        question, size, tp, best_s = self.question, slicing.micro_batch_size, slicing.tp, self.best_s
        if best_s < math.inf:
            self.watch.report(f"microbatch {size}: bounding layers sliced {tp} ways")
            target_s = best_s * (1 - question.gap / 2)
            if slicing.is_beaten_by(target_s):
                self.pruned.append(Pruned(slicing, target_s))
                return
        self.watch.report(f"microbatch {size}: scheduling layers sliced {tp} ways")
        slices = slicing.scheduled(self.options)
        others = [
            other.slices for other in self.candidates if (other.slices.micro_batch_size, other.slices.tp) == (size, tp)
        ]
        if any(dominates(other, slices) for other in others):
            return
        self.watch.report(f"microbatch {size}: placing layers sliced {tp} ways")
        problem = narrowed_problem(question, slices)
        gap = 0.0 if _is_one_strategy(question) else question.gap / 2
        result = find_placement(problem, top=1, cutoff_s=best_s, gap=gap, network=self.network)
        self.candidates.append(Candidate(slices=slices, problem=problem, result=result))
        if result.best is not None:
            self.watch.best_step_time_s = result.best.time_s

    def polish(self) -> None:
        """Look once more for what is better by less than the gap."""
        for index, candidate in enumerate(self.candidates):
            best_s = self.best_s
            if best_s == math.inf or candidate.result.bound_s >= best_s:
                continue
            prepared = PreparedProblem.of(candidate.problem, network=self.network)
            better = search_parallelisms(prepared, effort=_POLISH, cutoff_s=best_s).plans
            if better:
                placement = assemble(prepared, better[0].parallelism, better[0].stages)
                self._replace_best(index, placement)

    def settle(self) -> None:
        """Give the best strategy the stages that it gets when it is evaluated: those that its own search finds.

        What was found for a strategy while many were compared may depend on the others. A strategy whose own search
        does worse than that gives way to the next best one.
        """
        settled: set[int] = set()
        while self.best_s < math.inf and not _is_one_strategy(self.question):
            self.watch.report("settling the best strategy")
            index = min(range(len(self.candidates)), key=self._found_s)
            if index in settled:
                return
            settled.add(index)
            candidate = self.candidates[index]
            assert candidate.result.best is not None
            problem = strategy_problem(self.question, candidate.slices, candidate.result.best.parallelism)
            alone = find_placement(problem, top=1, network=self.network).best
            if alone is not None:
                self._replace_best(index, alone)

    def _found_s(self, index: int) -> float:
        best = self.candidates[index].result.best
        return math.inf if best is None else best.time_s

    def _replace_best(self, index: int, placement: Placement) -> None:
        candidate = self.candidates[index]
        result = replace(candidate.result, best=placement, status=PlacementStatus.WITHIN)
        self.candidates[index] = replace(candidate, result=result)
        self.watch.best_step_time_s = placement.time_s


def choose(question: Question, watch: Watch) -> Answer:
    """Look at every microbatch size and tp that may be chosen.

    Raises PlanError if nothing was found before the time was over, or if nothing is possible.
    """
    watch.best_step_time_s, watch.bound_s = None, least_time_s(question)
    search = _Search(
        question=question,
        watch=watch,
        options=profile_options(question, profiled_modes(question)),
        network=Network(question.cluster, question.calibration),
    )
    is_interrupted = False
    try:
        search.look_at_all()
        watch.bound_s = search.bound_s
        watch.report("looking for what is a little better")
        search.polish()
        search.settle()
    except (TimeLimitError, KeyboardInterrupt) as error:
        if search.best_s == math.inf:
            raise nothing_found(watch, error) from error
        is_interrupted = True
    question = search.question
    if not search.candidates:
        offer = nearest_tp(question, question.micro_batch_sizes[0], max(question.tp_degrees))
        raise PlanError(f"the model cannot be sliced as asked. {' '.join(search.refused.values())}{offer}")
    answer = replace(_best(search.candidates, question), pruned=tuple(search.pruned), refused=search.refused)
    bounds = [answer.bound_s]
    if answer.is_feasible:
        bounds += [pruned.least_s for pruned in search.pruned]
    if is_interrupted:
        bounds.append(least_time_s(question))
    return replace(answer, bound_s=min(bounds), is_interrupted=is_interrupted)


def _divided(values: Sequence[int], most: int) -> tuple[list[int], list[int]]:
    """Values up to a number, and those beyond."""
    return [value for value in values if value <= most], [value for value in values if value > most]


def nothing_found(watch: Watch, error: BaseException) -> BaseException:
    """What to raise where the time limit or the user ended a search that had found nothing yet."""
    if isinstance(error, KeyboardInterrupt):
        return error
    return PlanError(
        f"nothing was found within {watch.time_limit_s} s; allow more time, or offer fewer values of micro_batch_size "
        "and tp."
    )


def nearest_tp(question: Question, size: int, tp: int) -> str:
    """The largest smaller tp that slices the model and divides the devices, as an offer."""
    for smaller in range(tp - 1, 0, -1):
        if question.cluster.device_count % smaller:
            continue
        try:
            slicings(question, graph_at(question, size), smaller)
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
        capabilities=question.capabilities.with_tp(slices.tp),
        choices=Choices(recompute=slices.modes),
        memory_margin=question.calibration.margin,
        calibration=question.calibration,
    )


def narrowed_problem(question: Question, slices: ModelProfiles) -> PlacementProblem:
    """The placement problem of some slices within what the question allows.

    A strategy that fixes tp fixes it for every stage, and one that fixes dp, tp or pp may leave devices idle.
    """
    fixed, capabilities = question.fixed, question.capabilities.with_tp(slices.tp)
    if "tp" in fixed:
        capabilities = replace(capabilities, allows_mixed_tp=False)
    if fixed.keys() & {"dp", "tp", "pp"}:
        capabilities = replace(capabilities, allows_idle_devices=True)
    return replace(placement_problem(question, slices), choices=question.choices, capabilities=capabilities)


def strategy_problem(question: Question, slices: ModelProfiles, parallelism: Parallelism) -> PlacementProblem:
    """The placement problem of one strategy: exactly the one that is solved where the strategy is evaluated."""
    names = ("dp", "tp", "pp", "schedule", "chunks", "zero")
    fixed = {
        **question.fixed,
        **{name: getattr(parallelism, name) for name in names},
        "micro_batch_size": slices.micro_batch_size,
        "sequence_parallel": sequence_parallel_of(slices.sharded),
    }
    return narrowed_problem(question.with_fixed(fixed), slices)


def _is_one_strategy(question: Question) -> bool:
    """Whether the question leaves nothing open but stages and what is recomputed."""
    needed = {"dp", "tp", "pp", "zero", "micro_batch_size", "sequence_parallel", "schedule"}
    needed |= {"chunks"} if question.fixed.get("schedule") is PipelineSchedule.INTERLEAVED else set()
    return needed <= question.fixed.keys()


def _best(candidates: Sequence[Candidate], question: Question) -> Answer:
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
    return Answer(question=question, placement=placement, candidate=best, candidates=tuple(candidates), bound_s=bound_s)


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
