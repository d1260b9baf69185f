"""A quick good schedule: ops are placed one by one, spread or on one core by a rule; the best of several rules counts.

A rule spreads the ops whose spread time is at most a given share of their latency. Each rule is tried with two orders:
the op that can start first, or the op with the longest way to the end. Ops are appended: an op starts no earlier than
its predecessors' ends and the last end on its cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phaze.schedule.cores import Cores, Placed, makespan
from phaze.schedule.reduce import FloatArray, Reduced

__all__ = ["list_schedule", "place_in_order", "tails"]

_SHARES = (0.0, 0.1, 0.3, 0.55, 0.7, 0.9, 1.0)


def list_schedule(reduced: Reduced) -> tuple[Placed, ...]:
    """The best schedule that the rules give."""
    share = reduced.spread_s / reduced.latency_s
    choices = {tuple((share <= limit).tolist()) for limit in _SHARES}
    priority = tails(reduced).tolist()
    tried = [
        place_in_order(reduced, spread, priority, is_first_come=first_come)
        for spread in sorted(choices)
        for first_come in (True, False)
    ]
    return min(tried, key=makespan)


def tails(reduced: Reduced) -> FloatArray:
    """For each op the least time from its start to the end of the schedule, by precedence alone."""
    tail = reduced.shortest_s.copy()
    for op in range(reduced.count - 1, -1, -1):
        later = tail[reduced.is_before[op]]
        tail[op] += later.max() if later.size else 0.0
    return tail


def place_in_order(
    reduced: Reduced, spread: Sequence[bool], priority: Sequence[float], *, is_first_come: bool
) -> tuple[Placed, ...]:
    """Place all ops; `spread` says which are spread, `priority` which goes first (the larger)."""
    cores, edges = Cores(reduced), reduced.is_edge
    after = [np.flatnonzero(row).tolist() for row in edges]
    waiting, ready_s = edges.sum(axis=0).tolist(), [0.0] * reduced.count
    latency = np.where(spread, reduced.spread_s, reduced.latency_s).tolist()
    eligible = [op for op, count in enumerate(waiting) if count == 0]
    placed: list[Placed] = []
    while eligible:
        start, core, op = _next_op(cores, eligible, ready_s, spread, priority, is_first_come)
        end = start + latency[op]
        cores.hold(op, core, end, is_spread=spread[op])
        placed.append(Placed(op, start, end, spread[op], core))
        eligible.remove(op)
        for later in after[op]:
            ready_s[later] = max(ready_s[later], end)
            waiting[later] -= 1
            if waiting[later] == 0:
                eligible.append(later)
    return tuple(placed)


def _next_op(
    cores: Cores,
    eligible: Sequence[int],
    ready_s: Sequence[float],
    spread: Sequence[bool],
    priority: Sequence[float],
    is_first_come: bool,
) -> tuple[float, int, int]:
    """The start, core and op to place next."""
    if not is_first_come:
        eligible = [max(eligible, key=lambda op: (priority[op], -op))]
    found = []
    for op in eligible:
        core = -1 if spread[op] else cores.best_core(op, ready_s[op])
        start = cores.spread_start(op, ready_s[op]) if spread[op] else cores.start_on(op, ready_s[op], core)
        found.append((start, -priority[op], op, core))
    start, _, op, core = min(found)
    return start, core, op
