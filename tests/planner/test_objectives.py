"""Cost, energy and the fewest devices: a plan takes as many devices as serve it best, with a bound over all counts."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from plans import QUESTION, checked, small_cluster, small_graph

import phaze
from phaze.commands.command import ExitCode
from phaze.errors import FormatError, HardwareError, PlanError, QuestionError
from phaze.hardware.hardware_files import load_cluster, save_cluster
from phaze.installed import installed_plugins
from phaze.plan.plan import Plan, PlanStatus, plan_from_document
from phaze.planner.progress import Watch
from phaze.verify.bound_checks import derive_value_bound
from phaze.verify.saved_plan import question_for

MEMORY = 160 * 2**20
"""So little memory that one device does not hold the model."""

ASKED: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 1, "tp": 1, "target": None}


@cache
def planned(objective: str, devices: int = 4, **options: Any) -> Plan:
    cluster = small_cluster(MEMORY, devices)
    return phaze.optimize(small_graph(), cluster=cluster, objective=objective, **ASKED, **options)


@cache
def fastest_on(devices: int) -> Plan:
    """The fastest plan on all of so many devices of the same cluster."""
    cluster = replace(small_cluster(MEMORY, 4), device_count=devices)
    return phaze.optimize(small_graph(), cluster=cluster, gap=0.0, **ASKED)


def used(plan: Plan) -> int:
    return len({rank for stage in plan.stages for rank in stage.devices})


def test_the_cheapest_plan_costs_what_the_cheapest_of_all_clusters_up_to_its_size_costs() -> None:
    plan = checked(planned("cost", price=2.5))
    tokens = 8 * 256
    costs = [
        2.5 * count * fastest_on(count).step_time_s / 3600 / tokens * 1e6
        for count in range(1, 5)
        if fastest_on(count).is_feasible
    ]
    assert plan.value.bound <= min(costs) * (1 + 1e-9)
    assert plan.value.reached <= min(costs) * 1.01
    assert plan.value.reached == pytest.approx(2.5 * used(plan) * plan.step_time_s / 3600 / tokens * 1e6)
    assert plan.cluster.device_count == used(plan) < 4
    assert plan.question.most_devices == 4
    assert "per million tokens at 2.5 per device-hour" in " ".join(str(plan).split())
    assert "on 1 to 4 devices, each stage on tp of them, costs less than" in " ".join(str(plan).split())


def test_a_price_scales_the_cost_and_changes_no_plan() -> None:
    cheap, dear = planned("cost", price=2.5), planned("cost", price=5.0)
    assert dear.strategy == cheap.strategy
    assert dear.value.reached == pytest.approx(2 * cheap.value.reached)


def test_a_price_is_told_with_the_fastest_plan_too() -> None:
    plan = planned("throughput", price=2.5)
    assert plan.step_time_s == planned("throughput").step_time_s
    assert "at 2.5 per device-hour" in str(plan)
    assert "device-hour" not in str(planned("throughput"))


def test_the_fewest_devices_are_those_below_which_nothing_fits() -> None:
    plan = checked(planned("devices"))
    counts = [count for count in range(1, 5) if fastest_on(count).is_feasible]
    assert plan.cluster.device_count == used(plan) == min(counts)
    assert plan.value.bound == plan.value.reached == min(counts)
    assert plan.step_time_s <= fastest_on(min(counts)).step_time_s * 1.01


def test_the_fewest_devices_that_hold_a_step_time_are_those_below_which_every_step_takes_longer() -> None:
    limit_s = fastest_on(3).step_time_s * 1.001
    plan = checked(planned("devices", step_time=limit_s))
    assert plan.step_time_s <= limit_s
    assert plan.cluster.device_count <= 3
    fewer = [fastest_on(count) for count in range(1, plan.cluster.device_count)]
    assert all(not other.is_feasible or other.step_time_s > limit_s for other in fewer)
    assert "whose steps take at most" in str(plan)


def test_steps_of_many_seconds_are_not_taken_for_devices() -> None:
    cluster = small_cluster(MEMORY, 4)
    chip = cluster.accelerator
    slow = replace(chip, clock_hz=chip.clock_hz / 1e5, hbm_bandwidth_bytes_per_s=chip.hbm_bandwidth_bytes_per_s / 1e5)
    asked = {**ASKED, "micro_batch_size": (1, 2), "objective": "devices"}
    plan = phaze.optimize(small_graph(), cluster=replace(cluster, accelerator=slow), **asked)
    assert plan.step_time_s > 10
    assert plan.cluster.device_count == planned("devices").cluster.device_count


def test_the_least_energy_is_no_more_than_that_of_the_fastest_plan_of_any_size() -> None:
    plan = checked(planned("energy"))
    energies = [fastest_on(count).energy["per_token_j"] for count in range(1, 5) if fastest_on(count).is_feasible]
    assert plan.value.bound <= min(energies) * (1 + 1e-9)
    assert plan.value.reached <= min(energies) * (1 + 1e-9)
    assert plan.value.reached == plan.energy["per_token_j"]
    assert plan.gap == pytest.approx(1 - plan.value.bound / plan.value.reached)
    assert plan.gap < 0.02


def test_evaluate_compares_by_the_objective() -> None:
    asked = {**ASKED, "cluster": small_cluster(MEMORY, 4), "objective": "cost", "price": 1.0}
    evaluation = phaze.evaluate(small_graph(), strategy={"dp": 4, "zero": 1, "recompute": "full"}, **asked)
    assert evaluation.plan.cluster.device_count == 4
    assert evaluation.best is not None
    assert evaluation.worse_than_best == pytest.approx(
        evaluation.plan.value.reached / evaluation.best.value.reached - 1
    )
    assert "per million tokens; this strategy is" in str(evaluation)
    assert "dearer" in str(evaluation)
    given = phaze.evaluate(small_graph(), strategy={"dp": 2, "pp": 2, "stages": (3, 3)}, compares=False, **asked)
    assert given.plan.cluster.device_count == used(given.plan) == 4


def test_a_saved_plan_keeps_its_objective_and_is_for_both_clusters(tmp_path: Path) -> None:
    plan, path = planned("cost", price=2.5), tmp_path / "plan.json"
    plan.save(path)
    loaded = phaze.load_plan(path, small_graph(), cluster=small_cluster(MEMORY, 4))
    assert loaded.value == plan.value
    assert loaded.question == plan.question
    assert phaze.load_plan(path, cluster=plan.cluster).strategy == plan.strategy
    with pytest.raises(PlanError, match="device_count: 4 in the plan, 3 now"):
        phaze.load_plan(path, cluster=replace(small_cluster(MEMORY, 4), device_count=3))
    assert "the best of other kinds" in loaded.explain(small_graph())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("value", "reached"), 0.001, "value.reached is 0.001"),
        (("value", "bound"), 1e9, "value.bound"),
        (("question", "most_devices"), 1, "most_devices is 1|takes . devices"),
        (("question", "objective", "kind"), "throughput", "price|most_devices"),
        (("question", "objective", "price"), None, "price"),
        (("question", "objective", "price"), -1.0, "price"),
        (("question", "objective", "step_time_s"), 1.0, "step time"),
    ],
)
def test_a_forged_value_is_refused(path: tuple[str, ...], value: object, message: str) -> None:
    from phaze.json_documents import with_digest, without_digest

    document = json.loads(planned("cost", price=2.5).to_json())
    run = document.pop("run")
    document = without_digest(document, "plan")
    part = document
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    with pytest.raises(FormatError, match=message):
        plan_from_document({**with_digest(document), "run": run}, "plan")


@pytest.mark.parametrize("objective", ["cost", "energy", "devices"])
def test_plain_code_shows_a_bound_and_refutes_one_that_is_too_high(objective: str) -> None:
    plan = planned(objective, **({"price": 2.5} if objective == "cost" else {}))
    question = question_for(plan, small_graph(), None, installed_plugins())
    reached = {
        "cost": plan.cluster.device_count * plan.step_time_s,
        "energy": plan.energy["total_j"],
        "devices": float(plan.cluster.device_count),
    }[objective]
    shown = derive_value_bound(question, reached * plan.value.bound / plan.value.reached, Watch())
    assert shown.faster is None
    assert shown.proof.strategies > 10
    assert shown.proof.left_open == 0
    assert derive_value_bound(question, reached * 1.05 + (objective == "devices"), Watch()).faster is not None


def test_interrupted_searches_claim_only_what_follows_from_the_question() -> None:
    told: list[Any] = []

    def end(progress: Any) -> None:
        told.append(progress)
        if progress.best_step_time_s is not None:
            raise KeyboardInterrupt

    options = {**ASKED, "cluster": small_cluster(MEMORY, 4), "objective": "cost", "price": 1.0}
    plan = phaze.optimize(small_graph(), progress=end, **options)
    assert plan.status is PlanStatus.INTERRUPTED
    assert plan.value.bound < plan.value.reached
    checked(plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "expected one of throughput, cost, energy, devices"),
        ({"objective": None}, "objective is None"),
        ({"objective": "cost"}, "no price is known; pass price="),
        ({"objective": "cost", "price": 0}, "price is 0; expected money"),
        ({"objective": "cost", "price": float("nan")}, "price is nan"),
        ({"objective": "cost", "price": "2"}, "price is '2'"),
        ({"objective": "cost", "price": True}, "price is True"),
        ({"objective": "devices", "step_time": -1.0}, "step_time is -1.0; expected seconds"),
        ({"objective": "devices", "step_time": float("inf")}, "step_time is inf"),
        ({"objective": "cost", "price": 1.0, "step_time": 1.0}, "which objective 'devices' asks for"),
    ],
)
def test_an_objective_that_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(QuestionError, match=message):
        phaze.optimize(small_graph(), cluster=small_cluster(), **QUESTION, **options)


def test_a_step_time_that_nothing_holds_is_refused_with_the_fastest() -> None:
    with pytest.raises(PlanError, match="takes at most 1e-06 s; the fastest on all of them takes"):
        planned("devices", step_time=1e-6)


def test_nothing_fits_under_any_objective_where_nothing_fits() -> None:
    options = {**ASKED, "cluster": small_cluster(2**20, 2), "objective": "cost", "price": 1.0}
    plan = phaze.optimize(small_graph(), **options)
    assert plan.status is PlanStatus.DOES_NOT_FIT
    assert plan.remedies
    checked(plan)


def test_a_cluster_file_has_a_price(tmp_path: Path) -> None:
    cluster = replace(small_cluster(MEMORY, 4), price_per_device_hour=2.5)
    save_cluster(cluster, tmp_path / "cluster.json")
    assert load_cluster(tmp_path / "cluster.json") == cluster
    plan = phaze.optimize(small_graph(), cluster=str(tmp_path / "cluster.json"), objective="cost", **ASKED)
    assert plan.value == planned("cost", price=2.5).value
    with pytest.raises(HardwareError, match="price_per_device_hour"):
        replace(cluster, price_per_device_hour=0.0)


def test_the_page_and_the_comparison_tell_the_objective() -> None:
    cheap, fastest = planned("cost", price=2.5), planned("throughput")
    assert "Objective." in cheap.to_html()
    assert "the least cost" in cheap.to_html().lower()
    assert "Objective." not in fastest.to_html()
    assert "cost: " in str(phaze.compare(fastest, cheap))


def test_the_command_line_takes_an_objective(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from phaze.cli import main

    graph = tmp_path / "graph.json"
    small_graph().save(graph)
    save_cluster(small_cluster(MEMORY, 4), tmp_path / "cluster.json")
    question = ["optimize", str(graph), "--cluster", str(tmp_path / "cluster.json"), "--global-batch", "8"]
    question += ["--micro-batch-size", "1", "--tp", "1", "--target", "none"]
    assert main([*question, "--objective", "cost", "--price", "2.5", "--json"]) == ExitCode.FINE
    document = json.loads(capsys.readouterr().out)
    assert document["value"]["reached"] == planned("cost", price=2.5).value.reached
    assert main([*question, "--objective", "devices", "--step-time", "1000"]) == ExitCode.FINE
    assert "the least number of devices whose steps take at most 1000 s" in " ".join(capsys.readouterr().out.split())
    assert main([*question, "--objective", "cost"]) == ExitCode.ERROR
    assert "no price is known" in capsys.readouterr().err
