"""The front: fallbacks that say so, checked answers, and refused problems."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from phaze.errors import SolverError, UnknownNameError
from phaze.solvers import (
    BUILT_IN_SOLVERS,
    LinearProblem,
    LinearResult,
    LinearSolver,
    ProblemBuilder,
    SolveReport,
    SolveStatus,
    WorkLimits,
    solve_linear,
)


def covering(variables: int = 3) -> LinearProblem:
    builder = ProblemBuilder("covering")
    x = builder.binaries(variables, cost=np.arange(1.0, variables + 1.0))
    builder.rows(x, 1.0, lower=1.0)
    return builder.build()


@dataclass(frozen=True)
class Absent:
    name: str = "absent"

    def is_importable(self) -> bool:
        return False

    def refusal(self, problem: LinearProblem) -> str | None:
        return None

    def solve(self, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
        raise AssertionError("an absent library must not be asked")


@dataclass(frozen=True)
class Careless(Absent):
    name: str = "careless"

    def is_importable(self) -> bool:
        return True

    def solve(self, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
        zeros = np.zeros(problem.variable_count)
        return LinearResult(
            status=SolveStatus.OPTIMAL, report=SolveReport(solver=self.name), solution=zeros, objective=0.0
        )


def test_built_in_solvers_fit_the_protocol() -> None:
    assert all(isinstance(solver, LinearSolver) for solver in BUILT_IN_SOLVERS)
    assert [solver.name for solver in BUILT_IN_SOLVERS] == ["highs", "scip", "cp-sat", "gurobi"]


def test_default_runs_on_an_open_solver() -> None:
    result = solve_linear(covering())
    assert result.report.solver == "highs"
    assert result.report.fallbacks == ()
    assert result.objective == pytest.approx(1.0)


def test_missing_library_falls_back_and_says_so() -> None:
    result = solve_linear(covering(), solver="absent", solvers=(Absent(), *BUILT_IN_SOLVERS))
    assert result.status is SolveStatus.OPTIMAL
    assert result.report.solver == "highs"
    assert result.report.fallbacks == ("absent: not installed",)
    assert "fell back from absent: not installed" in str(result.report)


def test_gurobi_over_its_bundled_licence_falls_back_and_says_so() -> None:
    gurobi = next(solver for solver in BUILT_IN_SOLVERS if solver.name == "gurobi")
    large = covering(2001)
    if gurobi.refusal(large) is None:  # a full licence is installed here
        assert solve_linear(large, solver="gurobi").report.solver == "gurobi"
        return
    result = solve_linear(large, solver="gurobi")
    assert result.report.solver == "highs"
    assert result.report.fallbacks[0].startswith("gurobi: 2001 variables and 1 rows exceed the licence")


def test_gurobi_within_its_bundled_licence_runs() -> None:
    result = solve_linear(covering(2000), solver="gurobi")
    assert result.report.solver == "gurobi"
    assert result.report.fallbacks == ()


def test_cp_sat_passes_continuous_variables_on() -> None:
    builder = ProblemBuilder("continuous")
    builder.rows(builder.variables(1, upper=2.0, cost=1.0), 2.0, lower=1.0)
    result = solve_linear(builder.build(), solver="cp-sat")
    assert result.report.solver == "highs"
    assert result.report.fallbacks == ("cp-sat: 1 continuous variables; CP-SAT takes integers only",)
    assert result.objective == pytest.approx(0.5)


def test_cp_sat_refuses_rows_it_would_have_to_round() -> None:
    builder = ProblemBuilder("thirds")
    builder.rows(builder.binaries(2, cost=1.0), [1 / 3, math.pi], lower=0.3)
    result = solve_linear(builder.build(), solver="cp-sat")
    assert "power of ten" in result.report.fallbacks[0]


def test_no_fallback_wanted_raises_with_the_reason() -> None:
    with pytest.raises(SolverError, match=r"no solver could take 'covering': absent: not installed"):
        solve_linear(covering(), solver="absent", solvers=(Absent(),), may_fall_back=False)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown solver 'higs'. Did you mean highs\?"):
        solve_linear(covering(), solver="higs")


def test_a_wrong_answer_is_caught() -> None:
    with pytest.raises(SolverError, match="careless answered 'covering' with a solution that breaks a row"):
        solve_linear(covering(), solver="careless", solvers=(Careless(),))


def test_problem_without_variables_is_answered() -> None:
    assert solve_linear(ProblemBuilder("empty").build(offset=2.0)).objective == 2.0


@pytest.mark.parametrize("arguments", [{"relative_gap": -0.1}, {"relative_gap": math.nan}, {"work": 0.0}, {"seed": -1}])
def test_limits_that_mean_nothing_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        WorkLimits(**arguments)  # type: ignore[arg-type]
