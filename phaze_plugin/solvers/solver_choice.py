"""Which solver a linear problem goes to: the one chosen by name, or the first of a chain that can take it.

A solver is chosen once, by `choose_solver`, and the resulting `SolverChain` is passed on to whoever has problems to
solve. In a chain, a solver that is not licensed for a problem's size, or that is made for other kinds of problems, is
passed over, and the report lists each with its reason. Every solution is checked against the problem itself before it
is handed out: integers are rounded, the objective is computed anew, and the bound is never reported above it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from phaze.errors import SolverError
from phaze.solvers.gurobi_solver import gurobi
from phaze.solvers.linear_problem import (
    FloatArray,
    LinearProblem,
    LinearResult,
    LinearSolver,
    SolveReport,
    SolveStatus,
    WorkLimits,
)
from phaze.solvers.ortools_solvers import cp_sat, highs, scip
from phaze.tolerances import SOLVER_BREACH

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["AUTOMATIC_SOLVERS", "BUILT_IN_SOLVERS", "SolverChain", "choose_solver", "solve_linear"]

BUILT_IN_SOLVERS: tuple[LinearSolver, ...] = (highs, scip, cp_sat, gurobi)
"""The solvers that come with Phaze. Gurobi, which needs a licence, runs only when it is asked for by name."""


@dataclass(frozen=True, slots=True)
class SolverChain:
    """Solvers in the order in which they are tried; the first one that can take a problem solves it."""

    solvers: tuple[LinearSolver, ...]

    @property
    def name(self) -> str:
        """The name of the solver that is tried first."""
        return self.solvers[0].name


AUTOMATIC_SOLVERS = SolverChain((highs, scip, cp_sat))
"""The chain that is used where nobody names a solver: all free ones, the quickest on our problems first."""


def choose_solver(name: str | None, plugins: PluginManager) -> SolverChain:
    """The solver called `name`, built-in or from a plugin, with the automatic ones behind it; None: only these.

    Raises UnknownNameError for a name that no plugin offers, and SolverError if the solver's library is not installed.
    """
    if name is None:
        return AUTOMATIC_SOLVERS
    chosen = plugins.solvers().get(name)
    if not chosen.is_importable():
        raise SolverError(
            f"solver {name!r} was asked for and its library is not installed. Install it, or leave the solver out to "
            f"use {AUTOMATIC_SOLVERS.name}; `phaze doctor` shows the state of every solver."
        )
    fallbacks = tuple(solver for solver in AUTOMATIC_SOLVERS.solvers if solver.name != name)
    return SolverChain((chosen, *fallbacks))


def solve_linear(
    problem: LinearProblem, limits: WorkLimits | None = None, solver: SolverChain = AUTOMATIC_SOLVERS
) -> LinearResult:
    """Solve `problem` on the first solver of the chain that can take it; SolverError if none can."""
    passed_over: list[str] = []
    for candidate in solver.solvers:
        result = _attempt(candidate, problem, limits or WorkLimits())
        if result.status is not SolveStatus.REFUSED:
            report = replace(result.report, fallbacks=tuple(passed_over))
            return _checked(problem, replace(result, report=report))
        passed_over.append(f"{candidate.name}: {result.report.message}")
    raise SolverError(
        f"no solver could take {problem.name!r}: {'; '.join(passed_over)}. Install ortools, or choose another solver."
    )


def _attempt(solver: LinearSolver, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
    """Ask one solver; REFUSED if its library is missing or it cannot take this problem."""
    reason = "not installed" if not solver.is_importable() else solver.refusal(problem)
    if reason is not None:
        return LinearResult(status=SolveStatus.REFUSED, report=SolveReport(solver=solver.name, message=reason))
    if problem.variable_count == 0:
        return _without_variables(solver, problem)
    return solver.solve(problem, limits)


def _without_variables(solver: LinearSolver, problem: LinearProblem) -> LinearResult:
    """The answer to a problem of no variables, whose rows are all zero; solvers differ on these, so none is asked."""
    report = SolveReport(solver=solver.name, message="no variables")
    if ((problem.row_lower > 0.0) | (problem.row_upper < 0.0)).any():
        return LinearResult(status=SolveStatus.INFEASIBLE, report=report)
    empty: FloatArray = np.zeros(0)
    return LinearResult(
        status=SolveStatus.OPTIMAL, report=report, solution=empty, objective=problem.offset, bound=problem.offset
    )


def _checked(problem: LinearProblem, result: LinearResult) -> LinearResult:
    """The result with integers rounded and the objective computed anew; SolverError if it breaks a row."""
    if result.solution is None:
        return result
    solution = np.clip(result.solution, problem.lower, problem.upper)
    solution[problem.is_integer] = np.round(solution[problem.is_integer])
    breach = problem.violation(solution)
    if breach > SOLVER_BREACH:
        raise SolverError(
            f"{result.report.solver} answered {problem.name!r} with a solution that breaks a row by {breach:.2g} "
            f"(relative; at most {SOLVER_BREACH:g} is accepted). Scale the problem, or choose another solver."
        )
    solution.setflags(write=False)
    objective = problem.objective_at(solution)
    return replace(result, solution=solution, objective=objective, bound=min(result.bound, objective))
