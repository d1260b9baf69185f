"""Real processes that plan together: four gloo ranks on this machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

from phaze.plan.plan import PlanStatus, plan_from_document

RANKS = 4
Found = list[dict[str, dict[str, str]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found in each case: one process group serves all."""
    folder = tmp_path_factory.mktemp("ranks")
    script = ROOT / "tests" / "support" / "planning_ranks.py"
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, str(RANKS), folder], env=environment, check=True)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_all_ranks_get_one_plan(found: Found) -> None:
    plans = [one["agree"]["plan"] for one in found]
    assert len(set(plans)) == 1
    assert not plan_from_document(json.loads(plans[0])).run.is_cached


def test_the_next_start_loads_the_plan(found: Found) -> None:
    first, second = (plan_from_document(json.loads(found[3][name]["plan"])) for name in ("agree", "again"))
    assert second.run.is_cached
    assert first.stages == second.stages
    assert first.step_time_s == second.step_time_s


def test_another_model_on_one_rank_is_raised_on_all(found: Found) -> None:
    for one in found:
        assert "rank 2 asks for another plan than rank 0: its graph differs" in one["other"]["error"]


def test_a_failure_on_one_rank_is_raised_on_all(found: Found) -> None:
    assert "no-such-chip" in found[1]["fails"]["error"]
    assert found[1]["fails"]["error"].startswith("UnknownNameError")
    for rank in (0, 2, 3):
        assert found[rank]["fails"]["error"].startswith("PlanError: rank 1 failed, so no rank has a plan.")


def test_an_interrupted_plan_is_handed_to_all_and_not_kept(found: Found) -> None:
    for one in found:
        first, second = (
            plan_from_document(json.loads(one[case]["plan"])) for case in ("interrupted", "interrupted before")
        )
        assert first.status is PlanStatus.INTERRUPTED
        assert second.status is not PlanStatus.INTERRUPTED
        assert not second.run.is_cached


def test_a_failure_while_planning_is_raised_on_all(found: Found) -> None:
    for one in found:
        assert "allow more time" in one["impossible"]["error"]


def test_without_a_cluster_the_processes_of_the_launch_are_the_devices(found: Found) -> None:
    plan = plan_from_document(json.loads(found[0]["unnamed"]["plan"]))
    assert plan.hardware["device_count"] == RANKS
    assert plan.hardware["accelerator"]["name"] == "cpu"


def test_jax_processes_get_one_plan_and_raise_together(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    script = ROOT / "tests" / "support" / "planning_jax_ranks.py"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), "2", port, tmp_path], env=environment) for rank in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    plans, errors = zip(
        *((tmp_path / f"jax{rank}.txt").read_text().split("\n====\n") for rank in range(2)), strict=True
    )
    assert plans[0] == plans[1]
    for error in errors:
        assert "rank 1 asks for another plan than rank 0" in error
