"""Solve a linear problem on the solver asked for, or on the next one that can, and say so.

A preferred solver that is not installed, not licensed for the size or made for other problems is passed over; the
report lists each with its reason. Every solution is checked against the problem itself before it is handed out:
integers are rounded, the objective is computed anew, and the bound is never reported above the objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from phaze.errors import SolverError, UnknownNameError
from phaze.solvers.cp_sat import cp_sat
from phaze.solvers.gurobi import gurobi
from phaze.solvers.mathopt import highs, scip
from phaze.solvers.problem import (
    FloatArray,
    LinearProblem,
    LinearResult,
    LinearSolver,
    SolveReport,
    SolveStatus,
    WorkLimits,
)

__all__ = ["BUILT_IN_SOLVERS", "solve_linear"]

BUILT_IN_SOLVERS: tuple[LinearSolver, ...] = (highs, scip, cp_sat, gurobi)
"""In the order in which they are tried. Gurobi runs when it is asked for."""

TOLERANCE = 1e-5
"""The largest relative breach of a row that a solution may have: ten times what the solvers promise."""


def solve_linear(
    problem: LinearProblem,
    limits: WorkLimits | None = None,
    *,
    solver: str = "highs",
    solvers: Sequence[LinearSolver] = BUILT_IN_SOLVERS,
    may_fall_back: bool = True,
) -> LinearResult:
    """Solve `problem` on `solver`; `solvers` are the known ones in order of preference (built-in plus plugins).

    Raises UnknownNameError for a name that is not in `solvers`, and SolverError if nothing could take the problem.
    """
    names = [candidate.name for candidate in solvers]
    if solver not in names:
        raise UnknownNameError("solver", solver, names)
    asked = solvers[names.index(solver)]
    others = [candidate for candidate in solvers if candidate is not asked and candidate.name != gurobi.name]
    passed_over: list[str] = []
    for candidate in [asked, *others] if may_fall_back else [asked]:
        result = _attempt(candidate, problem, limits or WorkLimits())
        if result.status is not SolveStatus.REFUSED:
            report = replace(result.report, fallbacks=tuple(passed_over))
            return _checked(problem, replace(result, report=report))
        passed_over.append(f"{candidate.name}: {result.report.message}")
    raise SolverError(
        f"no solver could take {problem.name!r}: {'; '.join(passed_over)}. Install ortools, or allow a fallback."
    )


def _attempt(solver: LinearSolver, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
    reason = "not installed" if not solver.is_importable() else solver.refusal(problem)
    if reason is not None:
        return LinearResult(status=SolveStatus.REFUSED, report=SolveReport(solver=solver.name, message=reason))
    if problem.variable_count == 0:
        return _without_variables(solver, problem)
    return solver.solve(problem, limits)


def _without_variables(solver: LinearSolver, problem: LinearProblem) -> LinearResult:
    """A problem of no variables: its rows are all zero."""
    report = SolveReport(solver=solver.name, message="no variables")
    if ((problem.row_lower > 0.0) | (problem.row_upper < 0.0)).any():
        return LinearResult(status=SolveStatus.INFEASIBLE, report=report)
    empty: FloatArray = np.zeros(0)
    return LinearResult(
        status=SolveStatus.OPTIMAL, report=report, solution=empty, objective=problem.offset, bound=problem.offset
    )


def _checked(problem: LinearProblem, result: LinearResult) -> LinearResult:
    if result.solution is None:
        return result
    solution = np.clip(result.solution, problem.lower, problem.upper)
    solution[problem.is_integer] = np.round(solution[problem.is_integer])
    breach = problem.violation(solution)
    if breach > TOLERANCE:
        raise SolverError(
            f"{result.report.solver} answered {problem.name!r} with a solution that breaks a row by {breach:.2g} "
            f"(relative; at most {TOLERANCE:g} is accepted). Scale the problem, or choose another solver."
        )
    solution.setflags(write=False)
    objective = problem.objective_at(solution)
    return replace(result, solution=solution, objective=objective, bound=min(result.bound, objective))
