"""Objectives that choose how many devices a plan takes: the least cost, the least energy, the fewest devices.

1. *How many.* All slicings are looked at as in the search for the fastest plan, with every strategy on as many devices
   as it takes (`ValuedSearch`). `valued_search.py` finds the least value, and proves on the layers' lower bounds what
   no plan on any number of devices falls below. Every stage takes tp devices.
2. *Which plan.* On as many devices as were found, the fastest plan is looked for and proven (`on_devices`): a plan of
   another objective is the plan of a cluster of that size. Where the first search came across one of lower value on
   as many devices, that one is taken.

`find_answer` is the door for all objectives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from phaze.errors import PlanError
from phaze.objective import ObjectiveKind
from phaze.place import (
    FoundPlan,
    Placement,
    PlacementProblem,
    PlacementResult,
    PlacementStatus,
    PreparedProblem,
    SearchEffort,
    find_placement,
)
from phaze.place.search.valued_search import PlanValue, ValuedAnswer, likely_strategies, search_by_value, unrefuted
from phaze.place.simulation.placement import assemble
from phaze.planner.candidate_slicings import CandidateSlicing, least_time_s
from phaze.planner.fixed_stages import price_fixed_stages
from phaze.planner.progress import TimeLimitError, Watch, nothing_found
from phaze.planner.strategy_search import (
    Answer,
    Candidate,
    Pruned,
    StrategySearch,
    choose,
    narrowed_problem,
    strategy_problem,
)
from phaze.planner.time_and_energy import EnergyFloor, static_power_w, step_energy
from phaze.profile.model_profiles import ModelProfiles, dominates
from phaze.question import Question
from phaze.tolerances import EQUAL_RESULTS

__all__ = ["answered_question", "find_answer", "on_any_devices", "on_devices", "plan_value", "price_given_stages"]

_EFFORT = SearchEffort(nodes=10_000, nodes_per_strategy=1_000, strategies=3_000)
"""The effort for one slicing: many numbers of devices are alike, and what is left open only lowers the bound."""

_LIKELY_EFFORT = SearchEffort(nodes=1_000, nodes_per_strategy=200)
"""The effort for the first strategies that are tried, whose values need only be good."""


def find_answer(question: Question, watch: Watch) -> Answer:
    """The best plan for what is made small, and the question that it answers as `Answer.question`.

    Raises PlanError if nothing was found before the time was over, if nothing is possible, or if no plan holds the
    step time that was asked for.
    """
    if not question.objective.chooses_devices:
        return choose(question, watch)
    search = ValuedSearch.of(on_any_devices(question), watch)
    try:
        search.look_at_all()
    except (TimeLimitError, KeyboardInterrupt) as error:
        if search.best_s == math.inf:
            raise nothing_found(watch, error) from error
        return _interrupted(question, search)
    offered = search.question.choices
    question = replace(question, offered=offered, choices=offered, grows=frozenset())
    if search.best_s == math.inf:
        return _nothing_fits(question, watch)
    answer = _fastest_on(question, search.best_placement.parallelism.device_count, watch, search)
    best = min(search.best_s, _value_of(answer))
    # What was ruled out before it was looked at has at least the value of the best plan by then, but for the gap.
    least = min(search.least, search.best_s * (1 - search.gap)) if search.pruned else search.least
    return replace(answer, bound_value=min(least, best))


def answered_question(question: Question, answer: Answer) -> Question:
    """The question that a plan is built for: on as many devices as it takes where the objective chooses them."""
    return answer.question if question.objective.chooses_devices else question


def on_devices(question: Question, count: int) -> Question:
    """The question of the fastest plan on exactly so many of the devices, every stage on tp of them."""
    runs = replace(question.target.capabilities, allows_mixed_tp=False, allows_idle_devices=False)
    return replace(
        question,
        cluster=replace(question.cluster, device_count=count),
        target=replace(question.target, capabilities=runs),
        most_devices=question.most_devices or question.cluster.device_count,
    )


def on_any_devices(question: Question) -> Question:
    """The question in which plans may leave devices to others."""
    runs = replace(question.target.capabilities, allows_mixed_tp=False, allows_idle_devices=True)
    return replace(question, target=replace(question.target, capabilities=runs))


def plan_value(question: Question, slices: ModelProfiles, problem: PlacementProblem) -> PlanValue:
    """What is made small, for the plans of one slicing."""
    objective = question.objective

    def allows(count: int) -> bool:
        return not problem.capabilities.needs_whole_nodes or on_devices(question, count).cluster.has_whole_nodes

    match objective.kind:
        case ObjectiveKind.DEVICES:
            most_s = math.inf if objective.step_time_s is None else objective.step_time_s
            return PlanValue(per_device=1.0, most_s=most_s, allows=allows)
        case ObjectiveKind.ENERGY:
            floor = EnergyFloor(question, slices, problem)
            return PlanValue(
                per_device_second=static_power_w(question),
                constant=floor.of_passes(),
                further=floor.of_strategy,
                allows=allows,
            )
        case _:
            return PlanValue(per_device_second=1.0, allows=allows)


@dataclass(slots=True, kw_only=True)
class ValuedSearch(StrategySearch):
    """The search over all slicings and numbers of devices; `least` is what no plan that was looked at falls below."""

    least: float = math.inf
    energies: dict[int, float] = field(default_factory=dict)

    def value(self, candidate: Candidate) -> float:
        """What is made small, of a candidate's best plan; infinite where it has none."""
        placement = candidate.result.best
        if placement is None:
            return math.inf
        return self._value_of(candidate.slices, candidate.problem, placement)

    def _value_of(self, slices: ModelProfiles, problem: PlacementProblem, placement: Placement) -> float:
        if self.question.objective.kind is not ObjectiveKind.ENERGY:
            value = plan_value(self.question, slices, problem)
            return value.of(placement.parallelism, placement.time_s)
        if id(placement) not in self.energies:
            self.energies[id(placement)] = _energy_j(self.question, slices, problem, placement)
        return self.energies[id(placement)]

    @property
    def best_candidate(self) -> Candidate:
        """The candidate with the best plan so far."""
        return min(self.candidates, key=self.value)

    @property
    def best_placement(self) -> Placement:
        """The best plan so far."""
        assert self.best_candidate.result.best is not None
        return self.best_candidate.result.best

    @property
    def gap(self) -> float:
        """How much better than the best plan another may be; devices are counted exactly."""
        return 0.0 if self.question.objective.kind is ObjectiveKind.DEVICES else self.question.gap / 2

    @property
    def target_s(self) -> float:
        """Seconds on all devices that a slicing must beat to be of use: every value grows with device-seconds."""
        question, value = self.question, self.best_s * (1 - self.gap)
        match question.objective.kind:
            case ObjectiveKind.COST:
                return value / question.cluster.device_count
            case ObjectiveKind.ENERGY:
                return value / question.cluster.device_count / static_power_w(question)
            case _:
                return math.inf

    def look_at(self, slicing: CandidateSlicing) -> None:
        """Schedule and search one slicing, unless it cannot be better than what is known."""
        best, quick = self.best_s, plan_value(self.question, slicing.slices, slicing.problem)
        self.watch.report(f"microbatch {slicing.micro_batch_size}, tp {slicing.tp}: bounding all numbers of devices")
        strategies, rows = slicing.strategies, None
        if best < math.inf:
            rows = unrefuted(slicing.bounded, strategies, quick, best * (1 - self.gap))
            self.least = min(self.least, best * (1 - self.gap))
            if not len(rows):
                self.pruned.append(Pruned(slicing, best))
                return
        slices = slicing.scheduled(self.options)
        is_energy = self.question.objective.kind is ObjectiveKind.ENERGY
        if not is_energy and any(dominates(other.slices, slices) for other in self._alike(slices)):
            return
        self.watch.report(f"microbatch {slicing.micro_batch_size}, tp {slicing.tp}: searching numbers of devices")
        problem = narrowed_problem(self.question, slices)
        prepared = PreparedProblem.of(problem, network=self.network)
        value, started = self._measuring(slices, prepared), ValuedAnswer(plan=None, value=best, bound=math.inf)
        if rows is None:
            likely = likely_strategies(slicing.bounded, strategies, quick)
            started = search_by_value(prepared, likely, value, gap=self.gap, effort=_LIKELY_EFFORT)
            rows = unrefuted(slicing.bounded, strategies, quick, started.value * (1 - self.gap))
            self.least = min(self.least, started.value * (1 - self.gap))
        found = search_by_value(prepared, rows, value, best_value=started.value, gap=self.gap, effort=_EFFORT)
        enough = found.value * (1 - self.gap)
        proof = search_by_value(prepared.with_bounds(), rows, quick, best_value=enough, effort=_EFFORT)
        self.least = min(self.least, proof.bound)
        plan = found.plan or started.plan
        placement = None if plan is None else assemble(prepared, plan.parallelism, plan.stages)
        self.candidates.append(Candidate(slices=slices, problem=problem, result=_result(placement)))
        if placement is not None:
            self.watch.best_step_time_s = placement.time_s

    def _alike(self, slices: ModelProfiles) -> list[Candidate]:
        """Candidates of the same microbatch size and degrees."""
        names = ("micro_batch_size", "tp", "cp", "ep")
        return [
            other
            for other in self.candidates
            if all(getattr(other.slices, name) == getattr(slices, name) for name in names)
        ]

    def _measuring(self, slices: ModelProfiles, prepared: PreparedProblem) -> PlanValue:
        """What is made small, with the values of plans that are found measured instead of bounded."""
        value = plan_value(self.question, slices, prepared.problem)
        if self.question.objective.kind is not ObjectiveKind.ENERGY:
            return value

        def measured(plan: FoundPlan) -> float:
            placement = assemble(prepared, plan.parallelism, plan.stages)
            return _energy_j(self.question, slices, prepared.problem, placement)

        return replace(value, measured=measured)


def _energy_j(question: Question, slices: ModelProfiles, problem: PlacementProblem, placement: Placement) -> float:
    """Joules of a step of a plan, on the devices that it takes."""
    used = on_devices(question, placement.parallelism.device_count)
    return step_energy(used, _answer_of(used, slices, problem, placement), 1.0)["total_j"]


def _result(placement: Placement | None) -> PlacementResult:
    """A placement as the result of a search that proved nothing of its time."""
    return PlacementResult(
        status=PlacementStatus.CUT_OFF if placement is None else PlacementStatus.WITHIN,
        best=placement,
        alternatives=(),
        bound_s=0.0,
        strategies=0,
        nodes=0,
        simulated=0,
    )


def _answer_of(question: Question, slices: ModelProfiles, problem: PlacementProblem, placement: Placement) -> Answer:
    """A placement as an answer on the devices of a question, of which nothing is proven."""
    problem = replace(problem, cluster=question.cluster)
    candidate = Candidate(slices=slices, problem=problem, result=_result(placement))
    bound_s = least_time_s(question)
    return Answer(question=question, placement=placement, candidate=candidate, candidates=(candidate,), bound_s=bound_s)


def _interrupted(question: Question, search: ValuedSearch) -> Answer:
    """The best plan of a search that was ended, of which only what follows from the question is claimed."""
    candidate, placement = search.best_candidate, search.best_placement
    used = on_devices(question, placement.parallelism.device_count)
    return replace(_answer_of(used, candidate.slices, candidate.problem, placement), is_interrupted=True)


def _nothing_fits(question: Question, watch: Watch) -> Answer:
    """Why nothing does what was asked: the plan that needs least memory, or an error that says how far steps get."""
    question = on_devices(question, question.cluster.device_count)
    answer = choose(question, watch)
    if not answer.is_feasible:
        return answer
    limit_s = question.objective.step_time_s
    if limit_s is None:
        return replace(answer, bound_value=0.0)
    raise PlanError(
        f"no plan was found on up to {question.cluster.device_count} devices whose step takes at most {limit_s:g} s; "
        f"the fastest on all of them takes {answer.placement.time_s:.4g} s. Allow a longer step_time, or offer more "
        "devices."
    )


def _fastest_on(question: Question, count: int, watch: Watch, search: ValuedSearch) -> Answer:
    """The best plan on exactly so many devices: the fastest one, or the one that was found for its value."""
    used = on_devices(question, count)
    try:
        answer = choose(used, watch)
    except PlanError:
        if watch.is_over:
            return _interrupted(question, search)
        raise
    if answer.placement.parallelism.device_count < count:  # a strategy that the user gave may do better with fewer
        return _fastest_on(question, answer.placement.parallelism.device_count, watch, search)
    found, placement = search.best_candidate, search.best_placement
    if answer.is_feasible and search.best_s >= _value_of(answer) * (1 - EQUAL_RESULTS):
        return answer
    problem = strategy_problem(used, found.slices, placement.parallelism)
    alone = find_placement(problem, top=1).best
    if alone is None or placement.parallelism.device_count != count:
        return answer
    settled = replace(_answer_of(answer.question, found.slices, problem, alone), bound_s=answer.bound_s)
    settled = replace(settled, candidates=(settled.candidate, *answer.candidates), pruned=answer.pruned)
    settled = replace(settled, refused=answer.refused, is_interrupted=answer.is_interrupted)
    return settled if not answer.is_feasible or _value_of(settled) < _value_of(answer) else answer


def _value_of(answer: Answer) -> float:
    """What is made small, of an answer's plan."""
    question, placement = answer.question, answer.placement
    if question.objective.kind is ObjectiveKind.ENERGY:
        return _energy_j(question, answer.candidate.slices, answer.candidate.problem, placement)
    value = plan_value(question, answer.candidate.slices, answer.candidate.problem)
    return value.of(placement.parallelism, placement.time_s)


def price_given_stages(question: Question, watch: Watch) -> Answer:
    """The price of a strategy whose stages are given, on as many devices as it takes if the objective counts them."""
    if not question.objective.chooses_devices:
        return price_fixed_stages(question, watch)
    everywhere = on_devices(question, question.cluster.device_count)
    count = price_fixed_stages(everywhere, watch).placement.parallelism.device_count
    return replace(price_fixed_stages(on_devices(question, count), watch), bound_value=None)
