"""Check a claimed schedule against every rule of its problem, trusting nothing that a method did.

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
from itertools import islice

from phaze.errors import ScheduleError
from phaze.schedule.proven_schedule import Schedule, ScheduledJob
from phaze.schedule.scheduling_problem import Resource, SchedulingProblem
from phaze.tolerances import EQUAL_RESULTS

__all__ = ["breaches", "verify_schedule"]

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
