"""HiGHS and SCIP, both through ortools' MathOpt: one translation, two solvers.

MathOpt takes the problem as one protocol buffer, so that no Python object is made per variable. A solver that cannot
tell infeasible from unbounded is asked again with a zero objective.
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

if TYPE_CHECKING:
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt

__all__ = ["NODES_PER_WORK", "MathOptSolver", "highs", "scip"]

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
        status = _STATUSES.get(reason.name, SolveStatus.LIMIT)
        if status not in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE) or not answer.has_primal_feasible_solution():
            ended = SolveStatus.LIMIT if status in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE) else status
            bound = answer.termination.objective_bounds.dual_bound if ended is SolveStatus.LIMIT else -math.inf
            return LinearResult(status=ended, report=report, bound=bound)
        values = answer.variable_values()
        solution = np.array([values[variable] for variable in sorted(values, key=lambda v: v.id)])
        bound = answer.termination.objective_bounds.dual_bound
        objective = problem.objective_at(solution)
        return LinearResult(status=status, report=report, solution=solution, objective=objective, bound=bound)


_STATUSES = {
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
