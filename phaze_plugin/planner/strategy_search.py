"""The search for the best strategy over microbatch sizes, tp, cp, ep and slicings: slice, bound, schedule, place.

Every slicing of a microbatch size, tp, cp and ep is a placement problem of its own (`candidate_slicings.py`). All are
sliced, and looked at in the order of an estimate (`StrategySearch.look_at`). The best step time so far is handed to the
next one: where closed-form bounds prove that it is not beaten by more than the gap, the slicing is pruned and nothing
of it is searched. Otherwise its layers are scheduled, and placement looks only for plans that are faster. Schedules and
placements are each solved to half of the requested gap; the gap that is reached in all is measured afterwards. At the
end `StrategySearch.polish` searches what was placed briefly for plans that are better by less than the gap, and
`StrategySearch.settle` gives the best strategy the stages that it gets when it is evaluated alone.

When the time limit or the user ends the work, what was not looked at is bounded by `least_time_s`: the matrix products
of the whole step at peak speed on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from phaze.errors import PlanError, ShardError
from phaze.hardware import Cluster, cast_graph
from phaze.ir import Graph, RecomputeMode
from phaze.offered_choices import DEFAULT_EP, DEFAULT_MICRO_BATCH_SIZES, DEFAULT_TP, MOST_FIRST_CP
from phaze.parallelism import Choices, Parallelism, PipelineSchedule
from phaze.place import (
    BoundedStrategies,
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
from phaze.planner.candidate_slicings import (
    CandidateSlicing,
    degrees_in_words,
    has_fewer_sequences,
    least_time_s,
    most_promising,
    next_cp,
    next_ep,
    next_size,
    next_tp,
    offering,
    slicing_in_words,
)
from phaze.planner.progress import TimeLimitError, Watch, nothing_found
from phaze.profile.layer_passes import ProfileOptions
from phaze.profile.local_graphs import LocalGraphs
from phaze.profile.model_profiles import (
    ModelProfiles,
    dominates,
    profile_options,
    profiled_modes,
    sequence_parallel_of,
    slicings,
)
from phaze.question import Question
from phaze.shard import ShardingTables

__all__ = [
    "Answer",
    "Candidate",
    "Pruned",
    "StrategySearch",
    "choose",
    "graph_at",
    "narrowed_problem",
    "nearest_tp",
    "placement_problem",
    "strategy_problem",
]

_POLISH = SearchEffort(nodes=60, nodes_per_strategy=30, strategies=20)
"""The effort of the last short search: about a hundredth of the first one, enough to take what lies beside the best."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One microbatch size and tp that was placed: its slices, its problem, the result, and bounds from before."""

    slices: ModelProfiles
    problem: PlacementProblem
    result: PlacementResult
    known: BoundedStrategies | None = None


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

    Where nothing fits, `placement` is the one that needs least memory. `refused` says by degrees why the model cannot
    be sliced so many ways. `question` names all microbatch sizes and degrees that were looked at. `bound_value` is the
    bound under another objective than throughput, over all numbers of devices (`device_counts.py`).
    """

    question: Question
    placement: Placement
    candidate: Candidate
    candidates: tuple[Candidate, ...]
    pruned: tuple[Pruned, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    bound_s: float
    bound_value: float | None = None
    is_interrupted: bool = False

    @property
    def is_feasible(self) -> bool:
        """Whether something fits."""
        return self.candidate.result.best is not None


@dataclass(slots=True, kw_only=True)
class StrategySearch:
    """The state of one search: what was placed, pruned and refused so far, and prices that serve all slicings."""

    question: Question
    watch: Watch
    options: ProfileOptions
    network: Network
    graphs: LocalGraphs
    tables: ShardingTables = field(default_factory=ShardingTables)
    candidates: list[Candidate] = field(default_factory=list)
    pruned: list[Pruned] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    cp_degrees: list[int] = field(default_factory=lambda: [1])
    ep_degrees: list[int] = field(default_factory=lambda: [1])

    @classmethod
    def of(cls, question: Question, watch: Watch) -> Self:
        """A search in which nothing was looked at yet."""
        return cls(
            question=question,
            watch=watch,
            options=profile_options(question, profiled_modes(question)),
            network=Network(question.cluster, question.calibration),
            graphs=LocalGraphs(question),
        )

    def value(self, candidate: Candidate) -> float:
        """What is made small: the step time of a candidate's best plan; infinite where it has none."""
        return math.inf if candidate.result.best is None else candidate.result.best.time_s

    @property
    def best_s(self) -> float:
        """The least value so far."""
        return min(map(self.value, self.candidates), default=math.inf)

    @property
    def bound_s(self) -> float:
        """What no plan beats that was placed or pruned so far."""
        placed = [candidate.result.bound_s for candidate in self.candidates]
        return min([*placed, *(pruned.least_s for pruned in self.pruned)], default=math.inf)

    def look_at_all(self) -> None:
        """Look at every microbatch size and degree that is offered, and beyond while the largest one is the best.

        Default values come first, then further sizes and then further degrees, one by one whether they are offered or
        grown, so that a question that names all of them is answered in the same order.
        """
        question = self.question
        sizes, further_sizes = _divided(question.micro_batch_sizes, max(DEFAULT_MICRO_BATCH_SIZES))
        degrees, _ = _divided(question.tp_degrees, max(DEFAULT_TP))
        self.cp_degrees, _ = _divided(question.cp_degrees, MOST_FIRST_CP)
        self.ep_degrees, _ = _divided(question.ep_degrees, max(DEFAULT_EP))
        self._look_at_each(sizes, degrees)
        for further_size in further_sizes:
            self._look_at_each((further_size,), degrees)
        while (size := next_size(self.question)) and self._has_best(micro_batch_size=size // 2):
            self.question = offering(self.question, "micro_batch_size", size)
            self._look_at_each((size,), degrees)
        for tp in self._further("tp", max(DEFAULT_TP), next_tp):
            self._look_at_each(self.question.micro_batch_sizes, (tp,))
        for ep in self._further("ep", max(DEFAULT_EP), next_ep):
            self._look_at_each(self.question.micro_batch_sizes, self.question.tp_degrees, ep=ep)
            self.ep_degrees.append(ep)
        for cp in self._further("cp", MOST_FIRST_CP, next_cp):
            self._look_at_each(self.question.micro_batch_sizes, self.question.tp_degrees, cp=cp)
            self.cp_degrees.append(cp)

    def _further(self, name: str, most: int, grown: Callable[[Question], int | None]) -> Iterator[int]:
        """Degrees of one axis beyond the first ones: those that are offered, then twice the largest while it is best.

        Where nothing fits yet, experts and sequences are divided further, too. Sequences are first divided where the
        best plan recomputes: what they keep is then what time is lost for.
        """
        yield from [degree for degree in getattr(self.question, f"{name}_degrees") if degree > most]
        while (degree := grown(self.question)) and self._is_promising(name, degree):
            self.question = offering(self.question, name, degree)
            yield degree

    def _is_promising(self, name: str, degree: int) -> bool:
        """Whether a further degree of an axis is worth slicing for."""
        if self.best_s == math.inf:
            return name != "tp"
        if name == "tp" or degree > 2:
            return self._has_best(**{name: degree // 2})
        return name == "cp" and self._best_recomputes()

    def _best_recomputes(self) -> bool:
        """Whether the best plan so far recomputes something."""
        best = min(self.candidates, key=self.value).result.best
        return best is not None and any(stage.recompute is not RecomputeMode.NONE for stage in best.stages)

    def _has_best(self, **wanted: int) -> bool:
        """Whether the best plan so far has a microbatch size or tp."""
        if self.best_s == math.inf:
            return False
        slices = min(self.candidates, key=self.value).slices
        return all(getattr(slices, name) == value for name, value in wanted.items())

    def _look_at_each(
        self, sizes: Sequence[int], degrees: Sequence[int], cp: int | None = None, ep: int | None = None
    ) -> None:
        """Slice with all of some sizes and degrees, and look at the slicings in the order of their estimates.

        What more copies in place of cp do with fewer sequences in a microbatch (`has_fewer_sequences`) is left out.
        """
        listed = [
            (size, tp, each_cp, each_ep)
            for each_ep in (self.ep_degrees if ep is None else [ep])
            for each_cp in (self.cp_degrees if cp is None else [cp])
            for size in sizes
            for tp in degrees
            if not has_fewer_sequences(self.question, size, each_cp)
        ]
        self.watch.expect(len(listed))
        waiting: list[CandidateSlicing] = []
        for size, tp, each_cp, each_ep in listed:
            waiting += self._sliced(size, tp, each_cp, each_ep)
            self.watch.step()
        self.watch.expect(len(waiting))
        for slicing, is_ruled_out in most_promising(waiting, lambda: self.target_s):
            if is_ruled_out:
                self.pruned.append(Pruned(slicing, slicing.least_s))
            else:
                self.look_at(slicing)
            self.watch.step()

    def _sliced(self, size: int, tp: int, cp: int, ep: int) -> list[CandidateSlicing]:
        """Every slicing of one microbatch size, tp, cp and ep."""
        self.watch.report(f"microbatch {size}: slicing layers {slicing_in_words(tp, cp, ep)}")
        if tp * max(cp, ep) > self.question.cluster.device_count:
            return []
        try:
            graph = self.graphs.at(size, tp=tp, cp=cp, ep=ep)
            models = slicings(self.question, graph, tp, self.tables, cp=cp, ep=ep)
        except ShardError as error:
            self.refused[degrees_in_words(tp, cp, ep)] = str(error)
            return []
        shared = (self.options, self.question.global_batch_size // size, self.network)
        problem_of, kept = partial(narrowed_problem, self.question), self.question.choices.offload
        return [CandidateSlicing(model, *shared, problem_of, each) for model in models for each in kept]

    @property
    def gap(self) -> float:
        """The gap to which strategies are placed: half of that of the answer, and none where there is but one."""
        return 0.0 if _is_one_strategy(self.question) else self.question.gap / 2

    @property
    def target_s(self) -> float:
        """The step time that a plan must beat to be of use."""
        return self.best_s * (1 - self.gap)

    def look_at(self, slicing: CandidateSlicing) -> None:
        """Schedule and place one slicing, unless it cannot be better than what is known."""
        question, size, best_s = self.question, slicing.micro_batch_size, self.best_s
        target_s, ways, known = self.target_s, slicing_in_words(slicing.tp, slicing.cp, slicing.ep), None
        if best_s < math.inf:
            self.watch.report(f"microbatch {size}: bounding layers sliced {ways}")
            known = slicing.bounded_below(target_s)
            if not len(known.promising):
                self.pruned.append(Pruned(slicing, target_s))
                return
        self.watch.report(f"microbatch {size}: scheduling layers sliced {ways}")
        slices = slicing.scheduled(self.options)
        others = [other.slices for other in self.candidates if _degrees(other.slices) == _degrees(slices)]
        if any(dominates(other, slices) for other in others):
            return
        self.watch.report(f"microbatch {size}: placing layers sliced {ways}")
        is_same = slices is slicing.slices
        problem = slicing.problem if is_same else narrowed_problem(question, slices)
        result = find_placement(problem, top=1, cutoff_s=best_s, gap=self.gap, network=self.network, known=known)
        self.candidates.append(Candidate(slices=slices, problem=problem, result=result, known=known))
        if result.best is not None:
            self.watch.best_step_time_s = result.best.time_s

    def polish(self) -> None:
        """Look once more for what is better by less than the gap, among strategies that were not ruled out before."""
        for index, candidate in enumerate(self.candidates):
            best_s, known = self.best_s, candidate.known
            if best_s == math.inf or candidate.result.bound_s >= best_s:
                continue
            prepared = PreparedProblem.of(candidate.problem, network=self.network)
            strategies = None if known is None else known.promising
            better = search_parallelisms(prepared, effort=_POLISH, cutoff_s=best_s, strategies=strategies).plans
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
            index = min(range(len(self.candidates)), key=lambda place: self.value(self.candidates[place]))
            if index in settled:
                return
            settled.add(index)
            candidate = self.candidates[index]
            assert candidate.result.best is not None
            problem = strategy_problem(self.question, candidate.slices, candidate.result.best.parallelism)
            alone = find_placement(problem, top=1, network=self.network).best
            if alone is not None:
                self._replace_best(index, alone)

    def _replace_best(self, index: int, placement: Placement) -> None:
        candidate = self.candidates[index]
        result = replace(candidate.result, best=placement, status=PlacementStatus.WITHIN)
        self.candidates[index] = replace(candidate, result=result)
        self.watch.best_step_time_s = placement.time_s


def _degrees(slices: ModelProfiles) -> tuple[int | str, ...]:
    return slices.micro_batch_size, slices.tp, slices.cp, slices.ep, slices.offload


def choose(question: Question, watch: Watch) -> Answer:
    """Look at every microbatch size and degree that may be chosen.

    Raises PlanError if nothing was found before the time was over, or if nothing is possible.
    """
    watch.best_step_time_s, watch.bound_s = None, least_time_s(question)
    search = StrategySearch.of(question, watch)
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
        reasons = " ".join(dict.fromkeys(search.refused.values()))
        raise PlanError(f"the model cannot be sliced as asked. {reasons}{offer}")
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


def nearest_tp(question: Question, size: int, tp: int) -> str:
    """The largest smaller tp that slices the model and divides the devices, as an offer, where cp and ep are 1."""
    for smaller in range(tp - 1, 0, -1) if question.cp_degrees == question.ep_degrees == (1,) else ():
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
    # Modes that the target runs, and those that are asked for.
    modes = {*question.capabilities.recompute_modes, *question.choices.recompute}
    return PlacementProblem(
        graph=slices.placement,
        profiles=slices.profiles,
        cluster=cluster or question.cluster,
        micro_batches=question.global_batch_size // slices.micro_batch_size,
        cp=slices.cp,
        ep=slices.ep,
        recipe=question.recipe,
        capabilities=question.capabilities.at_degrees(tp=slices.tp, cp=slices.cp, ep=slices.ep),
        offload=slices.offload,
        choices=Choices(recompute=tuple(mode for mode in slices.modes if mode in modes)),
        memory_margin=question.calibration.margin,
        calibration=question.calibration,
    )


def narrowed_problem(question: Question, slices: ModelProfiles) -> PlacementProblem:
    """The placement problem of some slices within what the question allows.

    A strategy that fixes tp fixes it for every stage, and one that fixes dp, cp, tp or pp may leave devices idle.
    """
    problem, fixed = placement_problem(question, slices), question.fixed
    runs = problem.capabilities
    idles = runs.allows_idle_devices or bool(fixed.keys() & {"dp", "cp", "tp", "pp"})
    runs = replace(runs, allows_idle_devices=idles, allows_mixed_tp=runs.allows_mixed_tp and "tp" not in fixed)
    return replace(problem, choices=question.choices, capabilities=runs)


def strategy_problem(question: Question, slices: ModelProfiles, parallelism: Parallelism) -> PlacementProblem:
    """The placement problem of one strategy: exactly the one that is solved where the strategy is evaluated."""
    names = ("dp", "cp", "ep", "tp", "pp", "schedule", "chunks", "zero", "shard", "offload")
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
    needed |= {name for name in ("cp", "ep") if getattr(question, f"{name}_degrees") != (1,)}
    needed |= {"offload"} if len(question.choices.offload) > 1 else set()
    needed |= set() if question.fixed.get("zero") == 0 or not question.capabilities.allows_shard_groups else {"shard"}
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
