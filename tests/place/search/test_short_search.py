"""A short search against trying everything: what it finds is real, and it finds something where something fits."""

import math

from hypothesis import given
from hypothesis import strategies as st
from placement_brute_force import brute_force
from placement_problems import problem_with_axes
from property_examples import examples

from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.short_search import short_search

seeds = st.integers(0, 2**32 - 1)


@examples(40)
@given(seeds, st.sampled_from([0.9, 1.2, math.inf]))
def test_a_short_search_comes_within_its_gap_of_the_best_of_few_strategies(seed: int, part: float) -> None:
    problem = problem_with_axes(seed)
    expected = brute_force(problem)
    best_s = min(expected.values(), default=math.inf)
    cutoff_s = part * best_s if math.isfinite(best_s) else math.inf
    plan, is_searched = short_search(PreparedProblem.of(problem), cutoff_s)
    if plan is not None:
        assert plan.time_s < cutoff_s
        assert plan.time_s >= expected[plan.parallelism] * (1 - 1e-9)
        assert plan.time_s <= best_s / (1 - 0.02) * (1 + 1e-9)
    else:
        assert math.isinf(best_s) or best_s >= cutoff_s * (1 - 0.02)
        assert is_searched or part < math.inf
