"""What a search makes large, and the front of what nothing beats."""

import math

import numpy as np
import pytest

from phaze.explore.objectives import DesignCosts, Metric, Objective, least_sufficient_s, pareto_front


def costs(*seconds: float, joules: float = 5.0, static_w: float = 2.0, area_mm2: float = 10.0) -> DesignCosts:
    """A design on which every model has one slicing."""
    return DesignCosts(
        seconds=tuple(np.array([time_s]) for time_s in seconds),
        joules=tuple(np.array([joules]) for _ in seconds),
        static_w=static_w,
        area_mm2=area_mm2,
    )


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        (Metric.THROUGHPUT, 8 / 4),
        (Metric.PER_AREA, 8 / 4 / 10),
        (Metric.PER_ENERGY, 8 / (5 + 2 * 4)),
    ],
)
def test_a_metric_of_one_model_is_its_samples_over_what_they_cost(metric: Metric, value: float) -> None:
    objective = Objective(metric=metric, samples=(8,), weights=(1.0,))
    assert objective.value(costs(4.0)) == pytest.approx(value)


@pytest.mark.parametrize(("takes_worst", "value"), [(False, (1 * 2.0 + 3 * 0.5) / 4), (True, 0.5)])
def test_several_models_count_by_their_ratios_to_the_reference(takes_worst: bool, value: float) -> None:
    objective = Objective(
        metric=Metric.THROUGHPUT,
        samples=(8, 8),
        weights=(1.0, 3.0),
        takes_worst=takes_worst,
        reference_values=(1.0, 4.0),
    )
    assert objective.value(costs(4.0, 4.0)) == pytest.approx(value)
    assert objective.value(costs(4.0, math.inf)) == 0.0  # a model that does not fit


def test_the_least_costs_over_slicings_count_and_none_is_infinite() -> None:
    design = DesignCosts(
        seconds=(np.array([4.0, 2.0]), np.array([])),
        joules=(np.array([1.0, 9.0]), np.array([])),
        static_w=1,
        area_mm2=1,
    )
    assert (design.time_s(0), design.energy_j(0)) == (2.0, 5.0)
    assert math.isinf(design.time_s(1))
    assert math.isinf(design.energy_j(1))


def test_the_front_keeps_what_nothing_beats_and_the_first_of_equals() -> None:
    points = [(2.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 0.5, 2.0), (2.0, 1.0, 1.0), (2.0, 1.0, 0.5)]
    assert pareto_front(points) == [2, 4]
    assert pareto_front(points[:4]) == [0, 2]


@pytest.mark.parametrize("threshold_s", [1.0, 3.7, 9999.0])
def test_the_least_seconds_that_suffice_are_found_to_the_last_digits(threshold_s: float) -> None:
    assert least_sufficient_s(lambda seconds: seconds >= threshold_s, 1.0) == pytest.approx(threshold_s, rel=1e-12)


def test_where_nothing_suffices_the_seconds_are_infinite() -> None:
    assert math.isinf(least_sufficient_s(lambda seconds: False, 1.0))
