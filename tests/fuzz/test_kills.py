"""Searches, plans, exports and pages that are killed at random moments end with the same answers when asked again.

One of the plans is that of a launch, which keeps it for the next start; what is kept is used, or made anew.
"""

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from designs import tiny_model
from full_disks import full_disk
from killed_runs import killed, leftovers
from launches import OneProcess
from plans import QUESTION, small_cluster, small_graph
from readable_files import plan_text

from phaze.cli import main
from phaze.hardware import save_cluster
from phaze.hooks import PluginManager
from phaze.planner.launch import plan_together
from phaze.planner.planning import plan_for
from phaze.planner.progress import Watch
from phaze.question import ask

SPACE = {
    "format": "phaze-space",
    "version": 1,
    "tensor_cores": [1, 2, 4],
    "tensor_rows": 128,
    "tensor_cols": 128,
    "vector_cores": 1,
    "buffer_mib": 16,
}
WIDE_SPACE = {**SPACE, "tensor_cores": [1, 2, 4, 8, 16, 32], "tensor_rows": [64, 128]}
"""A space of twelve accelerators, for whose whole front a search writes many more lines."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, a cluster and a space, and a saved plan."""
    folder = tmp_path_factory.mktemp("kills")
    tiny_model().save(folder / "tiny.json")
    small_graph().save(folder / "model.json")
    save_cluster(small_cluster(), folder / "cluster.json")
    (folder / "space.json").write_text(json.dumps(SPACE))
    (folder / "wide.json").write_text(json.dumps(WIDE_SPACE))
    (folder / "plan.json").write_text(plan_text())
    return folder


def commands(inputs: Path, outputs: Path) -> dict[str, list[str]]:
    """One command of each kind, with everything that it writes in a folder."""
    question = [
        "--cluster",
        str(inputs / "cluster.json"),
        "--global-batch",
        "32",
        "--micro-batch-size",
        "1",
        "--tp",
        "1",
    ]
    search = ["--devices", "2", "--space", str(inputs / "space.json"), "--hbm", "1", "--micro-batch-size", "2"]
    search += ["--tp", "1", "--global-batch", "8", "--executor", "serial"]
    plan = str(inputs / "plan.json")
    return {
        "optimize": ["optimize", str(inputs / "model.json"), *question, "--out", str(outputs / "plan.json"), "--quiet"],
        "search": [
            *("search", str(inputs / "tiny.json"), *search),
            *("--journal", str(outputs / "journal"), "--out", str(outputs / "search.json")),
        ],
        "export": ["export", plan, "--target", "megatron-lm", "-o", str(outputs / "exported")],
        "report": ["report", plan, "--out", str(outputs / "page.html")],
    }


def planned_in_a_launch(outputs: Path) -> None:
    """Plan as rank 0 of a launch, which keeps its plans in a folder, and save the plan."""
    os.environ["XDG_CACHE_HOME"] = str(outputs)  # of this process, which is a copy or cleans up behind itself
    options: Any = {"cluster": small_cluster(), **QUESTION}
    question = ask(small_graph(), None, options, PluginManager.load())
    plan = plan_together(OneProcess(), lambda: question, lambda asked: plan_for(asked, Watch()))
    plan.save(outputs / "plan.json")


def work_of(kind: str, inputs: Path, outputs: Path) -> Callable[[], object]:
    """What one kind of run does."""
    if kind == "launch":
        return lambda: planned_in_a_launch(outputs)
    return lambda: main(commands(inputs, outputs)[kind])


def document_of(path: Path) -> Any:
    """What a file says, apart from the seconds that it took."""
    if path.suffix != ".json":
        return path.read_bytes()
    return _timeless(json.loads(path.read_text()))


def _timeless(value: Any) -> Any:
    """A document without what its run took, at any depth, and without the digests that cover it."""
    if isinstance(value, dict):
        return {name: _timeless(item) for name, item in value.items() if name not in ("run", "seconds", "digest")}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


KINDS = ("optimize", "launch", "search", "export", "report")


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_leaves_nothing_half_written_and_ends_as_if_it_had_not_been(
    kind: str, kills: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole, again = tmp_path / "whole", tmp_path / "again"
    for place in (whole, again):
        place.mkdir()
    started_s = time.monotonic()
    work_of(kind, folder, whole)()
    longest_s = 1.2 * (time.monotonic() - started_s)
    expected = {path.name for path in whole.iterdir()}
    chance = random.Random(kind)
    for _ in range(kills):
        killed(work_of(kind, folder, again), chance, longest_s)
        assert leftovers(again, expected) == []
        for path in written(again):
            if path.name != "journal":
                assert document_of(path) == document_of(whole / path.relative_to(again))
        if chance.random() < 0.5:  # a run that ended before it was killed leaves the next one too little to do
            for path in written(again):
                path.unlink()
    work_of(kind, folder, again)()
    assert {path.relative_to(again) for path in written(again)} == {path.relative_to(whole) for path in written(whole)}
    for path in written(whole):
        found = document_of(again / path.relative_to(whole))
        if path.name == "journal":
            assert sorted(found.splitlines()) == sorted(document_of(path).splitlines())
        else:
            assert found == document_of(path), path.name


def written(folder: Path) -> list[Path]:
    """The files under a folder, but for the hidden, unfinished ones that a kill may leave."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]


@pytest.mark.parametrize("space", ["space", pytest.param("wide", marks=pytest.mark.exhaustive)])
def test_a_full_disk_at_any_write_of_a_search_is_told_and_the_search_goes_on_behind_it(
    space: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk has room for one more line each time, and then for the answer's file, too."""

    def search(outputs: Path) -> int:
        arguments = commands(folder, outputs)["search"]
        arguments = [part.replace("space.json", f"{space}.json") for part in arguments]
        return main([*arguments, *(["--front"] if space == "wide" else [])])

    whole, again = tmp_path / "whole", tmp_path / "again"
    for place in (whole, again):
        place.mkdir()
    assert search(whole) == 0
    journal = (whole / "journal").read_bytes()
    ends = [index for index, byte in enumerate(journal) if byte == ord("\n")]
    assert len(ends) >= (5 if space == "space" else 20)
    for end in ends:
        with full_disk(end):  # the line's last byte has no room
            assert search(again) == 1
        assert "goes on from them" in capsys.readouterr().err
        assert (again / "journal").read_bytes() == journal[: max((each + 1 for each in ends if each < end), default=0)]
        assert leftovers(again, {"journal"}) == []
    assert search(again) == 0
    assert document_of(again / "search.json") == document_of(whole / "search.json")
    before = (again / "search.json").read_bytes()
    with full_disk(len(before) // 2):
        assert search(again) == 1
    assert "What was there before is unchanged" in capsys.readouterr().err
    assert (again / "search.json").read_bytes() == before
