"""Hybrid sharding, split sequences and divided experts, from a question to a plan that is verified and explained."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import phaze
from phaze.cost import IDEAL
from phaze.errors import PhazeError, PlanError, QuestionError
from phaze.hardware import Cluster, InterconnectLevel, preset
from phaze.installed import installed_plugins
from phaze.ir import Graph
from phaze.plan.plan import Plan
from phaze.question import ask
from phaze.verify.plan_checks import check_plan

QUESTION: dict[str, Any] = {"global_batch_size": 16, "target": None, "calibration": IDEAL}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}


@cache
def model(name: str, length: int = 256) -> Graph:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if name == "mixtral" else {}
    return phaze.import_graph({"model_type": name, **SMALL, **experts}, sequence_length=length)


def cluster(devices: int = 16) -> Cluster:
    """Nodes of four devices with slow links between them."""
    levels = (InterconnectLevel(4, 100e9, 1e-6), InterconnectLevel(8, 1e9, 5e-6))
    return Cluster(preset("a100-80gb").accelerator, devices, levels)


def assert_verified(plan: Plan, graph: Graph) -> None:
    assert [finding for finding in check_plan(plan, graph) if not finding.holds] == []


def test_parameters_gathered_within_a_node_spare_the_slow_links_between_nodes() -> None:
    graph, degrees = model("llama"), {"dp": 16, "tp": 1, "pp": 1, "micro_batch_size": 1, "zero": 3}
    over_all, within = (
        phaze.evaluate(graph, cluster=cluster(), strategy={**degrees, "shard": shard}, compares=False, **QUESTION).plan
        for shard in ("all", 4)
    )
    assert within.step_time_s < over_all.step_time_s
    held = [plan.stages[0].memory_bytes["optimizer"] for plan in (within, over_all)]
    assert held[0] == pytest.approx(4 * held[1])
    assert "ZeRO-3 over 4 of 16" in str(within)
    assert "ZeRO-3," in str(over_all)
    assert_verified(within, graph)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama", {"dp": 8, "tp": 2, "pp": 1, "zero": 2, "shard": 2}),
        ("llama", {"dp": 4, "cp": 2, "tp": 1, "pp": 2, "zero": 3, "shard": 4}),
        ("mixtral", {"dp": 8, "ep": 4, "tp": 2, "pp": 1, "zero": 1, "shard": 4}),
        ("mixtral", {"dp": 4, "cp": 2, "ep": 2, "tp": 1, "pp": 2, "zero": 3, "shard": 8}),
        ("mixtral", {"dp": 8, "ep": 2, "tp": 2, "expert_tp": 1, "pp": 1, "zero": 1, "shard": 4}),
    ],
)
def test_a_strategy_of_all_axes_is_priced_and_verified(name: str, strategy: dict[str, Any]) -> None:
    graph = model(name)
    options = {**QUESTION, "micro_batch_size": 1}
    plan = phaze.evaluate(graph, cluster=cluster(), strategy=strategy, compares=False, **options).plan
    told = {key: getattr(plan.strategy, key) for key in strategy}
    assert told == {**strategy, "shard": "all" if strategy["shard"] == plan.strategy.replicas else strategy["shard"]}
    assert len({rank for stage in plan.stages for rank in stage.devices}) == 16
    assert_verified(plan, graph)


def test_owners_that_broadcast_their_tensors_one_after_the_other_make_wide_groups_slow() -> None:
    graph, stack = model("llama"), replace(IDEAL.stack, owners_broadcast=True)
    options = {**QUESTION, "micro_batch_size": 1, "calibration": replace(IDEAL, stack=stack)}
    degrees = {"dp": 16, "tp": 1, "pp": 1, "zero": 1}
    over_all, within = (
        phaze.evaluate(graph, cluster=cluster(), strategy={**degrees, "shard": shard}, compares=False, **options).plan
        for shard in ("all", 4)
    )
    hops_s = 12 * (1e-6 + 2**18 / 100e9) + 3 * (5e-6 + 2**18 / 1e9)
    inner_s = 3 * (1e-6 + 2**18 / 100e9)
    assert over_all.step_time_s - within.step_time_s > 16 * hops_s - 4 * inner_s
    for plan in (over_all, within):
        assert_verified(plan, graph)


def test_experts_that_tp_devices_divide_or_cut_are_priced_apart_and_the_faster_is_found() -> None:
    graph, degrees = model("mixtral"), {"dp": 4, "ep": 2, "tp": 2, "pp": 1, "zero": 1, "micro_batch_size": 1}
    divided, cut, free = (
        phaze.evaluate(graph, cluster=cluster(8), strategy={**degrees, **named}, compares=False, **QUESTION).plan
        for named in ({"expert_tp": 1}, {"expert_tp": 2}, {})
    )
    for plan, expert_tp, dim in ((divided, 1, 0), (cut, 2, 1)):
        (split,) = plan.layouts.parameters["model.layers.0.mlp.experts.gate_up_proj"]
        assert (plan.strategy.expert_tp, split.dim, split.ways) == (expert_tp, dim, 2)
        assert f"ep 2, expert tp {expert_tp}" in " ".join(str(plan).split())
    assert free.step_time_s == min(divided.step_time_s, cut.step_time_s)
    assert free.strategy.expert_tp == (1 if divided.step_time_s < cut.step_time_s else 2)
    held = [plan.stages[0].memory_bytes["parameters"] for plan in (divided, cut)]
    assert held[0] == held[1]
    forged = replace(cut, strategy=replace(cut.strategy, expert_tp=1))
    broken = {finding.what for finding in check_plan(forged, graph) if not finding.holds}
    assert "how tp devices share experts" in broken


def test_short_sequences_are_split_where_the_best_plan_recomputes_otherwise() -> None:
    small_memory = replace(preset("a100-80gb").accelerator, hbm_bytes=60 * 2**20)
    asked: dict[str, Any] = {**QUESTION, "global_batch_size": 4, "tp": 1, "micro_batch_size": 1}
    asked["cluster"] = Cluster(small_memory, 4, (InterconnectLevel(4, 100e9, 1e-6),))
    whole, free = (phaze.optimize(model("llama", 4096), **asked, **cp) for cp in ({"cp": 1}, {}))
    assert "full" in whole.strategy.recompute
    assert (free.strategy.cp, set(free.strategy.recompute)) == (2, {"none"})
    assert free.step_time_s < whole.step_time_s


def test_sequences_of_8192_may_be_split_from_the_beginning_and_shorter_ones_later() -> None:
    degrees = [
        ask(model("llama", length), None, {**QUESTION, "cluster": cluster()}, installed_plugins()).cp_degrees
        for length in (4096, 8192)
    ]
    assert degrees == [(1,), (1, 2)]


def test_experts_are_divided_where_that_is_fastest_and_what_it_brings_is_told() -> None:
    graph = model("mixtral")
    plan = phaze.optimize(graph, cluster=cluster(8), tp=1, micro_batch_size=1, **QUESTION)
    whole = phaze.optimize(graph, cluster=cluster(8), tp=1, micro_batch_size=1, ep=1, **QUESTION)
    assert plan.question.ep == (1, 2, 4)
    assert plan.step_time_s <= whole.step_time_s * 1.01
    assert ("ep" in str(plan)) == (plan.strategy.ep > 1)
    if plan.strategy.ep > 1:
        kinds = [runner.kind for runner in plan.explained().runners_up]
        assert "no expert parallelism" in kinds


def test_a_sequence_is_split_where_a_batch_has_fewer_sequences_than_there_are_devices() -> None:
    graph = model("llama", 8192)
    asked = {**QUESTION, "global_batch_size": 1, "tp": 1, "micro_batch_size": 1}
    split = phaze.optimize(graph, cluster=cluster(4), cp=(1, 2, 4), **asked)
    whole = phaze.optimize(graph, cluster=cluster(4), cp=1, **asked)
    assert split.strategy.cp > 1
    assert split.step_time_s < whole.step_time_s
    assert_verified(split, graph)
    runner = next(runner for runner in split.explained().runners_up if runner.kind == "no context parallelism")
    assert runner.step_time_s is not None
    assert runner.step_time_s >= split.step_time_s


@pytest.mark.parametrize(
    ("name", "strategy", "message"),
    [
        ("llama", {"cp": 3}, "cp=3 does not divide the 256 positions.*nearest that do are 2 and 4"),
        ("llama", {"ep": 2}, "has no experts that ep=2 could divide"),
        ("llama", {"tp": 2, "expert_tp": 1}, "has no experts; leave expert_tp out"),
        ("mixtral", {"tp": 4, "ep": 2, "expert_tp": 1}, "2 x 4, which do not divide the 4 experts.*or use expert_tp 4"),
        ("mixtral", {"ep": 3}, "ep=3 does not divide the 4 experts.*nearest that do are 2 and 4"),
        ("llama", {"dp": 12, "shard": 8}, "shard 8, which does not divide dp x cp, 12 x 1"),
    ],
)
def test_what_cannot_be_divided_so_is_refused_by_name(name: str, strategy: dict[str, Any], message: str) -> None:
    with pytest.raises((PlanError, QuestionError), match=message):
        phaze.evaluate(model(name), cluster=cluster(12), strategy=strategy, compares=False, **QUESTION)


def test_a_model_without_sequences_says_so() -> None:
    graph = phaze.import_graph("vit-base")
    with pytest.raises(PhazeError, match="has no sequence that cp=2 could split"):
        phaze.evaluate(graph, cluster=cluster(4), strategy={"cp": 2, "tp": 1}, compares=False, **QUESTION)


@pytest.mark.parametrize("ep", [1, 2])
def test_an_imbalance_of_experts_is_priced_kept_told_and_verified(ep: int) -> None:
    graph, strategy = model("mixtral"), {"dp": 2, "ep": ep, "tp": 1, "pp": 1, "zero": 0, "micro_batch_size": 1}
    even, uneven = (
        phaze.evaluate(
            graph, cluster=cluster(2), strategy=strategy, compares=False, expert_imbalance=imbalance, **QUESTION
        ).plan
        for imbalance in (1, 1.5)
    )
    assert uneven.step_time_s > even.step_time_s
    assert uneven.stages[0].memory_bytes["activations"] > even.stages[0].memory_bytes["activations"]
    assert uneven.stages[0].memory_bytes["parameters"] == even.stages[0].memory_bytes["parameters"]
    assert (even.question.expert_imbalance, uneven.question.expert_imbalance) == (1.0, 1.5)
    told = "it is assumed that every expert takes 1.5 times its equal share of tokens"
    assert told in uneven.explain()
    assert told not in even.explain()
    assert_verified(uneven, graph)


@pytest.mark.parametrize(
    ("name", "imbalance", "message"),
    [
        ("mixtral", 0.5, "expert_imbalance is 0.5; expected a number from 1"),
        ("mixtral", float("nan"), "expert_imbalance is nan"),
        ("mixtral", "much", "expert_imbalance is 'much'"),
        ("llama", 2, "expert_imbalance is 2, but model .* sends no tokens to experts"),
    ],
)
def test_an_imbalance_that_cannot_be_is_refused(name: str, imbalance: Any, message: str) -> None:
    with pytest.raises(QuestionError, match=message):
        phaze.optimize(model(name), cluster=cluster(2), expert_imbalance=imbalance, **QUESTION)
