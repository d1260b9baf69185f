"""No bound of a search exceeds what an evaluation finds: random models, accelerators, networks, memories and stacks."""

import math
import random
from typing import Any

import numpy as np
import pytest
from designs import small_question, some_points, tiny_model
from plans import small_graph

import phaze
from phaze.cost import Calibration
from phaze.cost.calibration import LIBRARY_STACK
from phaze.errors import ShardError
from phaze.explore.design_bounds import FloatArray, SweepTask, SweptSlicing, best_case_accelerator, sweep_slicing
from phaze.explore.search_question import SearchQuestion
from phaze.explore.worker_tasks import (
    BoundTask,
    EvaluateTask,
    ScheduleTask,
    bound_step_time,
    evaluate_design,
    schedule_pass_bounds,
)
from phaze.hardware import AcceleratorArray
from phaze.ir import Graph
from phaze.profile.model_profiles import profile_options

LIBRARY = Calibration(matrix=0.6, memory=0.8, link=0.7, overhead_s=2e-6, overlap=0.5, stack=LIBRARY_STACK)


def random_points(draw: random.Random) -> AcceleratorArray:
    if draw.random() < 0.5:
        return some_points(4, seed=draw.randrange(10**6))
    points = phaze.space.grid(
        tensor_cores=draw.sample((1, 2, 3, 6, 17), 2),
        tensor_rows=draw.sample((8, 64, 100), 2),
        tensor_cols=draw.sample((8, 128, 200), 1),
        vector_cores=draw.sample((1, 3, 16), 1),
        vector_lanes=draw.sample((1, 64, 500), 1),
        buffer_mib=draw.sample((1, 16), 1),
        clock_hz=draw.uniform(2e8, 2e9),
        hbm_bandwidth_bytes_per_s=draw.uniform(2e10, 4e12),
    )
    scale = np.array([draw.choice((0.5, 1.0)) for _ in range(len(points))])
    return AcceleratorArray(
        **{name: getattr(points, name) for name in AcceleratorArray.__slots__ if name != "rates"},
        rates=points.rates * scale[:, None],
    )


def random_model(draw: random.Random) -> Graph:
    if draw.random() < 0.25:
        return tiny_model(draw.choice((2, 5)), draw.choice((64, 1000)))
    return small_graph(num_layers=draw.choice((1, 2)), hidden_size=draw.choice((64, 256)), vocab_size=1000)


def random_question(draw: random.Random) -> SearchQuestion:
    changes: dict[str, Any] = {
        "devices": draw.choice((2, 4, 6)),
        "network": draw.choice(("paper", "dgx-a100", "tpuv4-pod")),
        "hbm_gib": (draw.choice((0.01, 0.03, 1)),),
        "micro_batch_size": (draw.choice((1, 2)),),
        "tp": draw.choice(((1,), (2,))),
        "gap": draw.choice((0.0, 0.01, 0.1)),
        "optimizer": draw.choice(("adamw", "sgd")),
        "compatibility": draw.choice((None, None, "paper")),
        "schedule": draw.choice((("1f1b", "zero-bubble"), ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"))),
        "calibration": draw.choice((None, None, LIBRARY)),
    }
    return small_question([random_model(draw)], random_points(draw), **changes)


def bounded(
    swept: SweptSlicing, question: SearchQuestion, pass_s: FloatArray, chosen: list[int], cutoff_s: float
) -> float:
    """The bound of some accelerators together."""
    points = np.array(chosen)
    slicing = swept.slicing
    problem = slicing.problem_with(pass_s[points].min(axis=0), best_case_accelerator(question.points, points))
    return bound_step_time(BoundTask(problem=problem, cutoff_s=cutoff_s, is_paper=slicing.is_paper))


def assert_bounds_hold(question: SearchQuestion, swept: SweptSlicing, draw: random.Random) -> None:
    slicing, bounds = swept.slicing, swept.bounds
    model_question, count = question.questions[0], len(question.points)
    chips = tuple(question.points.at(point) for point in range(count))
    evaluations = [
        evaluate_design(
            EvaluateTask(model_question=model_question, accelerator=chip, slicings=((0.0, slicing),), cutoff_s=math.inf)
        )
        for chip in chips
    ]
    times = [math.inf if evaluation.time_s is None else evaluation.time_s for evaluation in evaluations]
    options = profile_options(model_question)
    scheduled = np.array(schedule_pass_bounds(ScheduleTask(slicing=slicing, accelerators=chips, options=options)))
    for point, (time_s, evaluation) in enumerate(zip(times, evaluations, strict=True)):
        assert bounds.step_s[point] <= time_s
        assert evaluation.energy_j is None or bounds.step_j[point] <= evaluation.energy_j
        for table in (bounds.pass_s, np.maximum(bounds.pass_s, scheduled)):
            for cutoff_s in (math.inf, time_s * 1.2):
                assert bounded(swept, question, table, [point], cutoff_s) <= time_s * (1 + 1e-9)
    some = draw.sample(range(count), min(3, count))
    assert bounded(swept, question, bounds.pass_s, some, math.inf) <= min(times[point] for point in some) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4, 120))]
)
def test_no_bound_exceeds_an_evaluation(seed: int) -> None:
    draw = random.Random(seed)
    question = random_question(draw)
    model_question = question.questions[0]
    (size,), (tp,) = model_question.micro_batch_sizes, model_question.tp_degrees
    for is_tight in (True, False):
        try:
            swept = sweep_slicing(
                SweepTask(question=question, model=0, micro_batch_size=size, tp=tp, is_tight=is_tight)
            )
        except ShardError:
            return
        assert_bounds_hold(question, swept, draw)


@pytest.mark.parametrize(
    ("name", "optimum_s"),
    [
        ("t2048x2x64-v4096x2-b8m", 0.10472054536807282),
        ("t64x256x4-v64x256-b64m", 0.12419837259571614),
        ("t256x64x16-v32x64-b16m", 0.10735388180997757),
    ],
)
def test_an_accelerator_of_the_papers_space_keeps_its_optimum_and_is_within_the_gap_of_it(
    name: str, optimum_s: float
) -> None:
    space = phaze.space.paper()
    points = space.take(np.array([space.names.index(name)]))
    for gap in (0.0, 0.01):
        question = small_question(
            ["bert-large"], points, devices=1024, hbm_gib=(32,), micro_batch_size=(1,), global_batch_size=4096, gap=gap
        )
        swept = sweep_slicing(SweepTask(question=question, model=0, micro_batch_size=1, tp=1))
        task = EvaluateTask(
            model_question=question.questions[0],
            accelerator=question.points.at(0),
            slicings=((0.0, swept.slicing),),
            cutoff_s=math.inf,
        )
        evaluation = evaluate_design(task)
        assert evaluation.bound_s is not None
        assert evaluation.bound_s <= optimum_s * (1 + 1e-9)
        assert optimum_s * (1 - 1e-9) <= evaluation.time_s <= optimum_s * (1 + gap + 1e-9)
