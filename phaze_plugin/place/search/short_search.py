"""A short search for a good plan: what a guess calls promising is tried first, then a few more strategies are searched.

`short_search` proves nothing of what it finds. A guess (`estimated_steps_s`) ranks the strategies of each schedule. The
best of them are tried as they are (`_try_promising`), which takes some milliseconds each and mostly comes within a few
percent. Then those that are ranked first are searched with little effort for something that is better by more than a
gap.
"""

from __future__ import annotations

import numpy as np

from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.parallelism_search import SearchEffort, search_parallelisms, stages_below
from phaze.place.search.parallelism_table import ParallelismTable
from phaze.place.search.prepared_problem import PreparedProblem, estimated_steps_s, priced_steps_s
from phaze.place.search.stage_search import FoundPlan

__all__ = ["short_search"]

_EFFORT = SearchEffort(nodes=300, nodes_per_strategy=60, strategies=30)
"""About a percent of the effort of a whole search, because ten to twenty short ones make an explanation."""

_GAP = 0.02
"""A short search ends at this gap: people compare kinds of plans by percents, not by less."""

_SEARCHED = 100
"""How many strategies of each schedule and number of chunks are searched: of thousands the others rarely have the best
plan."""

_RANKED_AGAIN = 64
"""How many of these are ranked once more on their own links instead of the fastest ones, to be tried first."""

_TRIED = 12
"""How many strategies are tried before the search; more of them take longer than what the search saves by it."""


def short_search(prepared: PreparedProblem, cutoff_s: float) -> tuple[FoundPlan | None, bool]:
    """A good plan below the cutoff if one is found; else whether there is provably none."""
    strategies = prepared.strategies()
    if not len(strategies):
        return None, True
    step_s, again_s = estimated_steps_s(prepared, strategies)
    ranks = _ranks(strategies, step_s)
    first = np.flatnonzero((ranks < _RANKED_AGAIN) & np.isfinite(step_s))
    tried = _try_promising(prepared, strategies.take(first).narrowed(), again_s[first], cutoff_s)
    searched = strategies.take(ranks < _SEARCHED)
    best_s = cutoff_s if tried is None else tried.time_s
    answer = search_parallelisms(prepared, effort=_EFFORT, cutoff_s=best_s, gap=_GAP, strategies=searched)
    if answer.plans:
        return answer.plans[0], True
    return tried, tried is not None or (answer.bound_s >= cutoff_s and len(searched) == len(strategies))


def _try_promising(
    prepared: PreparedProblem, strategies: ParallelismTable, again_s: FloatArray, cutoff_s: float
) -> FoundPlan | None:
    """The best plan that a few strategies have below the cutoff, the most promising ones first."""
    if not len(strategies):
        return None
    step_s = np.maximum(strategies.bound_s, priced_steps_s(prepared, strategies)) + again_s
    is_strategy = strategies.dp * prepared.problem.cp % strategies.shard == 0
    best, best_s = None, cutoff_s
    for index in np.argsort(np.where(is_strategy, step_s, np.inf), kind="stable")[:_TRIED].tolist():
        if step_s[index] >= best_s * (1 - _GAP) or not is_strategy[index]:
            break
        parallelism = strategies.parallelism(index, prepared.problem)
        search = prepared.stage_search_below(parallelism, best_s)
        if search is None or (bound_s := search.root_bound(0.0, best_s)) >= best_s * (1 - _GAP):
            continue
        nodes = _EFFORT.nodes_per_strategy
        answer, _ = stages_below(prepared, search, best_s, bound_s, nodes, _GAP, best_s=best_s)
        if answer.time_s < best_s:
            best_s, stages = answer.time_s, search.candidates.stages_and_modes(answer.pipeline)
            best = FoundPlan(time_s=best_s, parallelism=parallelism, stages=stages)
    return best


def _ranks(strategies: ParallelismTable, step_s: FloatArray) -> IntArray:
    """The place of each strategy among those of its schedule and number of chunks, by step times, then by bounds."""
    kinds = (strategies.chunks, strategies.schedule)
    order = np.lexsort((strategies.bound_s, step_s, *kinds))
    is_first = np.any(np.diff(np.stack(kinds)[:, order], axis=1, prepend=-1) != 0, axis=0)
    place = np.arange(len(order))
    ranks = np.empty_like(place)
    ranks[order] = place - np.maximum.accumulate(np.where(is_first, place, 0))
    return ranks
