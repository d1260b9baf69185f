"""What a search finds and proves, against evaluating every accelerator."""

import math
from typing import Any

import numpy as np
import pytest
from designs import searched, small_question, some_points, tiny_model
from plans import small_graph

from phaze.explore.best_first_search import Engine
from phaze.explore.design_boxes import Box
from phaze.explore.objectives import front_of
from phaze.explore.search_state import Evaluated
from phaze.explore.worker_tasks import EvaluateTask, evaluate_point


def every_point(engine: Engine) -> list[Evaluated]:
    """Each accelerator of the space, evaluated without a cutoff and without any bound."""
    found = []
    for point in range(len(engine.question.points)):
        alone = Box(name="", points=np.array([point]), bounds_s=np.full(len(engine.know.cells), 1e-12))
        models = range(len(engine.question.names))
        tasks = [engine._task(alone, model, engine.question.points.at(point), math.inf) for model in models]
        outcomes = engine._evaluations([f"every/{point}/{model}" for model in models], tasks)
        found.append(engine.know.judge(alone, outcomes))
    return found


def assert_exact(engine: Engine, every: list[Evaluated] | None = None) -> None:
    """The best, its ties and every bound agree with the evaluations."""
    every, know = every or every_point(engine), engine.know
    assert know.best is not None
    most = max(one.value for one in every)
    ties = [one.point for one in every if one.value >= most * (1 - 3e-6)]
    assert know.best.value == pytest.approx(most, rel=3e-6)
    assert know.best.point == min(ties, key=lambda point: (know.areas_mm2[point], point))
    bounds = {int(point): bound for box, bound in know.closed for point in box.points}
    bounds |= {point: one.most for point, one in know.evaluated.items()}
    assert max(bounds.values()) <= most * (1 + 3e-6)
    assert sorted(bounds) == list(range(len(every)))
    for one in every:
        assert one.value <= bounds[one.point] * (1 + 1e-9)
    if engine.question.wants_front:
        mine = sorted(know.evaluated.values(), key=lambda one: one.point)
        fronts = [
            [list_[at].point for at in front_of([know.goal.coordinates(one.facts) for one in list_ if one.facts])]
            for list_ in (mine, every)
        ]
        assert fronts[0] == fronts[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"front": True},
        {"objective": "throughput-per-area"},
        {"objective": "throughput-per-energy"},
        {"compatibility": "paper"},
    ],
    ids=["throughput", "front", "per-area", "per-energy", "paper"],
)
def test_a_search_at_gap_0_finds_what_evaluating_everything_finds(changes: dict[str, Any]) -> None:
    assert_exact(searched(small_question([tiny_model()], some_points(8, seed=5), micro_batch_size=(2,), **changes)))


@pytest.mark.parametrize("combine", ["average", "worst"])
def test_two_models_are_joined_by_their_ratios_to_the_reference(combine: str) -> None:
    models = [tiny_model(), tiny_model(2, 1024)]
    question = small_question(models, some_points(5), micro_batch_size=(2,), combine=combine, weights=(1.0, 3.0))
    assert question.names == ("tiny#1", "tiny#2")
    engine = searched(question)
    assert_exact(engine)
    best = engine.know.best
    assert best is not None
    times = [outcome.time_s or math.nan for outcome in best.outcomes]
    one, other = (8 / time_s / base for time_s, base in zip(times, engine.know.goal.bases, strict=True))
    assert one != pytest.approx(other)
    assert best.value == pytest.approx(min(one, other) if combine == "worst" else (one + 3 * other) / 4)


@pytest.mark.parametrize("objective", ["throughput", "throughput-per-area", "throughput-per-energy"])
def test_the_front_of_several_models_is_about_the_mean_ratio_of_their_throughputs(objective: str) -> None:
    models = [tiny_model(name="a"), tiny_model(2, 1024, name="b")]
    asked: dict[str, Any] = {"micro_batch_size": (2,), "hbm_gib": (1,), "front": True, "objective": objective}
    engine = searched(small_question(models, some_points(3), **asked))
    alone = [searched(small_question([model], some_points(1), **asked)).question.questions[0] for model in models]
    bases = []
    for model, model_question in enumerate(alone):
        cells = tuple((0.0, engine.know.cells[at].cell) for at in engine.know.cells_of(model))
        task = EvaluateTask(
            model_question=model_question,
            accelerator=model_question.cluster.accelerator,
            cells=cells,
            cutoff_s=math.inf,
        )
        bases.append(8 / (evaluate_point(task).time_s or math.nan))
    for one in engine.know.evaluated.values():
        assert one.facts is not None
        ratios = [8 / one.facts.time_s(model) / base for model, base in enumerate(bases)]
        assert engine.know.goal.coordinates(one.facts)[0] == pytest.approx(sum(ratios) / 2)


def test_bounds_hold_on_random_accelerators_of_the_whole_space() -> None:
    engine = searched(small_question([tiny_model()], some_points(12, seed=9), gap=0.3, micro_batch_size=(1, 2)))
    bounds = {int(point): bound for box, bound in engine.know.closed for point in box.points}
    bounds |= {point: one.most for point, one in engine.know.evaluated.items()}
    for one in every_point(engine):
        assert one.value <= bounds[one.point] * (1 + 1e-9)
        least_s = min(float(swept.rows.least_s[one.point]) for swept in engine.know.cells)
        assert one.value <= 8 / least_s


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3, 30))]
)
def test_more_schedules_to_choose_from_never_give_a_slower_accelerator(seed: int) -> None:
    gap = (0.0, 0.01, 0.2)[seed % 3]
    values = []
    for kinds in (("1f1b", "zero-bubble"), ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")):
        asked: dict[str, Any] = {"schedule": kinds, "gap": gap, "global_batch_size": 16, "micro_batch_size": (1,)}
        engine = searched(small_question([tiny_model(8)], some_points(6, seed=seed), **asked))
        assert engine.know.best is not None
        values.append(engine.know.best.value)
    assert values[1] >= values[0] * (1 - 3e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_sub_spaces_of_200_accelerators_are_exact_and_their_fronts_too(seed: int) -> None:
    points = some_points(200, seed=100 + seed)
    best, front = (
        searched(small_question([small_graph()], points, tp=(1, 2), front=is_front)) for is_front in (False, True)
    )
    every = every_point(best)
    assert_exact(best, every)
    assert_exact(front, every)


@pytest.mark.exhaustive
def test_the_bound_is_at_least_the_evaluated_throughput_on_1000_accelerators() -> None:
    engine = searched(small_question([small_graph()], some_points(1000, seed=7), gap=0.01))
    bounds = {int(point): bound for box, bound in engine.know.closed for point in box.points}
    bounds |= {point: one.most for point, one in engine.know.evaluated.items()}
    for one in every_point(engine):
        assert one.value <= bounds[one.point] * (1 + 1e-9)
