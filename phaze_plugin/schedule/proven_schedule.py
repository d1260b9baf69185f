"""A schedule as an answer: when and where each job runs, the makespan, the proven bound, and the gap between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from phaze.schedule.scheduling_problem import SchedulingProblem
from phaze.tolerances import EQUAL_RESULTS

__all__ = ["Schedule", "ScheduleStatus", "ScheduledJob", "infeasible_schedule", "status_of"]


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
