"""What a search finds and proves, against evaluating every accelerator."""

import math
from typing import Any

import pytest
from designs import searched, small_question, some_points, tiny_model
from plans import small_graph

import phaze
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.objectives import pareto_front
from phaze.explore.search_state import EvaluatedDesign, SearchState, neighbours
from phaze.explore.worker_tasks import EvaluateTask, evaluate_design


def evaluate_every_point(best_first: BestFirstSearch) -> list[EvaluatedDesign]:
    """Each accelerator of the space, evaluated without a cutoff and without any bound."""
    designs = []
    for point in range(len(best_first.question.points)):
        alone = best_first.state.unbounded_box(point)
        models = range(len(best_first.question.names))
        tasks = [
            best_first.tasks.evaluate_task(alone, model, best_first.question.points.at(point), math.inf)
            for model in models
        ]
        evaluations = best_first.tasks.evaluate([f"every/{point}/{model}" for model in models], tasks)
        designs.append(best_first.state.judge(alone, evaluations))
    return designs


def assert_exact(best_first: BestFirstSearch, designs: list[EvaluatedDesign] | None = None) -> None:
    """The best, its ties and every bound agree with the evaluations."""
    designs, state = designs or evaluate_every_point(best_first), best_first.state
    assert state.best is not None
    most = max(design.value for design in designs)
    ties = [design.point for design in designs if design.value >= most * (1 - 3e-6)]
    assert state.best.value == pytest.approx(most, rel=3e-6)
    assert state.best.point == min(ties, key=lambda point: (state.areas_mm2[point], point))
    bounds = bounds_by_point(state)
    assert max(bounds.values()) <= most * (1 + 3e-6)
    assert sorted(bounds) == list(range(len(designs)))
    for design in designs:
        assert design.value <= bounds[design.point] * (1 + 1e-9)
    if best_first.question.wants_front:
        evaluated = sorted(state.evaluated.values(), key=lambda design: design.point)
        assert front_points(state, evaluated) == front_points(state, designs)


def front_points(state: SearchState, designs: list[EvaluatedDesign]) -> list[int]:
    """The positions in the space of the designs that no other beats."""
    coordinates = [state.objective.coordinates(design.costs) for design in designs if design.costs]
    return [designs[index].point for index in pareto_front(coordinates)]


def bounds_by_point(state: SearchState) -> dict[int, float]:
    """The upper bound of every accelerator, pruned or evaluated."""
    pruned = {int(point): bound for box, bound in state.closed for point in box.points}
    return pruned | {point: design.upper_bound for point, design in state.evaluated.items()}


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
    best_first = searched(question)
    assert_exact(best_first)
    best = best_first.state.best
    assert best is not None
    times = [evaluation.time_s or math.nan for evaluation in best.evaluations]
    references = best_first.state.objective.reference_values
    first, second = (8 / time_s / reference for time_s, reference in zip(times, references, strict=True))
    assert first != pytest.approx(second)
    assert best.value == pytest.approx(min(first, second) if combine == "worst" else (first + 3 * second) / 4)


@pytest.mark.parametrize("objective", ["throughput", "throughput-per-area", "throughput-per-energy"])
def test_the_front_of_several_models_is_about_the_mean_ratio_of_their_throughputs(objective: str) -> None:
    models = [tiny_model(name="a"), tiny_model(2, 1024, name="b")]
    asked: dict[str, Any] = {"micro_batch_size": (2,), "hbm_gib": (1,), "front": True, "objective": objective}
    best_first = searched(small_question(models, some_points(3), **asked))
    alone = [searched(small_question([model], some_points(1), **asked)).question.questions[0] for model in models]
    reference_values = []
    for model, model_question in enumerate(alone):
        slicings = tuple(
            (0.0, best_first.state.slicings[index].slicing) for index in best_first.state.slicings_of(model)
        )
        task = EvaluateTask(
            model_question=model_question,
            accelerator=model_question.cluster.accelerator,
            slicings=slicings,
            cutoff_s=math.inf,
        )
        reference_values.append(8 / (evaluate_design(task).time_s or math.nan))
    for design in best_first.state.evaluated.values():
        assert design.costs is not None
        ratios = [8 / design.costs.time_s(model) / base for model, base in enumerate(reference_values)]
        assert best_first.state.objective.coordinates(design.costs)[0] == pytest.approx(sum(ratios) / 2)


def test_bounds_hold_on_random_accelerators_of_the_whole_space() -> None:
    best_first = searched(small_question([tiny_model()], some_points(12, seed=9), gap=0.3, micro_batch_size=(1, 2)))
    bounds = bounds_by_point(best_first.state)
    for design in evaluate_every_point(best_first):
        assert design.value <= bounds[design.point] * (1 + 1e-9)
        least_s = min(float(swept.bounds.step_s[design.point]) for swept in best_first.state.slicings)
        assert design.value <= 8 / least_s


@pytest.mark.parametrize("gap", [0.1, 0.3])
def test_no_neighbour_of_the_answer_is_better_however_wide_the_gap(gap: float) -> None:
    points = phaze.space.grid(
        tensor_cores=(1, 2, 4),
        tensor_rows=(32, 64, 128),
        tensor_cols=(32, 64, 128),
        vector_cores=(1, 2, 4),
        buffer_mib=(4, 8),
        where=lambda points: points.tensor_cores * points.tensor_rows * points.tensor_cols <= 2 * 64 * 64,
    )
    best_first = searched(small_question([tiny_model()], points, gap=gap, micro_batch_size=(2,)))
    best = best_first.state.best
    assert best is not None
    near = neighbours(points, best.point)
    assert len(near) == 10
    assert max(best_first.tasks.value_of(point) for point in near) <= best.value * (1 + 3e-6)
    assert best.value <= best_first.proven_bound()


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3, 30))]
)
def test_more_schedules_to_choose_from_never_give_a_slower_accelerator(seed: int) -> None:
    gap = (0.0, 0.01, 0.2)[seed % 3]
    values = []
    for kinds in (("1f1b", "zero-bubble"), ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")):
        asked: dict[str, Any] = {"schedule": kinds, "gap": gap, "global_batch_size": 16, "micro_batch_size": (1,)}
        best_first = searched(small_question([tiny_model(8)], some_points(6, seed=seed), **asked))
        assert best_first.state.best is not None
        values.append(best_first.state.best.value)
    assert values[1] >= values[0] * (1 - 3e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
def test_sub_spaces_of_200_accelerators_are_exact_and_their_fronts_too(seed: int) -> None:
    points = some_points(200, seed=100 + seed)
    best, front = (
        searched(small_question([small_graph()], points, tp=(1, 2), front=is_front)) for is_front in (False, True)
    )
    designs = evaluate_every_point(best)
    assert_exact(best, designs)
    assert_exact(front, designs)


@pytest.mark.exhaustive
def test_the_bound_is_at_least_the_evaluated_throughput_on_1000_accelerators() -> None:
    best_first = searched(small_question([small_graph()], some_points(1000, seed=7), gap=0.01))
    bounds = bounds_by_point(best_first.state)
    for design in evaluate_every_point(best_first):
        assert design.value <= bounds[design.point] * (1 + 1e-9)
