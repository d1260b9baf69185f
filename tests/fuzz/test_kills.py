"""Searches, plans, exports and pages that are killed at random moments end with the same answers when asked again."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from designs import tiny_model
from killed_runs import killed, leftovers
from plans import small_cluster, small_graph
from readable_files import plan_text

from phaze.cli import main
from phaze.hardware import save_cluster

SPACE = {
    "format": "phaze-space",
    "version": 1,
    "tensor_cores": [1, 2, 4],
    "tensor_rows": 128,
    "tensor_cols": 128,
    "vector_cores": 1,
    "buffer_mib": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, a cluster and a space, and a saved plan."""
    folder = tmp_path_factory.mktemp("kills")
    tiny_model().save(folder / "tiny.json")
    small_graph().save(folder / "model.json")
    save_cluster(small_cluster(), folder / "cluster.json")
    (folder / "space.json").write_text(json.dumps(SPACE))
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


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["optimize", "search", "export", "report"])
def test_a_killed_command_leaves_nothing_half_written_and_ends_as_if_it_had_not_been(
    kind: str, kills: int, folder: Path, tmp_path: Path
) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    for place in (whole, again):
        place.mkdir()
    started_s = time.monotonic()
    assert main(commands(folder, whole)[kind]) == 0
    # Starting Python and importing takes about a second more than the command takes here.
    longest_s = time.monotonic() - started_s + 1.5
    expected = {path.name for path in whole.iterdir()}
    chance = random.Random(kind)
    for _ in range(kills):
        killed(commands(folder, again)[kind], chance, longest_s)
        assert leftovers(again, expected) == []
        for path in (path for path in again.rglob("*") if path.is_file() and not path.name.startswith(".")):
            if path.name != "journal":
                assert document_of(path) == document_of(whole / path.relative_to(again))
    assert main(commands(folder, again)[kind]) == 0
    for path in (path for path in whole.rglob("*") if path.is_file()):
        found = document_of(again / path.relative_to(whole))
        if path.name == "journal":
            assert sorted(found.splitlines()) == sorted(document_of(path).splitlines())
        else:
            assert found == document_of(path), path.name
