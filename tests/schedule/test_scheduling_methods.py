"""Every exact method finds the optimum: the reference's, brute force's, and each other's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracles.scheduling_instances import read_instances
from scheduling import brute_force, layer_like_problem, linked_problem, random_problem

from phaze.hooks import Origin, PluginManager, hookimpl
from phaze.schedule import Schedule, ScheduleCache, ScheduleStatus, SchedulingProblem, breaches, schedule_layer
from phaze.schedule.exact_search import search_exact
from phaze.schedule.list_scheduling import Placed, makespan
from phaze.schedule.scheduling_problem import ReducedProblem, reduce_problem
from phaze.solvers import (
    AUTOMATIC_SOLVERS,
    LinearProblem,
    LinearResult,
    LinearSolver,
    SolverChain,
    WorkLimits,
    choose_solver,
)

ORACLE = read_instances(Path(__file__).parents[1] / "data" / "schedule.json")
PLUGINS = PluginManager.load()
EXACT = [("auto", None), ("exact", None), ("cp-sat", None), ("milp", "highs"), ("milp", "gurobi"), ("auto", "highs")]


def chain(solver: str | None) -> SolverChain | None:
    return None if solver is None else choose_solver(solver, PLUGINS)


def is_same(first: float, second: float) -> bool:
    return abs(first - second) <= 1e-6 * max(1.0, second)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "solver"), EXACT, ids=lambda value: str(value))
def test_reference_optima_are_found(method: str, solver: str | None) -> None:
    wrong = []
    for instance in ORACLE:
        answer = schedule_layer(instance.problem, gap=0.0, method=method, solver=chain(solver))
        assert instance.makespan is not None
        if answer.status is not ScheduleStatus.OPTIMAL or not is_same(answer.makespan_s, instance.makespan):
            wrong.append((instance.problem.name, answer.makespan_s, instance.makespan))
    assert wrong == []
    assert len(ORACLE) == 60


def one_by_one(reduced: ReducedProblem) -> tuple[Placed, ...]:
    """The worst schedule there is: a search that starts from it gets no help."""
    ends = np.concatenate([[0.0], np.cumsum(reduced.latency_s)])
    return tuple(Placed(job, ends[job], ends[job + 1], False, 0) for job in range(reduced.count))


def check_against_brute_force(problem: SchedulingProblem) -> None:
    """The default finds the optimum, the search alone finds it from the worst start, and no limit breaks a bound."""
    best = brute_force(problem)
    answer = schedule_layer(problem, gap=0.0)
    assert answer.status is ScheduleStatus.OPTIMAL, problem.name
    assert is_same(answer.makespan_s, best), (problem.name, answer.makespan_s, best)
    assert answer.bound_s <= best * (1 + 1e-9), problem.name
    reduced = reduce_problem(problem)
    worst = one_by_one(reduced)
    if worst:
        outcome = search_exact(reduced, worst, gap=0.0, work=10**8)
        assert is_same(makespan(outcome.placed), best), (problem.name, makespan(outcome.placed), best)
        assert is_same(outcome.bound_s, best), (problem.name, outcome.bound_s, best)
        for work in (1, 5, 20, 60):
            cut = search_exact(reduced, worst, gap=0.0, work=work)
            assert cut.bound_s <= best * (1 + 1e-9), (problem.name, work, cut.bound_s, best)
            assert makespan(cut.placed) >= best * (1 - 1e-9), (problem.name, work)


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_problem, layer_like_problem, linked_problem])
def test_brute_force_agrees_on_small_problems(make: Callable[[int, int], SchedulingProblem]) -> None:
    for seed in range(90):
        check_against_brute_force(make(seed, 1 + seed % 6))


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [random_problem, layer_like_problem, linked_problem])
def test_brute_force_agrees_on_many_small_problems(make: Callable[[int, int], SchedulingProblem]) -> None:
    for seed in range(90, 2300):
        check_against_brute_force(make(seed, 3 + seed % 4))


def check_methods_agree(problem: SchedulingProblem, method: str, solver: str | None, work: float | None) -> bool:
    """Whether the other method proved its answer; proven or not, it verifies and brackets the optimum."""
    exact = schedule_layer(problem, gap=0.0)
    assert exact.status is ScheduleStatus.OPTIMAL, problem.name
    other = schedule_layer(problem, gap=0.0, method=method, solver=chain(solver), work=work)
    assert list(breaches(other)) == [], problem.name
    assert other.bound_s <= exact.makespan_s * (1 + 1e-6), problem.name
    assert exact.makespan_s <= other.makespan_s * (1 + 1e-6), problem.name
    if other.status is ScheduleStatus.OPTIMAL:
        assert is_same(other.makespan_s, exact.makespan_s), problem.name
    return other.status is ScheduleStatus.OPTIMAL


@pytest.mark.slow
def test_cp_sat_and_the_exact_method_agree_up_to_12_jobs() -> None:
    proven = [check_methods_agree(random_problem(seed, 2 + seed % 11), "cp-sat", None, 0.3) for seed in range(30)]
    assert sum(proven) >= 27


def test_cp_sat_and_the_exact_method_agree_on_what_backward_passes_look_like() -> None:
    problems = [layer_like_problem(seed, 8 + seed % 5) for seed in range(60)]
    assert sum(check_methods_agree(problem, "cp-sat", None, 0.3) for problem in problems) >= 50


def test_cp_sat_and_the_exact_method_agree_on_many_links() -> None:
    problems = [linked_problem(seed, 6 + seed % 6) for seed in range(60)]
    assert sum(check_methods_agree(problem, "cp-sat", None, 0.3) for problem in problems) >= 50


@pytest.mark.exhaustive
def test_cp_sat_and_the_exact_method_agree_on_more_problems_up_to_12_jobs() -> None:
    proven = [check_methods_agree(random_problem(seed, 2 + seed % 11), "cp-sat", None, 0.3) for seed in range(30, 300)]
    assert sum(proven) >= 243


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [layer_like_problem, linked_problem])
def test_cp_sat_and_the_exact_method_agree_on_larger_problems(make: Callable[[int, int], SchedulingProblem]) -> None:
    problems = [make(seed, 12 + seed % 9) for seed in range(1000, 1060)]
    assert sum(check_methods_agree(problem, "cp-sat", None, 1.0) for problem in problems) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["highs", "gurobi"])
def test_milp_solvers_and_the_exact_method_agree_up_to_8_jobs(solver: str) -> None:
    proven = [check_methods_agree(random_problem(seed, 2 + seed % 7), "milp", solver, 3.0) for seed in range(60)]
    assert sum(proven) >= 57


@pytest.mark.exhaustive
@pytest.mark.parametrize("solver", ["highs", "gurobi", "scip"])
def test_milp_solvers_and_the_exact_method_agree_on_more_jobs(solver: str) -> None:
    proven = [check_methods_agree(random_problem(seed, 2 + seed % 7), "milp", solver, 3.0) for seed in range(60, 300)]
    assert sum(proven) >= 228


@pytest.mark.parametrize("method", ["auto", "list", "exact", "cp-sat", "milp"])
def test_same_input_gives_the_same_schedule(method: str) -> None:
    problem = random_problem(7, 8)
    first, second = (schedule_layer(problem, gap=0.0, method=method) for _ in range(2))
    assert first == second


def test_wanted_gap_is_kept() -> None:
    for seed in range(40):
        problem = random_problem(seed, 9)
        best = schedule_layer(problem, gap=0.0).makespan_s
        answer = schedule_layer(problem, gap=0.2)
        assert answer.status in (ScheduleStatus.OPTIMAL, ScheduleStatus.WITHIN_GAP)
        assert best <= answer.makespan_s * (1 + 1e-9)
        assert answer.makespan_s * 0.8 <= answer.bound_s * (1 + 1e-9)
        assert answer.bound_s <= best * (1 + 1e-9)


def test_work_limit_ends_with_a_valid_schedule_and_says_so() -> None:
    cut: list[Schedule] = []
    for seed in range(60):
        problem = random_problem(seed, 12)
        best = schedule_layer(problem, gap=0.0).makespan_s
        answer = schedule_layer(problem, gap=0.0, work=10)
        assert answer.bound_s <= best * (1 + 1e-9)
        assert best <= answer.makespan_s * (1 + 1e-9)
        if answer.status is ScheduleStatus.LIMIT:
            cut.append(answer)
    assert cut
    assert all(answer.gap > 0.0 for answer in cut)


def test_cache_answers_equal_problems_of_other_names() -> None:
    problem = random_problem(3, 9)
    renamed = SchedulingProblem(
        jobs=tuple(
            type(job)(f"other-{job.name}", job.resource, job.latency_s, job.spread_s, 1.0, 1.0) for job in problem.jobs
        ),
        edges=problem.edges,
        tensor_cores=problem.tensor_cores,
        vector_cores=problem.vector_cores,
        intra_op_exclusive=problem.intra_op_exclusive,
    )
    cache = ScheduleCache()
    first, second = schedule_layer(problem, cache=cache), schedule_layer(renamed, cache=cache)
    assert len(cache.schedules) == 1
    assert (first.jobs, first.bound_s) == (second.jobs, second.bound_s)
    assert second.problem is renamed
    assert second.energy_j == 9.0


def test_milp_over_the_licence_falls_back_and_says_so() -> None:
    problem = random_problem(1, 60)
    answer = schedule_layer(problem, method="milp", solver=chain("gurobi"), work=0.01)
    if "on gurobi" not in answer.method:
        assert "fell back from gurobi" in answer.report


class PluginOfHighs:
    """A plugin whose solver is HiGHS under another name, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.name = "counted"

    def is_importable(self) -> bool:
        return True

    def refusal(self, problem: LinearProblem) -> str | None:
        return None

    def solve(self, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
        self.asked += 1
        result = AUTOMATIC_SOLVERS.solvers[0].solve(problem, limits)
        return replace(result, report=replace(result.report, solver=self.name))

    @hookimpl
    def phaze_solvers(self) -> list[LinearSolver]:
        return [self]


def test_a_solver_of_a_plugin_schedules_when_it_is_named() -> None:
    plugins, plugin = PluginManager(), PluginOfHighs()
    plugins.register(plugin, Origin(plugin="counted"))
    named = choose_solver("counted", plugins)
    for seed in range(20):
        problem = random_problem(seed, 7)
        exact, by_solver = schedule_layer(problem, gap=0.0), schedule_layer(problem, gap=0.0, solver=named)
        assert by_solver.method in ("list", "milp on counted")
        assert is_same(by_solver.makespan_s, exact.makespan_s)
    assert plugin.asked > 0


@pytest.mark.parametrize("solver", ["highs", "scip", "gurobi"])
def test_a_named_solver_and_the_exact_method_agree_within_the_gap(solver: str) -> None:
    for seed in range(30):
        problem = layer_like_problem(seed, 3 + seed % 6)
        exact, by_solver = schedule_layer(problem), schedule_layer(problem, solver=chain(solver))
        assert by_solver.method in ("list", f"milp on {solver}")
        assert max(exact.bound_s, by_solver.bound_s) <= min(exact.makespan_s, by_solver.makespan_s) * (1 + 1e-6)
        assert by_solver.gap <= 0.01 + 1e-9


@pytest.mark.parametrize("method", ["list", "exact", "cp-sat"])
def test_a_solver_with_a_method_that_uses_none_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match="only auto and milp use a linear solver"):
        schedule_layer(random_problem(1, 4), method=method, solver=chain("highs"))
