"""Bounds hold on every problem, one by one and for many accelerators at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scheduling import random_problem

from phaze.schedule import Job, Resource, SchedulingProblem, lower_bounds, schedule_layer
from phaze.schedule.makespan_bounds import best_bound_s, rates, spreading_is_best
from phaze.schedule.scheduling_problem import ReducedProblem, reduce_problem, segments


def lower_bound(reduced: ReducedProblem) -> float:
    """The bound of one problem, its segments added up."""
    return sum(float(rates(part).bounds_s.max()) for part in segments(reduced))


def arrays(problem: SchedulingProblem) -> dict[str, np.ndarray]:
    return {
        "latency_s": np.array([[job.latency_s for job in problem.jobs]]),
        "spread_s": np.array([[job.spread_s for job in problem.jobs]]),
    }


@pytest.mark.parametrize("exclusive", [True, False])
def test_bound_never_exceeds_the_optimum(exclusive: bool) -> None:
    for seed in range(120):
        problem = random_problem(seed, 2 + seed % 9, exclusive=exclusive)
        best = schedule_layer(problem, gap=0.0).makespan_s
        bound = lower_bound(reduce_problem(problem))
        assert bound <= best * (1 + 1e-9), problem.name
        cores = {"tensor_cores": problem.tensor_cores, "vector_cores": problem.vector_cores}
        (batch,) = lower_bounds(problem, **arrays(problem), **cores)
        (quick,) = lower_bounds(problem, **arrays(problem), **cores, is_tight=False)
        assert max(batch, quick) <= best * (1 + 1e-9), problem.name


@pytest.mark.slow
def test_batch_gives_the_bound_of_each_accelerator() -> None:
    template = random_problem(5, 12, exclusive=True)
    random = np.random.default_rng(0)
    latency = random.uniform(1.0, 9.0, (30, 12))
    spread = latency * random.uniform(0.1, 1.0, (30, 12))
    tensor, vector = random.integers(1, 9, 30), random.integers(1, 5, 30)
    bounds = lower_bounds(template, latency_s=latency, spread_s=spread, tensor_cores=tensor, vector_cores=vector)
    for row in range(30):
        jobs = tuple(
            Job(job.name, job.resource, latency[row, number], spread[row, number])
            for number, job in enumerate(template.jobs)
        )
        problem = SchedulingProblem(
            jobs=jobs, edges=template.edges, tensor_cores=int(tensor[row]), vector_cores=int(vector[row])
        )
        best = schedule_layer(problem, gap=0.0).makespan_s
        assert bounds[row] <= best * (1 + 1e-9)
        assert bounds[row] >= 0.9 * lower_bound(reduce_problem(problem))


def test_the_best_bound_is_that_of_all_rows_unless_the_first_one_is_enough() -> None:
    for seed in range(40):
        for part in segments(reduce_problem(random_problem(seed, 2 + seed % 9))):
            bounds = rates(part).bounds_s
            assert best_bound_s(part, math.inf) == pytest.approx(bounds.max(), rel=1e-12)
            assert best_bound_s(part, 0.0) == pytest.approx(bounds[0], rel=1e-12)


def test_accelerators_that_cannot_run_an_op_get_infinity() -> None:
    template = SchedulingProblem(
        jobs=(Job("a", Resource.TENSOR, 1.0), Job("b", Resource.VECTOR, 1.0)), edges=(), tensor_cores=1, vector_cores=1
    )
    bounds = lower_bounds(
        template,
        latency_s=[[1.0, 2.0], [math.inf, 2.0], [1.0, 2.0], [1.0, 2.0]],
        spread_s=np.full((4, 2), math.inf),
        tensor_cores=[1, 1, 0, 1],
        vector_cores=[1, 1, 1, 0],
    )
    assert bounds.tolist() == [2.0, math.inf, math.inf, math.inf]


def test_memory_is_a_floor() -> None:
    template = SchedulingProblem(jobs=(Job("a", Resource.TENSOR, 1.0),), edges=(), tensor_cores=1, vector_cores=1)
    bounds = lower_bounds(
        template, latency_s=[[1.0], [1.0]], spread_s=[[1.0], [1.0]], tensor_cores=1, vector_cores=1, memory_s=[0.5, 3.0]
    )
    assert bounds.tolist() == [1.0, 3.0]


def test_chain_falls_into_segments_and_is_proven_without_search() -> None:
    jobs = tuple(Job(f"job{number}", Resource.TENSOR, 4.0 + number, 1.0 + number) for number in range(20))
    chain = SchedulingProblem(
        jobs=jobs, edges=tuple((number, number + 1) for number in range(19)), tensor_cores=4, vector_cores=1
    )
    assert len(segments(reduce_problem(chain))) == 20
    answer = schedule_layer(chain, gap=0.0)
    assert (answer.method, answer.work, answer.gap) == ("list", 0, 0.0)


def test_wide_spreading_is_proven_optimal_without_search() -> None:
    """If no antichain's spread-to-latency shares exceed 1 together, running everything spread is optimal."""
    jobs = tuple(Job(f"job{number}", Resource.TENSOR, 64.0, 1.0) for number in range(30))
    wide = SchedulingProblem(jobs=jobs, edges=((0, 29),), tensor_cores=64, vector_cores=1)
    answer = schedule_layer(wide, gap=0.0)
    assert (answer.makespan_s, answer.work) == (30.0, 0)
    assert answer.gap <= 1e-9


def test_where_spreading_is_best_no_schedule_is_shorter() -> None:
    """Proven apart by CP-SAT; with shares of up to a third, chains prove some of the problems and not others."""
    proven = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        template = random_problem(seed, 7, exclusive=True)
        latency = random.uniform(1.0, 9.0, 7)
        spread = latency * random.uniform(0.02, 0.35, 7)
        jobs = tuple(
            Job(job.name, Resource.TENSOR, *times) for job, *times in zip(template.jobs, latency, spread, strict=True)
        )
        problem = SchedulingProblem(jobs=jobs, edges=template.edges, tensor_cores=8, vector_cores=1)
        if not spreading_is_best(reduce_problem(problem)):
            continue
        proven += 1
        answer, other = schedule_layer(problem, gap=0.0), schedule_layer(problem, gap=0.0, method="cp-sat")
        assert answer.work == 0
        assert answer.makespan_s == answer.bound_s == pytest.approx(float(spread.sum()), rel=1e-12)
        assert other.makespan_s == pytest.approx(answer.makespan_s, rel=1e-6)
    assert 5 < proven < 35


def test_views_join_what_they_stand_between() -> None:
    jobs = (Job("a", Resource.TENSOR, 1.0), Job("view", Resource.NONE, 0.0), Job("b", Resource.TENSOR, 1.0))
    reduced = reduce_problem(SchedulingProblem(jobs=jobs, edges=((0, 1), (1, 2)), tensor_cores=2, vector_cores=0))
    assert reduced.is_before.tolist() == [[False, True], [False, False]]
