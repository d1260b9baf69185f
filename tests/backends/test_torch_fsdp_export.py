"""Target 'fsdp': its files train without Phaze."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT
from torch_plans import planned

from phaze.errors import PlanError

EXPORTED: dict[str, dict[str, object]] = {"gpt2": {"tp": 2, "recompute": "full"}, "uncut": {"dp": 2, "zero": 3}}
"""By kind of model: the strategy of the plan whose export is run."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of every kind and what they gave: one program runs all of them."""
    folder = tmp_path_factory.mktemp("exports")
    for kind, strategy in EXPORTED.items():
        (folder / kind).mkdir()
        for name, text in planned(kind, 2, strategy).export("fsdp").items():
            (folder / kind / name).write_text(text)
    script = ROOT / "tests" / "support" / "run_exported_torch.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), *EXPORTED],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("kind", EXPORTED)
def test_exported_files_train_where_phaze_cannot_be_imported(exports: Path, kind: str) -> None:
    for name in planned(kind, 2, EXPORTED[kind]).export("fsdp"):
        text = (exports / kind / name).read_text()
        assert "phaze.backends" not in text
        assert "import phaze" not in text
    training = json.loads((exports / kind / "found.json").read_text())
    assert training["losses"] == pytest.approx(training["expected"], rel=1e-5)


def test_the_export_holds_one_stage_only() -> None:
    with pytest.raises(PlanError, match="target 'fsdp' cannot run this plan: it has a pipeline"):
        planned("gpt2", 2, {"pp": 2}).export("fsdp")
