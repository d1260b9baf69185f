"""The plan that needs least memory, against trying everything with a little more and a little less."""

import math
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from placement_brute_force import brute_force
from placement_problems import problem_with_axes, random_problem, stage_sharded_problem, with_memory
from property_examples import examples

from phaze.place import PlacementProblem, PreparedProblem
from phaze.place.memory.least_memory_plan import least_memory

seeds = st.integers(0, 2**32 - 1)


@examples(20)
@given(seeds, st.sampled_from([random_problem, stage_sharded_problem, problem_with_axes]))
def test_nothing_fits_below_the_least_memory_and_something_fits_at_it(
    seed: int, made: Callable[[int], PlacementProblem]
) -> None:
    problem = replace(made(seed), memory_margin=0.0)
    least = least_memory(PreparedProblem.of(problem))
    if least is None:
        assert not brute_force(with_memory(problem, 10**12))
        return
    assert brute_force(with_memory(problem, math.ceil(least.peak_bytes * (1 + 1e-9)) + 1))
    if least.peak_bytes > 2:
        assert not brute_force(with_memory(problem, math.floor(least.peak_bytes * (1 - 1e-9)) - 1))
