"""Target 'fsdp': its files train without Phaze."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT
from torch_plans import planned

from phaze.errors import PlanError


@pytest.mark.parametrize(
    ("kind", "strategy"), [("gpt2", {"tp": 2, "recompute": "full"}), ("uncut", {"dp": 2, "zero": 3})]
)
def test_exported_files_train_where_phaze_cannot_be_imported(
    tmp_path: Path, kind: str, strategy: dict[str, object]
) -> None:
    files = planned(kind, 2, strategy).export("fsdp")
    assert not any("phaze.backends" in text or "import phaze" in text for text in files.values())
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    script = ROOT / "tests" / "support" / "run_exported_torch.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), kind],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    training = json.loads((tmp_path / "found.json").read_text())
    assert training["losses"] == pytest.approx(training["expected"], rel=1e-5)


def test_the_export_holds_one_stage_only() -> None:
    with pytest.raises(PlanError, match="target 'fsdp' cannot run this plan: it has a pipeline"):
        planned("gpt2", 2, {"pp": 2}).export("fsdp")
