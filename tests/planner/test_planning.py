"""One call from a model to a plan, and the price of a strategy of one's own."""

import itertools
import json
import math
import pickle
from dataclasses import fields, replace
from pathlib import Path

import pytest
from graphs import tiny_graph
from plans import FITTED_CHIP, IDEAL_CHIP, QUESTION, checked, small_cluster, small_graph, small_plan

import phaze
from phaze.errors import PhazeError, PlanError, QuestionError
from phaze.installed import installed_plugins
from phaze.plan.plan import PlanStatus, plan_from_document
from phaze.planner import Progress
from phaze.planner.candidate_slicings import next_tp, offering
from phaze.question import ask


def test_the_parts_of_a_step_add_up_and_none_is_negative() -> None:
    plan = small_plan()
    parts = [getattr(plan.step_time_parts, part.name) for part in fields(plan.step_time_parts)]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(plan.step_time_s, rel=1e-12)


def test_figures_follow_from_the_step_time() -> None:
    plan = small_plan()
    assert plan.samples_per_s == 32 / plan.step_time_s
    assert plan.tokens_per_s == plan.samples_per_s * 256
    peak = plan.cluster.accelerator.peak_flops_per_s("bfloat16") * 8
    assert plan.mfu == pytest.approx(plan.model.matmul_flops_per_sample * 32 / plan.step_time_s / peak)
    assert 0 < plan.mfu < 1
    assert plan.gap == pytest.approx((plan.step_time_s - plan.bound_s) / plan.step_time_s)
    assert 0 <= plan.gap <= 0.01


def test_every_layer_is_in_one_stage_and_every_rank_in_one_place() -> None:
    for plan in (small_plan(), small_plan(hbm_mib=80)):
        layers = [layer for stage in plan.stages for layer in stage.layers]
        assert [layer.index for layer in layers] == list(range(6))
        ranks = [rank for stage in plan.stages if stage.chunk == 0 for rank in stage.devices]
        assert ranks == list(range(len(ranks)))
        assert len(ranks) <= 8


def test_a_plan_fits_and_its_memory_is_itemised() -> None:
    for stage in small_plan(hbm_mib=80).stages:
        memory = dict(stage.memory_bytes)
        total, capacity = memory.pop("total"), memory.pop("capacity")
        assert sum(memory.values()) == pytest.approx(total)
        assert total <= 0.95 * capacity
        assert stage.fit == "fits"


@pytest.mark.slow
@pytest.mark.parametrize("chip_name", [IDEAL_CHIP, FITTED_CHIP])
def test_less_memory_is_never_faster_and_changes_the_strategy(chip_name: str) -> None:
    roomy, tight = (small_plan(hbm_mib=mib, chip_name=chip_name) for mib in (80 * 1024, 80))
    assert tight.provenance.prices == roomy.provenance.prices
    assert tight.step_time_s >= roomy.step_time_s
    assert tight.strategy != roomy.strategy


def test_two_runs_give_equal_documents_apart_from_the_run() -> None:
    first, second = (
        json.loads(phaze.optimize(small_graph(), cluster=small_cluster(), **QUESTION).to_json()) for _ in range(2)
    )
    assert first.pop("run").keys() == second.pop("run").keys()
    assert json.dumps(first) == json.dumps(second)


GRID = [
    {"dp": dp, "tp": tp, "pp": 8 // dp // tp, "micro_batch_size": size, "recompute": mode, "zero": zero}
    for dp, tp, size, mode, zero in itertools.product((2, 4, 8), (1, 2), (1, 2), ("none", "full"), (0, 1, 3))
    if dp * tp <= 8
]


@pytest.mark.slow
@pytest.mark.parametrize(("hbm_mib", "every"), [(80, 8), pytest.param(80, 1, marks=pytest.mark.exhaustive)])
def test_at_gap_0_no_strategy_of_a_grid_is_faster(hbm_mib: int, every: int) -> None:
    cluster, graph = small_cluster(hbm_mib * 2**20), small_graph()
    asked = {**QUESTION, "tp": (1, 2), "gap": 0.0}
    best = checked(phaze.optimize(graph, cluster=cluster, **asked))
    fitting = 0
    for strategy in GRID[::every]:
        question = {**asked, "compares": False}
        found = phaze.evaluate(graph, cluster=cluster, strategy=strategy, **question)
        fitting += found.is_feasible
        if found.is_feasible:
            assert found.step_time_s >= best.step_time_s * (1 - 1e-9), strategy
    assert fitting > len(GRID) // every // 8


@pytest.mark.slow
def test_a_strategy_of_ones_own_is_kept_and_what_is_left_out_is_optimised() -> None:
    asked = {"dp": 2, "pp": 2, "tp": 2, "schedule": "gpipe", "micro_batch_size": 2, "recompute": "full", "zero": 1}
    question = {**QUESTION, "tp": (1, 2)}
    found = phaze.evaluate(small_graph(), cluster=small_cluster(), strategy=asked, **question)
    checked(found.plan)
    for name, value in asked.items():
        kept = getattr(found.plan.strategy, name)
        assert kept == (("full", "full") if name == "recompute" else value)
    assert found.best is not None
    assert found.slower_than_best is not None
    assert found.slower_than_best > 0
    assert found.change is not None
    assert "most valuable single change" in str(found)


def test_a_size_and_width_outside_the_defaults_are_compared_with_a_best_that_may_use_them() -> None:
    question = {**QUESTION, "micro_batch_size": (1,)}
    asked = {"dp": 2, "tp": 4, "micro_batch_size": 4}
    found = phaze.evaluate(small_graph(), cluster=small_cluster(), strategy=asked, **question)
    assert found.best is not None
    assert found.best.question.micro_batch_size == (1, 4)
    assert found.best.question.tp == (1, 4)
    assert found.step_time_s >= found.best.bound_s * (1 - 1e-9)


class _InterruptingExplanation:
    """Presses Ctrl-C once the plan is found and other kinds are looked for."""

    def __call__(self, progress: Progress) -> None:
        if progress.doing.startswith("the best plan of another kind"):
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_explanation_leaves_the_plan_and_its_proof() -> None:
    listener = _InterruptingExplanation()
    plan = phaze.optimize(small_graph(), cluster=small_cluster(), explain=True, progress=listener, **QUESTION)
    assert not plan.is_explained
    assert plan.runners_up == ()
    assert plan.bound_s == small_plan().bound_s
    checked(plan)
    assert plan.explained().runners_up  # asked again, without the interruption


@pytest.mark.slow
def test_nothing_is_looked_for_beside_the_plan_until_somebody_asks() -> None:
    doing: list[str] = []
    question = {**QUESTION, "micro_batch_size": (2,)}
    plan = phaze.optimize(
        small_graph(), cluster=small_cluster(), progress=lambda progress: doing.append(progress.doing), **question
    )
    assert not [words for words in doing if "another kind" in words or "twice" in words]
    assert (plan.runners_up, plan.changes, plan.is_explained) == ((), (), False)
    assert "was not looked for" not in plan.explain()
    saved = plan_from_document(json.loads(plan.to_json()))
    assert saved == plan.explained() != plan
    assert saved.is_explained
    at_once = phaze.optimize(small_graph(), cluster=small_cluster(), explain=True, **question)
    assert replace(at_once, run=saved.run) == saved
    checked(at_once)


@pytest.mark.slow
def test_a_plan_from_a_file_explains_itself_as_far_as_its_model_can_be_had(tmp_path: Path) -> None:
    question = {**QUESTION, "micro_batch_size": (2,)}
    plan = phaze.optimize(small_graph(), cluster=small_cluster(), **question)
    plan.save(tmp_path / "plan.json")
    loaded = phaze.load_plan(tmp_path / "plan.json")
    assert loaded == plan
    text = " ".join(loaded.explain().split())
    assert "saved without its explanation, and its model cannot be had again" in text
    assert "plan.explain(model)" in text
    assert "is another model; pass its model" in " ".join(loaded.explain(small_graph(num_layers=3)).split())
    assert "the best of other kinds" not in text
    assert loaded.explained(small_graph()) == plan.explained()
    assert json.loads(loaded.to_json())["is_explained"]
    assert phaze.load_plan(tmp_path / "plan.json", small_graph()).explained() == plan.explained()


def test_a_copy_of_a_plan_in_another_process_is_equal_and_has_no_search_behind_it() -> None:
    copied = pickle.loads(pickle.dumps(small_plan()))
    assert copied == small_plan()
    assert copied.explainer is None


@pytest.mark.parametrize("chip_name", [IDEAL_CHIP, FITTED_CHIP])
def test_a_model_that_cannot_fit_gets_levers_that_make_it_fit(chip_name: str) -> None:
    cluster = small_cluster(20 * 2**20, 2, chip_name)
    plan = checked(phaze.optimize(small_graph(), cluster=cluster, **QUESTION))
    assert plan.status is PlanStatus.DOES_NOT_FIT
    assert "DOES NOT FIT" in str(plan)
    assert "would fit" in plan.explain()
    assert plan.remedies
    by_text = {remedy.text: remedy for remedy in plan.remedies}
    memory = next(remedy for text, remedy in by_text.items() if "GiB" in text)
    needed = int(memory.value.split(" bytes")[0].rsplit(" ", 1)[1])
    enough, less = (small_cluster(size, 2, chip_name) for size in (needed, int(needed * 0.98)))
    assert phaze.optimize(small_graph(), cluster=enough, **QUESTION).is_feasible
    assert not phaze.optimize(small_graph(), cluster=less, **QUESTION).is_feasible
    devices = next((remedy for text, remedy in by_text.items() if "devices" in text), None)
    if devices is not None:
        count = int(devices.text.split()[0])
        more = small_cluster(20 * 2**20, count, chip_name)
        assert phaze.optimize(small_graph(), cluster=more, **QUESTION).is_feasible


@pytest.mark.parametrize("devices", [1, 7])
def test_one_device_and_a_prime_number_of_devices_work(devices: int) -> None:
    plan = small_plan(devices=devices)
    assert plan.is_feasible
    assert plan.strategy.dp * plan.strategy.tp * plan.strategy.pp <= devices


def test_a_batch_smaller_than_the_devices_works() -> None:
    question = {**QUESTION, "global_batch_size": 2}
    plan = checked(phaze.optimize(small_graph(), cluster=small_cluster(), **question))
    assert plan.strategy.dp * plan.strategy.micro_batch_size <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "mixtral", "bert", "llama"])
def test_every_kind_of_model_is_planned_and_verified(name: str) -> None:
    graph = tiny_graph(name)
    plan = phaze.optimize(graph, cluster=small_cluster(devices=4), global_batch_size=8, micro_batch_size=(2,))
    checked(plan, graph)
    assert plan.is_feasible


WRONG = [
    ({"loss_fn": 3}, "loss_fn is 3; expected a function"),
    ({"cluster": "a100-80gb:0"}, "0 devices"),
    ({"cluster": "a100-80gb"}, "CHIP:COUNT"),
    ({"cluster": 8}, "cluster is 8"),
    ({"cluster": None}, "pass for example cluster='a100-80gb:64'"),
    ({"global_batch_size": 0}, "global_batch_size is 0"),
    ({"global_batch_size": True}, "global_batch_size is True"),
    ({"micro_batch_size": ()}, "micro_batch_size is empty"),
    ({"micro_batch_size": (0,)}, "micro_batch_size is 0"),
    ({"micro_batch_size": (5,)}, "divides the global batch of 32"),
    ({"micro_batch_size": "all"}, "micro_batch_size is 'all'"),
    ({"tp": (16,)}, "tp is .16., but the cluster has 8 devices"),
    ({"optimizer": "moun"}, "unknown optimizer 'moun'. Did you mean muon"),
    ({"optimizer": 3}, "optimizer is 3; expected one of adam"),
    ({"precision": "int4"}, "unknown precision"),
    ({"precision": 16}, "precision is 16"),
    ({"target": "tensorflow"}, "unknown target"),
    ({"target": 3}, "target is 3"),
    ({"constraints": "whole"}, "constraints is 'whole'"),
    ({"constraints": {"no.such.*": 0}}, "matches no parameter"),
    ({"calibration": 0.5}, "calibration is 0.5"),
    ({"time_limit_s": -1}, "time_limit_s is -1"),
    ({"gap": 1.0}, "gap is 1.0"),
    ({"gap": math.nan}, "gap is nan"),
    ({"progress": 3}, "progress is 3"),
    ({"sequence_length": 8}, "takes no option 'sequence_length'"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_wrong_argument_is_named_with_what_is_allowed(wrong: dict[str, object], message: str) -> None:
    question: dict[str, object] = {"cluster": small_cluster(), **QUESTION, **wrong}
    with pytest.raises(PhazeError, match=message):
        phaze.optimize(small_graph(), **question)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"ddp": 8}, "Did you mean dp"),
        ({"dp": 0}, "dp 0; expected a whole number"),
        ({"schedule": "2f2b"}, "schedule '2f2b'; expected one of none, gpipe"),
        ({"zero": 4}, "zero 4; expected one of"),
        ({"sequence_parallel": 1}, "sequence_parallel 1; expected True or False"),
        ({"recompute": "some"}, "recompute 'some'; expected one of none, selective, dots"),
        ({"recompute": ["none", "full"]}, "say with `stages`"),
        ({"pp": 1, "schedule": "1f1b"}, "a single stage has schedule 'none'"),
        ({"pp": 2, "schedule": "none"}, "several stages need a schedule"),
        ({"pp": 2, "stages": [6]}, "expected pp x chunks"),
        ({"chunks": 2, "schedule": "gpipe"}, "expected 'interleaved-1f1b'"),
        ("dp=8", "expected a mapping"),
    ],
)
def test_a_wrong_strategy_is_refused_by_key(strategy: object, message: str) -> None:
    with pytest.raises(QuestionError, match=message):
        phaze.evaluate(small_graph(), cluster=small_cluster(), strategy=strategy, **QUESTION)  # type: ignore[arg-type]


def test_progress_counts_up_and_names_the_best_so_far() -> None:
    heard: list[Progress] = []
    plan = phaze.optimize(small_graph(), cluster=small_cluster(), progress=heard.append, **QUESTION)
    assert [one.done for one in heard] == sorted(one.done for one in heard)
    assert all(one.done <= one.total for one in heard)
    assert heard[-1].best_step_time_s == plan.step_time_s
    assert heard[-1].remaining_s is not None


class _Interrupting:
    """Presses Ctrl-C when the next slicing begins after something was found."""

    def __call__(self, progress: Progress) -> None:
        if progress.best_step_time_s is not None:
            raise KeyboardInterrupt


def test_an_interrupted_search_returns_the_best_so_far_marked_and_bounded() -> None:
    plan = phaze.optimize(small_graph(), cluster=small_cluster(), progress=_Interrupting(), **QUESTION)
    assert plan.status is PlanStatus.INTERRUPTED
    assert plan.step_time_s >= small_plan().step_time_s * (1 - small_plan().question.gap)
    assert plan.bound_s <= small_plan().bound_s
    assert "interrupted" in str(plan)
    checked(plan)


def test_a_time_limit_before_anything_is_found_says_what_to_do() -> None:
    with pytest.raises(PlanError, match="allow more time"):
        phaze.optimize(small_graph(), cluster=small_cluster(), time_limit_s=1e-9, **QUESTION)


@pytest.mark.slow
def test_a_calibrated_plan_says_so_and_is_slower() -> None:
    from phaze.cost import Calibration

    calibration = Calibration(name="half", matrix=0.5, vector=0.5, memory=0.5, link=0.5, network=0.5)
    plan = checked(phaze.optimize(small_graph(), cluster=small_cluster(), calibration=calibration, **QUESTION))
    assert plan.provenance.prices == "half"
    assert plan.step_time_s == pytest.approx(2 * small_plan().step_time_s, rel=0.05)


def test_a_fitted_chip_with_another_clock_says_why_its_prices_are_ideal() -> None:
    cluster = small_cluster(chip_name=FITTED_CHIP)
    quicker = replace(cluster, accelerator=replace(cluster.accelerator, clock_hz=2e9))
    plan = phaze.optimize(small_graph(), cluster=quicker, **QUESTION)
    assert plan.provenance.prices == "ideal"
    assert any("another clock_hz than the chip of that name" in note for note in plan.provenance.notes)


@pytest.mark.slow
def test_layout_constraints_are_kept() -> None:
    graph = small_graph()
    name = next(tensor.id for tensor in graph.parameters if len(tensor.shape) == 2 and "mlp" in tensor.id)
    question = {**QUESTION, "tp": (2,), "constraints": {name: 1}}
    plan = checked(phaze.optimize(graph, cluster=small_cluster(), **question))
    assert [split.dim for split in plan.layouts.parameters[name]] == [1]


def test_twice_the_devices_are_among_the_changes_and_never_slower() -> None:
    plan = small_plan(hbm_mib=80).explained()
    assert len(plan.changes) == 3
    for change in plan.changes:
        assert change.step_time_s is not None
        assert change.step_time_s <= plan.step_time_s * 1.01


def test_runners_up_are_of_other_kinds_and_not_faster_than_the_bound() -> None:
    plan = small_plan(hbm_mib=80).explained()
    kinds = [other.kind for other in plan.runners_up]
    assert len(set(kinds)) == len(kinds)
    assert len(kinds) >= 4
    for other in plan.runners_up:
        assert other.step_time_s is None or other.step_time_s >= plan.bound_s * (1 - 1e-9)
        assert other.strategy != plan.strategy
    assert replace(plan, runners_up=()).runners_up == ()


def test_a_runner_up_that_is_faster_within_the_gap_says_so() -> None:
    plan = small_plan(hbm_mib=80).explained()
    slower = next(other for other in plan.runners_up if other.step_time_s is not None)
    faster = replace(slower, step_time_s=0.99 * plan.step_time_s)
    words = "faster, but within the gap at which the search ended"
    assert words in " ".join(replace(plan, runners_up=(faster,)).explain().split())
    equal = replace(slower, step_time_s=plan.step_time_s)
    assert words not in " ".join(replace(plan, runners_up=(equal,)).explain().split())


def test_microbatches_are_offered_beyond_the_default_sizes_while_the_largest_is_the_best() -> None:
    question: dict[str, object] = {"cluster": small_cluster(devices=1), "global_batch_size": 64}
    plan = checked(phaze.optimize(small_graph(num_layers=1), **question), small_graph(num_layers=1))
    tried = plan.question.micro_batch_size
    assert tried[:4] == (1, 2, 4, 8)
    assert max(tried) > 8
    assert plan.strategy.micro_batch_size > 8
    named = phaze.optimize(small_graph(num_layers=1), micro_batch_size=(1, 2, 4, 8), **question)
    assert named.question.micro_batch_size == (1, 2, 4, 8)
    assert named.step_time_s > plan.step_time_s


@pytest.mark.parametrize(("node", "devices", "expected"), [(8, 64, None), (16, 64, 16), (16, 8, None)])
def test_tp_is_offered_beyond_the_default_degrees_up_to_a_node(node: int, devices: int, expected: int | None) -> None:
    cluster = small_cluster(devices=devices)
    levels = (replace(cluster.levels[0], size=node), replace(cluster.levels[-1], size=-(-devices // node)))
    question = ask(small_graph(), None, {"cluster": replace(cluster, levels=levels)}, installed_plugins())
    assert next_tp(question) == expected
    assert next_tp(question.with_strategy({"tp": 8})) is None
    if expected is not None:
        assert offering(question, "tp", expected).tp_degrees == (1, 2, 4, 8, expected)
