"""No bound under unfinished pipelines exceeds the simulated time of a pipeline that finishes them."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_problems import examples, random_problem

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.bounds.interleaved_bounds import interleaved_closed_form_s
from phaze.place.search.parallelism_table import ParallelismTable, list_parallelisms
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.stage_search import StageSearch, best_stages
from phaze.place.simulation.placement import assemble


def random_pipeline(random: Random, search: StageSearch) -> list[int] | None:
    """Candidates from the empty to the full state, or None where the walk got stuck."""
    candidates, state, picks = search.candidates, 0, []
    for position in range(search.stages):
        options = list(range(candidates.first[state], candidates.first[state + 1]))
        if position + 1 == search.stages:
            options = [pick for pick in options if candidates.target[pick] == search.last_state]
        if not options:
            return None
        picks.append(random.choice(options))
        state = int(candidates.target[picks[-1]])
    return picks if state == search.last_state else None


def random_degrees(random: Random, problem_batches: int, widths: tuple[int, ...], layers: int) -> Parallelism | None:
    schedule = random.choice(list(PipelineSchedule))
    dp = random.randrange(1, 4)
    chunks = 2 if schedule is PipelineSchedule.INTERLEAVED else 1
    devices = 1 if schedule is PipelineSchedule.NONE else random.randrange(2, 6)
    parallelism = Parallelism(
        tp=random.choice(widths),
        dp=dp,
        pp=devices,
        chunks=chunks,
        schedule=schedule,
        zero=random.choice([0, 1, 2, 3]) if dp > 1 else 0,
    )
    rounds = parallelism.micro_batches_per_pipeline(problem_batches)
    return None if parallelism.stages > layers or (chunks > 1 and rounds % devices) else parallelism


@examples(200)
@given(st.integers(0, 2**32 - 1))
def test_bounds_never_exceed_simulated_times(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(seed, largest=10, most_devices=8, most_micro_batches=24, memory_bytes=10**12)
    parallelism = random_degrees(random, problem.micro_batches, problem.tp_degrees, len(problem.graph.layers))
    if parallelism is None:
        return
    prepared = PreparedProblem.of(problem)
    candidates = prepared.candidates(parallelism, math.inf)
    search = prepared.stage_search(parallelism, candidates)
    for _ in range(5):
        picks = random_pipeline(random, search)
        if picks is None:
            continue
        time_s = search.simulated(np.array([picks]))[0]
        row = search.bounds.root
        for position, pick in enumerate(picks):
            rows, bounds = search.bounds.extend(row, position, np.array([pick]), np.zeros(1, dtype=np.int64))
            assert bounds[0] <= time_s * (1 + 1e-9)
            row = rows[0]


@examples(200)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_floors_never_exceed_the_time_of_a_pipeline_in_the_memory_that_it_needs(seed: int, interleaved: bool) -> None:
    random = Random(seed)
    problem = random_problem(seed, largest=12, most_devices=8, most_micro_batches=24, memory_bytes=10**12)
    prepared = PreparedProblem.of(replace(problem, memory_margin=0.0))
    every = choices_of(prepared)
    some = every.take((every.chunks > 1) == interleaved)
    if not len(some):
        return
    parallelism = some.parallelism(random.randrange(len(some)))
    search = prepared.stage_search_below(parallelism, math.inf)
    picks = None if search is None or search.singles.least or search.singles.exact else random_pipeline(random, search)
    if search is None or picks is None:
        return
    candidates = search.candidates
    placement = assemble(prepared, parallelism, list(zip(candidates.stage[picks], candidates.mode[picks], strict=True)))
    peak = max(memory.total_bytes for memory in placement.memory)
    chip = replace(problem.cluster.accelerator, hbm_bytes=math.ceil(peak))
    tight = PreparedProblem.of(replace(prepared.problem, cluster=replace(problem.cluster, accelerator=chip)))
    every = choices_of(tight)
    choice = next(
        every.take(np.array([index])) for index in range(len(every)) if every.parallelism(index) == parallelism
    )
    limit = placement.time_s * (1 + 1e-9)
    assert choice.bound_s[0] <= limit
    assert not tight.layer_table.refuted(choice, np.array([limit]))[0]
    assert tight.layer_table.tightened(choice, 2 * limit)[0] <= limit
    if interleaved and tight.space.is_chain:
        assert interleaved_closed_form_s(tight.layer_table, choice)[0] <= limit
    search = tight.stage_search_below(parallelism, math.inf)
    assert search is not None
    assert search.root_bound() <= limit


def choices_of(prepared: PreparedProblem) -> ParallelismTable:
    return list_parallelisms(prepared.problem, prepared.space, prepared.stage_sums, prepared.network, prepared.update_s)


@examples(40)
@given(st.integers(0, 2**32 - 1))
def test_branch_and_bound_finds_the_best_of_all_pipelines(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(seed, largest=6, most_devices=8, most_micro_batches=12, memory_bytes=10**12)
    parallelism = random_degrees(random, problem.micro_batches, problem.tp_degrees, len(problem.graph.layers))
    if parallelism is None or parallelism.stages > 4:
        return
    prepared = PreparedProblem.of(problem)
    candidates = prepared.candidates(parallelism, math.inf)
    search = prepared.stage_search(parallelism, candidates)
    unfinished = [((), 0)]
    for _ in range(parallelism.stages):
        unfinished = [
            ((*picks, pick), int(candidates.target[pick]))
            for picks, state in unfinished
            for pick in range(candidates.first[state], candidates.first[state + 1])
        ]
    finished = [picks for picks, state in unfinished if state == search.last_state]
    answer = best_stages(search, math.inf, 10**6)
    expected = search.simulated(np.array(finished)).min() if finished else math.inf
    assert answer.time_s == pytest.approx(expected, rel=1e-9)
    assert answer.bound_s == pytest.approx(expected, rel=1e-9)
