"""Solvers are chosen by name, fall back and say so; answers are checked, and problems that nobody takes are refused."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from phaze.errors import SolverError, UnknownNameError
from phaze.hooks import Origin, PluginManager, hookimpl
from phaze.solvers import (
    AUTOMATIC_SOLVERS,
    BUILT_IN_SOLVERS,
    LinearProblem,
    LinearResult,
    LinearSolver,
    ProblemBuilder,
    SolverChain,
    SolveReport,
    SolveStatus,
    WorkLimits,
    choose_solver,
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


@dataclass(frozen=True)
class FirstVariable(Careless):
    """Sets the first variable to 1: the optimum of the covering problem."""

    name: str = "first-variable"

    def solve(self, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
        solution = np.eye(problem.variable_count)[0]
        return LinearResult(status=SolveStatus.OPTIMAL, report=SolveReport(solver=self.name), solution=solution)


class PluginOfSolvers:
    @hookimpl
    def phaze_solvers(self) -> list[LinearSolver]:
        return [FirstVariable(), Absent()]


def chosen(name: str) -> SolverChain:
    return choose_solver(name, PluginManager.load())


def test_built_in_solvers_fit_the_protocol() -> None:
    assert all(isinstance(solver, LinearSolver) for solver in BUILT_IN_SOLVERS)
    assert [solver.name for solver in BUILT_IN_SOLVERS] == ["highs", "scip", "cp-sat", "gurobi"]


def test_default_runs_on_an_open_solver() -> None:
    result = solve_linear(covering())
    assert result.report.solver == "highs"
    assert result.report.fallbacks == ()
    assert result.objective == pytest.approx(1.0)


def test_missing_library_falls_back_and_says_so() -> None:
    result = solve_linear(covering(), solver=SolverChain((Absent(), *AUTOMATIC_SOLVERS.solvers)))
    assert result.status is SolveStatus.OPTIMAL
    assert result.report.solver == "highs"
    assert result.report.fallbacks == ("absent: not installed",)
    assert "fell back from absent: not installed" in str(result.report)


def test_gurobi_over_its_bundled_licence_falls_back_and_says_so() -> None:
    gurobi = next(solver for solver in BUILT_IN_SOLVERS if solver.name == "gurobi")
    large = covering(2001)
    if gurobi.refusal(large) is None:  # a full licence is installed here
        assert solve_linear(large, solver=chosen("gurobi")).report.solver == "gurobi"
        return
    result = solve_linear(large, solver=chosen("gurobi"))
    assert result.report.solver == "highs"
    assert result.report.fallbacks[0].startswith("gurobi: 2001 variables and 1 rows exceed the licence")


def test_gurobi_within_its_bundled_licence_runs() -> None:
    result = solve_linear(covering(2000), solver=chosen("gurobi"))
    assert result.report.solver == "gurobi"
    assert result.report.fallbacks == ()


def test_cp_sat_passes_continuous_variables_on() -> None:
    builder = ProblemBuilder("continuous")
    builder.rows(builder.variables(1, upper=2.0, cost=1.0), 2.0, lower=1.0)
    result = solve_linear(builder.build(), solver=chosen("cp-sat"))
    assert result.report.solver == "highs"
    assert result.report.fallbacks == ("cp-sat: 1 continuous variables; CP-SAT takes integers only",)
    assert result.objective == pytest.approx(0.5)


def test_cp_sat_refuses_rows_it_would_have_to_round() -> None:
    builder = ProblemBuilder("thirds")
    builder.rows(builder.binaries(2, cost=1.0), [1 / 3, math.pi], lower=0.3)
    result = solve_linear(builder.build(), solver=chosen("cp-sat"))
    assert "power of ten" in result.report.fallbacks[0]


def test_a_problem_that_nobody_takes_raises_with_the_reasons() -> None:
    with pytest.raises(SolverError, match=r"no solver could take 'covering': absent: not installed"):
        solve_linear(covering(), solver=SolverChain((Absent(),)))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown solver 'higs'. Did you mean highs\?"):
        chosen("higs")


def test_no_name_chooses_the_automatic_solvers_and_never_gurobi() -> None:
    assert choose_solver(None, PluginManager.load()) is AUTOMATIC_SOLVERS
    assert [solver.name for solver in AUTOMATIC_SOLVERS.solvers] == ["highs", "scip", "cp-sat"]


@pytest.mark.parametrize("name", [solver.name for solver in BUILT_IN_SOLVERS])
def test_a_named_solver_runs_and_finds_the_same_optimum(name: str) -> None:
    chain = chosen(name)
    assert chain.name == name
    assert len({solver.name for solver in chain.solvers}) == len(chain.solvers)
    result = solve_linear(covering(12), solver=chain)
    assert result.report.solver == name
    assert result.report.fallbacks == ()
    assert result.objective == pytest.approx(solve_linear(covering(12)).objective, abs=1e-6)


def test_a_solver_of_a_plugin_runs_when_it_is_named() -> None:
    plugins = PluginManager()
    plugins.register(PluginOfSolvers(), Origin(plugin="solvers"))
    result = solve_linear(covering(), solver=choose_solver("first-variable", plugins))
    assert result.report.solver == "first-variable"
    assert result.objective == pytest.approx(1.0)


def test_a_named_solver_whose_library_is_missing_is_refused_at_once() -> None:
    plugins = PluginManager()
    plugins.register(PluginOfSolvers(), Origin(plugin="solvers"))
    with pytest.raises(SolverError, match="solver 'absent' was asked for and its library is not installed"):
        choose_solver("absent", plugins)


def test_a_wrong_answer_is_caught() -> None:
    with pytest.raises(SolverError, match="careless answered 'covering' with a solution that breaks a row"):
        solve_linear(covering(), solver=SolverChain((Careless(),)))


def test_problem_without_variables_is_answered() -> None:
    assert solve_linear(ProblemBuilder("empty").build(offset=2.0)).objective == 2.0


@pytest.mark.parametrize("arguments", [{"relative_gap": -0.1}, {"relative_gap": math.nan}, {"work": 0.0}, {"seed": -1}])
def test_limits_that_mean_nothing_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        WorkLimits(**arguments)  # type: ignore[arg-type]
