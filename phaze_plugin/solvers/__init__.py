"""A neutral linear problem and the solvers that take it."""

from phaze.solvers.builder import ProblemBuilder
from phaze.solvers.front import BUILT_IN_SOLVERS, solve_linear
from phaze.solvers.problem import (
    LinearProblem,
    LinearResult,
    LinearSolver,
    SolveReport,
    SolveStatus,
    WorkLimits,
)

__all__ = [
    "BUILT_IN_SOLVERS",
    "LinearProblem",
    "LinearResult",
    "LinearSolver",
    "ProblemBuilder",
    "SolveReport",
    "SolveStatus",
    "WorkLimits",
    "solve_linear",
]
