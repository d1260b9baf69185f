"""What is kept on the host, from a cluster that names one to a plan that is verified, explained and saved."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from plans import checked, small_cluster, small_graph

import phaze
from phaze.errors import HardwareError, PlanError, QuestionError
from phaze.hardware import Cluster, HostLink, parse_cluster
from phaze.hardware.hardware_files import load_cluster, save_cluster
from phaze.installed import installed_plugins
from phaze.parallelism import Offload
from phaze.plan.handover import obstacles
from phaze.plan.plan import Plan
from phaze.targets import Capabilities

ASKED: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 1, "tp": 1, "target": None}
HOST = HostLink(25e9, 2**33)


def with_host(memory_mib: int, devices: int = 1) -> Cluster:
    return replace(small_cluster(memory_mib * 2**20, devices), host=HOST)


@cache
def offloaded() -> Plan:
    """One device with too little memory for the states of the model."""
    return checked(phaze.optimize(small_graph(), cluster=with_host(240), **ASKED))


def test_states_go_to_the_host_where_the_model_does_not_fit_otherwise() -> None:
    without = phaze.optimize(small_graph(), cluster=small_cluster(240 * 2**20, 1), **ASKED)
    assert not without.is_feasible
    plan = offloaded()
    assert plan.is_feasible
    assert plan.strategy.offload is Offload.OPTIMIZER
    memory, states = plan.stages[0].memory_bytes, 12 * plan.model.parameter_count
    assert memory["host"] == pytest.approx(states)
    assert memory["optimizer"] == 0
    assert plan.stages[0].passes.update_s == pytest.approx(states / HOST.bandwidth_bytes_per_s)
    assert "optimizer states on the host" in str(plan)
    assert "on hosts  up to 0.1 of 8 GiB for each device" in str(plan)


def test_states_stay_on_the_devices_where_they_fit_since_that_is_faster() -> None:
    plan = phaze.optimize(small_graph(), cluster=with_host(4096), explain=True, **ASKED)
    assert plan.strategy.offload is Offload.NONE
    assert plan.step_time_s == phaze.optimize(small_graph(), cluster=small_cluster(2**32, 1), **ASKED).step_time_s
    other = next(runner for runner in plan.runners_up if runner.kind == "optimizer states on the host")
    assert other.step_time_s is not None
    assert other.step_time_s > plan.step_time_s
    assert "nothing on the host: nothing fits" in " ".join(offloaded().explain().split())


def test_a_strategy_says_where_states_are() -> None:
    asked = {**ASKED, "cluster": with_host(4096, 2)}
    given = {"dp": 2, "pp": 1, "zero": 1, "micro_batch_size": 1, "recompute": "none"}
    held, moved = (
        phaze.evaluate(small_graph(), strategy={**given, "offload": offload}, compares=False, **asked).plan
        for offload in ("none", "optimizer")
    )
    assert moved.step_time_s > held.step_time_s
    assert moved.stages[0].memory_bytes["host"] == pytest.approx(held.stages[0].memory_bytes["optimizer"])
    assert moved.energy["communication_j"] > held.energy["communication_j"]
    checked(moved)
    staged = phaze.evaluate(
        small_graph(), strategy={"pp": 2, "stages": (3, 3), "offload": "optimizer"}, compares=False, **asked
    ).plan
    assert staged.strategy.offload is Offload.OPTIMIZER
    checked(staged)


@cache
def moved() -> Plan:
    """One device with too little memory for the activations of its microbatch, and a quick host."""
    cluster = replace(small_cluster(220 * 2**20, 1), host=HostLink(1e12, 2**33))
    asked = {**ASKED, "micro_batch_size": 8, "optimizer": "sgd", "explain": True}
    return checked(phaze.optimize(small_graph(), cluster=cluster, **asked))


def test_activations_go_to_the_host_where_that_is_quicker_than_recomputing_them() -> None:
    plan = moved()
    assert plan.strategy.offload.moves_activations
    assert "activations on the host" in str(plan)
    memory = plan.stages[0].memory_bytes
    assert memory["host"] > 0
    others = {runner.kind: runner.step_time_s for runner in plan.runners_up}
    without = others["nothing on the host"]
    assert "full" not in plan.strategy.recompute
    assert without is None or without > plan.step_time_s


def test_a_strategy_says_that_activations_are_on_the_host() -> None:
    given = {"dp": 1, "pp": 2, "schedule": "1f1b", "zero": 0, "micro_batch_size": 2, "recompute": "none"}
    plans = {
        offload: phaze.evaluate(
            small_graph(),
            strategy={**given, "offload": offload},
            compares=False,
            **{**ASKED, "micro_batch_size": 2, "cluster": with_host(4096, 2)},
        ).plan
        for offload in Offload
    }
    memory = {offload: plan.stages[0].memory_bytes for offload, plan in plans.items()}
    kept, both = memory[Offload.ACTIVATIONS], memory[Offload.BOTH]
    assert kept["activations"] < memory[Offload.NONE]["activations"]
    assert kept["activations"] + kept["host"] == pytest.approx(memory[Offload.NONE]["activations"])
    assert both["host"] == pytest.approx(kept["host"] + memory[Offload.OPTIMIZER]["host"])
    assert plans[Offload.ACTIVATIONS].step_time_s > plans[Offload.NONE].step_time_s
    assert plans[Offload.ACTIVATIONS].energy["communication_j"] > plans[Offload.NONE].energy["communication_j"]
    for plan in plans.values():
        checked(plan)


def test_a_plan_with_states_on_the_host_is_saved_and_loaded(tmp_path: Path) -> None:
    offloaded().save(tmp_path / "plan.json")
    loaded = phaze.load_plan(tmp_path / "plan.json", small_graph(), cluster=with_host(240))
    assert loaded.strategy == offloaded().strategy
    assert loaded.stages == offloaded().stages
    assert "optimizer states on the host" in loaded.to_html()


def test_targets_that_cannot_keep_states_on_the_host_never_offer_it() -> None:
    for target in installed_plugins().targets():
        assert target.value.capabilities.offloads == {Offload.NONE}
    assert "memory of the host (offload optimizer)" in obstacles(offloaded(), Capabilities())
    asked = {**ASKED, "cluster": with_host(240), "target": "megatron-lm"}
    assert not phaze.optimize(small_graph(), **asked).is_feasible
    with pytest.raises(QuestionError, match=r"offload optimizer .it runs none."):
        phaze.evaluate(small_graph(), strategy={"offload": "optimizer"}, **asked)
    with pytest.raises(PlanError, match="memory of the host"):
        offloaded().export("megatron-lm")


def test_a_host_is_named_in_text_and_in_files(tmp_path: Path) -> None:
    cluster = parse_cluster("a100-80gb:8/host=25GB/s,200GiB")
    assert cluster == replace(parse_cluster("a100-80gb:8"), host=HostLink(25e9, 200 * 2**30))
    named = parse_cluster("h100:16@nvlink8+ib400/host=55.5GB/s,128GB")
    assert named.host == HostLink(55.5e9, 128 * 10**9)
    assert named.levels == parse_cluster("h100:16@nvlink8+ib400").levels
    save_cluster(cluster, tmp_path / "cluster.json")
    assert load_cluster(tmp_path / "cluster.json") == cluster


@pytest.mark.parametrize("host", ["", "25", "25GB/s", "0GB/s,1GiB", "25GB/s,0GiB", "25GB/s,200TB", "..GB/s,1GiB"])
def test_a_host_that_cannot_be_is_refused(host: str) -> None:
    with pytest.raises(HardwareError, match="host"):
        parse_cluster(f"a100-80gb:8/host={host}")


@pytest.mark.parametrize(
    ("value", "message"), [("disk", "expected one of none, optimizer, activations"), (True, "offload True")]
)
def test_an_offload_that_cannot_be_is_refused(value: object, message: str) -> None:
    with pytest.raises(QuestionError, match=message):
        phaze.evaluate(small_graph(), cluster=with_host(240), strategy={"offload": value}, **ASKED)


def test_an_offload_without_a_host_is_refused_with_how_to_name_one() -> None:
    with pytest.raises(QuestionError, match="names no host; write for example a100-80gb:8/host=25GB/s,200GiB"):
        phaze.evaluate(small_graph(), cluster=small_cluster(), strategy={"offload": "optimizer"}, **ASKED)
