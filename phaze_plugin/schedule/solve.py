"""Schedule a layer: the smallest sufficient method first, to the requested gap or a deterministic work limit.

A problem that memory alone decides, or whose bound meets the list schedule, needs no search. Otherwise its segments are
searched one by one, the one with the largest gap first, until the whole is within the gap. Every answer is verified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from phaze.schedule.bounds import rates
from phaze.schedule.cores import Placed, makespan
from phaze.schedule.cp_sat import solve_cp_sat
from phaze.schedule.frontier import search_frontier
from phaze.schedule.list_schedule import list_schedule
from phaze.schedule.milp import solve_milp
from phaze.schedule.problem import OpKind, Problem, infeasibility, topological_order
from phaze.schedule.reduce import Reduced, reduce_problem, segments
from phaze.schedule.result import PROVEN, Schedule, ScheduledOp, infeasible_schedule, relative_gap, status_of
from phaze.schedule.verify import verify
from phaze.solvers import BUILT_IN_SOLVERS, LinearSolver, WorkLimits

__all__ = ["DEFAULT_WORK", "Method", "ScheduleCache", "schedule_layer"]

DEFAULT_WORK = 1_000_000
"""Moves that the default method may look at: a few seconds."""


class Method(StrEnum):
    """How to schedule. `AUTO` is the list schedule where that is proven good enough, else the frontier search."""

    AUTO = "auto"
    LIST = "list"
    FRONTIER = "frontier"
    CP_SAT = "cp-sat"
    MILP = "milp"


@dataclass(slots=True)
class ScheduleCache:
    """Schedules already found, by the content of the problem and the question. The caller owns it, for one run."""

    found: dict[tuple[str, float, float | None, str, str, int], Schedule] = field(default_factory=dict)


@dataclass(slots=True)
class _Part:
    """A segment with its incumbent and bound."""

    reduced: Reduced
    placed: tuple[Placed, ...]
    bound_s: float

    @property
    def gap_s(self) -> float:
        return max(0.0, makespan(self.placed) - self.bound_s)


def schedule_layer(
    problem: Problem,
    *,
    gap: float = 0.01,
    work: float | None = None,
    method: Method | str = Method.AUTO,
    solver: str = "highs",
    solvers: Sequence[LinearSolver] = BUILT_IN_SOLVERS,
    seed: int = 0,
    cache: ScheduleCache | None = None,
) -> Schedule:
    """A verified schedule with its bound, within the relative `gap` (0: optimal) unless `work` runs out.

    `work` is in the method's own unit: moves for the frontier (DEFAULT_WORK if None), deterministic seconds for
    CP-SAT, the linear solver's work for the MILP on `solver` (no limit if None). Raises ValueError on a bad gap or
    method.
    """
    if not 0.0 <= gap < 1.0:
        raise ValueError(f"gap is {gap}; expected at least 0 and less than 1, such as 0.01")
    method = Method(method)
    key = (problem.key(), gap, work, method.value, solver, seed)
    if cache is not None and key in cache.found:
        return cache.found[key].of(problem)
    schedule = verify(_schedule(problem, gap, work, method, solver, tuple(solvers), seed))
    if cache is not None:
        cache.found[key] = schedule
    return schedule


def _schedule(
    problem: Problem,
    gap: float,
    work: float | None,
    method: Method,
    solver: str,
    solvers: tuple[LinearSolver, ...],
    seed: int,
) -> Schedule:
    reason = infeasibility(problem)
    if reason is not None:
        return infeasible_schedule(problem, reason, method.value)
    reduced = reduce_problem(problem)
    parts = [_first(part) for part in segments(reduced)]
    if method in (Method.CP_SAT, Method.MILP) and reduced.count:
        return _by_solver(problem, reduced, parts, gap, work, method, solver, solvers, seed)
    used, spent = Method.LIST, 0
    if method is not Method.LIST and not _is_done(problem, parts, gap):
        used = Method.FRONTIER
        spent = _search(problem, parts, gap, int(DEFAULT_WORK if work is None else work))
    bound = math.fsum(part.bound_s for part in parts)
    return _answer(problem, _joined(parts), bound, gap, used.value, spent, "")


def _first(part: Reduced) -> _Part:
    """The list schedule and the bound without search. A lone op is its own optimum."""
    placed = list_schedule(part)
    if part.count == 1:
        return _Part(part, placed, makespan(placed))
    return _Part(part, placed, min(float(rates(part).bounds_s.max()), makespan(placed)))


def _is_done(problem: Problem, parts: Sequence[_Part], gap: float) -> bool:
    """Whether the layer's time, makespan or memory, is within the gap of its bound."""
    time = max(math.fsum(makespan(part.placed) for part in parts), problem.floor_s)
    bound = max(math.fsum(part.bound_s for part in parts), problem.floor_s)
    return relative_gap(time, bound) <= gap + PROVEN


def _search(problem: Problem, parts: list[_Part], gap: float, work: int) -> int:
    """Search segments, the largest gap first, each as far as the others' gaps leave room; the work spent."""
    spent = 0
    for part in sorted(parts, key=lambda part: -part.gap_s):
        if _is_done(problem, parts, gap) or spent >= work:
            break
        others = [other for other in parts if other is not part]
        spare_s = math.fsum(gap * makespan(other.placed) - other.gap_s for other in others)
        enough_s = problem.floor_s - math.fsum(makespan(other.placed) for other in others)
        outcome = search_frontier(
            part.reduced, part.placed, gap=gap, spare_s=spare_s, enough_s=enough_s, work=work - spent
        )
        part.placed, part.bound_s = outcome.placed, max(part.bound_s, outcome.bound_s)
        spent += outcome.work
    return spent


def _by_solver(
    problem: Problem,
    reduced: Reduced,
    parts: Sequence[_Part],
    gap: float,
    work: float | None,
    method: Method,
    solver: str,
    solvers: tuple[LinearSolver, ...],
    seed: int,
) -> Schedule:
    """The whole problem at once, trusting neither segments nor our own bounds."""
    first = _merged(reduced, parts)
    if method is Method.CP_SAT:
        found = solve_cp_sat(reduced, first, gap=gap, work=work, seed=seed)
        return _answer(problem, _named(reduced, found.placed), found.bound_s, gap, method.value, found.work, "")
    limits = WorkLimits(relative_gap=gap, work=work, seed=seed)
    solved = solve_milp(reduced, first, limits=limits, solver=solver, solvers=solvers)
    name = f"{method.value} on {solved.report.solver}"
    return _answer(
        problem, _named(reduced, solved.placed), solved.bound_s, gap, name, solved.report.work, str(solved.report)
    )


def _merged(reduced: Reduced, parts: Sequence[_Part]) -> tuple[Placed, ...]:
    """The segments' schedules one after another, in the positions of the whole problem."""
    position = {int(op): at for at, op in enumerate(reduced.index)}
    merged, offset = [], 0.0
    for part in parts:
        for op in part.placed:
            at = position[int(part.reduced.index[op.position])]
            merged.append(replace(op, position=at, start_s=op.start_s + offset, end_s=op.end_s + offset))
        offset += makespan(part.placed)
    return tuple(merged)


def _named(reduced: Reduced, placed: Sequence[Placed]) -> dict[int, Placed]:
    """Placed ops by their index in the problem."""
    return {int(reduced.index[op.position]): op for op in placed}


def _joined(parts: Sequence[_Part]) -> dict[int, Placed]:
    """The segments one after another, by index in the problem."""
    joined, offset = {}, 0.0
    for part in parts:
        for index, op in _named(part.reduced, part.placed).items():
            joined[index] = replace(op, start_s=op.start_s + offset, end_s=op.end_s + offset)
        offset += makespan(part.placed)
    return joined


def _answer(
    problem: Problem, placed: dict[int, Placed], bound_s: float, gap: float, method: str, work: float, report: str
) -> Schedule:
    """All ops in the problem's order; those that take no time start when their predecessors have ended."""
    ops: dict[int, ScheduledOp] = {}
    for index in topological_order(problem):
        kind = problem.kinds[index]
        if index in placed:
            at = placed[index]
            start, end, is_spread, core = at.start_s, at.end_s, at.is_spread, at.core
        else:
            start = max((ops[before].end_s for before in problem.predecessors[index]), default=0.0)
            is_spread = kind not in (OpKind.NONE, OpKind.LINK) and problem.ops[index].latency_s > 0.0
            end, core = start, 0
        ops[index] = ScheduledOp(
            op=index,
            start_s=start,
            end_s=end,
            is_spread=is_spread,
            tensor_core=core if kind.uses_tensor and not is_spread else None,
            vector_core=core if kind.uses_vector and not is_spread else None,
        )
    span = max((op.end_s for op in ops.values()), default=0.0)
    bound = min(bound_s, span)
    floor = problem.floor_s
    return Schedule(
        problem=problem,
        ops=tuple(ops[index] for index in range(len(problem.ops))),
        makespan_s=span,
        bound_s=bound,
        status=status_of(max(span, floor), max(bound, floor), gap),
        method=method,
        work=work,
        report=report,
    )
