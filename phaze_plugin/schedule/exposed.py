"""How long a schedule has nothing to do but wait for the link."""

from __future__ import annotations

from phaze.schedule.problem import OpKind
from phaze.schedule.result import Schedule

__all__ = ["exposed_link_s"]


def exposed_link_s(schedule: Schedule) -> float:
    """Seconds in which a link op runs and no core does, as far as waiting for memory does not hide them."""
    links: list[tuple[float, float]] = []
    cores: list[tuple[float, float]] = []
    for entry, kind in zip(schedule.ops, schedule.problem.kinds, strict=False):
        if kind is not OpKind.NONE and entry.end_s > entry.start_s:
            (links if kind is OpKind.LINK else cores).append((entry.start_s, entry.end_s))
    alone = _covered(links + cores) - _covered(cores)
    return max(0.0, alone - (schedule.time_s - schedule.makespan_s))


def _covered(intervals: list[tuple[float, float]]) -> float:
    """The length of a union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
