"""Cores and the link as they fill up: place ops one after another, each as early as what came before allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from phaze.schedule.reduce import Reduced

__all__ = ["Cores", "Placed", "Step", "give_cores", "makespan", "order_of_starts", "retime"]


@dataclass(frozen=True, slots=True)
class Placed:
    """One op of a reduced problem, placed: its position there, its interval, and its core (-1: none, or spread)."""

    position: int
    start_s: float
    end_s: float
    is_spread: bool
    core: int


@dataclass(frozen=True, slots=True)
class Step:
    """One op to place next: spread, or on this core (-1 for ops that hold none)."""

    position: int
    is_spread: bool
    core: int


def makespan(placed: Iterable[Placed]) -> float:
    """The latest end."""
    return max((op.end_s for op in placed), default=0.0)


class Cores:
    """When each core and the link is free again. Tensor core c and vector core c are a pair."""

    def __init__(self, reduced: Reduced) -> None:
        self.uses_tensor: list[bool] = reduced.uses_tensor.tolist()
        self.uses_vector: list[bool] = reduced.uses_vector.tolist()
        self.is_link: list[bool] = reduced.is_link.tolist()
        self.is_exclusive = reduced.is_exclusive
        tensor, vector = reduced.useful_cores
        self.tensor_free, self.vector_free = [0.0] * tensor, [0.0] * vector
        self.pairs, self.link_free = min(tensor, vector), 0.0

    def spread_start(self, op: int, ready_s: float) -> float:
        """The earliest start of the op from `ready_s` on, spread."""
        tensor = self.tensor_free if self.uses_tensor[op] or self.is_exclusive else []
        vector = self.vector_free if self.uses_vector[op] or self.is_exclusive else []
        return max([ready_s, *tensor, *vector])

    def start_on(self, op: int, ready_s: float, core: int) -> float:
        """The earliest start of the op from `ready_s` on, on this core; ops off the cores name any core."""
        if self.is_link[op]:
            return max(ready_s, self.link_free)
        tensor = self.tensor_free[core] if self.uses_tensor[op] else 0.0
        vector = self.vector_free[core] if self.uses_vector[op] else 0.0
        return max(ready_s, tensor, vector)

    def best_core(self, op: int, ready_s: float) -> int:
        """The core on which the op can start first; of those free by then the one free last, so that others stay."""
        if self.uses_tensor[op] and self.uses_vector[op]:
            free = [max(pair) for pair in zip(self.tensor_free, self.vector_free, strict=False)]
        elif self.uses_tensor[op] or self.uses_vector[op]:
            free = self.tensor_free if self.uses_tensor[op] else self.vector_free
        else:
            return -1
        best, chosen = -math.inf, -1
        for core, at in enumerate(free):
            if best < at <= ready_s:
                best, chosen = at, core
        return chosen if chosen >= 0 else min(range(len(free)), key=free.__getitem__)

    def hold(self, op: int, core: int, end_s: float, *, is_spread: bool) -> None:
        """Hold what the op needs until `end_s`."""
        if self.is_link[op]:
            self.link_free = end_s
        elif is_spread:
            if self.uses_tensor[op] or self.is_exclusive:
                self.tensor_free = [end_s] * len(self.tensor_free)
            if self.uses_vector[op] or self.is_exclusive:
                self.vector_free = [end_s] * len(self.vector_free)
        else:
            if self.uses_tensor[op]:
                self.tensor_free[core] = end_s
            if self.uses_vector[op]:
                self.vector_free[core] = end_s


def retime(reduced: Reduced, steps: Sequence[Step]) -> tuple[Placed, ...]:
    """Place ops in this order, each as early as its predecessors and cores allow; predecessors come first."""
    cores, ended = Cores(reduced), [0.0] * reduced.count
    before = [np.flatnonzero(column).tolist() for column in reduced.is_edge.T]
    latency, spread = reduced.latency_s.tolist(), reduced.spread_s.tolist()
    placed = []
    for step in steps:
        op = step.position
        ready = max((ended[other] for other in before[op]), default=0.0)
        start = cores.spread_start(op, ready) if step.is_spread else cores.start_on(op, ready, step.core)
        ended[op] = start + (spread[op] if step.is_spread else latency[op])
        cores.hold(op, step.core, ended[op], is_spread=step.is_spread)
        placed.append(Placed(op, start, ended[op], step.is_spread, step.core))
    return tuple(placed)


def order_of_starts(reduced: Reduced, start: Sequence[float]) -> list[int]:
    """Ops by start, predecessors before successors even where a solver's starts are equal or a little crossed."""
    waiting = reduced.is_edge.sum(axis=0).tolist()
    eligible, order = [op for op, count in enumerate(waiting) if count == 0], []
    while eligible:
        op = min(eligible, key=lambda at: (start[at], at))
        eligible.remove(op)
        order.append(op)
        for later in np.flatnonzero(reduced.is_edge[op]).tolist():
            waiting[later] -= 1
            if waiting[later] == 0:
                eligible.append(later)
    return order


def give_cores(reduced: Reduced, order: Sequence[tuple[int, bool]]) -> list[Step]:
    """Core numbers for (op, is spread) in the order of starts, where no pair has to be chosen with care.

    That is: there are no both ops, and then the first free core serves; or there is a core for every op.
    """
    pairs = int(reduced.is_both.sum())
    if pairs:
        following = {True: 0, False: pairs}, {True: 0, False: pairs}
        return [Step(op, is_spread, -1 if is_spread else _own_core(reduced, op, following)) for op, is_spread in order]
    cores, ended, steps = Cores(reduced), [0.0] * reduced.count, []
    before = [np.flatnonzero(column).tolist() for column in reduced.is_edge.T]
    for op, is_spread in order:
        ready = max((ended[other] for other in before[op]), default=0.0)
        core = -1 if is_spread else cores.best_core(op, ready)
        start = cores.spread_start(op, ready) if is_spread else cores.start_on(op, ready, core)
        ended[op] = start + float((reduced.spread_s if is_spread else reduced.latency_s)[op])
        cores.hold(op, core, ended[op], is_spread=is_spread)
        steps.append(Step(op, is_spread, core))
    return steps


def _own_core(reduced: Reduced, op: int, following: tuple[dict[bool, int], dict[bool, int]]) -> int:
    """A core that no other op has: pairs first, the others behind them."""
    if reduced.is_off_core[op]:
        return -1
    is_both, side = bool(reduced.is_both[op]), following[0 if reduced.uses_tensor[op] else 1]
    core = side[is_both]
    side[is_both] += 1
    return core
