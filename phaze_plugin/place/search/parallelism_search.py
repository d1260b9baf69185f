"""The search over all degrees: the lowest bound first, until nothing left can be faster than what was simulated.

Each choice of degrees passes four gates, each with a higher bound under its time: the closed forms of `degrees.py`, the
filling of `filling.py`, the tables of `bounds.py` on its own stages, and branch and bound over its pipelines
(`splits.py`), which simulates. A choice is let through a gate only while its bound is below the k-th best simulated
time, or below a target that rises until it is met. What is left open when the effort is spent lowers the bound that is
returned, and nothing else.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from dataclasses import dataclass, field, replace

import numpy as np

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.bounds.interleaved_bounds import InterleavedBounds, interleaved_closed_form_s
from phaze.place.model.stage_space import FloatArray
from phaze.place.search.parallelism_table import SCHEDULES, ParallelismTable, list_parallelisms
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.stage_search import TOLERANCE, StageSearch, best_stages, warm_starts

__all__ = [
    "Found",
    "SearchAnswer",
    "SearchEffort",
    "is_refuted",
    "root_bound",
    "search_parallelisms",
    "try_parallelism",
]

_HOPELESS = 10
_FOREVER_S = 1e30
_GUESSES = (1.1, 1.25, 1.5, 2.0, 4.0, math.inf)
_REACH = 1.25
_NEAR = 2.0
_LOOSE = [SCHEDULES.index(kind) for kind in (PipelineSchedule.GPIPE, PipelineSchedule.INTERLEAVED)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEffort:
    """Deterministic limits: nodes of branch and bound in all and per choice of degrees, and choices to look at."""

    nodes: int = 20_000
    nodes_per_strategy: int = 4_000
    strategies: int = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A simulated pipeline: its degrees, and the (index in the stage space, mode) of each of its stages."""

    time_s: float
    parallelism: Parallelism
    stages: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAnswer:
    """The best choices of degrees, fastest first, and a bound under every plan of the problem."""

    found: tuple[Found, ...]
    bound_s: float
    strategies: int
    nodes: int
    simulated: int


@dataclass(frozen=True, slots=True, order=True)
class _Refined:
    """A choice whose stages were looked at, without those that alone take longer than ``reach_s``."""

    bound_s: float
    index: int
    reach_s: float
    parallelism: Parallelism = field(compare=False)
    search: StageSearch = field(compare=False)


@dataclass(slots=True, kw_only=True, eq=False)
class _Progress:
    """The k best so far, choices whose stages were looked at and wait to be solved (a heap), what was spent, and the
    least bound of choices whose best stages were found but not proven.
    """

    top: int
    effort: SearchEffort
    slowest_s: float
    gap: float
    found: list[Found] = field(default_factory=list)
    refined: list[_Refined] = field(default_factory=list)
    strategies: int = 0
    nodes: int = 0
    simulated: int = 0
    open_s: float = math.inf

    @property
    def cutoff_s(self) -> float:
        """What another choice must beat to be among the k best, or to be the best if a gap is allowed."""
        if len(self.found) < self.top:
            return self.slowest_s
        return min(self.found[0 if self.gap else self.top - 1].time_s, self.slowest_s)

    def is_out(self, bound_s: float) -> bool:
        """Whether a bound is too near to the cutoff to go on from."""
        return bound_s >= self.cutoff_s * (1 - max(self.gap, TOLERANCE))

    def is_next(self, limit_s: float) -> bool:
        """Whether a choice whose stages were looked at is to be solved next: its bound is the lowest and promising."""
        return bool(self.refined) and self.refined[0].bound_s <= limit_s and not self.is_out(self.refined[0].bound_s)

    def keep(self, found: Found) -> None:
        """Remember a choice, unless its degrees are already known to do better."""
        known = next((other for other in self.found if other.parallelism == found.parallelism), None)
        if known is not None and known.time_s <= found.time_s:
            return
        if known is not None:
            self.found.remove(known)
        insort(self.found, found, key=lambda one: one.time_s)


def search_parallelisms(
    prepared: PreparedProblem,
    *,
    top: int = 1,
    effort: SearchEffort | None = None,
    cutoff_s: float = math.inf,
    gap: float = 0.0,
    proves: bool = False,
) -> SearchAnswer:
    """The ``top`` fastest choices of degrees, each with its fastest stages.

    Only plans faster than the cutoff are looked for. With a gap, the first is the fastest but for the gap, and the
    others are the best that the search came across. One that ``proves`` expects to find nothing below the cutoff, and
    is quicker if so.

    Schedules whose bounds are loose (gpipe, interleaved) come after all others and must beat what these found: more of
    them to choose from never give a slower plan, whatever the gap.
    """
    progress = _Progress(top=top, effort=effort or SearchEffort(), slowest_s=cutoff_s, gap=gap)
    strategies = _strategies(prepared)
    is_loose = np.isin(strategies.schedule, _LOOSE)
    left = math.inf
    for some in (strategies.take(~is_loose), strategies.take(is_loose)):
        if len(some):
            left = min(left, _search_some(prepared, some, left if proves else math.inf, progress, proves))
    left = min(left, progress.open_s)
    best = progress.found[0].time_s if progress.found else cutoff_s
    return SearchAnswer(
        found=tuple(progress.found[:top]),
        bound_s=best if left >= best * (1 - TOLERANCE) else left,
        strategies=progress.strategies,
        nodes=progress.nodes,
        simulated=progress.simulated,
    )


def try_parallelism(
    prepared: PreparedProblem, parallelism: Parallelism, *, cutoff_s: float = math.inf, gap: float = 0.0
) -> Found | None:
    """The fastest plan with some degrees but for the gap, if there is one below the cutoff; nothing is proven.

    None also for degrees that are no choice of the problem, and for interleaved ones.
    """
    if parallelism.chunks > 1 or not _strategies(prepared).has(parallelism):
        return None
    search = prepared.search(parallelism, cutoff_s)
    if search is None:
        return None
    answer = best_stages(search, cutoff_s, SearchEffort().nodes_per_strategy, gap=gap)
    if not answer.time_s < cutoff_s:
        return None
    return Found(time_s=answer.time_s, parallelism=parallelism, stages=_stages(search, answer.picks))


def is_refuted(prepared: PreparedProblem, target_s: float) -> bool:
    """Whether closed forms and filling prove that no plan takes less than the target."""
    every = _strategies(prepared)
    below = every.take(every.bound_s < target_s)
    return not len(below) or bool(prepared.layer_table.refuted(below, np.full(len(below), target_s)).all())


def _strategies(prepared: PreparedProblem) -> ParallelismTable:
    return list_parallelisms(prepared.problem, prepared.space, prepared.stage_sums, prepared.network, prepared.update_s)


def _search_some(
    prepared: PreparedProblem, strategies: ParallelismTable, enough_s: float, progress: _Progress, proves: bool
) -> float:
    """Look at some choices, up to a target that rises; the least bound of what is left, but for `progress.open_s`."""
    least = float(strategies.bound_s.min())
    cutoff_s = min(progress.cutoff_s, enough_s)
    guesses: tuple[float, ...] = _GUESSES[1:] if proves else _GUESSES
    if proves and cutoff_s <= _NEAR * least:
        guesses = _GUESSES[-1:]
    for guess in guesses:
        target = min(guess * least, min(progress.cutoff_s, enough_s) * (1 + TOLERANCE))
        _search_below(prepared, strategies, target, progress)
        is_spent = progress.strategies >= progress.effort.strategies and float(strategies.bound_s.min()) < target
        if min(progress.cutoff_s, enough_s) <= target or is_spent:
            break
    left = min([float(strategies.bound_s.min()), *(one.bound_s for one in progress.refined)])
    progress.refined.clear()
    return left


def _search_below(prepared: PreparedProblem, every: ParallelismTable, target_s: float, progress: _Progress) -> None:
    """Look at every choice that may take less than the target, the lowest bound first.

    What is learnt raises the choices' floors: infinite once their best stages are known.
    """
    for stale in [one for one in progress.refined if one.reach_s < min(target_s, progress.cutoff_s)]:
        progress.refined.remove(stale)
        every.bound_s[stale.index] = stale.bound_s
    heapq.heapify(progress.refined)
    below = np.flatnonzero(every.bound_s < target_s)
    every.bound_s[below] = _raised_floors(prepared, every.take(below), target_s)
    for index in below[np.argsort(every.bound_s[below], kind="stable")].tolist():
        floor = float(every.bound_s[index])
        while progress.is_next(target_s if len(progress.found) < progress.top else min(floor, target_s)):
            _solve(heapq.heappop(progress.refined), every, progress)
        if floor >= target_s or progress.is_out(floor) or progress.strategies >= progress.effort.strategies:
            break
        progress.strategies += 1
        parallelism, reach = every.parallelism(index), min(progress.cutoff_s, _REACH * target_s)
        search = prepared.search(parallelism, reach)
        bound = math.inf if search is None else max(floor, root_bound(search))
        every.bound_s[index] = math.inf
        if search is not None and bound < reach:
            heapq.heappush(progress.refined, _Refined(bound, index, reach, parallelism, search))
        elif search is not None:  # stages beyond the reach were left out: no plan is below it, and no more is known
            every.bound_s[index] = max(floor, reach)
    while progress.is_next(target_s):
        _solve(heapq.heappop(progress.refined), every, progress)


def _raised_floors(prepared: PreparedProblem, strategies: ParallelismTable, target_s: float) -> FloatArray:
    """Higher bounds by packing and, for interleaved choices, by their layers; at least the target where refuted."""
    if not prepared.space.is_chain:
        return strategies.bound_s
    floors, layer_table = strategies.bound_s.copy(), prepared.layer_table
    interleaved = np.flatnonzero(strategies.chunks > 1)
    floors[interleaved] = np.maximum(
        floors[interleaved], interleaved_closed_form_s(layer_table, strategies.take(interleaved))
    )
    refuted = layer_table.refuted(strategies, np.full(len(strategies), min(target_s, _FOREVER_S)))
    floors[refuted] = target_s
    if target_s < math.inf:
        open_ones = np.flatnonzero(floors < target_s)
        floors[open_ones] = layer_table.tightened(replace(strategies, bound_s=floors).take(open_ones), target_s)
    return floors


def root_bound(search: StageSearch) -> float:
    """The least bound over all first stages."""
    candidates = search.candidates
    options = np.arange(candidates.first[0], candidates.first[1])
    if not len(options):
        return math.inf
    needed = np.maximum(search.needed - candidates.is_single[options], 0)
    _, bounds = search.bounds.extend(search.bounds.root, 0, options, needed)
    return float(bounds.min())


def _solve(refined: _Refined, every: ParallelismTable, progress: _Progress) -> None:
    """Find the best stages of a choice, and keep it if it is among the best."""
    search, effort = refined.search, progress.effort
    reach = min(progress.cutoff_s, refined.reach_s)
    limit = min(effort.nodes_per_strategy, max(effort.nodes - progress.nodes, 0))
    seeds: tuple[tuple[int, ...], ...] = ()
    if isinstance(search.bounds, InterleavedBounds):
        seeds = warm_starts(search, search.bounds, reach)
        if not seeds and search.bounds.is_over(search.full + 1):
            every.bound_s[refined.index] = math.inf
            return
        limit = limit if search.bounds.count_pipelines(search.full + 1) <= _HOPELESS * limit else 0
    answer = best_stages(search, reach, limit, seeds, progress.gap)
    progress.nodes += answer.nodes
    progress.simulated += answer.simulated
    is_proven = answer.bound_s >= min(answer.time_s, reach)
    bound = reach if is_proven else max(refined.bound_s, answer.bound_s)
    if answer.time_s <= reach:
        progress.open_s = progress.open_s if is_proven else min(progress.open_s, bound)
        bound = math.inf
    every.bound_s[refined.index] = bound
    if answer.time_s < progress.slowest_s:
        stages = _stages(search, answer.picks)
        progress.keep(Found(time_s=answer.time_s, parallelism=refined.parallelism, stages=stages))


def _stages(search: StageSearch, picks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((int(search.candidates.stage[pick]), int(search.candidates.mode[pick])) for pick in picks)
