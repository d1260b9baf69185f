"""The solvers of ortools: HiGHS and SCIP through MathOpt, and CP-SAT where all variables are bounded integers.

MathOpt (`MathOptSolver`) is one translation for two solvers. It takes the problem as one protocol buffer, so that no
Python object is made per variable. A solver that cannot tell infeasible from unbounded is asked again with a zero
objective.

CP-SAT (`CpSatSolver`) reasons in integers. A row is taken only if some power of ten up to 10^9 makes all its
coefficients integral, so that nothing is rounded; its bounds are then tightened to integers, which cuts off nothing.
The objective may be any floating numbers: CP-SAT scales it and corrects its bound for the scaling itself. Continuous
variables are refused.
"""

from __future__ import annotations

import datetime
import importlib.util
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from phaze.solvers.linear_problem import (
    FloatArray,
    IntArray,
    LinearProblem,
    LinearResult,
    SolveReport,
    SolveStatus,
    WorkLimits,
)
from phaze.tolerances import WHOLE_COEFFICIENT, WHOLE_NUMBER

if TYPE_CHECKING:
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt
    from ortools.sat.python import cp_model

__all__ = ["NODES_PER_WORK", "CpSatSolver", "MathOptSolver", "cp_sat", "highs", "scip"]

NODES_PER_WORK = 1000
"""Branch-and-bound nodes that count as one unit of `WorkLimits.work`: these solvers have no finer deterministic clock.

On problems of a few hundred variables a thousand nodes take seconds.
"""


@dataclass(frozen=True, slots=True)
class MathOptSolver:
    """A solver that ortools ships: `solver_type` is its name in MathOpt."""

    name: str
    solver_type: str

    def is_importable(self) -> bool:
        """Whether ortools is installed."""
        return importlib.util.find_spec("ortools") is not None

    def refusal(self, problem: LinearProblem) -> str | None:
        """Never: both solvers are free of licences and sizes."""
        return None

    def solve(self, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
        """Solve on one thread; `work` counts nodes."""
        from ortools.math_opt.python import mathopt

        answer = self._run(problem, limits)
        reason, kinds = answer.termination.reason, mathopt.TerminationReason
        if reason == kinds.INFEASIBLE_OR_UNBOUNDED:
            feasibility = replace(problem, objective=np.zeros(problem.variable_count))
            reason = self._run(feasibility, limits).termination.reason
            reason = kinds.INFEASIBLE if reason == kinds.INFEASIBLE else kinds.UNBOUNDED
        return self._result(problem, answer, reason)

    def _run(self, problem: LinearProblem, limits: WorkLimits) -> mathopt.SolveResult:
        """One run of the solver, whatever its status."""
        from ortools.math_opt.python import mathopt

        model = mathopt.Model.from_model_proto(_to_proto(problem))
        parameters = mathopt.SolveParameters(
            relative_gap_tolerance=limits.relative_gap, absolute_gap_tolerance=0.0, random_seed=limits.seed
        )
        if limits.work is not None:
            parameters.node_limit = max(1, round(limits.work * NODES_PER_WORK))
        if limits.wall_s is not None:
            parameters.time_limit = datetime.timedelta(seconds=limits.wall_s)
        if self.solver_type == "HIGHS":  # it refuses the common `threads`
            parameters.highs.int_options["threads"] = 1
            parameters.highs.string_options["parallel"] = "off"
        else:
            parameters.threads = 1
        hints = mathopt.ModelSolveParameters()
        if problem.start is not None:
            values = dict(zip(model.variables(), problem.start.tolist(), strict=True))
            hints.solution_hints = [mathopt.SolutionHint(variable_values=values)]
        return mathopt.solve(model, mathopt.SolverType[self.solver_type], params=parameters, model_params=hints)

    def _result(
        self, problem: LinearProblem, answer: mathopt.SolveResult, reason: mathopt.TerminationReason
    ) -> LinearResult:
        """A run's answer in our words."""
        nodes = answer.solve_stats.node_count
        report = SolveReport(solver=self.name, work=float(nodes), work_unit="nodes", message=answer.termination.detail)
        status = _MATHOPT_STATUSES.get(reason.name, SolveStatus.LIMIT)
        if status not in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE) or not answer.has_primal_feasible_solution():
            ended = SolveStatus.LIMIT if status in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE) else status
            bound = answer.termination.objective_bounds.dual_bound if ended is SolveStatus.LIMIT else -math.inf
            return LinearResult(status=ended, report=report, bound=bound)
        values = answer.variable_values()
        solution = np.array([values[variable] for variable in sorted(values, key=lambda v: v.id)])
        bound = answer.termination.objective_bounds.dual_bound
        objective = problem.objective_at(solution)
        return LinearResult(status=status, report=report, solution=solution, objective=objective, bound=bound)


_MATHOPT_STATUSES = {
    "OPTIMAL": SolveStatus.OPTIMAL,
    "FEASIBLE": SolveStatus.FEASIBLE,
    "INFEASIBLE": SolveStatus.INFEASIBLE,
    "UNBOUNDED": SolveStatus.UNBOUNDED,
}


def _to_proto(problem: LinearProblem) -> model_pb2.ModelProto:
    """The problem as MathOpt's protocol buffer."""
    from ortools.math_opt import model_pb2

    proto = model_pb2.ModelProto(name=problem.name)
    variables = range(problem.variable_count)
    proto.variables.ids.extend(variables)
    proto.variables.lower_bounds.extend(problem.lower.tolist())
    proto.variables.upper_bounds.extend(problem.upper.tolist())
    proto.variables.integers.extend(problem.is_integer.tolist())
    proto.objective.offset = problem.offset
    priced = np.flatnonzero(problem.objective)
    proto.objective.linear_coefficients.ids.extend(priced.tolist())
    proto.objective.linear_coefficients.values.extend(problem.objective[priced].tolist())
    proto.linear_constraints.ids.extend(range(problem.row_count))
    proto.linear_constraints.lower_bounds.extend(problem.row_lower.tolist())
    proto.linear_constraints.upper_bounds.extend(problem.row_upper.tolist())
    rows, columns, values = _entries(problem)
    proto.linear_constraint_matrix.row_ids.extend(rows.tolist())
    proto.linear_constraint_matrix.column_ids.extend(columns.tolist())
    proto.linear_constraint_matrix.coefficients.extend(values.tolist())
    return proto


def _entries(problem: LinearProblem) -> tuple[IntArray, IntArray, FloatArray]:
    """Coefficients sorted by row and column, repeated columns of a row added up, as MathOpt demands."""
    keys = problem.row_of_entry * max(problem.variable_count, 1) + problem.row_columns
    unique, inverse = np.unique(keys, return_inverse=True)
    values = np.bincount(inverse, weights=problem.row_values, minlength=len(unique))
    rows, columns = np.divmod(unique, max(problem.variable_count, 1))
    kept = values != 0.0
    return rows[kept], columns[kept], values[kept]


highs = MathOptSolver("highs", "HIGHS")
scip = MathOptSolver("scip", "GSCIP")


_LARGEST = 2**40
"""The largest bound of a variable, and scaled coefficient: sums of their products must stay within CP-SAT's 64 bits."""

_LARGEST_ROW_BOUND = 2**60
"""Bounds of rows beyond this count as infinite: CP-SAT has no infinity, and takes numbers of at most 63 bits."""

_SCALES = 10.0 ** np.arange(10)
"""The powers of ten that may make a row integral: coefficients that people write have at most nine decimals."""


@dataclass(frozen=True, slots=True)
class CpSatSolver:
    """CP-SAT with one worker and deterministic time."""

    name: str = "cp-sat"

    def is_importable(self) -> bool:
        """Whether ortools is installed."""
        return importlib.util.find_spec("ortools") is not None

    def refusal(self, problem: LinearProblem) -> str | None:
        """Why this problem is not one of bounded integers with integral rows, or None."""
        continuous = int((~problem.is_integer).sum())
        if continuous:
            return f"{continuous} continuous variables; CP-SAT takes integers only"
        if not (np.abs(np.concatenate([problem.lower, problem.upper])) <= _LARGEST).all():
            return "an integer variable without finite bounds"
        if np.isnan(_row_scales(problem)).any():
            return "a row whose coefficients no power of ten up to 10^9 makes integral"
        return None

    def solve(self, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
        """Solve; `work` is deterministic time."""
        reason = self.refusal(problem)
        if reason is not None:
            return LinearResult(status=SolveStatus.REFUSED, report=SolveReport(solver=self.name, message=reason))
        model, variables = _model(problem)
        solver = _configured_solver(limits)
        status = _CP_SAT_STATUSES[solver.status_name(solver.solve(model))]
        work = float(solver.response_proto.deterministic_time)
        report = SolveReport(solver=self.name, work=work, work_unit="deterministic s")
        if status not in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
            return LinearResult(status=status, report=report)
        solution = np.array([solver.value(variable) for variable in variables], np.float64)
        return LinearResult(
            status=status,
            report=report,
            solution=solution,
            objective=problem.objective_at(solution),
            bound=solver.best_objective_bound + problem.offset,
        )


_CP_SAT_STATUSES = {
    "OPTIMAL": SolveStatus.OPTIMAL,
    "FEASIBLE": SolveStatus.FEASIBLE,
    "INFEASIBLE": SolveStatus.INFEASIBLE,
    "UNKNOWN": SolveStatus.LIMIT,
    "MODEL_INVALID": SolveStatus.REFUSED,
}


def _model(problem: LinearProblem) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """The problem as a CP-SAT model, and its variables in order."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    bounds = zip(np.ceil(problem.lower), np.floor(problem.upper), strict=True)
    variables = [model.new_int_var(int(low), int(high), "") for low, high in bounds]
    for row, scale in enumerate(_row_scales(problem)):
        span = slice(problem.row_starts[row], problem.row_starts[row + 1])
        weights = np.round(problem.row_values[span] * scale).astype(np.int64).tolist()
        terms = cp_model.LinearExpr.weighted_sum([variables[j] for j in problem.row_columns[span]], weights)
        low, high = _integral_bounds(problem.row_lower[row] * scale, problem.row_upper[row] * scale)
        model.add_linear_constraint(terms, low, high)
    model.minimize(cp_model.LinearExpr.weighted_sum(variables, problem.objective.tolist()))
    if problem.start is not None:
        for variable, value in zip(variables, np.round(problem.start), strict=True):
            model.add_hint(variable, int(value))
    return model, variables


def _configured_solver(limits: WorkLimits) -> cp_model.CpSolver:
    """CP-SAT with the limits, on one worker, so that the same input gives the same answer."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = limits.seed + 1  # 1 is the library's own default
    solver.parameters.relative_gap_limit = limits.relative_gap
    solver.parameters.presolve_inclusion_work_limit = 0  # can prove a wrong optimum: google/or-tools issue 5293
    if limits.work is not None:
        solver.parameters.max_deterministic_time = limits.work
    if limits.wall_s is not None:
        solver.parameters.max_time_in_seconds = limits.wall_s
    return solver


def _row_scales(problem: LinearProblem) -> FloatArray:
    """For each row the smallest power of ten that makes its coefficients integral, or NaN."""
    scaled = problem.row_values[None, :] * _SCALES[:, None]
    is_whole = np.abs(scaled - np.round(scaled)) <= WHOLE_COEFFICIENT * np.abs(scaled)
    is_whole &= np.abs(scaled) <= _LARGEST
    broken = np.stack(
        [np.bincount(problem.row_of_entry, weights=~line, minlength=problem.row_count) for line in is_whole]
    )
    fits = broken == 0
    return np.where(fits.any(axis=0), _SCALES[fits.argmax(axis=0)], math.nan)


def _integral_bounds(lower: float, upper: float) -> tuple[int, int]:
    """The integers between two bounds, forgiving the last digits of a scaled float."""
    low = -_LARGEST_ROW_BOUND if lower < -_LARGEST_ROW_BOUND else math.ceil(lower - WHOLE_NUMBER * max(1.0, abs(lower)))
    high = _LARGEST_ROW_BOUND if upper > _LARGEST_ROW_BOUND else math.floor(upper + WHOLE_NUMBER * max(1.0, abs(upper)))
    return low, high


cp_sat = CpSatSolver()
