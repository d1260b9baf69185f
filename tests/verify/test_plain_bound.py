"""The plain proof of a bound: it shows what trying everything shows, and finds every time that is no bound."""

import math

import pytest
from placement_brute_force import brute_force
from placement_problems import problem_with_axes, random_problem

from phaze.place import PlacementProblem
from phaze.verify.plain_bound import PlainEffort, prove_plainly

AMPLE = 10_000_000


def compare_with_brute_force(problem: PlacementProblem) -> None:
    """The least time of all strategies is proven, a little more is refuted by a strategy that takes it."""
    times = brute_force(problem, uses_bounds=True)
    least_s = min(times.values(), default=math.inf)
    proof = prove_plainly(problem, least_s, PlainEffort(AMPLE))
    assert proof.faster is None
    assert proof.left_open == 0
    if times:
        refuted = prove_plainly(problem, least_s * 1.0001, PlainEffort(AMPLE))
        assert refuted.faster is not None
        strategy, seconds = refuted.faster
        assert times[strategy] <= seconds < least_s * 1.0001


@pytest.mark.parametrize("seed", range(8))
def test_the_least_time_is_proven_and_more_is_refuted(seed: int) -> None:
    compare_with_brute_force(random_problem(seed))


@pytest.mark.parametrize("seed", range(4))
def test_the_least_time_over_all_axes_is_proven_and_more_is_refuted(seed: int) -> None:
    compare_with_brute_force(problem_with_axes(seed))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100, 200))
def test_the_least_time_of_many_problems_is_proven_and_more_is_refuted(seed: int) -> None:
    compare_with_brute_force(random_problem(seed))
    compare_with_brute_force(problem_with_axes(seed))


def test_without_effort_strategies_are_left_open_and_not_called_proven() -> None:
    problem = random_problem(1)
    times = brute_force(problem, uses_bounds=True)
    proof = prove_plainly(problem, min(times.values()), PlainEffort(0))
    assert proof.faster is None
    assert proof.left_open > 0
    assert proof.by_stages == proof.by_trying == 0
