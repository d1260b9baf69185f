"""Branch and bound over the stages of one strategy, against all its pipelines."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_problems import random_problem, random_strategy
from property_examples import examples

from phaze.place import PreparedProblem
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.stage_search import best_stages


@examples(40)
@given(st.integers(0, 2**32 - 1))
def test_branch_and_bound_finds_the_best_of_all_pipelines(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(seed, largest=6, most_devices=8, most_micro_batches=12, memory_bytes=10**12)
    parallelism = random_strategy(random, problem)
    if parallelism is None or parallelism.stages > 4:
        return
    prepared = PreparedProblem.of(problem)
    candidates = prepared.candidates(parallelism, math.inf)
    search = prepared.stage_search(parallelism, candidates)
    unfinished = [((), 0)]
    for _ in range(parallelism.stages):
        unfinished = [
            ((*pipeline, candidate), int(candidates.target[candidate]))
            for pipeline, state in unfinished
            for candidate in range(candidates.first[state], candidates.first[state + 1])
        ]
    finished = [pipeline for pipeline, state in unfinished if state == search.last_state]
    answer = best_stages(search, math.inf, 10**6)
    expected = search.simulated(np.array(finished)).min() if finished else math.inf
    assert answer.time_s == pytest.approx(expected, rel=1e-9)
    assert answer.bound_s == pytest.approx(expected, rel=1e-9)


@examples(20)
@given(st.integers(0, 2**32 - 1))
def test_a_mode_that_recomputes_no_more_than_an_earlier_one_is_not_offered(seed: int) -> None:
    problem = random_problem(seed)
    first = problem.choices.recompute[0]
    profiles = {key: problem.profiles[key[0], key[1], first] for key in problem.profiles}
    problem = replace(problem, profiles=profiles)
    parallelism = random_strategy(Random(seed), problem)
    if parallelism is not None:
        assert not PreparedProblem.of(problem).candidates(parallelism, math.inf).mode.any()


@examples(20)
@given(st.integers(0, 2**32 - 1))
def test_the_last_digits_of_simulated_times_choose_no_pipeline(seed: int) -> None:
    """Another processor adds the same numbers in another order; its plans should be the same ones."""
    problem = random_problem(seed, largest=6, most_devices=8, most_micro_batches=12, memory_bytes=10**12)
    parallelism = random_strategy(Random(seed), problem)
    if parallelism is None or parallelism.stages > 4:
        return
    prepared = PreparedProblem.of(problem)
    search = prepared.stage_search(parallelism, prepared.candidates(parallelism, math.inf))
    digits = np.random.default_rng(seed)

    def tied(several: IntArray) -> FloatArray:
        return 1e3 * np.ceil(search.simulated(several) / 1e3)

    def rounded(several: IntArray) -> FloatArray:
        return tied(several) * (1 + 1e-13 * digits.normal(size=len(several)))

    as_summed_here, as_summed_elsewhere = (
        best_stages(replace(search, simulated=simulated), math.inf, 10**6) for simulated in (tied, rounded)
    )
    assert as_summed_elsewhere.pipeline == as_summed_here.pipeline
