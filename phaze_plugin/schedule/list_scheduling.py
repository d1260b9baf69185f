"""Jobs placed one after another: when each core and the link is free, which core a job gets, and list scheduling.

`Cores` keeps when cores and the link are free while jobs are placed. `retime` and `give_cores` turn an order of starts
that another method found into times and core numbers.

List scheduling is a quick, good schedule without a proof, which every other method starts from (`list_schedule`). Each
job is placed as early as its predecessors and what was placed before it on its cores allow. A rule decides which jobs
are spread: those whose spread time is at most a given share of their one-core latency. Each rule is tried with two
orders, the job that can start first or the job with the longest way to the end, and the shortest of all these schedules
counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from phaze.schedule.scheduling_problem import FloatArray, ReducedProblem

__all__ = [
    "Cores",
    "Placed",
    "Step",
    "give_cores",
    "list_schedule",
    "makespan",
    "order_of_starts",
    "place_in_order",
    "retime",
    "spread_one_by_one",
    "tails",
]


@dataclass(frozen=True, slots=True)
class Placed:
    """One job of a reduced problem, placed: its position there, its interval, and its core (-1: none, or spread)."""

    position: int
    start_s: float
    end_s: float
    is_spread: bool
    core: int


@dataclass(frozen=True, slots=True)
class Step:
    """One job to place next: spread, or on this core (-1 for jobs that hold none)."""

    position: int
    is_spread: bool
    core: int


def makespan(placed: Iterable[Placed]) -> float:
    """The latest end."""
    return max((job.end_s for job in placed), default=0.0)


class Cores:
    """When each core and the link is free again. Tensor core c and vector core c are a pair."""

    def __init__(self, reduced: ReducedProblem) -> None:
        self.uses_tensor: list[bool] = reduced.uses_tensor.tolist()
        self.uses_vector: list[bool] = reduced.uses_vector.tolist()
        self.is_link: list[bool] = reduced.is_link.tolist()
        self.is_exclusive = reduced.is_exclusive
        tensor, vector = reduced.useful_cores
        self.tensor_free, self.vector_free = [0.0] * tensor, [0.0] * vector
        self.pairs, self.link_free = min(tensor, vector), 0.0
        self.tensor_ends_s = self.vector_ends_s = 0.0  # when all of a kind are free

    def spread_start(self, job: int, ready_s: float) -> float:
        """The earliest start of the job from `ready_s` on, spread."""
        if self.uses_tensor[job] or self.is_exclusive:
            ready_s = max(ready_s, self.tensor_ends_s)
        if self.uses_vector[job] or self.is_exclusive:
            ready_s = max(ready_s, self.vector_ends_s)
        return ready_s

    def start_on(self, job: int, ready_s: float, core: int) -> float:
        """The earliest start of the job from `ready_s` on, on this core; jobs off the cores name any core."""
        if self.is_link[job]:
            return max(ready_s, self.link_free)
        tensor = self.tensor_free[core] if self.uses_tensor[job] else 0.0
        vector = self.vector_free[core] if self.uses_vector[job] else 0.0
        return max(ready_s, tensor, vector)

    def best_core(self, job: int, ready_s: float) -> int:
        """The core on which the job can start first; of those free by then the one free last, so that others stay."""
        if self.uses_tensor[job] and self.uses_vector[job]:
            free = [max(pair) for pair in zip(self.tensor_free, self.vector_free, strict=False)]
        elif self.uses_tensor[job] or self.uses_vector[job]:
            free = self.tensor_free if self.uses_tensor[job] else self.vector_free
        else:
            return -1
        best, chosen = -math.inf, -1
        for core, free_s in enumerate(free):
            if best < free_s <= ready_s:
                best, chosen = free_s, core
        return chosen if chosen >= 0 else min(range(len(free)), key=free.__getitem__)

    def hold(self, job: int, core: int, end_s: float, *, is_spread: bool) -> None:
        """Hold what the job needs until `end_s`."""
        if self.is_link[job]:
            self.link_free = end_s
        elif is_spread:
            if self.uses_tensor[job] or self.is_exclusive:
                self.tensor_free, self.tensor_ends_s = [end_s] * len(self.tensor_free), end_s
            if self.uses_vector[job] or self.is_exclusive:
                self.vector_free, self.vector_ends_s = [end_s] * len(self.vector_free), end_s
        else:
            if self.uses_tensor[job]:
                self.tensor_free[core], self.tensor_ends_s = end_s, max(self.tensor_ends_s, end_s)
            if self.uses_vector[job]:
                self.vector_free[core], self.vector_ends_s = end_s, max(self.vector_ends_s, end_s)


def retime(reduced: ReducedProblem, steps: Sequence[Step]) -> tuple[Placed, ...]:
    """Place jobs in this order, each as early as its predecessors and cores allow; predecessors come first."""
    cores, ended = Cores(reduced), [0.0] * reduced.count
    before = [np.flatnonzero(column).tolist() for column in reduced.is_edge.T]
    latency, spread = reduced.latency_s.tolist(), reduced.spread_s.tolist()
    placed = []
    for step in steps:
        job = step.position
        ready = max((ended[earlier] for earlier in before[job]), default=0.0)
        start = cores.spread_start(job, ready) if step.is_spread else cores.start_on(job, ready, step.core)
        ended[job] = start + (spread[job] if step.is_spread else latency[job])
        cores.hold(job, step.core, ended[job], is_spread=step.is_spread)
        placed.append(Placed(job, start, ended[job], step.is_spread, step.core))
    return tuple(placed)


def order_of_starts(reduced: ReducedProblem, start: Sequence[float]) -> list[int]:
    """Ops by start, predecessors before successors even where a solver's starts are equal or a little crossed."""
    waiting = reduced.is_edge.sum(axis=0).tolist()
    eligible, order = [job for job, count in enumerate(waiting) if count == 0], []
    while eligible:
        job = min(eligible, key=lambda candidate: (start[candidate], candidate))
        eligible.remove(job)
        order.append(job)
        for later in np.flatnonzero(reduced.is_edge[job]).tolist():
            waiting[later] -= 1
            if waiting[later] == 0:
                eligible.append(later)
    return order


def give_cores(reduced: ReducedProblem, order: Sequence[tuple[int, bool]]) -> list[Step]:
    """Core numbers for (job, is spread) in the order of starts, where no pair has to be chosen with care.

    That is: there are no both jobs, and then the first free core serves; or there is a core for every job.
    """
    pairs = int(reduced.is_both.sum())
    if pairs:
        following = {True: 0, False: pairs}, {True: 0, False: pairs}
        return [
            Step(job, is_spread, -1 if is_spread else _own_core(reduced, job, following)) for job, is_spread in order
        ]
    cores, ended, steps = Cores(reduced), [0.0] * reduced.count, []
    before = [np.flatnonzero(column).tolist() for column in reduced.is_edge.T]
    for job, is_spread in order:
        ready = max((ended[earlier] for earlier in before[job]), default=0.0)
        core = -1 if is_spread else cores.best_core(job, ready)
        start = cores.spread_start(job, ready) if is_spread else cores.start_on(job, ready, core)
        ended[job] = start + float((reduced.spread_s if is_spread else reduced.latency_s)[job])
        cores.hold(job, core, ended[job], is_spread=is_spread)
        steps.append(Step(job, is_spread, core))
    return steps


def _own_core(reduced: ReducedProblem, job: int, following: tuple[dict[bool, int], dict[bool, int]]) -> int:
    """A core that no other job has: pairs first, the others behind them."""
    if reduced.is_off_core[job]:
        return -1
    is_both, side = bool(reduced.is_both[job]), following[0 if reduced.uses_tensor[job] else 1]
    core = side[is_both]
    side[is_both] += 1
    return core


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
