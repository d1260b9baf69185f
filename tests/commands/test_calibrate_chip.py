import csv
import json
from pathlib import Path
from typing import Any

import pytest
from plans import small_cluster, small_graph

import phaze
from phaze.cli import main
from phaze.cost import LIBRARY_STACK, Calibration, load_calibration
from phaze.hardware import save_cluster

TRUTH = Calibration(
    name="truth", matrix=0.55, memory=0.65, link=0.5, network=0.7, overhead_s=1e-5, overlap=0.5, stack=LIBRARY_STACK
)
STRATEGIES = [
    {"dp": 8, "tp": 1, "pp": 1, "micro_batch_size": 1, "zero": 0},
    {"dp": 8, "tp": 1, "pp": 1, "micro_batch_size": 4, "zero": 0},
    {"dp": 2, "tp": 4, "pp": 1, "micro_batch_size": 2, "zero": 0},
    {"dp": 4, "tp": 2, "pp": 1, "micro_batch_size": 8, "zero": 0},
]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps that a known calibration predicts, as if they had been measured."""
    folder = tmp_path_factory.mktemp("steps")
    small_graph().save(folder / "model.json")
    save_cluster(small_cluster(), folder / "cluster.json")
    rows = []
    whole: dict[str, Any]
    for strategy in STRATEGIES:
        whole = {
            **strategy,
            "schedule": "none",
            "chunks": 1,
            "recompute": "none",
            "stages": (len(small_graph().layers),),
        }
        plan = phaze.evaluate(
            small_graph(),
            strategy=whole,
            cluster=small_cluster(),
            global_batch_size=32,
            calibration=TRUTH,
            target=None,
            compares=False,
        ).plan
        model, cluster = str(folder / "model.json"), str(folder / "cluster.json")
        held = 1.2 * max(stage.memory_bytes["total"] for stage in plan.stages) / 2**30
        run = {"global_batch": 32, "seconds": plan.step_time_s, "memory_gib": held if len(rows) < 3 else ""}
        rows.append({"model": model, "cluster": cluster, **run, **strategy})
    with (folder / "steps.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder / "steps.csv"


def test_a_calibration_reproduces_the_steps_it_was_fitted_to_and_planning_takes_its_file(
    steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = steps.parent / "mine.json"
    assert main(["calibrate", "--measured", str(steps), "--stack", "library", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    expected = ("what was fitted", "error with its start", "mean error", "warning: ", "held in reserve", "written to")
    for words in expected:
        assert words in printed
    found = load_calibration(out)
    assert found.reserve == pytest.approx(0.2, abs=1e-3)
    assert json.loads(out.read_text())["report"]["mean_error"] < 0.02
    strategy = "dp=8,tp=1,pp=1,micro_batch_size=4,zero=0"
    question = ["--cluster", str(steps.parent / "cluster.json"), "--global-batch", "32", "--calibration", str(out)]
    model = str(steps.parent / "model.json")
    assert main(["evaluate", model, *question, "--strategy", strategy, "--alone", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert found.name in json.dumps(document)


def test_an_unknown_term_and_too_few_steps_are_refused_kindly(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--measured", str(steps), "--terms", "matrx"]) == 1
    assert "Did you mean matrix" in capsys.readouterr().err
    assert main(["calibrate", "--measured", str(steps), "--terms", "matrix,memory,link,overhead_s,overlap"]) == 1
    assert "They cannot separate" in capsys.readouterr().err


def test_runs_on_two_chips_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "steps.csv"
    table.write_text("model,cluster,global_batch,seconds\ngpt2,a100-80gb:1,1,1\ngpt2,h100:1,1,1\n")
    assert main(["calibrate", "--measured", str(table)]) == 1
    assert "line 3: gpt2 on h100:1 ran on another chip than line 2" in " ".join(capsys.readouterr().err.split())


def test_a_trace_needs_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--trace", str(tmp_path / "none.json")]) == 1
    assert "--trace needs --model" in capsys.readouterr().err


def test_a_plan_is_no_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.json").write_text('{"kind": "phaze plan"}')
    code = main(["optimize", "gpt2", "--cluster", "cpu:1", "--calibration", str(tmp_path / "file.json")])
    assert code == 1
    assert "is no calibration" in capsys.readouterr().err
