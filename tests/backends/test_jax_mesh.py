"""Plans of JAX models run on eight host devices and give what one device gives, with the bytes that were planned."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

Results = Callable[[str], dict[str, Any]]

SCRIPT = ROOT / "tests" / "support" / "jax_mesh_runs.py"
EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
DEFAULT = (
    *(
        "pure dp2 tp4",
        "linen tp8",
        "scanned dp8 zero3",
        "scanned pp2 dp2 tp2",
        "pure pp2 dp2 tp2 eager-1f1b",
        "fused dp2 tp4",
    ),
)
HYBRID, CONTEXT = "scanned hybrid 2 x 4", "scanned cp2 tp2 dp2 zero1"
CONTEXTS = ("pure cp2 tp2 dp2", "pure cp2 pp2 dp2 eager", "scanned cp2 pp2 dp2", "scanned hybrid 2 x 4 cp2 zero2")
EXPERTS = "mixture ep2 dp4 tp2 zero1"
OTHER_EXPERTS = (
    *("mixture ep8 dp8", "mixture ep4 dp8 full", "mixture ep2 dp4 tp2 sequence", "mixture ep2 dp8 zero3"),
    *("listed mixture ep2 hybrid 2 x 4", "listed mixture ep2 dp4 zero2", "linen mixture ep4 dp8 zero1"),
)
STAGED_EXPERTS = "plain mixture ep2 pp2 dp2 tp2 gpipe"
OTHER_STAGED_EXPERTS = ("plain mixture ep2 pp2 dp2 tp2 eager-1f1b", "plain mixture ep2 pp2 dp4 zero1")
MANY = tuple(f"deep pp2 many {mode} {schedule}" for mode in ("none", "full") for schedule in ("gpipe", "eager-1f1b"))
MIXED = "scanned pp2 dp2 tp2 mixed"
CLIPPED = "scanned dp8 zero2 clipped"
FULL = (
    *(f"{model} {degrees}" for model in ("pure", "linen", "scanned") for degrees in ("dp8", "tp8", "dp2 tp4")),
    *(
        "scanned dp8 zero2",
        "scanned dp4 tp2 zero1 selective",
        "linen dp2 tp4 selective",
        "pure pp2 dp2 tp2 selective gpipe",
        "pure pp2 dp2 tp2 selective eager-1f1b",
        "scanned dp2 tp4 dots",
        "scanned dp2 tp4 full",
        "deep dp2 tp4 sequence",
    ),
    *("pure pp2 dp2 tp2 gpipe", "pure dp2 tp4 full", "uneven dp2 tp4", "odd dp2 tp4", "fused dp4 tp2 zero1 full"),
)
"""With sequences split, the plan is made for links whose bytes count (the preset's latencies favour other patterns than
the one that is run), and the CPU's compiler keeps the gathered input of the head: 3 % less than planned."""
UNFORCED = ("unforced 500 KB", "unforced 300 KB")


def run_cases(folder: Path, names: tuple[str, ...]) -> Results:
    """Run cases in one process with eight devices; what each one measured."""
    flags = {"XLA_FLAGS": f"{EIGHT_DEVICES} {os.environ['XLA_FLAGS']}", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *names],
        env=os.environ | flags | {"PYTHONPATH": str(ROOT / "tests")},  # where `oracles` lies
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return lambda name: json.loads((folder / f"{name}.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_cases(
        tmp_path_factory.mktemp("jax"), (*DEFAULT, MIXED, CLIPPED, *UNFORCED, HYBRID, CONTEXT, EXPERTS, STAGED_EXPERTS)
    )


@pytest.fixture(scope="module")
def full_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_cases(
        tmp_path_factory.mktemp("jax"),
        (
            *FULL,
            *MANY,
            *CONTEXTS,
            *OTHER_EXPERTS,
            *OTHER_STAGED_EXPERTS,
            "scanned dp4 tp2 zero2 mixed",
            "unforced 230 KB",
        ),
    )


def check_equality(measured: dict[str, Any]) -> None:
    assert measured["loss_error"] < 1e-5
    assert measured["gradient_error"] < 1e-5
    assert measured["parameter_error"] < 1e-5
    assert measured["structure_is_equal"]


def check_bytes(measured: dict[str, Any]) -> None:
    """Arguments are those of every stage, and traffic agrees on every axis.

    Stages differ in what they send between tensor-parallel devices; all but the last send to the next.
    """
    assert set(measured["planned_bytes"]) == {measured["argument_bytes"]}
    stages = measured["planned_traffic"]
    expected = {axis: sum(stage[axis] for stage in stages) / len(stages) for axis in ("dp", "tp")}
    expected["pp"] = max(stage["pp"] for stage in stages)
    for axis, size in expected.items():
        assert measured["traffic_bytes"][axis] == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize("name", DEFAULT)
def test_a_step_on_a_mesh_equals_one_on_a_device(results: Results, name: str) -> None:
    check_equality(results(name))


@pytest.mark.parametrize("name", DEFAULT)
def test_arguments_and_collectives_have_the_planned_bytes(results: Results, name: str) -> None:
    check_bytes(results(name))


@pytest.mark.parametrize("name", DEFAULT)
def test_a_device_holds_the_planned_bytes_of_parameters_gradients_and_optimizer(results: Results, name: str) -> None:
    planned = results(name)["planned_live_bytes"]
    assert [results(name)["live_bytes"]] * len(planned) == pytest.approx(planned, rel=0.01)


def check_mixed(measured: dict[str, Any]) -> None:
    """Gradients are as near to those in fp32 as one device comes in bf16; what is held in fp32 has its bytes."""
    assert measured["loss_error"] < 1e-2
    assert measured["gradient_error"] < 1.5 * measured["rounding_error"]
    assert measured["is_cast_from_master"]
    assert set(measured["planned_bytes"]) == {measured["argument_bytes"]}


def test_a_step_in_bf16_updates_the_master_copy_and_casts_it(results: Results) -> None:
    check_mixed(results(MIXED))


def test_an_optimizer_may_take_norms_over_sharded_gradients(results: Results) -> None:
    check_equality(results(CLIPPED))


def large_arrays(measured: dict[str, Any]) -> int:
    return sum(size for size in measured["array_bytes"] if size >= 1024)


def test_shards_within_groups_of_copies_are_gathered_there_and_summed_between_them(results: Results) -> None:
    measured = results(HYBRID)
    check_equality(measured)
    assert set(measured["planned_bytes"]) == {measured["argument_bytes"]}
    # Gathered in forward and in backward, and scattered; between the groups an all-reduce of each quarter.
    whole = large_arrays(measured)
    assert measured["traffic_bytes"]["shard"] == pytest.approx(3 * whole, rel=0.05)
    assert measured["traffic_bytes"]["dp"] == pytest.approx(2 * whole / 4, rel=0.1)


def test_devices_of_a_sequence_gather_keys_and_values_and_scatter_their_gradients(results: Results) -> None:
    measured = results(CONTEXT)
    check_equality(measured)
    assert set(measured["planned_bytes"]) == {measured["argument_bytes"]}
    # Two layers, keys and values of (8, 16, 8 / tp, 8) in fp32: gathered in both passes, and their gradients scattered.
    assert measured["traffic_bytes"]["cp"] == 2 * 2 * 3 * (8 * 16 * 4 * 8) * 4
    (planned,) = measured["planned_traffic"]
    assert measured["traffic_bytes"]["tp"] == planned["tp"]
    # Gradients are scattered, and parameters gathered, over copies and contexts together.
    assert measured["traffic_bytes"]["dp cp"] == pytest.approx(planned["dp"], rel=0.05)


def check_experts(measured: dict[str, Any]) -> None:
    """Rows travel between the owners of experts, and gradients of all parameters between their copies, as planned."""
    check_equality(measured)
    assert set(measured["planned_bytes"]) == {measured["argument_bytes"]}
    (planned,), traffic = measured["planned_traffic"], measured["traffic_bytes"]
    between_copies = sum(size for axes, size in traffic.items() if axes not in ("pp", "tp", "ep"))
    assert traffic["ep"] + between_copies == pytest.approx(planned["ep"] + planned["dp"], rel=0.05)
    if traffic["dp"]:  # otherwise all copies are owners of experts, and gradients travel between them, too
        assert traffic["ep"] == planned["ep"]


def test_owners_of_experts_exchange_rows_of_tokens(results: Results) -> None:
    measured = results(EXPERTS)
    check_experts(measured)
    # Two layers, two microbatches, rows of (8, 2, 4, 32) in fp32 on two tensor-parallel devices: twice there and back.
    assert measured["traffic_bytes"]["ep"] == 2 * 2 * 4 * (8 * 2 * 4 * 32) * 4 // 2
    # The router and gradients of scores are gathered; the plan adds up partial scores, as many bytes here.
    assert measured["traffic_bytes"]["tp"] == measured["planned_traffic"][0]["tp"]


def check_staged_experts(measured: dict[str, Any]) -> None:
    check_equality(measured)
    assert set(measured["planned_bytes"]) == {measured["argument_bytes"]}
    stages, traffic = measured["planned_traffic"], measured["traffic_bytes"]
    between_copies = sum(size for axes, size in traffic.items() if axes not in ("pp", "tp"))
    planned = [stage["ep"] + stage["dp"] for stage in stages]
    assert between_copies == pytest.approx(sum(planned) / len(planned), rel=0.01)
    assert traffic["pp"] == stages[0]["pp"]
    assert traffic["tp"] == pytest.approx(sum(stage["tp"] for stage in stages) / len(stages), rel=0.03)


def test_owners_of_experts_exchange_rows_in_the_stages_of_a_pipeline(results: Results) -> None:
    check_staged_experts(results(STAGED_EXPERTS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHER_STAGED_EXPERTS)
def test_pipelines_of_experts_go_with_other_schedules_and_shards(full_results: Results, name: str) -> None:
    check_staged_experts(full_results(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHER_EXPERTS)
def test_experts_go_with_every_other_division(full_results: Results, name: str) -> None:
    if "hybrid" in name:
        check_equality(full_results(name))
        assert full_results(name)["traffic_bytes"]["ep"] == full_results(name)["planned_traffic"][0]["ep"]
    else:
        check_experts(full_results(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_eager_1f1b_holds_a_few_microbatches_where_gpipe_holds_all(full_results: Results, recompute: str) -> None:
    gpipe, eager = (full_results(f"deep pp2 many {recompute} {schedule}") for schedule in ("gpipe", "eager-1f1b"))
    check_equality(gpipe)
    check_equality(eager)
    planned = [max(measured["planned_activation_bytes"]) for measured in (gpipe, eager)]
    assert gpipe["temporary_bytes"] - eager["temporary_bytes"] > 0.5 * (planned[0] - planned[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_go_with_every_other_division(full_results: Results, name: str) -> None:
    check_equality(full_results(name))
    if "pp" not in name:
        assert full_results(name)["traffic_bytes"]["tp"] == full_results(name)["planned_traffic"][0]["tp"]


def test_stages_send_activations_and_the_parameters_outside_of_the_scan(results: Results) -> None:
    measured = results("scanned pp2 dp2 tp2")
    activations_bytes, outside_bytes = 32768, 2 * (64 * 32 + 32 * 64) * 4 // 2
    assert [stage["pp"] for stage in measured["planned_traffic"]] == [activations_bytes + outside_bytes, outside_bytes]
    assert measured["traffic_bytes"]["pp"] == activations_bytes + outside_bytes


@pytest.mark.parametrize("name", UNFORCED)
def test_twenty_steps_of_an_unforced_plan_lose_what_one_process_loses(results: Results, name: str) -> None:
    check_unforced(results(name))


def test_plans_under_limits_of_memory_need_every_kind_of_division(results: Results) -> None:
    strategies = [results(name)["strategy"] for name in UNFORCED]
    assert max(strategy["tp"] for strategy in strategies) > 1
    assert max(strategy["pp"] for strategy in strategies) > 1
    assert max(strategy["zero"] for strategy in strategies) > 0
    assert any(mode != "none" for strategy in strategies for mode in strategy["recompute"])


def check_unforced(measured: dict[str, Any]) -> None:
    assert measured["target"] == "jax"
    assert measured["losses"] == pytest.approx(measured["expected"], rel=1e-4)
    assert measured["losses"][-1] < measured["losses"][0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FULL)
def test_every_step_on_a_mesh_equals_one_on_a_device(full_results: Results, name: str) -> None:
    check_equality(full_results(name))
    check_bytes(full_results(name))


@pytest.mark.exhaustive
def test_the_tightest_plan_loses_what_one_process_loses(full_results: Results) -> None:
    check_unforced(full_results("unforced 230 KB"))


@pytest.mark.exhaustive
def test_microbatches_in_bf16_add_up_in_fp32(full_results: Results) -> None:
    check_mixed(full_results("scanned dp4 tp2 zero2 mixed"))
