"""The paper's integer linear program for one layer's operators on the cores, solved on any linear solver.

Times are in units of the incumbent's makespan, which is the horizon 1. Variables (`_program`):

    t_i    start of job i, between 0 and 1
    y_i    1 if job i is spread over all cores of its resource (binary)
    x_ic   1 if job i runs on core c of its resource (binary; for a job that holds both, c is a pair of cores)
    o_ij   1 if job i ends before job j starts (binary; for each pair of jobs that may exclude each other)
    z      the makespan

The objective is z, which is minimised. With the duration d_i = l_i - (l_i - s_i) y_i, the constraints are:

 1. precedence:        t_i + d_i <= t_j                    for every edge                            `_add_precedence`
 2. makespan:          t_i + d_i <= z                      for every job                               `_add_makespan`
 3. one place:         y_i + sum_c x_ic = 1                for every job that holds cores             `_add_one_place`
 4. order:             t_i + d_i <= t_j + (1 - o_ij)       for every pair, in both directions             `_add_order`
 5. same core:         o_ij + o_ji >= x_ic + x_jc - 1      if both hold core c of one resource     `_add_same_core`
 6. spread excludes:   o_ij + o_ji >= y_i                  if i, spread, excludes j, and vice versa
                                                                                              `_add_spread_excludes`
 7. links:             o_ij + o_ji >= 1                    for two links                                  `_add_order`
 8. symmetry:          x_ic = 0 for c > k                  for the k-th job of a resource, if no job holds both
                                                                                                       `_add_symmetry`
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phaze.schedule.list_scheduling import Placed, Step, makespan, order_of_starts, retime
from phaze.schedule.proven_schedule import relative_gap
from phaze.schedule.scheduling_problem import FloatArray, IntArray, ReducedProblem
from phaze.solvers import (
    LinearProblem,
    ProblemBuilder,
    SolverChain,
    SolveReport,
    SolveStatus,
    WorkLimits,
    solve_linear,
)
from phaze.tolerances import SOLVER_GAP

__all__ = ["MilpOutcome", "solve_milp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpOutcome:
    """The best schedule known, a proven bound, and the solver's report."""

    placed: tuple[Placed, ...]
    bound_s: float
    report: SolveReport


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """The program as it is built: the indices of its variables by job, and times in units of the incumbent."""

    builder: ProblemBuilder
    start: IntArray  # t
    spread: IntArray  # y
    makespan: IntArray  # z
    core: list[IntArray]  # x: for each job its core choices
    latency: FloatArray  # l
    saved: FloatArray  # l - s; 0 where the job cannot be spread
    can_spread: list[bool]


def solve_milp(
    reduced: ReducedProblem, incumbent: tuple[Placed, ...], *, limits: WorkLimits, solver: SolverChain
) -> MilpOutcome:
    """Improve the incumbent with a linear solver, to the relative gap or work of `limits`."""
    unit_s = makespan(incumbent)
    problem, program = _build(reduced, unit_s)
    result = solve_linear(problem, limits, solver)
    best = incumbent
    if result.solution is not None:
        improved = retime(reduced, _steps(reduced, program, result.solution))
        best = min(improved, incumbent, key=makespan)
    bound_s = min(max(result.bound, 0.0) * unit_s, makespan(best))
    if result.status is SolveStatus.OPTIMAL and relative_gap(makespan(best), bound_s) <= SOLVER_GAP:
        bound_s = makespan(best)  # the solver's proof, up to its own tolerance
    return MilpOutcome(placed=best, bound_s=bound_s, report=result.report)


def _build(reduced: ReducedProblem, unit_s: float) -> tuple[LinearProblem, _Program]:
    """All variables and constraints."""
    program = _program(reduced, unit_s)
    _add_precedence(reduced, program)
    _add_makespan(program)
    _add_one_place(program)
    for first in range(reduced.count):
        for second in range(first + 1, reduced.count):
            _add_pair(reduced, program, first, second)
    _add_symmetry(reduced, program)
    return program.builder.build(), program


def _program(reduced: ReducedProblem, unit_s: float) -> _Program:
    """The variables t, y, z and x; the orders o are added pair by pair."""
    builder = ProblemBuilder("schedule")
    can_spread = np.isfinite(reduced.spread_s)
    tensor, vector = reduced.useful_cores
    latency = reduced.latency_s / unit_s
    start = builder.variables(reduced.count, upper=1.0)
    spread = builder.variables(reduced.count, upper=can_spread.astype(float), integer=True)
    last_end = builder.variables(1, upper=1.0, cost=1.0)
    counts = np.minimum(np.where(reduced.uses_tensor, tensor, np.inf), np.where(reduced.uses_vector, vector, np.inf))
    core = [builder.binaries(int(count) if np.isfinite(count) else 0) for count in counts]
    saved = latency - np.where(can_spread, reduced.spread_s / unit_s, latency)
    return _Program(builder, start, spread, last_end, core, latency, saved, can_spread.tolist())


def _add_precedence(reduced: ReducedProblem, program: _Program) -> None:
    """Constraint 1: t_i - (l_i - s_i) y_i - t_j <= -l_i."""
    before, after = np.argwhere(reduced.is_edge).T
    columns = np.stack([program.start[before], program.spread[before], program.start[after]], axis=1)
    values = np.stack([np.ones(len(before)), -program.saved[before], -np.ones(len(before))], axis=1)
    program.builder.rows(columns.reshape(-1, 3), values.reshape(-1, 3), upper=-program.latency[before])


def _add_makespan(program: _Program) -> None:
    """Constraint 2: t_i - (l_i - s_i) y_i - z <= -l_i."""
    count = len(program.start)
    columns = np.stack([program.start, program.spread, np.repeat(program.makespan, count)], axis=1)
    values = np.stack([np.ones(count), -program.saved, -np.ones(count)], axis=1)
    program.builder.rows(columns, values, upper=-program.latency)


def _add_one_place(program: _Program) -> None:
    """Constraint 3."""
    for spread, cores in zip(program.spread, program.core, strict=True):
        if len(cores):
            program.builder.rows(np.append(cores, spread), 1.0, lower=1.0, upper=1.0)


def _add_pair(reduced: ReducedProblem, program: _Program, first: int, second: int) -> None:
    """Constraints 4 to 7 for two jobs, if they may exclude each other and precedence does not order them already."""
    shares_core = _can_share_core(reduced, first, second)
    on_cores = not (reduced.is_off_core[first] or reduced.is_off_core[second])
    excluded_if_spread = on_cores and (reduced.is_exclusive or shares_core)
    spreading = [job for job in (first, second) if excluded_if_spread and program.can_spread[job]]
    are_links = bool(reduced.is_link[first] and reduced.is_link[second])
    is_ordered = reduced.is_before[first, second] or reduced.is_before[second, first]
    if is_ordered or not (shares_core or spreading or are_links):
        return
    order = _add_order(program, first, second, are_links=are_links)
    if shares_core:
        _add_same_core(program, first, second, order)
    for job in spreading:
        _add_spread_excludes(program, job, order)


def _add_order(program: _Program, first: int, second: int, *, are_links: bool) -> IntArray:
    """Constraint 4 in both directions, and constraint 7 for two links; the two order variables.

    At most one of the two orders holds, which costs nothing and helps solvers.
    """
    order = program.builder.binaries(2)
    for earlier, later, is_so in ((first, second, order[0]), (second, first, order[1])):
        program.builder.rows(
            [program.start[earlier], program.spread[earlier], program.start[later], is_so],
            [1.0, -program.saved[earlier], -1.0, 1.0],
            upper=1.0 - program.latency[earlier],
        )
    program.builder.rows(order, 1.0, lower=float(are_links), upper=1.0)
    return order


def _add_same_core(program: _Program, first: int, second: int, order: IntArray) -> None:
    """Constraint 5, for every core that both jobs may choose."""
    common = min(len(program.core[first]), len(program.core[second]))
    pairs = [[*order, program.core[first][c], program.core[second][c]] for c in range(common)]
    program.builder.rows(pairs, [1.0, 1.0, -1.0, -1.0], lower=-1.0)


def _add_spread_excludes(program: _Program, spread_job: int, order: IntArray) -> None:
    """Constraint 6."""
    program.builder.rows([*order, program.spread[spread_job]], [1.0, 1.0, -1.0], lower=0.0)


def _add_symmetry(reduced: ReducedProblem, program: _Program) -> None:
    """Constraint 8: cores of one resource are alike, so the k-th job of a resource need only choose among 0..k."""
    if reduced.is_both.any():
        return
    tensor_jobs, vector_jobs = 0, 0
    for job, cores in enumerate(program.core):
        rank = tensor_jobs if reduced.uses_tensor[job] else vector_jobs
        unused = cores[rank + 1 :]
        if len(unused):
            program.builder.rows(unused, 1.0, upper=0.0)
        if reduced.uses_tensor[job]:
            tensor_jobs += 1
        else:
            vector_jobs += 1


def _can_share_core(reduced: ReducedProblem, first: int, second: int) -> bool:
    """Whether two jobs can meet on one core."""
    return bool(
        (reduced.uses_tensor[first] and reduced.uses_tensor[second])
        or (reduced.uses_vector[first] and reduced.uses_vector[second])
    )


def _steps(reduced: ReducedProblem, program: _Program, solution: FloatArray) -> list[Step]:
    """The order of starts with the cores that were chosen."""
    spread = solution[program.spread] > 0.5  # binary, up to the solver's rounding
    order = order_of_starts(reduced, solution[program.start].tolist())
    chosen = [int(solution[cores].argmax()) if len(cores) else -1 for cores in program.core]
    return [Step(job, bool(spread[job]), -1 if spread[job] else chosen[job]) for job in order]
