"""One suite that every solver passes, and a check against brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from phaze.solvers import BUILT_IN_SOLVERS, LinearProblem, LinearSolver, ProblemBuilder, SolveStatus, WorkLimits

every_solver = pytest.mark.parametrize("solver", BUILT_IN_SOLVERS, ids=lambda solver: solver.name)
continuous_solver = pytest.mark.parametrize(
    "solver", [solver for solver in BUILT_IN_SOLVERS if solver.name != "cp-sat"], ids=lambda solver: solver.name
)


def knapsack(seed: int, items: int = 8, rows: int = 3) -> LinearProblem:
    """Choose items of greatest value under several weights: always feasible, never trivial."""
    random = np.random.default_rng(seed)
    builder = ProblemBuilder(f"knapsack-{seed}")
    chosen = builder.binaries(items, cost=-np.round(random.uniform(1, 10, items), 3))
    weights = random.integers(1, 20, (rows, items)).astype(float)
    builder.rows(np.tile(chosen, (rows, 1)), weights, upper=np.floor(weights.sum(axis=1) / 2))
    return builder.build(offset=5.0)


def brute_force(problem: LinearProblem) -> float:
    points = np.array(list(itertools.product((0.0, 1.0), repeat=problem.variable_count)))
    return min(problem.objective_at(x) for x in points if problem.violation(x) == 0.0)


@every_solver
@pytest.mark.parametrize("seed", range(6))
def test_solver_finds_the_optimum_that_brute_force_finds(solver: LinearSolver, seed: int) -> None:
    problem = knapsack(seed)
    result = solver.solve(problem, WorkLimits())
    assert result.status is SolveStatus.OPTIMAL
    assert result.objective == pytest.approx(brute_force(problem), abs=1e-6)
    assert result.bound == pytest.approx(result.objective, abs=1e-6)
    assert result.solution is not None
    assert problem.violation(result.solution) <= 1e-6
    assert result.report.solver == solver.name


@every_solver
def test_infeasible_is_an_answer(solver: LinearSolver) -> None:
    builder = ProblemBuilder("odd")
    x = builder.variables(2, upper=5.0, integer=True)
    builder.rows(x, 2.0, lower=3.0, upper=3.0)
    result = solver.solve(builder.build(), WorkLimits())
    assert result.status is SolveStatus.INFEASIBLE
    assert result.solution is None


@every_solver
def test_same_seed_gives_the_same_solution(solver: LinearSolver) -> None:
    problem = knapsack(11, items=14)
    first, second = (solver.solve(problem, WorkLimits(seed=3)) for _ in range(2))
    assert first.solution is not None
    assert second.solution is not None
    assert first.solution.tolist() == second.solution.tolist()
    assert (first.objective, first.bound, first.report) == (second.objective, second.bound, second.report)


@every_solver
def test_a_limit_still_brackets_the_optimum(solver: LinearSolver) -> None:
    problem = knapsack(5, items=40, rows=12)
    proven = solver.solve(problem, WorkLimits())
    cut = solver.solve(problem, WorkLimits(work=0.001))
    assert proven.status is SolveStatus.OPTIMAL
    assert cut.bound <= proven.objective + 1e-6 <= cut.objective + 2e-6
    assert (cut.status is SolveStatus.LIMIT) == (cut.solution is None)


@every_solver
def test_a_known_solution_may_be_given(solver: LinearSolver) -> None:
    problem = knapsack(2)
    best = solver.solve(problem, WorkLimits())
    assert best.solution is not None
    again = solver.solve(replace(problem, start=best.solution), WorkLimits())
    assert again.objective == pytest.approx(best.objective, abs=1e-9)


@every_solver
def test_equality_and_two_sided_rows_hold(solver: LinearSolver) -> None:
    builder = ProblemBuilder("rows")
    x = builder.variables(3, upper=9.0, cost=[1.0, 2.0, 3.0], integer=True)
    builder.rows(x, 1.0, lower=7.0, upper=7.0)
    builder.rows(x[:2], [1.0, -1.0], lower=-1.0, upper=1.0)
    result = solver.solve(builder.build(), WorkLimits())
    assert result.objective == pytest.approx(10.0, abs=1e-6)  # 4 + 3 + 0


@continuous_solver
def test_continuous_variables_take_fractions(solver: LinearSolver) -> None:
    builder = ProblemBuilder("mixed")
    x = builder.variables(1, upper=10.0, cost=-1.0)
    y = builder.variables(1, upper=3.0, cost=-1.0, integer=True)
    builder.rows(np.concatenate([x, y]), [2.0, 3.0], upper=10.5)
    result = solver.solve(builder.build(), WorkLimits())
    assert result.status is SolveStatus.OPTIMAL
    assert result.objective == pytest.approx(-5.25, abs=1e-6)


@continuous_solver
def test_unbounded_is_told_from_infeasible(solver: LinearSolver) -> None:
    builder = ProblemBuilder("unbounded")
    x = builder.variables(2, upper=math.inf, cost=-1.0)
    builder.rows(x, [1.0, -1.0], upper=1.0)
    assert solver.solve(builder.build(), WorkLimits()).status is SolveStatus.UNBOUNDED
