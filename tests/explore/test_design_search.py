"""`phaze.search`: one call from models and a space to an accelerator, with plans that hold."""

import csv
import io
import json
from typing import Any

import pytest
from designs import SMALL, some_points, tiny_model
from plans import small_graph

import phaze
from phaze.errors import PlanError, QuestionError
from phaze.explore.search_result import SearchProgress
from phaze.verify.plan_checks import check_plan

QUESTION: dict[str, Any] = {**SMALL, "executor": "serial"}


def search_tiny(**options: Any) -> phaze.SearchResult:
    return phaze.search(tiny_model(), space=some_points(6), **{**QUESTION, **options})


def test_the_plan_of_the_best_accelerator_takes_the_time_that_was_found_and_verifies() -> None:
    result = search_tiny(hbm_gib=(0.003, 0.5, 1))
    (plan,) = result.plans.values()
    assert plan.step_time_s == pytest.approx(result.best.models[0].step_time_s, rel=1e-12)
    assert plan.cluster.accelerator.name == result.best.name
    assert plan.cluster.accelerator.hbm_bytes == result.best.hbm_gib * 2**30
    assert plan.is_feasible
    assert all(finding.holds for finding in check_plan(plan, tiny_model()))
    assert result.certificate.bound >= result.best.value


def test_a_plan_of_sliced_layers_takes_the_time_that_was_found_and_verifies() -> None:
    result = search_tiny(tp=(4,), devices=16, micro_batch_size=(4,), global_batch_size=16)
    (plan,) = result.plans.values()
    assert plan.strategy.sequence_parallel
    assert plan.step_time_s == pytest.approx(result.best.models[0].step_time_s, rel=1e-12)
    assert all(finding.holds for finding in check_plan(plan, tiny_model()))


def test_memories_that_were_not_looked_at_are_not_listed() -> None:
    def interrupt(progress: SearchProgress) -> None:
        if "@" in progress.doing:
            raise KeyboardInterrupt

    options = {"hbm_gib": (0.003, 0.5, 1), "progress": interrupt}
    result = search_tiny(**options)
    assert [row.hbm_gib for row in result.memories] == [1]
    assert result.best.hbm_gib == 1
    assert result.certificate.is_finished


def test_the_least_memory_that_costs_nothing_is_chosen() -> None:
    result = search_tiny(hbm_gib=(0.003, 0.5, 1))
    assert [row.hbm_gib * 2**30 for row in result.memories] == [round(0.003 * 2**30), 2**29, 2**30]
    assert result.best.hbm_gib == 0.5
    assert result.memories[1].value == result.memories[2].value == result.best.value


def test_every_accelerator_is_listed_with_its_bound_and_how_it_was_dealt_with() -> None:
    result = search_tiny()
    rows = list(csv.DictReader(io.StringIO(result.explored_csv())))
    assert [row["name"] for row in rows] == list(some_points(6).names)
    assert {row["state"] for row in rows} <= {"evaluated", "pruned"}
    assert all(float(row["bound"]) <= result.certificate.bound * (1 + 1e-12) for row in rows)
    assert sum(box.points for box in result.certificate.pruned) == sum(bool(row["box"]) for row in rows)
    (best,) = (row for row in rows if row["name"] == result.best.name)
    assert (best["state"], float(best["value"])) == ("evaluated", result.best.value)
    assert result.certificate.points == 6 * 2
    assert json.loads(result.to_json())["best"]["name"] == result.best.name


@pytest.mark.parametrize("objective", ["throughput", "throughput-per-area", "throughput-per-energy"])
def test_ratios_of_several_models_are_told_and_their_mean_is_the_value(objective: str) -> None:
    models = [tiny_model(), tiny_model(4, name="other")]
    result = phaze.search(models, space=some_points(4), **{**QUESTION, "objective": objective})
    ratios = [row.ratio for row in result.best.models]
    assert result.best.value == pytest.approx(sum(ratio for ratio in ratios if ratio) / 2)
    assert "times tpuv4-paper" in str(result)
    assert search_tiny().best.models[0].ratio is None


def test_the_proof_names_what_was_chosen_from() -> None:
    scope = search_tiny(micro_batch_size=(1, 2), schedule=("1f1b",)).certificate.scope
    assert scope.startswith("for 1f1b pipelines, microbatches of 1, 2, tp 1, all other degrees")
    assert search_tiny(schedule=()).certificate.scope.startswith("for one stage, microbatches")


def test_progress_tells_what_is_left_the_best_and_its_gap() -> None:
    heard: list[SearchProgress] = []
    search_tiny(gap=0.0, progress=heard.append)
    assert heard[0].left == heard[0].points == 6
    assert heard[0].best is None
    assert heard[-1].best is not None
    assert all(progress.gap is None or progress.gap >= 0 for progress in heard)


def test_an_interrupted_search_returns_the_best_so_far_and_says_what_is_open() -> None:
    def interrupt(progress: SearchProgress) -> None:
        if progress.best is not None:
            raise KeyboardInterrupt

    result = search_tiny(gap=0.0, progress=interrupt)
    assert not result.certificate.is_finished
    assert result.certificate.gap > 0
    assert "not finished: what was not looked at may reach" in str(result)
    assert {row.state for row in result.explored} <= {"open", "pruned", "evaluated"}
    with pytest.raises(PlanError, match="nothing was found"):
        search_tiny(time_limit_s=1e-9)


def test_a_model_that_fits_nowhere_names_itself_and_the_memory() -> None:
    with pytest.raises(PlanError, match=r"tiny fits on no accelerator of the space.*0\.00012207 GiB.*hbm_gib"):
        search_tiny(hbm_gib=(2**-13,))


def test_a_model_that_no_tp_can_slice_says_why_and_which_tp_does() -> None:
    with pytest.raises(PlanError, match=r"cannot be sliced as asked\. .* cannot be split 3 ways.* nearest tp .* is 2"):
        phaze.search(small_graph(), space=some_points(2), **{**QUESTION, "tp": (3,)})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"devices": 0}, "devices is 0"),
        ({"hbm_gib": ()}, "hbm_gib"),
        ({"hbm_gib": (-1,)}, "hbm_gib"),
        ({"space": "papers"}, "space is 'papers'"),
        ({"space": some_points(1).take([])}, "no accelerators"),
        ({"objective": "speed"}, "objective is 'speed'"),
        ({"combine": "sum"}, "combine is 'sum'"),
        ({"weights": (1, 2)}, "weights is"),
        ({"schedule": ("2f2b",)}, "schedule has '2f2b'"),
        ({"compatibility": "papers"}, "compatibility is"),
        ({"compatibility": "paper", "front": True}, "no energy"),
        ({"gap": 2}, "gap is 2"),
        ({"micro_batch_size": (3,)}, "microbatch"),
        ({"time_limit_s": -1}, "time_limit_s is -1"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], told: str) -> None:
    question = {"space": some_points(2), **QUESTION, **change}
    with pytest.raises(QuestionError, match=told):
        phaze.search(tiny_model(), **question)
