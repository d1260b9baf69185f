"""A neutral linear problem and the solvers that take it."""

from phaze.solvers.linear_problem import (
    LinearProblem,
    LinearResult,
    LinearSolver,
    ProblemBuilder,
    SolveReport,
    SolveStatus,
    WorkLimits,
)
from phaze.solvers.solver_choice import AUTOMATIC_SOLVERS, BUILT_IN_SOLVERS, SolverChain, choose_solver, solve_linear

__all__ = [
    "AUTOMATIC_SOLVERS",
    "BUILT_IN_SOLVERS",
    "LinearProblem",
    "LinearResult",
    "LinearSolver",
    "ProblemBuilder",
    "SolveReport",
    "SolveStatus",
    "SolverChain",
    "WorkLimits",
    "choose_solver",
    "solve_linear",
]
