"""What else is told about designs, against brute force: the best few, the best network, neighbours, utilisation."""

import csv
import io
from typing import Any

import pytest
from designs import SMALL, small_question, tiny_model

import phaze
from phaze.errors import QuestionError
from phaze.explore.best_first_search import BestFirstSearch
from phaze.explore.executors import Workers
from phaze.explore.journal import Journal
from phaze.explore.search_state import neighbour, neighbours

POINTS = phaze.space.grid(
    tensor_cores=(1, 4),
    tensor_rows=(32, 64),
    tensor_cols=(64,),
    vector_cores=(1, 2),
    buffer_mib=(8,),
    clock_hz=(1e9, 1.2e9),
)
ASKED: dict[str, Any] = {**SMALL, "hbm_gib": (1,), "micro_batch_size": (2,), "gap": 0.0}
NETWORKS = ("paper", "2x100GB/s+10GB/s")


def values_on(network: str) -> dict[str, float]:
    question = small_question([tiny_model()], POINTS, **{**ASKED, "network": network})
    best_first = BestFirstSearch(question=question, workers=Workers(), journal=Journal())
    best_first.sweep()
    return {name: best_first.tasks.value_of(point) for point, name in enumerate(POINTS.names)}


@pytest.fixture(scope="module")
def values() -> dict[tuple[str, str], float]:
    """The value of every accelerator on every network, one by one."""
    return {(name, network): value for network in NETWORKS for name, value in values_on(network).items()}


@pytest.fixture(scope="module")
def result() -> phaze.SearchResult:
    return phaze.search(
        tiny_model(), space=POINTS, executor="serial", top=3, sensitivity=True, **{**ASKED, "network": NETWORKS}
    )


def test_the_best_few_over_several_networks_are_those_of_brute_force(
    result: phaze.SearchResult, values: dict[tuple[str, str], float]
) -> None:
    expected = sorted(values.values(), reverse=True)[:3]
    assert [design.value for design in result.top] == pytest.approx(expected, rel=1e-6)
    for design in result.top:
        assert design.value == pytest.approx(values[design.name, str(design.network)], rel=1e-6)
    assert result.best.value == pytest.approx(expected[0], rel=1e-6)
    assert result.certificate.points == len(POINTS) * len(NETWORKS)
    assert [row.network for row in result.networks] == list(NETWORKS)
    for row in result.networks:
        assert row.bound >= max(value for (_, network), value in values.items() if network == row.network) * (1 - 1e-9)


def test_the_best_network_is_found_with_the_others_as_something_to_beat(
    values: dict[tuple[str, str], float],
) -> None:
    found = phaze.search(tiny_model(), space=POINTS, executor="serial", **{**ASKED, "network": NETWORKS[::-1]})
    assert found.best.value == pytest.approx(max(values.values()), rel=1e-6)
    assert found.certificate.bound >= max(values.values()) * (1 - 1e-9)
    assert found.certificate.gap <= 1e-5
    assert found.best.network in NETWORKS
    assert f"on {found.best.network}" in str(found)


def test_a_step_along_an_axis_changes_what_brute_force_says(
    result: phaze.SearchResult, values: dict[tuple[str, str], float]
) -> None:
    told = [row for row in result.sensitivity if row.value is not None]
    assert {row.field for row in result.sensitivity} >= {"tensor_cores", "vector_cores", "clock_hz", "tensor_rows"}
    assert told
    assert "vector_lanes" not in {row.field for row in result.sensitivity}  # they follow the rows of an array
    for row in told:
        assert row.value == pytest.approx(values[row.name, str(result.best.network)], rel=1e-6)
        assert row.change is not None
        assert row.change <= 1e-6  # the best has no better neighbour
    assert all(row.name == "" for row in result.sensitivity if row.value is None)


def test_a_neighbour_differs_in_one_field_and_lanes_follow_rows() -> None:
    point = POINTS.names.index("t4x64x64-v2x64-b8m-c1200m")
    assert neighbour(POINTS, point, "tensor_cores", "up") is None
    lower = neighbour(POINTS, point, "tensor_rows", "down")
    assert lower is not None
    assert POINTS.names[lower] == "t4x32x64-v2x32-b8m-c1200m"
    near = [POINTS.names[point] for point in neighbours(POINTS, POINTS.names.index("t1x64x64-v2x64-b8m-c1200m"))]
    assert near[0] == "t4x64x64-v2x64-b8m-c1200m"
    assert "t4x32x64-v2x32-b8m-c1200m" in near  # more cores that are smaller
    assert "t4x32x64-v1x32-b8m-c1200m" not in near  # three steps
    assert len(near) == len(set(near)) == 4 + 3


def test_utilisation_of_tensor_units_is_that_of_the_plan(result: phaze.SearchResult) -> None:
    (plan,), (row,) = result.plans.values(), result.best.models
    assert row.tensor_utilisation == pytest.approx(plan.mfu, rel=1e-9)
    assert 0 < row.vector_utilisation < 1
    assert result.best.power_w > 0


def test_the_busiest_pass_keeps_units_busier_than_the_whole_step(result: phaze.SearchResult) -> None:
    for design in (result.best, *result.top):
        for row in design.models:
            assert row.tensor_utilisation <= row.peak_tensor_utilisation <= 1
            assert row.vector_utilisation <= row.peak_vector_utilisation <= 1


def test_the_table_of_designs_tells_the_plan_of_each_that_was_evaluated(result: phaze.SearchResult) -> None:
    lines = list(csv.DictReader(io.StringIO(result.explored_csv())))
    assert len(lines) == len(POINTS) * len(NETWORKS)
    planned = [line for line in lines if line["strategy"]]
    assert planned
    assert {line["state"] for line in planned} == {"evaluated"}
    best = next(line for line in planned if line["name"] == f"{result.best.name}@{result.best.network}")
    (row,) = result.best.models
    assert float(best["samples_per_s"]) == pytest.approx(row.samples_per_s, rel=1e-5)
    assert float(best["peak_tensor_utilisation"]) == pytest.approx(row.peak_tensor_utilisation, abs=1e-4)
    assert float(best["power_w"]) == pytest.approx(result.best.power_w)


def test_the_page_shows_the_best_few_their_neighbours_and_the_networks(result: phaze.SearchResult) -> None:
    page = result.to_html()
    for design in result.top:
        assert f"{design.name} on {design.network}" in page
    for row in result.sensitivity:
        assert f"{row.field.replace('_', ' ')} {row.direction}" in page
    for label in ("The best few designs", "One step along each axis", "Networks", "tensor units busy"):
        assert label in page


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"top": 0}, "top is 0"),
        ({"network": ()}, "network is"),
        ({"network": ("paper", "paper")}, "several different ones"),
        ({"network": NETWORKS, "front": True}, "not searched with a front"),
        ({"network": NETWORKS, "journal": "kept"}, "not searched with a journal"),
        ({"network": NETWORKS, "method": "tpe"}, "not searched with method 'tpe'"),
        ({"strategy": {"recompute": "full"}}, "strategy has 'recompute'"),
        ({"strategy": [{}, {}]}, "or one for each model"),
    ],
)
def test_what_cannot_be_asked_together_is_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(QuestionError, match=told):
        phaze.search(tiny_model(), space=POINTS, **{**ASKED, **change})
