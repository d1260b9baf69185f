"""A solver that is named is the one that shards and schedules, a plugin's solver like a built-in one."""

from dataclasses import dataclass, field
from functools import cache

import pytest
from plans import QUESTION, small_cluster, small_graph
from plugins import plugin_with

import phaze
from phaze.errors import UnknownNameError
from phaze.hooks import Origin, PluginManager
from phaze.solvers import BUILT_IN_SOLVERS, LinearProblem, LinearResult, LinearSolver, WorkLimits


@dataclass
class CountingSolver:
    """HiGHS under another name, which remembers what it was given."""

    name: str = "counting"
    solved: list[str] = field(default_factory=list)

    @property
    def inner(self) -> LinearSolver:
        return next(solver for solver in BUILT_IN_SOLVERS if solver.name == "highs")

    def is_importable(self) -> bool:
        return True

    def refusal(self, problem: LinearProblem) -> str | None:
        return self.inner.refusal(problem)

    def solve(self, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
        self.solved.append(problem.name)
        return self.inner.solve(problem, limits)


def planned(solver: str | None, plugins: PluginManager | None = None) -> phaze.Plan:
    question = {**QUESTION, "tp": (2,), "micro_batch_size": (1,), "gap": 0.01}
    cluster = small_cluster(80 * 2**30, 8)
    return phaze.optimize(small_graph(), cluster=cluster, solver=solver, plugins=plugins, **question)


def test_a_plugins_solver_that_is_named_really_solves() -> None:
    plugins, solver = PluginManager.load(), CountingSolver()
    plugins.register(
        plugin_with(phaze_solvers=lambda: {"counting": solver}),
        Origin(plugin="counting", distribution=None, version=None),
    )
    plan = planned("counting", plugins)
    assert solver.solved
    assert plan.question.solver == "counting"
    assert plan.step_time_s == pytest.approx(planned_by_default().step_time_s, rel=0.02)  # each is within a gap of 1 %


@cache
def planned_by_default() -> phaze.Plan:
    return planned(None)


@pytest.mark.parametrize("name", [solver.name for solver in BUILT_IN_SOLVERS])
def test_every_built_in_solver_finds_an_equally_good_plan(name: str) -> None:
    assert planned(name).step_time_s == pytest.approx(planned_by_default().step_time_s, rel=0.02)


def test_an_unknown_solver_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="highs"):
        planned("simplex")
