"""The search over all strategies: the lowest bound first, until nothing left can be faster than what was simulated.

Each strategy passes four gates, and each gate has a higher bound under its time:

1. closed forms over the whole model (`path_bounds.py`, asked by `list_parallelisms`);
2. filling its stages from the front (`stage_filling.py`), or the closed form of interleaved pipelines; both by
   `_raise_bounds`;
3. the tables of partial pipelines on its own candidate stages, or of interleaved pipelines what each device can choose
   (`StageSearch.root_bound`);
4. branch and bound over its pipelines (`stage_search.py`), which simulates; by `_solve`.

A strategy is let through a gate only while its bound is below the k-th best simulated time, or below a target that
rises until it is met. What is left open when the effort is spent lowers the bound that is returned, and nothing else.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.bounds.interleaved_bounds import InterleavedBounds, interleaved_closed_form_s
from phaze.place.model.stage_space import FloatArray
from phaze.place.search.interleaved_starts import interleaved_start
from phaze.place.search.joint_bounds import refute_together
from phaze.place.search.parallelism_table import SCHEDULES, ParallelismTable, split_rows
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.stage_search import (
    FoundPlan,
    Pipeline,
    PlanKind,
    StageSearch,
    StageSearchAnswer,
    best_by_kind,
    best_stages,
)
from phaze.tolerances import EQUAL_SEARCH_TIMES

__all__ = [
    "SearchAnswer",
    "SearchEffort",
    "closed_bounds",
    "is_refuted",
    "refuted_below",
    "search_parallelisms",
    "split_strategies",
    "stages_below",
    "try_parallelism",
]

_HOPELESS = 10
"""Interleaved strategies with more pipelines than so many times the node limit are not searched beyond their start:
branch and bound would spend all its nodes and prove hardly more than `device_choice_bounds.py` did before."""

_FOREVER_S = 1e30
"""Stands for an infinite target, with which stage filling would compute infinity minus infinity."""

_TARGETS = (1.1, 1.25, 1.5, 2.0, 4.0, math.inf)
"""Targets to search below, in units of the least bound. A low target leaves most strategies untouched; each one that is
not met costs another round of filling."""

_REACH = 1.25
"""Candidate stages that alone take longer than this many times the target are left out: more would
show plans a little above the target without a second round, and make the tables larger."""

_NEAR_CUTOFF = 2.0
"""A search whose cutoff is within this factor of the least bound begins with the cutoff itself: lower targets would
only repeat the work."""

_MOST_BOUNDED = 600
"""How many strategies with no more than a bound a search returns: enough to see where they lie."""

_LIKELY = 6
"""How many strategies are tried before all others where no time is known yet: the first that fits spares most rounds of
rising targets, and hardly more than a handful is needed to find one."""

_LOOSELY_BOUNDED = [index for index, kind in enumerate(SCHEDULES) if kind is PipelineSchedule.GPIPE or kind.has_chunks]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEffort:
    """Deterministic limits of the search: what they allow is proven, what they forbid stays open.

    Attributes:
        nodes: nodes of branch and bound in all.
        nodes_per_strategy: nodes of branch and bound for one strategy.
        strategies: strategies whose stages are looked at.
    """

    nodes: int = 20_000
    nodes_per_strategy: int = 4_000
    strategies: int = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAnswer:
    """The best strategies with their stages, fastest first, and a bound under every plan of the problem.

    Attributes:
        plans: the best plan of each of the best strategies.
        best_by_kind: the fastest plan of each kind that the search came across. Nothing is proven of it, and a kind
            whose plans were all ruled out by their bounds is missing.
        bound_s: no plan takes less.
        strategies: strategies whose stages were looked at.
        nodes: partial pipelines that were extended.
        simulated: pipelines that were simulated.
        solved: the best simulated plan of every strategy that came so far, fastest first.
        bounded: the strategies with the lowest bounds of those that have only a bound in the end.
        bounded_count: how many have; those that differ only in dp or shard, and not in their microbatches, may count as
            one.
    """

    plans: tuple[FoundPlan, ...]
    best_by_kind: Mapping[PlanKind, FoundPlan]
    bound_s: float
    strategies: int
    nodes: int
    simulated: int
    solved: tuple[FoundPlan, ...]
    bounded: ParallelismTable = field(compare=False)
    bounded_count: int


@dataclass(frozen=True, slots=True, order=True)
class _OpenStrategy:
    """A strategy behind the third gate: it waits for branch and bound, in the order of its bound.

    Its candidate stages are those that alone take less than ``reach_s``.
    """

    bound_s: float
    index: int
    reach_s: float
    parallelism: Parallelism = field(compare=False)
    search: StageSearch = field(compare=False)


@dataclass(slots=True, kw_only=True, eq=False)
class _Progress:
    """What a search has found and spent.

    Attributes:
        top: how many strategies are asked for (k).
        effort: limits.
        slowest_s: only faster plans are of interest.
        gap: how much faster than the best plan returned another may be.
        plans: the best plan of each strategy that was solved, fastest first.
        open_strategies: strategies that wait for branch and bound, as a heap.
        strategies: how many strategies' stages were looked at.
        nodes: partial pipelines that were extended.
        simulated: pipelines that were simulated.
        unproven_s: the least bound of strategies whose best stages were found but not proven.
    """

    top: int
    effort: SearchEffort
    slowest_s: float
    gap: float
    plans: list[FoundPlan] = field(default_factory=list)
    open_strategies: list[_OpenStrategy] = field(default_factory=list)
    strategies: int = 0
    nodes: int = 0
    simulated: int = 0
    unproven_s: float = math.inf

    @property
    def cutoff_s(self) -> float:
        """What another strategy must beat to be among the k best, or to be the best if a gap is allowed."""
        if len(self.plans) < self.top:
            return self.slowest_s
        return min(self.plans[0 if self.gap else self.top - 1].time_s, self.slowest_s)

    def rejects(self, bound_s: float) -> bool:
        """Whether a bound is too near to the cutoff to go on from."""
        return bound_s >= self.cutoff_s * (1 - max(self.gap, EQUAL_SEARCH_TIMES))

    def promising_s(self, enough_s: float) -> float:
        """The bounds from which on nothing is looked at: what the cutoff and the gap reject, or what is enough."""
        return min(self.cutoff_s * (1 - self.gap), enough_s) * (1 + EQUAL_SEARCH_TIMES)

    def solves_next(self, limit_s: float) -> bool:
        """Whether an open strategy is to be solved next: its bound is the lowest and promising."""
        if not self.open_strategies:
            return False
        bound_s = self.open_strategies[0].bound_s
        return bound_s <= limit_s and not self.rejects(bound_s)

    def keep(self, plan: FoundPlan) -> None:
        """Remember a plan, unless its strategy is already known to do better."""
        known = next((other for other in self.plans if other.parallelism == plan.parallelism), None)
        if known is not None and known.time_s <= plan.time_s:
            return
        if known is not None:
            self.plans.remove(known)
        insort(self.plans, plan, key=lambda kept: kept.time_s)


def search_parallelisms(
    prepared: PreparedProblem,
    *,
    top: int = 1,
    effort: SearchEffort | None = None,
    cutoff_s: float = math.inf,
    gap: float = 0.0,
    proves: bool = False,
    strategies: ParallelismTable | None = None,
) -> SearchAnswer:
    """The ``top`` fastest strategies, each with its fastest stages.

    Only plans faster than the cutoff are looked for. With a gap, the first is the fastest but for the gap, and the
    others are the best that the search came across. One that ``proves`` expects to find nothing below the cutoff, and
    is quicker if so. ``strategies`` are all of the problem's, where bounds under them are known already.

    Schedules whose bounds are loose (GPipe, and all with chunks) come after all others and must beat what these found:
    more of them to choose from never give a slower plan, whatever the gap.
    """
    progress = _Progress(top=top, effort=effort or SearchEffort(), slowest_s=cutoff_s, gap=gap)
    strategies = prepared.strategies() if strategies is None else strategies
    is_loose = np.isin(strategies.schedule, _LOOSELY_BOUNDED)
    left_s, searched = math.inf, []
    for group in (strategies.take(~is_loose), strategies.take(is_loose)):
        if len(group):
            found_s, group = _search_group(prepared, group, left_s if proves else math.inf, progress, proves)
            left_s = min(left_s, found_s)
        searched.append(group)
    strategies = ParallelismTable.joined(searched)
    is_bounded = np.isfinite(strategies.bound_s)
    left_s = min(left_s, progress.unproven_s)
    best_s = progress.plans[0].time_s if progress.plans else cutoff_s
    return SearchAnswer(
        plans=tuple(progress.plans[:top]),
        best_by_kind=best_by_kind(progress.plans, prepared.problem.choices.recompute),
        bound_s=best_s if left_s >= best_s * (1 - EQUAL_SEARCH_TIMES) else left_s,
        strategies=progress.strategies,
        nodes=progress.nodes,
        simulated=progress.simulated,
        solved=tuple(progress.plans),
        bounded=strategies.take(np.argsort(strategies.bound_s, kind="stable")[: min(is_bounded.sum(), _MOST_BOUNDED)]),
        bounded_count=int(is_bounded.sum()),
    )


def try_parallelism(
    prepared: PreparedProblem, parallelism: Parallelism, *, cutoff_s: float = math.inf, gap: float = 0.0
) -> FoundPlan | None:
    """The fastest plan with one strategy but for the gap, if there is one below the cutoff; nothing is proven.

    None also for a strategy that is no choice of the problem, and for interleaved ones.
    """
    choices = prepared.problem.choices
    if parallelism.chunks > 1 or (choices.dp is not None and parallelism.dp not in choices.dp):
        return None
    if choices.shard is not None and parallelism.shard not in choices.shard:
        return None
    narrow = prepared.with_problem(prepared.problem.choosing(dp=(parallelism.dp,), shard=(parallelism.shard,)))
    if not narrow.strategies().has(parallelism):
        return None
    search = prepared.stage_search_below(parallelism, cutoff_s)
    if search is None:
        return None
    answer = best_stages(search, cutoff_s, SearchEffort().nodes_per_strategy, gap=gap)
    if not answer.time_s < cutoff_s:
        return None
    stages = search.candidates.stages_and_modes(answer.pipeline)
    return FoundPlan(time_s=answer.time_s, parallelism=parallelism, stages=stages)


def is_refuted(prepared: PreparedProblem, target_s: float) -> bool:
    """Whether closed forms and stage filling prove that no plan takes less than the target."""
    return not (refuted_below(prepared, prepared.strategies(), target_s).bound_s < target_s).any()


def refuted_below(prepared: PreparedProblem, strategies: ParallelismTable, target_s: float) -> ParallelismTable:
    """The strategies with the target as bound where closed forms and stage filling prove that they do not beat it.

    Rows that stand for several strategies are split where they may beat it: what is below the target is one strategy.
    """
    strategies = strategies.take(np.arange(len(strategies)))
    below = np.flatnonzero(strategies.bound_s < target_s)
    while len(below):
        rows = strategies.take(below)
        bounds = closed_bounds(prepared, rows)
        left = np.flatnonzero(bounds < target_s)
        left_rows = rows.take(left)
        bounds[left[prepared.layer_table.refuted(left_rows, np.full(len(left), min(target_s, _FOREVER_S)))]] = target_s
        strategies.bound_s[below] = bounds
        wide = below[(bounds < target_s) & rows.is_wide]
        if not len(wide):
            break
        parts = split_strategies(prepared, strategies.take(wide))
        strategies.bound_s[wide] = math.inf
        below = np.arange(len(strategies), len(strategies) + len(parts))
        strategies = ParallelismTable.joined([strategies, parts])
    if target_s < math.inf:
        refute_together(prepared, strategies, np.flatnonzero(strategies.bound_s < target_s), target_s)
    return strategies


def split_strategies(prepared: PreparedProblem, rows: ParallelismTable) -> ParallelismTable:
    """Two rows for each, as `split_rows` makes them."""
    return split_rows(prepared.problem, prepared.ends, prepared.end_sums, rows)


def _search_group(
    prepared: PreparedProblem, strategies: ParallelismTable, enough_s: float, progress: _Progress, proves: bool
) -> tuple[float, ParallelismTable]:
    """Look at some strategies, below a target that rises; the least bound of what is left, but for the unproven.

    The strategies are returned with their bounds; rows that were split are infinite and stand before their parts.
    """
    least_s = float(strategies.bound_s.min())
    if math.isinf(progress.cutoff_s) and not proves:
        _try_likely(prepared, strategies, progress)
    cutoff_s = min(progress.cutoff_s, enough_s)
    targets: tuple[float, ...] = _TARGETS[1:] if proves else _TARGETS
    if cutoff_s <= _NEAR_CUTOFF * least_s or progress.plans:
        targets = _TARGETS[-1:]
    for factor in targets:
        target_s = min(factor * least_s, progress.promising_s(enough_s))
        strategies = _search_below(prepared, strategies, target_s, progress)
        is_spent = progress.strategies >= progress.effort.strategies and float(strategies.bound_s.min()) < target_s
        if progress.promising_s(enough_s) <= target_s or is_spent:
            break
    left_s = min([float(strategies.bound_s.min()), *(waiting.bound_s for waiting in progress.open_strategies)])
    progress.open_strategies.clear()
    return left_s, strategies


def _try_likely(prepared: PreparedProblem, strategies: ParallelismTable, progress: _Progress) -> None:
    """Look for plans with a few strategies that use as many devices as they can, so that others have a time to beat."""
    same = (strategies.tp, strategies.pp, strategies.chunks, strategies.schedule, strategies.zero)
    order = np.lexsort((-strategies.dp, *same))
    is_first = np.any(np.diff(np.stack(same)[:, order], axis=1, prepend=-1) != 0, axis=0)
    likely = strategies.take(order[is_first])
    is_strategy = likely.dp * prepared.problem.cp % likely.shard == 0
    likely = likely.take((likely.chunks == 1) & is_strategy)
    if not len(likely):
        return
    likely = likely.narrowed()
    bounds = prepared.layer_table.tightened(likely, _TARGETS[-2] * float(likely.bound_s.min()))
    for index in np.argsort(bounds, kind="stable")[:_LIKELY].tolist():
        if len(progress.plans) >= progress.top and bounds[index] >= progress.plans[0].time_s:
            break
        parallelism = likely.parallelism(index, prepared.problem)
        search = prepared.stage_search_below(parallelism, progress.cutoff_s)
        if search is None:
            continue
        answer = best_stages(search, progress.cutoff_s, progress.effort.nodes_per_strategy, gap=progress.gap)
        progress.nodes += answer.nodes
        progress.simulated += answer.simulated
        if answer.time_s < progress.cutoff_s:
            stages = search.candidates.stages_and_modes(answer.pipeline)
            progress.keep(FoundPlan(time_s=answer.time_s, parallelism=parallelism, stages=stages))


def _search_below(
    prepared: PreparedProblem, strategies: ParallelismTable, target_s: float, progress: _Progress
) -> ParallelismTable:
    """Look at every strategy that may take less than the target, the lowest bound first.

    What is learnt raises the strategies' bounds: to infinity once their best stages are known, or once they are split.
    """
    _reopen_beyond_reach(strategies, target_s, progress)
    strategies = _split_below(prepared, strategies, target_s, progress.effort.strategies)
    below = np.flatnonzero(strategies.bound_s < target_s)
    for index in below[np.argsort(strategies.bound_s[below], kind="stable")].tolist():
        known_s = float(strategies.bound_s[index])
        while progress.solves_next(target_s if len(progress.plans) < progress.top else min(known_s, target_s)):
            _solve(prepared, heapq.heappop(progress.open_strategies), strategies, progress)
        if known_s >= target_s or progress.rejects(known_s) or progress.strategies >= progress.effort.strategies:
            break
        progress.strategies += 1
        parallelism, reach_s = (
            strategies.parallelism(index, prepared.problem),
            min(progress.cutoff_s, _REACH * target_s),
        )
        search = prepared.stage_search_below(parallelism, reach_s)
        bound_s = math.inf if search is None else max(known_s, search.root_bound(known_s, reach_s))
        strategies.bound_s[index] = math.inf
        if search is not None and bound_s < reach_s:
            waiting = _OpenStrategy(bound_s, index, reach_s, parallelism, search)
            heapq.heappush(progress.open_strategies, waiting)
        elif search is not None:  # stages beyond the reach were left out: no plan is below it, and no more is known
            strategies.bound_s[index] = max(known_s, reach_s)
    while progress.solves_next(target_s):
        _solve(prepared, heapq.heappop(progress.open_strategies), strategies, progress)
    return strategies


def _split_below(
    prepared: PreparedProblem, strategies: ParallelismTable, target_s: float, most_bounded: int
) -> ParallelismTable:
    """Raise the bounds that are below the target, and split rows that stay below it until each is one strategy.

    What is left below the target is then raised as far as stage filling goes. At most so many bounds of interleaved
    strategies are asked for together.
    """
    below = np.flatnonzero(strategies.bound_s < target_s)
    strategies.bound_s[below] = _raise_bounds(prepared, strategies.take(below), target_s)
    while len(wide := below[(strategies.bound_s[below] < target_s) & strategies.is_wide[below]]):
        parts = split_strategies(prepared, strategies.take(wide))
        parts.bound_s[:] = _raise_bounds(prepared, parts, target_s)
        strategies.bound_s[wide] = math.inf
        below = np.arange(len(strategies), len(strategies) + len(parts))
        strategies = ParallelismTable.joined([strategies, parts])
    if target_s < math.inf:
        left = np.flatnonzero(strategies.bound_s < target_s)
        strategies.bound_s[left] = prepared.layer_table.tightened(strategies.take(left), target_s)
        refute_together(prepared, strategies, left, target_s, most_bounded)
    return strategies


def _reopen_beyond_reach(strategies: ParallelismTable, target_s: float, progress: _Progress) -> None:
    """Return open strategies to the table if the new target lets in stages that their lists left out."""
    needed_s = min(target_s, progress.cutoff_s)
    for stale in [waiting for waiting in progress.open_strategies if waiting.reach_s < needed_s]:
        progress.open_strategies.remove(stale)
        strategies.bound_s[stale.index] = stale.bound_s
    heapq.heapify(progress.open_strategies)


def _raise_bounds(prepared: PreparedProblem, strategies: ParallelismTable, target_s: float) -> FloatArray:
    """Higher bounds by stage filling and, for interleaved strategies, by their closed form.

    A strategy that provably does not beat the target gets at least the target as its bound.
    """
    bounds = closed_bounds(prepared, strategies)
    refuted = prepared.layer_table.refuted(strategies, np.full(len(strategies), min(target_s, _FOREVER_S)))
    bounds[refuted] = target_s
    return bounds


def closed_bounds(prepared: PreparedProblem, strategies: ParallelismTable) -> FloatArray:
    """The bounds of strategies, raised for interleaved ones by their own closed form."""
    bounds = strategies.bound_s.copy()
    interleaved = np.flatnonzero((strategies.chunks > 1) & prepared.space.is_chain)
    closed_form_s = interleaved_closed_form_s(prepared.layer_table, strategies.take(interleaved))
    bounds[interleaved] = np.maximum(bounds[interleaved], closed_form_s)
    return bounds


def _solve(
    prepared: PreparedProblem, waiting: _OpenStrategy, strategies: ParallelismTable, progress: _Progress
) -> None:
    """Find the best stages of a strategy, and keep them if they are among the best."""
    search, effort = waiting.search, progress.effort
    reach_s = min(progress.cutoff_s, waiting.reach_s)
    node_limit = min(effort.nodes_per_strategy, max(effort.nodes - progress.nodes, 0))
    answer, known_s = stages_below(
        prepared, search, reach_s, waiting.bound_s, node_limit, progress.gap, best_s=progress.cutoff_s
    )
    progress.nodes += answer.nodes
    progress.simulated += answer.simulated
    is_proven = answer.bound_s >= min(answer.time_s, reach_s)
    bound_s = reach_s if is_proven else max(known_s, answer.bound_s)
    if answer.time_s <= reach_s:
        progress.unproven_s = progress.unproven_s if is_proven else min(progress.unproven_s, bound_s)
        bound_s = math.inf
    strategies.bound_s[waiting.index] = bound_s
    if answer.time_s < progress.slowest_s:
        stages = search.candidates.stages_and_modes(answer.pipeline)
        progress.keep(FoundPlan(time_s=answer.time_s, parallelism=waiting.parallelism, stages=stages))


def stages_below(
    prepared: PreparedProblem,
    search: StageSearch,
    cutoff_s: float,
    known_s: float,
    node_limit: int,
    gap: float,
    *,
    best_s: float,
) -> tuple[StageSearchAnswer, float]:
    """The best stages of a strategy below the cutoff but for the gap, and what is known to be under all of them.

    ``known_s`` is a bound that is known before; one that does not beat ``best_s`` is not worth a start.
    """
    known_pipelines: tuple[Pipeline, ...] = ()
    if isinstance(search.bounds, InterleavedBounds):
        known_s = max(known_s, search.simulated_bound(cutoff_s))
        if known_s < best_s * (1 - max(gap, EQUAL_SEARCH_TIMES)):
            start = interleaved_start(search, search.bounds, cutoff_s, gap, prepared.space.is_chain)
            known_pipelines, known_s = start.pipelines, max(known_s, start.bound_s)
        node_limit = node_limit if search.bounds.count_pipelines() <= _HOPELESS * node_limit else 0
    return best_stages(search, cutoff_s, node_limit, known_pipelines, gap, known_s), known_s
