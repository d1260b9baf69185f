"""How full a schedule keeps the cores of each kind, and the link.

    peak     the most cores busy at one time, over all cores of the kind
    average  core-seconds busy over cores x makespan

A spread op keeps all cores of its kind busy, a both op cores of both kinds. Excluded cores are idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from phaze.schedule.problem import OpKind
from phaze.schedule.result import Schedule

__all__ = ["Utilization", "utilization"]


@dataclass(frozen=True, slots=True)
class Utilization:
    """Shares between 0 and 1."""

    peak: float
    average: float


def utilization(schedule: Schedule) -> dict[OpKind, Utilization]:
    """For tensor cores, vector cores and the link."""
    problem = schedule.problem
    resources = {OpKind.TENSOR: problem.tensor_cores, OpKind.VECTOR: problem.vector_cores, OpKind.LINK: 1}
    return {kind: _of_kind(schedule, kind, count) for kind, count in resources.items()}


def _of_kind(schedule: Schedule, kind: OpKind, count: int) -> Utilization:
    changes: list[tuple[float, int]] = []
    for entry, own in zip(schedule.ops, schedule.problem.kinds, strict=False):
        if own is kind or (own is OpKind.BOTH and kind is not OpKind.LINK):
            held = count if entry.is_spread else 1
            changes += [(entry.start_s, held), (entry.end_s, -held)]
    busy, peak, core_seconds, before = 0, 0, 0.0, 0.0
    for at, change in sorted(changes):  # ends before starts
        core_seconds += busy * (at - before)
        busy, before = busy + change, at
        peak = max(peak, busy)
    if not count or schedule.makespan_s <= 0.0 or not schedule.is_feasible:
        return Utilization(0.0, 0.0)
    return Utilization(peak / count, core_seconds / (count * schedule.makespan_s))
