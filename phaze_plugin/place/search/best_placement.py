"""The best placement of a problem: the fastest plan, the runners-up, a proven bound, or reasons why nothing fits.

`find_placement` is the front door. It searches the strategies on the profiles' values, then once more on their lower
bounds for what the answer proves (`_proven_bound_s`). `bound_placement` and `is_beaten` ask only for bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property, partial

from phaze.parallelism import Parallelism
from phaze.place.memory.remedies import Infeasibility, explain_infeasibility
from phaze.place.model.network_prices import Network
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.search.parallelism_search import (
    SearchAnswer,
    SearchEffort,
    is_refuted,
    search_parallelisms,
    try_parallelism,
)
from phaze.place.search.parallelism_table import ParallelismTable
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.stage_search import FoundPlan, PlanKind, best_by_kind
from phaze.place.simulation.placement import Placement, TimeParts, assemble
from phaze.tolerances import EQUAL_RESULTS

__all__ = [
    "Alternative",
    "BoundedStrategies",
    "PlacementResult",
    "PlacementStatus",
    "bound_placement",
    "find_placement",
    "is_beaten",
]

_QUICK_PROOF = {"nodes": 100, "nodes_per_strategy": 50}
"""The nodes of a proof that is tried before a search: bounds alone prove most cutoffs; where they do not, branch and
bound would improve plans that the search looks for anyway."""


class PlacementStatus(StrEnum):
    """What is known about the answer."""

    OPTIMAL = "optimal"
    WITHIN = "within the gap of an optimum"
    INFEASIBLE = "nothing fits"
    CUT_OFF = "nothing is faster than the cutoff"
    UNKNOWN = "nothing was found in the effort allowed"


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best plan of another strategy, and what it loses against the best."""

    placement: Placement
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundedStrategies:
    """What is known of a problem's strategies before it is searched.

    Attributes:
        prepared: the problem with its profiles' lower bounds, or with lower ones for the same layers.
        strategies: all strategies, with bounds that hold on these profiles.
        target_s: bounds that are below are those of single strategies, which could not be ruled out.
    """

    prepared: PreparedProblem
    strategies: ParallelismTable
    target_s: float

    @property
    def promising(self) -> ParallelismTable:
        """The strategies that may beat the target."""
        return self.strategies.take(self.strategies.bound_s < self.target_s)


@dataclass(frozen=True, kw_only=True)
class PlacementResult:
    """The answer.

    Attributes:
        status: whether the best plan is proven.
        best: the fastest plan found.
        alternatives: the next fastest strategies.
        bound_s: no plan for these slices is faster: the same search on the profiles' lower bounds. At most the cutoff.
        strategies: strategies whose stages were looked at.
        nodes: partial pipelines that were extended.
        simulated: pipelines that were simulated.
        best_by_kind: the fastest plan of each kind that the search came across, which proves nothing of it; `assemble`
            makes its placement.
        search: the search behind it, with every strategy that it came across; None where nothing was searched.
        explain: finds out why nothing fits, where nothing does.
    """

    status: PlacementStatus
    best: Placement | None
    alternatives: tuple[Alternative, ...]
    bound_s: float
    strategies: int
    nodes: int
    simulated: int
    best_by_kind: Mapping[PlanKind, FoundPlan] = field(default_factory=dict)
    search: SearchAnswer | None = None
    explain: Callable[[], Infeasibility] | None = None

    @cached_property
    def infeasibility(self) -> Infeasibility | None:
        """Why nothing fits: found when it is asked for first, which takes longer than the search itself."""
        return None if self.explain is None else self.explain()

    @property
    def gap(self) -> float:
        """How much faster an optimum could be, as a part of the best time; 0 if it is proven."""
        if self.best is None or self.status is PlacementStatus.OPTIMAL:
            return 0.0
        return 1 - self.bound_s / self.best.time_s


def find_placement(
    problem: PlacementProblem,
    *,
    top: int = 3,
    effort: SearchEffort | None = None,
    smaller_micro_batches: Sequence[tuple[int, PlacementProblem]] = (),
    cutoff_s: float = math.inf,
    gap: float = 0.0,
    network: Network | None = None,
    likely: Parallelism | None = None,
    known: BoundedStrategies | None = None,
) -> PlacementResult:
    """The fastest placement, the ``top`` strategies, and a bound.

    Args:
        problem: what to place; its choices may be as narrow as one strategy.
        top: how many strategies to return.
        effort: deterministic limits of the search.
        smaller_micro_batches: the same problem with smaller microbatches, to be tried as remedies.
        cutoff_s: only faster plans are of interest; where there is none, the search ends as soon as that is proven.
        gap: how much faster than the best plan returned another may be, as a part of its time. The search is quicker
            for it, the bound tells what it left open, and alternatives are the best that it came across.
        network: prices that serve again, as `PreparedProblem.of` takes them.
        likely: a strategy that may well be the best one. If it is, up to the gap, the search is over at once, without
            alternatives; if not, it changes nothing.
        known: bounds under the problem's strategies that were found before.

    Raises:
        ValueError: ``top`` is below 1, the cutoff is not above 0, or the gap is not from 0 to below 1.
        PlacementError: the layer graph branches too much.
    """
    _check_arguments(top, cutoff_s, gap)
    views = _Views.of(problem, network, known)
    prepared = views.values
    answer = None if likely is None else _answer_if_best(views, likely, effort, cutoff_s, gap)
    answer = answer or _answer_if_cut_off(views, effort, cutoff_s, gap)
    if answer is not None:
        bound_s = answer.bound_s
    else:
        answer = search_parallelisms(
            prepared, top=top, effort=effort, cutoff_s=cutoff_s, gap=gap, strategies=views.strategies
        )
        bound_s = _proven_bound_s(views, answer, effort, cutoff_s, gap)
    placements = [assemble(prepared, plan.parallelism, plan.stages) for plan in answer.plans]
    best = placements[0] if placements else None
    is_explained = best is None and math.isinf(cutoff_s)
    return PlacementResult(
        status=_status(best, bound_s, cutoff_s, is_searched=answer.bound_s >= cutoff_s * (1 - gap)),
        best=best,
        alternatives=tuple(Alternative(slower, _reason(placements[0], slower)) for slower in placements[1:]),
        best_by_kind=answer.best_by_kind,
        bound_s=bound_s,
        explain=partial(explain_infeasibility, prepared, smaller_micro_batches) if is_explained else None,
        strategies=answer.strategies,
        nodes=answer.nodes,
        simulated=answer.simulated,
        search=answer,
    )


def _check_arguments(top: int, cutoff_s: float, gap: float) -> None:
    if top < 1:
        raise ValueError(f"top is {top}; expected at least 1.")
    if not cutoff_s > 0:
        raise ValueError(f"cutoff_s is {cutoff_s}; expected seconds above 0.")
    if not 0 <= gap < 1:
        raise ValueError(f"gap is {gap}; expected a part from 0 to below 1.")


def _status(best: Placement | None, bound_s: float, cutoff_s: float, *, is_searched: bool) -> PlacementStatus:
    """What is known: how well the best plan is proven, or whether everything below the cutoff was searched in vain."""
    if best is not None:
        return PlacementStatus.OPTIMAL if bound_s >= best.time_s * (1 - EQUAL_RESULTS) else PlacementStatus.WITHIN
    if not is_searched:
        return PlacementStatus.UNKNOWN
    return PlacementStatus.INFEASIBLE if math.isinf(cutoff_s) else PlacementStatus.CUT_OFF


@dataclass(frozen=True, kw_only=True, eq=False)
class _Views:
    """A problem with its profiles' values and, once it is asked for, with their lower bounds.

    ``strategies`` are all of the problem's, with bounds that hold in both views, where they are known.
    """

    values: PreparedProblem
    known: BoundedStrategies | None

    @classmethod
    def of(cls, problem: PlacementProblem, network: Network | None, known: BoundedStrategies | None) -> _Views:
        if known is not None and known.prepared.problem is problem:
            return cls(values=known.prepared.with_values(), known=known)
        return cls(values=PreparedProblem.of(problem, network=network), known=known)

    @property
    def strategies(self) -> ParallelismTable | None:
        return None if self.known is None else self.known.strategies

    @cached_property
    def has_loose_profiles(self) -> bool:
        """Whether some second of some profile is not its own bound."""
        names, problem = ("forward_s", "backward_input_s", "backward_weight_s", "recompute_s"), self.values.problem
        return any(
            getattr(profile, name).bound[problem.accelerator] < getattr(profile, name).value[problem.accelerator]
            for profile in problem.profiles.values()
            for name in names
        )

    @cached_property
    def bounds(self) -> PreparedProblem:
        """The problem with its profiles' lower bounds."""
        if not self.has_loose_profiles:
            return self.values
        if self.known is not None and self.known.prepared.problem is self.values.problem:
            return self.known.prepared
        return self.values.with_bounds()

    def proof(self, effort: SearchEffort | None, enough_s: float) -> SearchAnswer:
        """The search on lower bounds, which proves that no plan takes less than something up to ``enough_s``."""
        return search_parallelisms(
            self.bounds, effort=effort, cutoff_s=enough_s, proves=True, strategies=self.strategies
        )


def _proven_bound_s(
    views: _Views, answer: SearchAnswer, effort: SearchEffort | None, cutoff_s: float, gap: float
) -> float:
    """What holds by the profiles' lower bounds: no plan takes less, even if every layer runs as fast as it may."""
    if not views.has_loose_profiles or not (answer.plans or cutoff_s < math.inf):
        return answer.bound_s
    enough_s = min([cutoff_s, *(plan.time_s for plan in answer.plans)]) * (1 - gap)
    return min(answer.bound_s, views.proof(effort, enough_s).bound_s)


def _answer_if_best(
    views: _Views, parallelism: Parallelism, effort: SearchEffort | None, cutoff_s: float, gap: float
) -> SearchAnswer | None:
    """The best plan of one strategy below the cutoff; None where another may be faster by more than the gap."""
    plan = try_parallelism(views.values, parallelism, cutoff_s=cutoff_s, gap=gap)
    best_s = cutoff_s if plan is None else plan.time_s
    if math.isinf(best_s):
        return None
    proof = views.proof(effort, best_s * (1 - gap))
    if proof.plans or proof.bound_s < best_s * (1 - gap):
        return None
    plans = () if plan is None else (plan,)
    return replace(proof, plans=plans, best_by_kind=best_by_kind(plans, views.values.problem.choices.recompute))


def _answer_if_cut_off(views: _Views, effort: SearchEffort | None, cutoff_s: float, gap: float) -> SearchAnswer | None:
    """That nothing is faster than the cutoff by more than the gap; None where that is not proven.

    A proof on the profiles' lower bounds makes a search on their values needless, and not the other way round.
    """
    if not gap or math.isinf(cutoff_s) or not views.has_loose_profiles:
        return None
    proof = views.proof(replace(effort or SearchEffort(), **_QUICK_PROOF), cutoff_s * (1 - gap))
    if proof.plans or proof.bound_s < cutoff_s * (1 - gap):
        return None
    return replace(proof, best_by_kind={}, solved=())


def is_beaten(problem: PlacementProblem, time_s: float, network: Network | None = None) -> bool:
    """Whether closed forms and stage filling prove, on the profiles' lower bounds, that no plan takes less."""
    return is_refuted(PreparedProblem.of(problem, use_bounds=True, network=network), time_s)


def bound_placement(
    problem: PlacementProblem,
    *,
    cutoff_s: float = math.inf,
    effort: SearchEffort | None = None,
    network: Network | None = None,
) -> float:
    """Seconds below which no plan is, at most the cutoff; infinite if nothing fits.

    The profiles' lower bounds serve for their values. By default only closed forms and stage filling are asked, which
    takes a fraction of a search; with the effort of a search the bound is that of `find_placement`. ``network`` is as
    `PreparedProblem.of` takes it.

    Raises:
        PlacementError: the layer graph branches too much.
    """
    prepared, quick = PreparedProblem.of(problem, use_bounds=True, network=network), SearchEffort(strategies=0, nodes=0)
    return search_parallelisms(prepared, effort=effort or quick, cutoff_s=cutoff_s, proves=True).bound_s


def _reason(best: Placement, slower: Placement) -> str:
    """What a slower plan spends more on than the best one."""
    share = slower.time_s / best.time_s - 1
    more = {
        part.name.removesuffix("_s"): getattr(slower.parts, part.name) - getattr(best.parts, part.name)
        for part in fields(TimeParts)
    }
    name, seconds = max(more.items(), key=lambda item: item[1])
    if seconds <= 0:
        return f"{share:.2%} slower"
    before = getattr(best.parts, f"{name}_s")
    return f"{share:.2%} slower: {name} takes {before + seconds:.4g} s instead of {before:.4g} s"
