"""CP-SAT on linear problems whose variables are all bounded integers.

CP-SAT reasons in integers. A row is taken only if some power of ten up to 10^9 makes all its coefficients integral, so
that nothing is rounded; its bounds are then tightened to integers, which cuts off nothing. The objective may be any
floating numbers: CP-SAT scales it and corrects its bound for the scaling itself. Continuous variables are refused.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

import numpy as np

from phaze.solvers.linear_problem import FloatArray, LinearProblem, LinearResult, SolveReport, SolveStatus, WorkLimits

__all__ = ["CpSatSolver", "cp_sat"]

_LARGEST = 2**40
_SCALES = 10.0 ** np.arange(10)


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
        from ortools.sat.python import cp_model

        model = cp_model.CpModel()
        bounds = zip(np.ceil(problem.lower), np.floor(problem.upper), strict=True)
        x = [model.new_int_var(int(low), int(high), "") for low, high in bounds]
        for row, scale in enumerate(_row_scales(problem)):
            span = slice(problem.row_starts[row], problem.row_starts[row + 1])
            weights = np.round(problem.row_values[span] * scale).astype(np.int64).tolist()
            terms = cp_model.LinearExpr.weighted_sum([x[j] for j in problem.row_columns[span]], weights)
            low, high = _integral_bounds(problem.row_lower[row] * scale, problem.row_upper[row] * scale)
            model.add_linear_constraint(terms, low, high)
        model.minimize(cp_model.LinearExpr.weighted_sum(x, problem.objective.tolist()))
        if problem.start is not None:
            for variable, value in zip(x, np.round(problem.start), strict=True):
                model.add_hint(variable, int(value))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = limits.seed + 1  # 1 is the library's own default
        solver.parameters.relative_gap_limit = limits.relative_gap
        solver.parameters.presolve_inclusion_work_limit = 0  # can prove a wrong optimum: google/or-tools issue 5293
        if limits.work is not None:
            solver.parameters.max_deterministic_time = limits.work
        if limits.wall_s is not None:
            solver.parameters.max_time_in_seconds = limits.wall_s
        status = _STATUSES[solver.status_name(solver.solve(model))]
        work = float(solver.response_proto.deterministic_time)
        report = SolveReport(solver=self.name, work=work, work_unit="deterministic s")
        if status in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE):
            solution = np.array([solver.value(variable) for variable in x], np.float64)
            return LinearResult(
                status=status,
                report=report,
                solution=solution,
                objective=problem.objective_at(solution),
                bound=solver.best_objective_bound + problem.offset,
            )
        return LinearResult(status=status, report=report)


_STATUSES = {
    "OPTIMAL": SolveStatus.OPTIMAL,
    "FEASIBLE": SolveStatus.FEASIBLE,
    "INFEASIBLE": SolveStatus.INFEASIBLE,
    "UNKNOWN": SolveStatus.LIMIT,
    "MODEL_INVALID": SolveStatus.REFUSED,
}


def _row_scales(problem: LinearProblem) -> FloatArray:
    """For each row the smallest power of ten that makes its coefficients integral, or NaN."""
    scaled = problem.row_values[None, :] * _SCALES[:, None]
    whole = np.abs(scaled - np.round(scaled)) <= 1e-12 * np.abs(scaled)
    whole &= np.abs(scaled) <= _LARGEST
    broken = np.stack([np.bincount(problem.row_of_entry, weights=~line, minlength=problem.row_count) for line in whole])
    fits = broken == 0
    return np.where(fits.any(axis=0), _SCALES[fits.argmax(axis=0)], math.nan)


def _integral_bounds(lower: float, upper: float) -> tuple[int, int]:
    """The integers between two bounds, forgiving the last digits of a scaled float."""
    slack = 1e-9
    low = -(2**60) if lower < -(2.0**60) else math.ceil(lower - slack * max(1.0, abs(lower)))
    high = 2**60 if upper > 2.0**60 else math.floor(upper + slack * max(1.0, abs(upper)))
    return low, high


cp_sat = CpSatSolver()
