"""The best plan by another value than its step time, over all strategies on as many devices as each takes."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_brute_force import brute_force
from placement_problems import problem_with_axes, random_problem
from property_examples import examples

from phaze.parallelism import Parallelism
from phaze.place import PlacementProblem, PreparedProblem
from phaze.place.search.valued_search import PlanValue, likely_strategies, search_by_value, unrefuted

seeds = st.integers(0, 2**32 - 1)


def on_any_devices(problem: PlacementProblem) -> PlacementProblem:
    """The problem in which plans may take fewer devices, every stage tp of them."""
    runs = replace(problem.capabilities, allows_idle_devices=True, allows_mixed_tp=False)
    return replace(problem, capabilities=runs)


def values(problem: PlacementProblem, times_s: dict[Parallelism, float], seed: int) -> list[PlanValue]:
    """Cost, the fewest devices at all and within a step time, and a line with a part for each strategy."""
    random = Random(seed)
    limit_s = random.choice([*times_s.values(), 1.0]) * random.choice([0.9, 1.1])
    return [
        PlanValue(per_device_second=1.0),
        PlanValue(per_device=1.0),
        PlanValue(per_device=1.0, most_s=limit_s),
        PlanValue(per_device_second=2.0, constant=1.0, further=lambda strategy: 0.1 * strategy.zero + strategy.dp),
        PlanValue(per_device_second=1.0, allows=lambda count: count % 2 == 0),
    ]


def assert_least(problem: PlacementProblem, seed: int) -> None:
    times_s = brute_force(problem)
    prepared = PreparedProblem.of(problem)
    for value in values(problem, times_s, seed):
        tried = [
            value.of(strategy, time_s) for strategy, time_s in times_s.items() if value.allows(strategy.device_count)
        ]
        least = min(tried, default=math.inf)
        strategies = prepared.strategies()
        likely = search_by_value(prepared, likely_strategies(prepared, strategies, value), value)
        assert likely.value >= least * (1 - 1e-9)
        rows = unrefuted(prepared, strategies, value, likely.value)
        found = search_by_value(prepared, rows, value, best_value=likely.value)
        if math.isinf(least):
            assert found.plan is None
            assert math.isinf(found.bound)
            continue
        assert found.value == pytest.approx(least, rel=1e-9)
        assert found.bound == pytest.approx(least, rel=1e-6)


@examples(25)
@given(seeds)
def test_the_least_value_is_that_of_trying_everything(seed: int) -> None:
    assert_least(on_any_devices(random_problem(seed)), seed)


@examples(15)
@given(seeds)
def test_the_least_value_over_all_axes_is_that_of_trying_everything(seed: int) -> None:
    assert_least(on_any_devices(problem_with_axes(seed)), seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_the_least_value_of_six_layers_on_eight_devices_is_that_of_trying_everything(seed: int) -> None:
    assert_least(on_any_devices(random_problem(seed, largest=6, most_devices=8, most_micro_batches=4)), seed)


@examples(15)
@given(seeds)
def test_with_a_gap_the_value_and_its_bound_enclose_the_least(seed: int) -> None:
    problem = on_any_devices(random_problem(seed))
    value, prepared = PlanValue(per_device_second=1.0), PreparedProblem.of(problem)
    least = min((strategy.device_count * time_s for strategy, time_s in brute_force(problem).items()), default=math.inf)
    found = search_by_value(prepared, unrefuted(prepared, prepared.strategies(), value, math.inf), value, gap=0.1)
    if math.isinf(least):
        assert found.plan is None
        return
    assert found.bound <= least * (1 + 1e-9)
    assert least * (1 - 1e-9) <= found.value <= least / 0.9 * (1 + 1e-9)
    assert found.bound >= found.value * 0.9 * (1 - 1e-6)
