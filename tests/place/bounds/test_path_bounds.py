"""No bound under unfinished pipelines exceeds the simulated time of a pipeline that finishes them."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_problems import random_problem, random_strategy, with_axes, with_memory
from property_examples import examples

from phaze.place.bounds.interleaved_bounds import (
    InterleavedBounds,
    _layer_stages,
    _possible_stages,
    interleaved_closed_form_s,
)
from phaze.place.model.zero_sharding import distinct_columns
from phaze.place.search.joint_bounds import ALIKE, are_refuted
from phaze.place.search.parallelism_table import ParallelismTable, list_parallelisms
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.stage_search import StageSearch
from phaze.place.simulation.placement import assemble


def strategies_of(prepared: PreparedProblem) -> ParallelismTable:
    return list_parallelisms(prepared.problem, prepared.space, prepared.stage_sums, prepared.network, prepared.update_s)


def random_pipeline(random: Random, search: StageSearch) -> list[int] | None:
    """Candidates from the empty to the full state, or None where the walk got stuck."""
    candidates, state, pipeline = search.candidates, 0, []
    for position in range(search.stages):
        options = list(range(candidates.first[state], candidates.first[state + 1]))
        if position + 1 == search.stages:
            options = [option for option in options if candidates.target[option] == search.last_state]
        if not options:
            return None
        pipeline.append(random.choice(options))
        state = int(candidates.target[pipeline[-1]])
    return pipeline if state == search.last_state else None


@examples(200)
@given(st.integers(0, 2**32 - 1))
def test_bounds_never_exceed_simulated_times(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(seed, largest=10, most_devices=8, most_micro_batches=24, memory_bytes=10**12)
    parallelism = random_strategy(random, problem)
    if parallelism is None:
        return
    prepared = PreparedProblem.of(problem)
    candidates = prepared.candidates(parallelism, math.inf)
    search = prepared.stage_search(parallelism, candidates)
    for _ in range(5):
        pipeline = random_pipeline(random, search)
        if pipeline is None:
            continue
        time_s = search.simulated(np.array([pipeline]))[0]
        row = search.bounds.root
        for position, candidate in enumerate(pipeline):
            rows, bounds = search.bounds.extend(row, position, np.array([candidate]), np.zeros(1, dtype=np.int64))
            assert bounds[0] <= time_s * (1 + 1e-9)
            row = rows[0]


@examples(200)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_bounds_of_a_strategy_never_exceed_the_time_of_a_pipeline_in_the_memory_that_it_needs(
    seed: int, interleaved: bool
) -> None:
    random = Random(seed)
    problem = random_problem(seed, largest=12, most_devices=8, most_micro_batches=24, memory_bytes=10**12)
    problem = with_axes(problem, seed)
    prepared = PreparedProblem.of(replace(problem, memory_margin=0.0))
    strategies = strategies_of(prepared)
    strategies = strategies.take((strategies.chunks > 1) == interleaved)
    if not len(strategies):
        return
    parallelism = strategies.parallelism(random.randrange(len(strategies)), problem)
    search = prepared.stage_search_below(parallelism, math.inf)
    pipeline = (
        None if search is None or search.singles.least or search.singles.exact else random_pipeline(random, search)
    )
    if search is None or pipeline is None:
        return
    candidates = search.candidates
    placement = assemble(
        prepared, parallelism, list(zip(candidates.stage[pipeline], candidates.mode[pipeline], strict=True))
    )
    peak = max(memory.total_bytes for memory in placement.memory)
    tight = PreparedProblem.of(with_memory(prepared.problem, math.ceil(peak)))
    strategies = strategies_of(tight)
    same = [index for index in range(len(strategies)) if strategies.parallelism(index, problem) == parallelism]
    strategy = strategies.take(np.array(same))
    limit = placement.time_s * (1 + 1e-9)
    assert strategy.bound_s[0] <= limit
    assert not tight.layer_table.refuted(strategy, np.array([limit]))[0]
    assert tight.layer_table.tightened(strategy, 2 * limit)[0] <= limit
    if interleaved and tight.space.is_chain:
        assert interleaved_closed_form_s(tight.layer_table, strategy)[0] <= limit
    search = tight.stage_search_below(parallelism, math.inf)
    assert search is not None
    assert search.root_bound() <= limit
    if interleaved:
        assert max(search.simulated_bound(target_s) for target_s in (1.001 * limit, 2 * limit, 1e9)) <= limit


@examples(100)
@given(st.integers(0, 2**32 - 1))
def test_strategies_are_not_refuted_together_where_one_of_them_has_a_pipeline_below_the_target(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(seed, largest=10, most_devices=16, most_micro_batches=8, memory_bytes=10**9)
    prepared = PreparedProblem.of(with_axes(problem, seed))
    strategies = strategies_of(prepared)
    strategies = strategies.take(strategies.chunks > 1)
    if not len(strategies):
        return
    index = random.randrange(len(strategies))
    is_alike = [getattr(strategies, name) == getattr(strategies, name)[index] for name in ALIKE]
    search = prepared.stage_search_below(strategies.parallelism(index, prepared.problem), math.inf)
    pipelines = [] if search is None else [random_pipeline(random, search) for _ in range(8)]
    chosen = np.array([pipeline for pipeline in pipelines if pipeline is not None])
    if search is None or not len(chosen):
        return
    assert isinstance(search.bounds, InterleavedBounds)
    times_s = np.where(search.bounds.fits(chosen), search.simulated(chosen), math.inf)
    if times_s.min() < math.inf:
        alike = strategies.take(np.all(is_alike, axis=0))
        assert not are_refuted(prepared, alike, float(times_s.min()) * (1 + 1e-9))


@examples(200)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=14), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_what_alike_layers_choose_together_is_what_each_would_choose_alone(
    inner: list[int], stages: int, seed: int
) -> None:
    kinds = (0, *(kind + 1 for kind in inner), 4)
    stages = min(stages, len(kinds))
    pairs = _layer_stages(kinds, stages)
    prices = np.random.default_rng(seed).random((5, 2**5, stages))  # by kind, kinds behind, and stage

    def behind(layer: int) -> int:
        return sum(2**kind for kind in set(kinds[layer:]))

    alone = 0.0
    for layer, (first, last) in enumerate(zip(*_possible_stages(len(kinds), stages), strict=True)):
        alone += min(prices[kinds[layer], behind(layer), stage] for stage in range(first, last + 1))
    behind_pairs = [sum(2**kind for kind in np.flatnonzero(row)) for row in pairs.is_behind]
    together = pairs.least_sum(prices[pairs.kind, behind_pairs, pairs.stage][:, None])
    assert together[0] == pytest.approx(alone, rel=1e-12)
    assert pairs.counts.sum() == len(kinds)


@examples(60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 2**20, 2**40]))
def test_equal_columns_are_found_whether_their_digits_fit_one_number_or_not(seed: int, largest: int) -> None:
    columns = np.random.default_rng(seed).integers(0, 3, (4, 30)) * (largest // 3)
    first, which = distinct_columns(columns)
    assert (columns[:, first][:, which] == columns).all()
    assert len(first) == len({tuple(column) for column in columns.T.tolist()})
