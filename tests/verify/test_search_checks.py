"""A search that holds is found to hold, and one that was tampered with is not."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from designs import SMALL, some_points, tiny_model
from distributed import LocalCluster
from forgeries import forged_journal

import phaze
from phaze.cli import main
from phaze.errors import QuestionError
from phaze.explore.search_result import SearchProgress
from phaze.verify.plan_checks import Finding
from phaze.verify.search_checks import check_search

QUESTION: dict[str, Any] = {**SMALL, "micro_batch_size": (2,), "executor": "serial", "gap": 0.02}


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a finished search, and its model beside it."""
    path = tmp_path_factory.mktemp("audit") / "journal"
    tiny_model().save(path.parent / "model.json")
    phaze.search(tiny_model(), space=some_points(8), journal=path, **QUESTION)
    return path


def wrong(path: Path, model: object = None) -> list[Finding]:
    return [finding for finding in check_search(path, model or tiny_model(), points=3) if not finding.holds]


def changed(journal: Path, path: Path, lines: list[str]) -> Path:
    path.write_text(forged_journal([journal.read_text().splitlines()[0], *lines]))
    return path


def test_a_finished_search_holds_with_pruned_points_evaluated(journal: Path) -> None:
    findings = check_search(journal, tiny_model(), points=3)
    assert all(finding.holds for finding in findings), findings
    assert sum(finding.what.endswith("is within its bound") for finding in findings) == 3


@pytest.mark.exhaustive
def test_answers_of_a_dask_cluster_are_equal_to_the_byte_and_every_journal_holds(tmp_path: Path) -> None:
    """In one process, in two, and on a cluster of processes of which one is killed on the way."""
    options: dict[str, Any] = {**QUESTION, "top": 3}

    def answer(name: str, executor: str, progress: Callable[[SearchProgress], object] | None = None) -> str:
        model, space = tiny_model(), some_points(24)
        path = tmp_path / name
        asked = {**options, "executor": executor, "journal": path, "progress": progress}
        result = phaze.search(model, space=space, **asked)
        assert all(finding.holds for finding in check_search(path, tiny_model(), points=2))
        plans = {name: replace(plan, run=replace(plan.run, seconds=0.0)) for name, plan in result.plans.items()}
        return replace(result, seconds=0.0, plans=plans).to_json()  # all but how long it took

    first = answer("serial", "serial")
    assert answer("processes", "processes:2") == first
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        pids = [worker.pid for worker in cluster.workers.values()]
        killed: list[int] = []

        def kill_one(progress: SearchProgress) -> None:
            if not killed and progress.best is not None:
                killed.append(pids[0])
                os.kill(pids[0], signal.SIGKILL)

        address = cluster.scheduler_address.replace("tcp://", "dask://")
        assert answer("dask", address, kill_one) == first
        assert killed


def test_a_bound_that_was_raised_is_found(journal: Path, tmp_path: Path) -> None:
    lines = journal.read_text().splitlines()[1:]
    records = [json.loads(line) for line in lines]
    raised = next(record for record in records if record["result"].get("bound_s") and "bound/" in record["task"])
    raised["result"]["bound_s"] *= 1.01
    path = changed(journal, tmp_path / "raised", [json.dumps(record) for record in records])
    assert raised["task"] in [finding.what for finding in wrong(path)]


def test_an_unfinished_search_and_a_line_too_many_are_found(journal: Path, tmp_path: Path) -> None:
    lines = journal.read_text().splitlines()[1:]
    short = wrong(changed(journal, tmp_path / "short", lines[:-1]))
    assert [finding.what for finding in short] == ["the search is finished"]
    assert wrong(changed(journal, tmp_path / "empty", []))
    invented = json.dumps({"task": "bound/none", "cutoff_s": None, "result": {"bound_s": 1.0}})
    (extra,) = wrong(changed(journal, tmp_path / "long", [*lines, invented]))
    assert "never asked: bound/none" in extra.found


def test_another_model_is_found_before_anything_is_computed(journal: Path) -> None:
    assert [finding.what for finding in wrong(journal, tiny_model(size=256))] == ["its models"]


def test_models_of_another_number_or_order_are_named(tmp_path: Path) -> None:
    models, path = [tiny_model(name="a"), tiny_model(size=256, name="b")], tmp_path / "journal"
    phaze.search(models, space=some_points(1), journal=path, **QUESTION)
    with pytest.raises(QuestionError, match=r"for 2 models \(a, b\) and 1 given"):
        check_search(path, models[0])
    assert [finding.what for finding in wrong(path, models[::-1])] == ["its models"]


@pytest.mark.parametrize("task", ["bound/", "@"], ids=["a bound", "less memory"])
def test_a_check_that_is_interrupted_finds_nothing_wrong(tmp_path: Path, task: str) -> None:
    path, model = tmp_path / "journal", tiny_model(6, 2048)
    phaze.search(model, space=some_points(8), journal=path, **{**QUESTION, "hbm_gib": (0.3, 8), "devices": 2})

    heard: list[str] = []

    def interrupt(doing: str) -> None:
        heard.append(doing)
        if [name for name in heard if task in name] == [doing]:  # the first time
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_search(path, model, report=interrupt)


def test_the_command_verifies_a_journal(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", str(journal), "--model", str(journal.parent / "model.json"), "--executor", "serial"]
    assert main(arguments) == 0
    assert "checks hold" in capsys.readouterr().out
