"""How far measured runs lay from their predictions: classes, quantiles, and that plans say them."""

from dataclasses import replace

import pytest
from plans import small_graph

import phaze
from phaze.cost import IDEAL, calibration_of
from phaze.cost.calibration import LEAST_RUNS, ComparableRuns, RunClass, comparable_runs, fitted_families, runs_by_class
from phaze.hardware import parse_cluster, precision_recipe, preset
from phaze.hooks import PluginManager
from phaze.planner.plan_comparison import compare
from phaze.report.plan_page_contents import uncertainty_text
from phaze.report.plan_text import certainty_text, is_too_near

PLUGINS = PluginManager.load()
ONE = RunClass(has_many_nodes=False, has_narrow_products=False)
MANY = RunClass(has_many_nodes=True, has_narrow_products=False)


def test_quantiles_are_of_measured_over_predicted_seconds_by_class() -> None:
    errors = [0.25] * 10 + [-0.2] * 10
    (entry,) = runs_by_class([MANY] * 20, errors)
    assert (entry["runs"], entry["tenth"], entry["ninetieth"]) == (20, pytest.approx(-0.2), pytest.approx(0.25))
    assert entry["has_many_nodes"] is True


def test_a_class_with_few_runs_says_nothing() -> None:
    classes = [ONE] * (LEAST_RUNS - 1) + [MANY] * LEAST_RUNS
    assert [entry["has_many_nodes"] for entry in runs_by_class(classes, [0.0] * len(classes))] == [True]


def test_runs_are_alike_by_nodes_and_width_of_products() -> None:
    node, two = (parse_cluster(f"a100-80gb:{count}", PLUGINS) for count in (8, 16))
    wide, narrow = precision_recipe("bf16-adam"), precision_recipe("fp8-adam")
    assert RunClass.of(node, wide) == ONE
    assert RunClass.of(two, wide) == MANY
    assert RunClass.of(two, narrow).has_narrow_products


def test_chips_and_calibrations_that_were_not_fitted_have_no_comparable_runs() -> None:
    cluster, recipe = parse_cluster("l40s:16", PLUGINS), precision_recipe("bf16-adam")
    assert comparable_runs(IDEAL, cluster, recipe) is None
    own = replace(calibration_of(preset("a100-80gb").accelerator), name="of a user")
    assert comparable_runs(own, parse_cluster("a100-80gb:16", PLUGINS), recipe) is None


@pytest.mark.parametrize("name", fitted_families())
def test_shipped_classes_have_enough_runs_and_ordered_quantiles(name: str) -> None:
    for entry in fitted_families()[name].get("comparable", ()):
        assert entry["runs"] >= LEAST_RUNS
        assert -0.5 < entry["tenth"] <= entry["ninetieth"] < 1.0


def test_a_plan_says_where_comparable_runs_lie_and_keeps_it() -> None:
    plan = phaze.optimize(small_graph(), cluster="a100-80gb:16", global_batch_size=32, target=None, gap=0.5)
    runs = ComparableRuns(runs=40, tenth=-0.06, ninetieth=0.09)
    told = replace(plan, provenance=replace(plan.provenance, comparable=runs))
    assert "80 % of 40 comparable runs lie within -6% and +9%" in str(told)
    assert "may come out the other way round" in uncertainty_text(told)
    assert is_too_near(told, 1.08 * told.step_time_s)
    assert not is_too_near(told, 1.1 * told.step_time_s)
    assert "nearer than runs are to predictions" in str(
        compare(told, replace(told, step_time_s=1.05 * told.step_time_s))
    )
    silent = replace(plan, provenance=replace(plan.provenance, comparable=None))
    assert certainty_text(silent) == "no comparable runs are known"
    assert "no comparable runs are known" in str(silent)
    assert not is_too_near(silent, silent.step_time_s)
    assert "Too few of its 759 runs are like this one" in uncertainty_text(silent)
    missed = [table["group_left_out"] for table in fitted_families()["a100"]["errors"].values()]
    assert f"missed by {min(missed):.0%} to {max(missed):.0%} on average" in uncertainty_text(silent)
