"""Which method schedules a layer: the smallest one that suffices for the requested gap, within a work limit.

 1. The problem is reduced and cut into independent segments (`reduce_problem`, `segments`). Each gets a list schedule
    and a closed-form bound (`_first_answer`). If memory alone decides the layer's time, or the bounds meet the list
    schedules within the gap, nothing is searched (`_is_proven`).
 2. Otherwise segments are searched one after another, the one with the largest gap first, until the whole is within the
    gap: by the exact method (`_search_exactly`), or, if a solver was named, by the paper's integer program on that
    solver (`_search_by_solver`).
 3. The methods `cp-sat` and `milp` take the whole problem instead, trusting neither segments nor closed-form bounds, so
    that they check the exact method independently (`_whole_by_cp_sat`, `_whole_by_milp`).

Every answer is verified against all rules before it is returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from phaze.schedule.cp_sat_model import solve_cp_sat
from phaze.schedule.exact_search import search_exact
from phaze.schedule.list_scheduling import Placed, list_schedule, makespan, spread_one_by_one
from phaze.schedule.makespan_bounds import best_bound_s, spreading_is_best
from phaze.schedule.paper_ilp import solve_milp
from phaze.schedule.proven_schedule import (
    Schedule,
    ScheduledJob,
    infeasible_schedule,
    relative_gap,
    status_of,
    verify_schedule,
)
from phaze.schedule.scheduling_problem import (
    Job,
    ReducedProblem,
    Resource,
    SchedulingProblem,
    infeasibility,
    reduce_problem,
    segments,
    topological_order,
)
from phaze.solvers import AUTOMATIC_SOLVERS, SolverChain, WorkLimits
from phaze.tolerances import EQUAL_RESULTS

__all__ = ["DEFAULT_WORK", "Method", "ScheduleCache", "schedule_layer"]

DEFAULT_WORK = 1_000_000
"""Extensions of partial schedules that the exact method looks at before it keeps the gap that it has: a few seconds."""

EXTENSIONS_PER_SOLVER_WORK = 200_000
"""How many extensions count as one unit of a solver's work, so that naming a solver leaves a work limit as long.

Both are roughly a second of one core.
"""


class Method(StrEnum):
    """How to schedule.

    `AUTO` is the list schedule where that is proven good enough; otherwise the exact method, or the paper's integer
    program on the solver that was named.
    """

    AUTO = "auto"
    LIST = "list"
    EXACT = "exact"
    CP_SAT = "cp-sat"
    MILP = "milp"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Everything that a schedule depends on beside the problem."""

    gap: float
    work: float | None
    method: Method
    solver: SolverChain | None

    @property
    def extensions(self) -> int:
        """The work limit of the exact method."""
        return int(DEFAULT_WORK if self.work is None else self.work)


@dataclass(slots=True)
class ScheduleCache:
    """Schedules of this run by the content of the problem and the question; the caller owns it."""

    schedules: dict[tuple[str, float, float | None, str, str], Schedule] = field(default_factory=dict)


@dataclass(slots=True)
class _Segment:
    """A segment with its best schedule so far and its bound."""

    reduced: ReducedProblem
    placed: tuple[Placed, ...]
    bound_s: float

    @property
    def gap_s(self) -> float:
        return max(0.0, makespan(self.placed) - self.bound_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """What a method claims: where each job is placed, by its index in the problem, and what it proved."""

    placed: dict[int, Placed]
    bound_s: float
    method: str
    work: float = 0.0
    report: str = ""


def schedule_layer(
    problem: SchedulingProblem,
    *,
    gap: float = 0.01,
    work: float | None = None,
    method: Method | str = Method.AUTO,
    solver: SolverChain | None = None,
    cache: ScheduleCache | None = None,
) -> Schedule:
    """A verified schedule with its bound, within the relative `gap` (0: optimal) unless `work` runs out.

    `solver` makes the paper's integer program on that solver the method of `auto`, and is the solver of `milp` (None:
    automatic). `work` is in the method's own unit: extensions for `auto` and `exact` (DEFAULT_WORK if None),
    deterministic seconds for `cp-sat`, the solver's work for `milp` (no limit if None).

    Raises ValueError on a bad gap, an unknown method, or a solver with a method that uses none.
    """
    question = _checked_question(gap, work, method, solver)
    content = problem.key()
    key = (content, gap, work, question.method.value, "" if solver is None else solver.name)
    if cache is not None and key in cache.schedules:
        return cache.schedules[key].of(problem)
    if cache is not None and question.method is Method.AUTO:
        listed = cache.schedules.get((content, gap, work, Method.LIST.value, ""))
        if listed is not None and listed.gap <= gap + EQUAL_RESULTS:  # what `auto` would find out again
            return listed.of(problem)
    schedule = verify_schedule(_schedule(problem, question))
    if cache is not None:
        cache.schedules[key] = schedule
    return schedule


def _checked_question(gap: float, work: float | None, method: Method | str, solver: SolverChain | None) -> _Question:
    if not 0.0 <= gap < 1.0:
        raise ValueError(f"gap is {gap}; expected at least 0 and less than 1, such as 0.01")
    method = Method(method)
    if solver is not None and method not in (Method.AUTO, Method.MILP):
        raise ValueError(f"solver {solver.name!r} with method {method.value!r}: only auto and milp use a linear solver")
    return _Question(gap=gap, work=work, method=method, solver=solver)


def _schedule(problem: SchedulingProblem, question: _Question) -> Schedule:
    reason = infeasibility(problem)
    if reason is not None:
        return infeasible_schedule(problem, reason, question.method.value)
    reduced = reduce_problem(problem)
    parts = [_first_answer(segment) for segment in segments(reduced)]
    if question.method is Method.CP_SAT and reduced.count:
        claim = _whole_by_cp_sat(reduced, parts, question)
    elif question.method is Method.MILP and reduced.count:
        claim = _whole_by_milp(reduced, parts, question)
    elif question.method is Method.LIST or _is_proven(problem, parts, question.gap):
        claim = _joined_claim(parts, Method.LIST.value)
    elif question.method is Method.AUTO and question.solver is not None:
        claim = _search_by_solver(problem, parts, question, question.solver)
    else:
        claim = _search_exactly(problem, parts, question)
    return _answer(problem, claim, question.gap)


def _first_answer(segment: ReducedProblem) -> _Segment:
    """The list schedule and the closed-form bound of a segment.

    A lone job is its own optimum, and so are all jobs one after another, each spread, where nothing beats that.
    """
    if spreading_is_best(segment):
        placed = spread_one_by_one(segment)
        return _Segment(segment, placed, makespan(placed))
    placed = list_schedule(segment)
    length_s = makespan(placed)
    return _Segment(segment, placed, length_s if segment.count == 1 else min(best_bound_s(segment, length_s), length_s))


def _is_proven(problem: SchedulingProblem, parts: Sequence[_Segment], gap: float) -> bool:
    """Whether the layer's time, makespan or memory, is within the gap of its bound."""
    time_s = max(math.fsum(makespan(part.placed) for part in parts), problem.floor_s)
    bound_s = max(math.fsum(part.bound_s for part in parts), problem.floor_s)
    return relative_gap(time_s, bound_s) <= gap + EQUAL_RESULTS


def _search_exactly(problem: SchedulingProblem, parts: list[_Segment], question: _Question) -> _Claim:
    """Search segments by the exact method, the largest gap first, each as far as the others' gaps leave room."""
    gap, spent = question.gap, 0
    for part in sorted(parts, key=lambda part: -part.gap_s):
        if _is_proven(problem, parts, gap) or spent >= question.extensions:
            break
        others = [segment for segment in parts if segment is not part]
        spare_s = math.fsum(gap * makespan(segment.placed) - segment.gap_s for segment in others)
        enough_s = problem.floor_s - math.fsum(makespan(segment.placed) for segment in others)
        outcome = search_exact(
            part.reduced,
            part.placed,
            gap=gap,
            spare_s=spare_s,
            enough_s=enough_s,
            work=question.extensions - spent,
        )
        part.placed, part.bound_s = outcome.placed, max(part.bound_s, outcome.bound_s)
        spent += outcome.work
    return _joined_claim(parts, Method.EXACT.value, spent)


def _search_by_solver(
    problem: SchedulingProblem, parts: list[_Segment], question: _Question, solver: SolverChain
) -> _Claim:
    """Search segments by the paper's integer program, the largest gap first, until the whole is within the gap.

    The work limit holds for each segment, since solvers count their work in different units.
    """
    limits = WorkLimits(relative_gap=question.gap, work=question.extensions / EXTENSIONS_PER_SOLVER_WORK)
    reports = []
    for part in sorted(parts, key=lambda part: -part.gap_s):
        if _is_proven(problem, parts, question.gap):
            break
        outcome = solve_milp(part.reduced, part.placed, limits=limits, solver=solver)
        part.placed, part.bound_s = outcome.placed, max(part.bound_s, outcome.bound_s)
        reports.append(outcome.report)
    names = " and ".join(dict.fromkeys(report.solver for report in reports))
    told = "; ".join(dict.fromkeys(str(report) for report in reports))
    return _joined_claim(parts, f"{Method.MILP.value} on {names}", math.fsum(report.work for report in reports), told)


def _whole_by_cp_sat(reduced: ReducedProblem, parts: Sequence[_Segment], question: _Question) -> _Claim:
    """The whole problem on CP-SAT, from the list schedules."""
    outcome = solve_cp_sat(reduced, _merged(reduced, parts), gap=question.gap, work=question.work)
    placed = _by_index(reduced, outcome.placed)
    return _Claim(placed=placed, bound_s=outcome.bound_s, method=Method.CP_SAT.value, work=outcome.work)


def _whole_by_milp(reduced: ReducedProblem, parts: Sequence[_Segment], question: _Question) -> _Claim:
    """The whole problem as the paper's integer program, from the list schedules."""
    limits = WorkLimits(relative_gap=question.gap, work=question.work)
    outcome = solve_milp(reduced, _merged(reduced, parts), limits=limits, solver=question.solver or AUTOMATIC_SOLVERS)
    return _Claim(
        placed=_by_index(reduced, outcome.placed),
        bound_s=outcome.bound_s,
        method=f"{Method.MILP.value} on {outcome.report.solver}",
        work=outcome.report.work,
        report=str(outcome.report),
    )


def _by_index(reduced: ReducedProblem, placed: Sequence[Placed]) -> dict[int, Placed]:
    """Placed jobs by their index in the problem."""
    return {int(reduced.index[job.position]): job for job in placed}


def _joined(parts: Sequence[_Segment]) -> dict[int, Placed]:
    """The segments' schedules one after another, by index in the problem."""
    joined, offset_s = {}, 0.0
    for part in parts:
        for index, job in _by_index(part.reduced, part.placed).items():
            joined[index] = replace(job, start_s=job.start_s + offset_s, end_s=job.end_s + offset_s)
        offset_s += makespan(part.placed)
    return joined


def _merged(reduced: ReducedProblem, parts: Sequence[_Segment]) -> tuple[Placed, ...]:
    """The segments' schedules one after another, in the positions of the whole reduced problem."""
    position = {int(index): place for place, index in enumerate(reduced.index)}
    return tuple(replace(job, position=position[index]) for index, job in _joined(parts).items())


def _joined_claim(parts: Sequence[_Segment], method: str, work: float = 0, report: str = "") -> _Claim:
    """The segments' schedules one after another, their bounds added up."""
    bound_s = math.fsum(part.bound_s for part in parts)
    return _Claim(placed=_joined(parts), bound_s=bound_s, method=method, work=work, report=report)


def _answer(problem: SchedulingProblem, claim: _Claim, gap: float) -> Schedule:
    """The schedule of all jobs in the problem's order, with the status that its bound deserves."""
    jobs: dict[int, ScheduledJob] = {}
    resources, predecessors = problem.resources, problem.predecessors
    for index in topological_order(problem):
        ready_s = max((jobs[before].end_s for before in predecessors[index]), default=0.0)
        jobs[index] = _scheduled_job(problem.jobs[index], index, resources[index], claim.placed.get(index), ready_s)
    makespan_s = max((job.end_s for job in jobs.values()), default=0.0)
    bound_s = min(claim.bound_s, makespan_s)
    floor_s = problem.floor_s
    return Schedule(
        problem=problem,
        jobs=tuple(jobs[index] for index in range(len(problem.jobs))),
        makespan_s=makespan_s,
        bound_s=bound_s,
        status=status_of(max(makespan_s, floor_s), max(bound_s, floor_s), gap),
        method=claim.method,
        work=claim.work,
        report=claim.report,
    )


def _scheduled_job(job: Job, index: int, resource: Resource, placed: Placed | None, ready_s: float) -> ScheduledJob:
    """One job as it was placed; a job that takes no time was not, and starts when its predecessors have ended."""
    if placed is not None:
        start_s, end_s, is_spread, core = placed.start_s, placed.end_s, placed.is_spread, placed.core
    else:
        start_s = ready_s
        # a job of no time whose one-core latency is positive takes no time only if it is spread
        is_spread = resource not in (Resource.NONE, Resource.LINK) and job.latency_s > 0.0
        end_s, core = start_s, 0
    return ScheduledJob(
        job=index,
        start_s=start_s,
        end_s=end_s,
        is_spread=is_spread,
        tensor_core=core if resource.uses_tensor and not is_spread else None,
        vector_core=core if resource.uses_vector and not is_spread else None,
    )
