"""Gurobi, where it is installed and licensed for the problem's size.

gurobipy brings a licence for 2,000 variables and 2,000 rows. A problem within that is always tried; a larger one only
if a probe just over the limit passes. Whatever the licence then says at solve time becomes the status `REFUSED`.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from phaze.solvers.linear_problem import BoolArray, LinearProblem, LinearResult, SolveReport, SolveStatus, WorkLimits

if TYPE_CHECKING:
    import gurobipy

__all__ = ["GurobiSolver", "gurobi"]

BUNDLED_SIZE = 2000
"""Variables, and rows, that the licence inside gurobipy allows."""


@dataclass(frozen=True, slots=True)
class GurobiSolver:
    """Gurobi on one thread with deterministic work units."""

    name: str = "gurobi"

    def is_importable(self) -> bool:
        """Whether gurobipy is installed."""
        return importlib.util.find_spec("gurobipy") is not None

    def refusal(self, problem: LinearProblem) -> str | None:
        """Whether the licence at hand is too small for this problem; None if it is not."""
        rows = problem.row_count + int(_is_range(problem).sum())
        if problem.variable_count <= BUNDLED_SIZE and rows <= BUNDLED_SIZE:
            return None
        licence = _licence_trouble(BUNDLED_SIZE + 1)
        if licence is None:
            return None
        return f"{problem.variable_count} variables and {rows} rows exceed the licence ({licence})"

    def solve(self, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
        """Solve; `work` is Gurobi's work units."""
        import gurobipy

        try:
            with _environment() as environment, gurobipy.Model(problem.name, env=environment) as model:
                return _solve_model(problem, limits, model)
        except gurobipy.GurobiError as error:
            report = SolveReport(solver=self.name, message=f"{error} (error {error.errno})")
            return LinearResult(status=SolveStatus.REFUSED, report=report)


def _environment() -> gurobipy.Env:
    """A Gurobi environment that prints nothing."""
    import gurobipy

    environment = gurobipy.Env(empty=True)
    environment.setParam("OutputFlag", 0)
    environment.start()
    return environment


def _licence_trouble(size: int) -> str | None:
    """What Gurobi says to a trivial problem of `size` variables: None, or its complaint."""
    import gurobipy

    try:
        with _environment() as environment, gurobipy.Model(env=environment) as model:
            model.addVars(size, ub=1.0)
            model.optimize()
    except gurobipy.GurobiError as error:
        return str(error)
    return None


def _is_range(problem: LinearProblem) -> BoolArray:
    """Rows with two different finite bounds: Gurobi takes them as two rows."""
    has_both = np.isfinite(problem.row_lower) & np.isfinite(problem.row_upper)
    is_range: BoolArray = has_both & (problem.row_lower != problem.row_upper)
    return is_range


def _solve_model(problem: LinearProblem, limits: WorkLimits, model: gurobipy.Model) -> LinearResult:
    x = _fill_model(problem, model)
    model.Params.Threads = 1
    model.Params.Seed = limits.seed
    model.Params.MIPGap = limits.relative_gap
    model.Params.MIPGapAbs = 0.0
    model.Params.DualReductions = 0  # tells infeasible from unbounded
    if limits.work is not None:
        model.Params.WorkLimit = limits.work
    if limits.wall_s is not None:
        model.Params.TimeLimit = limits.wall_s
    model.optimize()
    report = SolveReport(solver="gurobi", work=float(model.Work), work_unit="work units")
    status = _status(model)
    if status is SolveStatus.LIMIT:
        return LinearResult(status=status, report=report, bound=_bound(model))
    if status not in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
        return LinearResult(status=status, report=report)
    solution = np.array([variable.X for variable in x])
    objective = problem.objective_at(solution)
    return LinearResult(status=status, report=report, solution=solution, objective=objective, bound=_bound(model))


def _fill_model(problem: LinearProblem, model: gurobipy.Model) -> list[gurobipy.Var]:
    """Add the problem to an empty model; its variables in order."""
    import gurobipy

    kinds = np.where(problem.is_integer, "I", "C").tolist()
    columns = zip(problem.lower.tolist(), problem.upper.tolist(), problem.objective.tolist(), kinds, strict=True)
    x = [model.addVar(low, high, cost, kind) for low, high, cost, kind in columns]
    model.ObjCon = problem.offset
    for row in range(problem.row_count):
        span = slice(problem.row_starts[row], problem.row_starts[row + 1])
        terms = gurobipy.LinExpr(problem.row_values[span].tolist(), [x[j] for j in problem.row_columns[span]])
        low, high = float(problem.row_lower[row]), float(problem.row_upper[row])
        if low == high:
            model.addLConstr(terms, "=", low)
            continue
        if math.isfinite(low):
            model.addLConstr(terms, ">", low)
        if math.isfinite(high):
            model.addLConstr(terms, "<", high)
    if problem.start is not None:
        for variable, value in zip(x, problem.start.tolist(), strict=True):
            variable.Start = value
    return x


def _status(model: gurobipy.Model) -> SolveStatus:
    from gurobipy import GRB

    statuses = {
        GRB.OPTIMAL: SolveStatus.OPTIMAL,
        GRB.INFEASIBLE: SolveStatus.INFEASIBLE,
        GRB.UNBOUNDED: SolveStatus.UNBOUNDED,
    }
    if model.Status in statuses:
        return statuses[model.Status]
    return SolveStatus.FEASIBLE if model.SolCount else SolveStatus.LIMIT


def _bound(model: gurobipy.Model) -> float:
    """The proven bound; a linear program that ran to its end proves its own value."""
    if model.IsMIP:
        return float(model.ObjBound)
    return float(model.ObjVal) if model.SolCount else -math.inf


gurobi = GurobiSolver()
