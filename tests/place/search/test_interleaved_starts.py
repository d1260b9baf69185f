"""Starts and bounds of interleaved pipelines, against all pipelines of a strategy."""

import math
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from placement_problems import random_problem
from property_examples import examples

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place import PreparedProblem
from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.search.interleaved_starts import interleaved_start
from phaze.place.search.stage_search import StageSearch

MOST_PIPELINES = 3_000
"""Strategies with more pipelines are left out: each is simulated."""


def interleaved_search(seed: int) -> tuple[StageSearch, bool] | None:
    """A random interleaved strategy, where its pipelines are few, and whether the layers are a chain."""
    random = Random(seed)
    memory_bytes = random.choice([8_000_000, 12_000_000, 16_000_000, 25_000_000, 40_000_000, 10**12])
    problem = random_problem(seed, largest=9, most_devices=8, most_micro_batches=12, memory_bytes=memory_bytes)
    layers = len(problem.graph.layers)
    shapes = [(pp, chunks) for pp in (2, 3, 4) for chunks in (2, 3, 4) if pp * chunks <= layers]
    if not shapes:
        return None
    (pp, chunks), dp = random.choice(shapes), random.randrange(1, 4)
    zero = random.randrange(4) if dp > 1 else 0
    parallelism = Parallelism(
        dp=dp,
        tp=random.choice(problem.tp_degrees),
        pp=pp,
        chunks=chunks,
        zero=zero,
        schedule=PipelineSchedule.INTERLEAVED,
    )
    if parallelism.micro_batches_per_pipeline(problem.micro_batches) % pp:
        return None
    prepared = PreparedProblem.of(problem)
    search = prepared.stage_search(parallelism, prepared.candidates(parallelism, math.inf))
    assert isinstance(search.bounds, InterleavedBounds)
    return (search, prepared.space.is_chain) if search.bounds.count_pipelines() <= MOST_PIPELINES else None


def all_pipelines(search: StageSearch) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Every pipeline that fits, as candidates per (pipeline, stage)."""
    candidates, unfinished = search.candidates, [((), 0)]
    for _ in range(search.stages):
        unfinished = [
            ((*pipeline, candidate), int(candidates.target[candidate]))
            for pipeline, state in unfinished
            for candidate in range(candidates.first[state], candidates.first[state + 1])
        ]
    finished = [pipeline for pipeline, state in unfinished if state == search.last_state]
    pipelines = np.array(finished, dtype=np.int64).reshape(-1, search.stages)
    assert isinstance(search.bounds, InterleavedBounds)
    return pipelines[search.bounds.fits(pipelines)] if len(pipelines) else pipelines


@examples(300)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.02, 0.2]), st.sampled_from([0.9, 1.0, 1.1, math.inf]))
def test_bounds_of_interleaved_strategies_lie_under_all_their_pipelines_and_starts_fit(
    seed: int, gap: float, part: float
) -> None:
    found = interleaved_search(seed)
    if found is None:
        return
    search, is_chain = found
    pipelines = all_pipelines(search)
    least_s = float(search.simulated(pipelines).min()) if len(pipelines) else math.inf
    assert isinstance(search.bounds, InterleavedBounds)
    cutoff_s = part * least_s if math.isfinite(least_s) else 1.0
    assert search.root_bound() <= least_s * (1 + 1e-9)
    assert search.root_bound(0.5 * min(cutoff_s, least_s), cutoff_s) <= max(cutoff_s, least_s) * (1 + 1e-9)
    start = interleaved_start(search, search.bounds, cutoff_s, gap, is_chain)
    assert min(start.bound_s, cutoff_s) <= least_s * (1 + 1e-9)
    if start.pipelines:
        assert search.bounds.fits(np.array(start.pipelines)).all()
        assert search.simulated(np.array(start.pipelines)).min() >= least_s * (1 - 1e-9)
