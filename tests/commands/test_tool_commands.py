"""`phaze export` and `phaze evaluate --from`: targets are listed, files written, a tool's file priced with a diff."""

import json
from pathlib import Path

import pytest
from plans import small_graph, small_plan
from tool_plans import TOOLS, plan_of

from phaze.cli import main
from phaze.parallelism import Parallelism, PipelineSchedule

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


def test_stages_of_another_model_are_left_to_the_search_and_all_else_is_priced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*5|t*7L' "
    script = SCRIPT.replace("--tensor-model-parallel-size 8 ", f"--tensor-model-parallel-size 2 {layout}")
    (tmp_path / "run.sh").write_text(script)
    assert main(["evaluate", "--from", str(tmp_path / "run.sh"), "--cluster", "a100-80gb:8", "--alone"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the stages of the file are left to the search: strategy has stages of 14 layers; the model has 6" in told
    assert "strategy dp 2 x tp 2 x pp 2" in told


def test_a_recompute_mode_per_stage_is_priced_and_the_strongest_where_the_stages_are_left_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = Parallelism(dp=4, pp=2, schedule=PipelineSchedule.ONE_F_ONE_B, recompute=("full", "none"))
    file = tmp_path / "mesh.json"
    file.write_text(TOOLS["torchrun"].export(plan_of(strategy, stages=(3, 3)), None)["mesh.json"])
    question = ["--cluster", "a100-80gb:8", "--from", str(file), "--alone"]
    small_graph().save(tmp_path / "graph.json")
    assert main(["evaluate", str(tmp_path / "graph.json"), *question]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "0 0-2 0-3 full " in told
    assert "1 3-5 4-7 none " in told
    assert main(["evaluate", "gpt2", *question]) == 0
    assert "ZeRO-0, recompute full " in " ".join(capsys.readouterr().out.split())
