"""List scheduling: a quick, good schedule without a proof, which every other method starts from.

Jobs are placed one after another, each as early as its predecessors and what was placed before it on its cores allow. A
rule decides which jobs are spread: those whose spread time is at most a given share of their one-core latency. Each
rule is tried with two orders, the job that can start first or the job with the longest way to the end, and the shortest
of all these schedules counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from phaze.schedule.core_timeline import Cores, Placed, makespan
from phaze.schedule.reduced_problem import FloatArray, ReducedProblem

__all__ = ["list_schedule", "place_in_order", "spread_one_by_one", "tails"]

_SHARES = (0.0, 0.1, 0.3, 0.55, 0.7, 0.9, 1.0)
"""Shares of spread time to latency up to which jobs are spread; more of them find better schedules and take longer."""


def list_schedule(reduced: ReducedProblem) -> tuple[Placed, ...]:
    """The best schedule that the rules give."""
    share = reduced.spread_s / reduced.latency_s
    if reduced.count == 1:  # as most segments of a layer are
        return place_in_order(reduced, (share < 1.0).tolist(), [0.0], is_first_come=True)
    choices = sorted({tuple((share <= limit).tolist()) for limit in _SHARES})
    priority = tails(reduced).tolist()
    best, best_s = tuple[Placed, ...](), math.inf
    for spread in reversed(choices):  # with many cores the last one is most often the best, and rules out the others
        duration = np.where(spread, reduced.spread_s, reduced.latency_s)
        if float(duration.max()) > best_s:
            continue
        for is_first_come in (False, True):
            placed = place_in_order(reduced, spread, priority, is_first_come=is_first_come)
            if makespan(placed) <= best_s:  # of equal ones that with the fewest jobs spread, first come first
                best, best_s = placed, makespan(placed)
    return best


def spread_one_by_one(reduced: ReducedProblem) -> tuple[Placed, ...]:
    """All jobs spread, one after another, that with the longest way to the end first."""
    spread_s = reduced.spread_s.tolist()
    if reduced.count == 1:
        return (Placed(0, 0.0, spread_s[0], True, -1),)
    placed, end_s, priority = list[Placed](), 0.0, tails(reduced).tolist()
    for job in sorted(range(reduced.count), key=lambda job: (-priority[job], job)):
        placed.append(Placed(job, end_s, end_s + spread_s[job], True, -1))
        end_s += spread_s[job]
    return tuple(placed)


def tails(reduced: ReducedProblem) -> FloatArray:
    """For each job the least time from its start to the end of the schedule, by precedence alone."""
    tail = reduced.shortest_s.copy()
    for job in range(reduced.count - 1, -1, -1):
        later = tail[reduced.is_before[job]]
        tail[job] += later.max() if later.size else 0.0
    return tail


def place_in_order(
    reduced: ReducedProblem, spread: Sequence[bool], priority: Sequence[float], *, is_first_come: bool
) -> tuple[Placed, ...]:
    """Place all jobs; `spread` says which are spread, `priority` which goes first (the larger)."""
    cores, edges = Cores(reduced), reduced.is_edge
    after = [np.flatnonzero(row).tolist() for row in edges]
    waiting, ready_s = edges.sum(axis=0).tolist(), [0.0] * reduced.count
    latency = np.where(spread, reduced.spread_s, reduced.latency_s).tolist()
    eligible = [job for job, count in enumerate(waiting) if count == 0]
    placed: list[Placed] = []
    while eligible:
        start, core, job = _next_job(cores, eligible, ready_s, spread, priority, is_first_come)
        end = start + latency[job]
        cores.hold(job, core, end, is_spread=spread[job])
        placed.append(Placed(job, start, end, spread[job], core))
        eligible.remove(job)
        for later in after[job]:
            ready_s[later] = max(ready_s[later], end)
            waiting[later] -= 1
            if waiting[later] == 0:
                eligible.append(later)
    return tuple(placed)


def _next_job(
    cores: Cores,
    eligible: Sequence[int],
    ready_s: Sequence[float],
    spread: Sequence[bool],
    priority: Sequence[float],
    is_first_come: bool,
) -> tuple[float, int, int]:
    """The start, core and job to place next: the first that can start, or the one of the highest priority."""
    if not is_first_come:
        eligible = [max(eligible, key=lambda job: (priority[job], -job))]
    candidates = []
    for job in eligible:
        core = -1 if spread[job] else cores.best_core(job, ready_s[job])
        start = cores.spread_start(job, ready_s[job]) if spread[job] else cores.start_on(job, ready_s[job], core)
        candidates.append((start, -priority[job], job, core))
    start, _, job, core = min(candidates)  # of equal starts the highest priority
    return start, core, job
