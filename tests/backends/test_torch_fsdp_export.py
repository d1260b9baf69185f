"""Target 'fsdp': its files train without Phaze."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT
from torch_plans import planned
from torch_training import build_model

from phaze.errors import PlanError

EXPORTED: dict[str, dict[str, object]] = {"gpt2": {"tp": 2, "recompute": "full"}, "uncut": {"dp": 2, "zero": 3}}
"""By kind of model: the strategy of the plan whose export is run."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of every kind and what they gave: one program runs all of them."""
    folder = tmp_path_factory.mktemp("exports")
    for kind, strategy in EXPORTED.items():
        (folder / kind).mkdir()
        model = build_model(kind) if kind == "gpt2" else None
        for name, text in planned(kind, 2, strategy).export("fsdp", model).items():
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


def test_placements_are_data_by_the_names_of_parameters() -> None:
    plan = planned("gpt2", 2, EXPORTED["gpt2"])
    data = plan.export("fsdp", build_model("gpt2"))["sharding.py"].splitlines()
    assert "    'transformer.h.0.mlp.c_fc.weight': (Replicate(), Replicate(), Shard(1))," in data
    assert "    'transformer.h.0.ln_1.weight': (Replicate(), Replicate(), Replicate())," in data
    assert "    'transformer.h.0.attn.c_attn.weight': 3," in data
    tied = [line.partition(": ")[2] for line in data if "wte.weight" in line or "lm_head.weight" in line]
    assert tied[0] == tied[1] == "(Replicate(), Replicate(), Shard(1)),"
    without_model = plan.export("fsdp")["sharding.py"]
    assert "mlp.c_fc.weight" in without_model
    assert "ln_1.weight" not in without_model


def test_the_export_holds_one_stage_only() -> None:
    with pytest.raises(PlanError, match="target 'fsdp' cannot run this plan: it has a pipeline"):
        planned("gpt2", 2, {"pp": 2}).export("fsdp")
