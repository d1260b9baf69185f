"""`phaze export` and `phaze evaluate --from`: targets are listed, files written, a tool's file priced with a diff."""

import json
from pathlib import Path

import pytest
from plans import small_plan

from phaze.cli import main

SCRIPT = """torchrun pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 \\
  --tensor-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 32 --recompute-granularity full \\
  --recompute-method uniform --recompute-num-layers 1 --bf16 --no-such-option 3
"""


def test_every_target_says_what_it_runs_and_how_it_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--list", "--json"]) == 0
    rows = {row["target"]: row for row in json.loads(capsys.readouterr().out)["targets"]}
    assert {"torchtitan", "megatron-lm", "megatron-bridge", "maxtext", "accelerate", "deepspeed"} <= rows.keys()
    assert "0.3.0" in rows["torchtitan"]["tool"]
    assert "not run" in rows["megatron-lm"]["checked"]
    assert "cp" in rows["torchtitan"]["runs"]


def test_files_are_written_with_a_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_plan().save(tmp_path / "plan.json")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "plan.json"), "--target", "torchrun", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "launch.sh", "mesh.json"]
    assert main(["export"]) == 1
    assert "needs PLAN and --target NAME" in capsys.readouterr().err


def test_a_script_is_priced_and_answered_with_a_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    assert main(["evaluate", "--from", str(tmp_path / "run.sh"), "--cluster", "a100-80gb:8"]) == 0
    told = capsys.readouterr().out
    assert "read as megatron-lm: dp=1, zero=0, cp=1, ep=1, tp=8" in told
    assert "--no-such-option" in told.partition("passed over")[2].splitlines()[0] + told.partition("unknown):")[2]
    changes = told.partition("what to change, for megatron-lm:")[2]
    assert "-  --tensor-model-parallel-size 8 --micro-batch-size 1 " in changes
    added = " ".join(line for line in changes.splitlines() if line.startswith("+ "))
    assert "--recompute-granularity" not in added, "nothing needs to be recomputed"
    assert "--micro-batch-size" in added
    assert "--micro-batch-size 1 " not in added, "so small a model wants large microbatches"
