"""How busy a schedule keeps the tensor cores, the vector cores and the link, and how long it only waits for the link.

    peak     the most cores that are busy at one time, as a share of all cores of that resource
    average  the core-seconds that are busy, as a share of cores x makespan

A job that is spread keeps all cores of its resource busy, and a job that holds both keeps cores of both busy. Cores
that an exclusive job keeps others from using count as idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from phaze.schedule.proven_schedule import Schedule
from phaze.schedule.scheduling_problem import Resource

__all__ = ["Utilization", "exposed_link_s", "utilization"]


@dataclass(frozen=True, slots=True)
class Utilization:
    """How much of one resource is used, as shares between 0 and 1."""

    peak: float
    average: float


def utilization(schedule: Schedule) -> dict[Resource, Utilization]:
    """The utilisation of the tensor cores, the vector cores and the link."""
    problem = schedule.problem
    units = {Resource.TENSOR: problem.tensor_cores, Resource.VECTOR: problem.vector_cores, Resource.LINK: 1}
    return {resource: _utilization_of(schedule, resource, count) for resource, count in units.items()}


def _utilization_of(schedule: Schedule, resource: Resource, count: int) -> Utilization:
    """The utilisation of one resource, of which there are `count` cores (or one link)."""
    changes: list[tuple[float, int]] = []
    for entry, held in zip(schedule.jobs, schedule.problem.resources, strict=False):
        if held is resource or (held is Resource.BOTH and resource is not Resource.LINK):
            cores = count if entry.is_spread else 1
            changes += [(entry.start_s, cores), (entry.end_s, -cores)]
    busy, peak, core_seconds, previous_s = 0, 0, 0.0, 0.0
    for time_s, change in sorted(changes):  # at equal times the negative changes, the ends, come first
        core_seconds += busy * (time_s - previous_s)
        busy, previous_s = busy + change, time_s
        peak = max(peak, busy)
    if not count or schedule.makespan_s <= 0.0 or not schedule.is_feasible:
        return Utilization(0.0, 0.0)
    return Utilization(peak / count, core_seconds / (count * schedule.makespan_s))


def exposed_link_s(schedule: Schedule) -> float:
    """The seconds in which a collective runs and no core does, which no computation hides.

    Where the layer waits for memory longer than its makespan, that waiting hides them too.
    """
    link_intervals: list[tuple[float, float]] = []
    core_intervals: list[tuple[float, float]] = []
    for entry, resource in zip(schedule.jobs, schedule.problem.resources, strict=False):
        if resource is not Resource.NONE and entry.end_s > entry.start_s:
            intervals = link_intervals if resource is Resource.LINK else core_intervals
            intervals.append((entry.start_s, entry.end_s))
    link_only_s = _covered_s(link_intervals + core_intervals) - _covered_s(core_intervals)
    return max(0.0, link_only_s - (schedule.time_s - schedule.makespan_s))


def _covered_s(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total_s, reached_s = 0.0, float("-inf")
    for start_s, end_s in sorted(intervals):
        total_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s
