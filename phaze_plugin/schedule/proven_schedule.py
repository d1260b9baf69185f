"""A schedule as an answer: what it claims, how busy it keeps each resource, and the check of it against every rule.

`Schedule` says when and where each job runs, the makespan, the proven bound, and the gap between them.

How busy it keeps the tensor cores, the vector cores and the link is its `utilization`; `exposed_link_s` is how long it
only waits for the link.

    peak     the most cores that are busy at one time, as a share of all cores of that resource
    average  the core-seconds that are busy, as a share of cores x makespan

A job that is spread keeps all cores of its resource busy, and a job that holds both keeps cores of both busy. Cores
that an exclusive job keeps others from using count as idle.

The check (`breaches`, `verify_schedule`) trusts nothing that a method did:

    every job once, for as long as its mode takes            `_interval_breaches`
    rule 1, precedence                                       `_precedence_breaches`
    cores that exist and pairs that match (rule 2)           `_core_breaches`
    rules 2, 3 and 4: what may not run at the same time      `_overlap_breaches`
    the claimed makespan and bound                           `_claim_breaches`

Times are compared with a tolerance relative to the makespan: starts are sums of latencies, and sums round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

from phaze.errors import ScheduleError
from phaze.schedule.scheduling_problem import Resource, SchedulingProblem
from phaze.tolerances import EQUAL_RESULTS

__all__ = [
    "Schedule",
    "ScheduleStatus",
    "ScheduledJob",
    "Utilization",
    "breaches",
    "exposed_link_s",
    "infeasible_schedule",
    "status_of",
    "utilization",
    "verify_schedule",
]


class ScheduleStatus(StrEnum):
    """What is proven about a schedule."""

    OPTIMAL = "optimal"
    WITHIN_GAP = "within_gap"
    LIMIT = "limit"  # the work limit ended the proof; the schedule and its bound still hold
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledJob:
    """One job's interval. A spread job has no core numbers; a `both` job has the same number twice."""

    job: int
    start_s: float
    end_s: float
    is_spread: bool = False
    tensor_core: int | None = None
    vector_core: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The answer to a problem; `jobs` are in the order of the problem's jobs, and empty if it is infeasible.

    `bound_s` is a proven lower bound on the makespan of every schedule. `work` counts the method's deterministic steps
    and `report` says in words what happened.
    """

    problem: SchedulingProblem
    jobs: tuple[ScheduledJob, ...]
    makespan_s: float
    bound_s: float
    status: ScheduleStatus
    method: str
    work: float = 0.0
    report: str = ""

    @property
    def is_feasible(self) -> bool:
        """Whether there is a schedule at all."""
        return self.status is not ScheduleStatus.INFEASIBLE

    @property
    def time_s(self) -> float:
        """The layer's time: the makespan, or what the memory needs if that is longer."""
        return max(self.makespan_s, self.problem.floor_s)

    @property
    def time_bound_s(self) -> float:
        """A proven lower bound on the layer's time."""
        return max(self.bound_s, self.problem.floor_s)

    @property
    def gap(self) -> float:
        """(time - bound) / time: how far the layer's time may be from the best; 0 if proven, infinite if infeasible."""
        return relative_gap(self.time_s, self.time_bound_s)

    @property
    def energy_j(self) -> float:
        """The sum of the jobs' energies, each as it runs: on one core or spread."""
        pairs = zip(self.problem.jobs, self.jobs, strict=False)
        return math.fsum(job.spread_energy_j if entry.is_spread else job.energy_j for job, entry in pairs)

    def of(self, problem: SchedulingProblem) -> Schedule:
        """The same schedule as the answer to an equal problem whose jobs have other names or energies."""
        return replace(self, problem=problem)


def relative_gap(time_s: float, bound_s: float) -> float:
    """(time - bound) / time, 0 where both are 0."""
    if math.isinf(time_s):
        return math.inf
    return max(0.0, (time_s - bound_s) / time_s) if time_s > 0.0 else 0.0


def status_of(time_s: float, bound_s: float, gap: float) -> ScheduleStatus:
    """The status that a time and its bound deserve."""
    reached = relative_gap(time_s, bound_s)
    if reached <= EQUAL_RESULTS:
        return ScheduleStatus.OPTIMAL
    return ScheduleStatus.WITHIN_GAP if reached <= gap + EQUAL_RESULTS else ScheduleStatus.LIMIT


def infeasible_schedule(problem: SchedulingProblem, reason: str, method: str) -> Schedule:
    """The answer to a problem without schedules."""
    return Schedule(
        problem=problem,
        jobs=(),
        makespan_s=math.inf,
        bound_s=math.inf,
        status=ScheduleStatus.INFEASIBLE,
        method=method,
        report=reason,
    )


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


_LISTED = 5
"""Breaches that an error lists: enough to see what is wrong, few enough to be read."""


def verify_schedule(schedule: Schedule) -> Schedule:
    """The schedule itself if it keeps every rule; else ScheduleError lists the first breaches."""
    first_breaches = list(islice(breaches(schedule), _LISTED))
    if first_breaches:
        raise ScheduleError(
            f"{schedule.problem.name}: the {schedule.method} schedule breaks its problem: {'; '.join(first_breaches)}. "
            "Report this with the problem: a method must never return such a schedule."
        )
    return schedule


def breaches(schedule: Schedule) -> Iterator[str]:
    """Every rule that the schedule breaks, in words; nothing for a valid one."""
    problem = schedule.problem
    if not schedule.is_feasible:
        yield from (["an infeasible answer carries ops"] if schedule.jobs else [])
        return
    numbers = [entry.job for entry in schedule.jobs]
    if numbers != list(range(len(problem.jobs))):
        yield f"ops are {numbers}, not each of 0..{len(problem.jobs) - 1} once and in order"
        return
    slack = EQUAL_RESULTS * max(schedule.makespan_s, 0.0) if math.isfinite(schedule.makespan_s) else 0.0
    yield from _interval_breaches(schedule, slack)
    yield from _precedence_breaches(schedule, slack)
    yield from _core_breaches(schedule)
    yield from _overlap_breaches(schedule, slack)
    yield from _claim_breaches(schedule, slack)


def _interval_breaches(schedule: Schedule, slack: float) -> Iterator[str]:
    """Jobs that run at no time, before 0, in a mode that they cannot have, or not for as long as their mode takes."""
    problem = schedule.problem
    for entry, job, resource in zip(schedule.jobs, problem.jobs, problem.resources, strict=True):
        if not (math.isfinite(entry.start_s) and math.isfinite(entry.end_s)):
            yield f"{job.name!r} runs from {entry.start_s} to {entry.end_s}"
        elif entry.start_s < -slack:
            yield f"{job.name!r} starts before 0, at {entry.start_s}"
        if entry.is_spread and resource in (Resource.NONE, Resource.LINK):
            yield f"{job.name!r} is spread, which a {resource} op cannot be"
        expected = job.spread_s if entry.is_spread else job.latency_s
        if not abs(entry.end_s - entry.start_s - expected) <= slack:
            mode = "spread" if entry.is_spread else "on one core"
            yield f"{job.name!r} takes {entry.end_s - entry.start_s} s, but {expected} s {mode}"


def _precedence_breaches(schedule: Schedule, slack: float) -> Iterator[str]:
    """Jobs that start before a predecessor ends."""
    jobs, problem = schedule.jobs, schedule.problem
    for before, after in problem.edges:
        if jobs[after].start_s < jobs[before].end_s - slack:
            names = f"{problem.jobs[after].name!r} starts before its predecessor {problem.jobs[before].name!r} ends"
            yield f"{names} ({jobs[after].start_s} < {jobs[before].end_s})"


def _core_breaches(schedule: Schedule) -> Iterator[str]:
    """Jobs on cores that are missing, not theirs, or no matched pair."""
    problem = schedule.problem
    for entry, job, resource in zip(schedule.jobs, problem.jobs, problem.resources, strict=True):
        for needed, core, cores, what in (
            (resource.uses_tensor, entry.tensor_core, problem.tensor_cores, "tensor"),
            (resource.uses_vector, entry.vector_core, problem.vector_cores, "vector"),
        ):
            if needed and cores == 0:
                yield f"{job.name!r} needs a {what} core and there is none"
            if needed and not entry.is_spread and not (core is not None and 0 <= core < cores):
                yield f"{job.name!r} is on {what} core {core}; there are {cores}"
            if core is not None and (entry.is_spread or not needed):
                yield f"{job.name!r} names {what} core {core}, which it does not hold alone"
        if resource is Resource.BOTH and entry.tensor_core != entry.vector_core:
            yield f"{job.name!r} is on tensor core {entry.tensor_core} and vector core {entry.vector_core}, not a pair"


def _overlap_breaches(schedule: Schedule, slack: float) -> Iterator[str]:
    """Pairs of jobs that run at the same time and may not."""
    problem, resources = schedule.problem, schedule.problem.resources
    by_start = sorted(schedule.jobs, key=lambda entry: (entry.start_s, entry.job))
    for position, early in enumerate(by_start):
        for late in islice(by_start, position + 1, None):
            if late.start_s >= early.end_s - slack:
                break  # and so do all that start later
            together = min(early.end_s, late.end_s) - late.start_s
            if together > slack and _exclude(problem, resources, early, late):
                names = " and ".join(repr(problem.jobs[job].name) for job in sorted((early.job, late.job)))
                yield f"{names} overlap by {together} s and may not"


def _exclude(
    problem: SchedulingProblem, resources: tuple[Resource, ...], first: ScheduledJob, second: ScheduledJob
) -> bool:
    """Whether two jobs may not run at the same time, as they are scheduled."""
    first_resource, second_resource = resources[first.job], resources[second.job]
    if Resource.NONE in (first_resource, second_resource):
        return False
    if Resource.LINK in (first_resource, second_resource):
        return first_resource is second_resource
    shares_tensor = first_resource.uses_tensor and second_resource.uses_tensor
    shares_vector = first_resource.uses_vector and second_resource.uses_vector
    if first.is_spread or second.is_spread:
        return problem.intra_op_exclusive or shares_tensor or shares_vector
    same_tensor = shares_tensor and first.tensor_core == second.tensor_core
    return same_tensor or (shares_vector and first.vector_core == second.vector_core)


def _claim_breaches(schedule: Schedule, slack: float) -> Iterator[str]:
    """A makespan that is not the last end, or a bound above it."""
    last = max((entry.end_s for entry in schedule.jobs), default=0.0)
    if not abs(last - schedule.makespan_s) <= slack:
        yield f"the makespan is claimed as {schedule.makespan_s}, but the last op ends at {last}"
    if not schedule.bound_s <= schedule.makespan_s + slack:
        yield f"the bound {schedule.bound_s} exceeds the makespan {schedule.makespan_s}"
