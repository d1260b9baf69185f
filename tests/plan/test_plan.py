"""Plans as data: saved, loaded, refused, priced anew, compared, and printed."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from forgeries import forged
from plans import FITTED_CHIP, QUESTION, checked, small_cluster, small_graph, small_plan

import phaze
from phaze.cost import calibration_of
from phaze.errors import FormatError, PlanError
from phaze.plan.plan import PlanStatus, plan_from_document


def test_a_plan_loads_as_it_was_saved(tmp_path: Path) -> None:
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    assert phaze.load_plan(tmp_path / "plan.json") == plan
    assert phaze.load_plan(tmp_path / "plan.json", small_graph(), cluster=small_cluster()) == plan
    assert os.listdir(tmp_path) == ["plan.json"]


def test_json_has_the_documented_names() -> None:
    document = json.loads(small_plan().to_json())
    assert {"strategy", "stages", "layouts", "step_time_s", "tokens_per_s", "mfu", "energy", "bound_s", "gap"} <= set(
        document
    )
    keys = ["dp", "shard", "zero", "cp", "ep", "tp", "expert_tp", "sequence_parallel", "pp", "schedule", "chunks"]
    keys += ["micro_batch_size", "recompute", "offload"]
    assert list(document["strategy"]) == keys
    assert document["value"] == {"reached": document["step_time_s"], "bound": document["bound_s"]}
    assert {"layers", "devices", "memory_bytes"} <= set(document["stages"][0])
    assert list(document["run"]) == ["seconds", "is_cached", "digest"]
    assert list(document["hashes"]) == ["graph", "hardware", "question", "version"]


def test_a_stage_may_begin_with_an_earlier_layer_where_a_model_branches() -> None:
    """As the embedding of a decoder does that is used only behind the encoder; every layer is still held once."""
    strategy = {"dp": 1, "tp": 1, "pp": 2, "schedule": "1f1b", "micro_batch_size": 1}
    asked = {"cluster": small_cluster(devices=2), "global_batch_size": 4, "compares": False}
    document = json.loads(phaze.evaluate(small_graph(), strategy=strategy, **asked).plan.to_json())
    (first, *rest), last = (stage["layers"] for stage in document["stages"])
    branched = [{**document["stages"][0], "layers": rest}, {**document["stages"][1], "layers": [first, *last]}]
    assert plan_from_document(forged(document, stages=branched)).stages[1].layers[0].index == 0
    twice = [document["stages"][0], branched[1]]
    for wrong in (twice, [branched[0], {**branched[1], "layers": [*last, first]}]):
        with pytest.raises(FormatError, match="layers in order, each once"):
            plan_from_document(forged(document, stages=wrong))


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.mkdir()
    with pytest.raises(FormatError, match="cannot write"):
        small_plan().save(target)
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_plan_for_another_cluster_is_refused_with_what_differs_or_priced_anew(tmp_path: Path) -> None:
    path, other = tmp_path / "plan.json", small_cluster(hbm_bytes=40 * 2**30)
    small_plan().save(path)
    with pytest.raises(PlanError, match=r"hardware.accelerator.hbm_bytes: 85899345920 in the plan, 42949672960 now"):
        phaze.load_plan(path, small_graph(), cluster=other)
    with pytest.raises(PlanError, match="pass a model"):
        phaze.load_plan(path, cluster=other, reprice=True)
    anew = checked(phaze.load_plan(path, small_graph(), cluster=other, reprice=True))
    assert anew.strategy == small_plan().strategy
    assert anew.step_time_s == small_plan().step_time_s
    assert anew.stages[0].memory_bytes["capacity"] == 40 * 2**30


def test_a_plan_for_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    small_plan().save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"model.parameter_count: .* in the plan"):
        phaze.load_plan(tmp_path / "plan.json", small_graph(hidden_size=256))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not a saved plan"),
        ({"version": 99}, "reads 10. Make the plan again"),
        ({"mfu": "high"}, "plan.mfu is 'high'; expected a finite number"),
        ({"mfu": None}, "plan.mfu is None"),
        ({"status": "fine"}, "plan.status is 'fine'; expected one of optimal"),
        ({"strategy": {"dp": 1}}, "plan.strategy lacks 'shard'"),
        ({"colour": 1}, "unknown field 'colour'"),
        ({"stages": {}}, "plan.stages is {}; expected a list"),
    ],
)
def test_a_damaged_plan_is_refused_by_field(change: dict[str, object], message: str) -> None:
    document = json.loads(small_plan().to_json())
    with pytest.raises(FormatError, match=message):
        plan_from_document(forged(document, **change))


@pytest.mark.parametrize("name", ["layers", "tokens_per_sample", "parameter_count"])
@pytest.mark.parametrize("count", [0, 10**20, 10**400])
def test_a_plan_with_an_absurd_count_contradicts_itself(name: str, count: int) -> None:
    document = json.loads(small_plan().to_json())
    with pytest.raises(FormatError, match="contradicts itself"):
        plan_from_document(forged(document, model={**document["model"], name: count}))


@pytest.mark.parametrize("text", ["", "[]", "not json", "\x00"])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(FormatError, match="plan"):
        phaze.load_plan(tmp_path / "plan.json")


@pytest.mark.slow
def test_the_summary_fits_100_columns_and_says_what_matters() -> None:
    fitted = calibration_of(small_cluster(chip_name=FITTED_CHIP).accelerator)
    ideal_plans = ((small_plan(), "ideal"), (small_plan(hbm_mib=80), "ideal"))
    for plan, prices in (*ideal_plans, (small_plan(chip_name=FITTED_CHIP), fitted.name)):
        text = str(plan)
        assert max(len(line) for line in text.splitlines()) <= 100
        for words in ("small-gpt", "dp ", "MFU", "tokens/s", "GiB", f"prices    {prices}", "not executable"):
            assert words in text
        explained = plan.explain()
        assert max(len(line) for line in explained.splitlines()) <= 100
        for words in ("what binds", "the best of other kinds", "other hardware", "twice the devices", "no ZeRO"):
            assert words in explained


def test_a_long_pipeline_is_shortened() -> None:
    plan = small_plan(hbm_mib=80)
    text = str(replace(plan, stages=plan.stages * 20))
    assert "more stages" in text
    assert len(text.splitlines()) < 40


def test_html_escapes_and_shows_the_summary() -> None:
    plan = small_plan()
    named = replace(plan, model=replace(plan.model, name="<b>"))
    assert "&lt;b&gt;" in named._repr_html_()
    assert "MFU" in named._repr_html_()


def test_an_optimal_plan_is_called_so_only_without_a_gap() -> None:
    plan = checked(phaze.optimize(small_graph(), cluster=small_cluster(), gap=0.0, **QUESTION))
    assert (plan.status is PlanStatus.OPTIMAL) == (plan.gap <= 1e-9)
    assert plan.step_time_s <= small_plan().step_time_s


def test_comparison_shows_what_differs_and_the_speedup() -> None:
    one, other = small_plan(hbm_mib=80), small_plan()
    comparison = phaze.compare(one, other)
    assert comparison.speedup == pytest.approx(one.step_time_s / other.step_time_s)
    names = [row.name for row in comparison.rows]
    assert "step" in names
    assert "recompute" in names
    assert "model" not in names
    assert "times the first one's" in str(comparison)
    assert phaze.compare(one, one).speedup == 1.0


def test_a_saved_plan_is_simulated_again_to_its_own_step_time(tmp_path: Path) -> None:
    plan = phaze.evaluate(
        small_graph(), cluster=small_cluster(), strategy={"pp": 2, "dp": 4}, compares=False, **QUESTION
    ).plan
    plan.save(tmp_path / "plan.json")
    timeline = phaze.load_plan(tmp_path / "plan.json").timeline()
    assert timeline.time_s == plan.step_time_s
    assert timeline.devices == 2
    assert max(event.micro_batch for event in timeline.events) == plan.micro_batches - 1


def test_the_ops_of_a_layer_fill_its_passes() -> None:
    for kind in small_plan().layer_kinds:
        for phase, seconds in (("forward", kind.forward_s), ("backward", kind.backward_s)):
            ends = [op.start_s + op.seconds for op in kind.ops if op.phase == phase]
            assert max(ends) <= seconds * (1 + 1e-9)
        assert {op.binding for op in kind.ops} <= {"compute", "memory", "fill", "overhead", "link"}


def test_the_landscape_holds_the_plan_and_nothing_faster_that_was_simulated() -> None:
    plan, met = small_plan(), small_plan().landscape
    simulated = [index for index, state in enumerate(met.state) if state == "simulated"]
    best = min(simulated, key=lambda index: met.seconds[index])
    assert met.seconds[best] == pytest.approx(plan.step_time_s)
    assert (met.dp[best], met.pp[best], met.zero[best]) == (plan.strategy.dp, plan.strategy.pp, plan.strategy.zero)
    assert all(
        seconds >= plan.bound_s for seconds, state in zip(met.seconds, met.state, strict=True) if state == "open"
    )
    assert met.met >= len(met.state)
