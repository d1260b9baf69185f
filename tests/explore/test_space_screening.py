"""Large spaces lose only what provably is not the best: every axis, against brute force."""

from typing import Any

import numpy as np
import pytest
from designs import small_question, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import small_graph

import phaze
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.design_bounds import sweep_tasks
from phaze.explore.design_search import run_search
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal
from phaze.explore.search_question import SearchQuestion
from phaze.explore.space_screening import _LEVELS, _Screen, _slice_or_refuse
from phaze.hardware.accelerator import areas_mm2

AXES: dict[str, Any] = {
    "tensor_cores": (1, 4),
    "tensor_rows": (32, 64),
    "tensor_cols": (64,),
    "vector_cores": (1, 2),
    "vector_lanes": (32, 64),
    "buffer_mib": (1, 8),
    "clock_hz": (0.9e9, 1.2e9),
    "hbm_bandwidth_bytes_per_s": (0.4e12, 1.2e12),
}
ASKED: dict[str, Any] = {"micro_batch_size": (2,), "hbm_gib": (1,), "devices": 1, "global_batch_size": 64}


def screened_search(question: SearchQuestion) -> BestFirstSearch:
    return BestFirstSearch(question=question, workers=Workers(), journal=Journal(), screened_from=1)


def values_one_by_one(question: SearchQuestion) -> list[float]:
    """The value of every accelerator with the largest memory, evaluated without any bound."""
    best_first = BestFirstSearch(question=question, workers=Workers(), journal=Journal())
    best_first.sweep()
    return [best_first.tasks.value_of(point) for point in range(len(question.points))]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"objective": "throughput-per-area"}, marks=pytest.mark.exhaustive)],
    ids=["throughput", "per area"],
)
def test_the_search_over_all_axes_is_what_brute_force_finds(options: dict[str, Any]) -> None:
    points = phaze.space.grid(**AXES, max_power_w=25.0)
    question = small_question([tiny_model()], points, **ASKED, **options)
    values = values_one_by_one(question)
    best_first = screened_search(question)
    result = run_search(best_first, 0.0)
    assert best_first.screened is not None
    closed = sum(cells.points for cells in best_first.screened.closed)
    assert 0 < closed == len(points) - len(best_first.question.points)
    assert result.best.value == pytest.approx(max(values), rel=1e-9)
    assert result.certificate.bound >= max(values) * (1 - 1e-9)
    assert result.certificate.points == len(points)
    assert sum(box.points for box in result.certificate.pruned) + len(best_first.state.evaluated) == len(points)


@settings(max_examples=3)
@given(st.data())
def test_no_accelerator_exceeds_the_bound_of_its_cell(data: st.DataObject) -> None:
    axes = {
        name: data.draw(st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True), label=name)
        for name, values in {
            "tensor_cores": (1, 3, 8),
            "tensor_rows": (16, 128),
            "tensor_cols": (32, 128),
            "vector_cores": (1, 5),
            "vector_lanes": (16, 100, 128),
            "buffer_mib": (1, 7, 32),
            "clock_hz": (0.5e9, 1e9, 2e9),
            "hbm_bandwidth_bytes_per_s": (0.1e12, 1e12, 4e12),
        }.items()
    }
    model = small_graph(num_layers=1) if data.draw(st.booleans()) else tiny_model()
    question = small_question([model], phaze.space.grid(**axes), micro_batch_size=(2,), tp=(1, 2), hbm_gib=(1,))
    (sliced, *more) = [model for model in map(_slice_or_refuse, sweep_tasks(question)) if model is not None]
    screen = _Screen(
        question=question,
        workers=Workers(),
        sliced=[sliced, *more],
        areas=areas_mm2(question.points),
        report=lambda doing: None,
    )
    everything = np.arange(len(question.points))
    alone = screen.cell_bounds(everything, everything)
    for level in range(len(_LEVELS)):
        cells = screen.cells(everything, level)
        assert (screen.cell_bounds(everything, cells)[cells] >= alone * (1 - 1e-12)).all()
    best_first = BestFirstSearch(question=question, workers=Workers(), journal=Journal())
    best_first.sweep()
    point = data.draw(st.integers(0, len(question.points) - 1))
    assert best_first.tasks.value_of(point) <= alone[point] * (1 + 1e-9)


def test_a_gap_keeps_less_and_still_proves_it() -> None:
    points = phaze.space.grid(**AXES)
    exact, near = (screened_search(small_question([tiny_model()], points, **ASKED, gap=gap)) for gap in (0.0, 0.05))
    best, bounded = run_search(exact, 0.0), run_search(near, 0.0)
    assert bounded.best.value >= best.best.value / 1.05
    assert bounded.certificate.gap <= 0.05 * (1 + 1e-9)
    assert bounded.certificate.bound >= best.best.value * (1 - 1e-9)
