"""`phaze optimize`, `explain`, `evaluate`, `compare` and `verify`: from a saved model to a plan that holds."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forgeries import forged
from full_disks import full_disk
from plans import small_cluster, small_graph

import phaze
from phaze.cli import main
from phaze.hardware import save_cluster

OPTIONS = ["--global-batch", "32", "--micro-batch-size", "1,2", "--tp", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, a cluster, and two plans."""
    folder = tmp_path_factory.mktemp("plans")
    small_graph().save(folder / "model.json")
    (folder / "model.py").write_text("from plans import small_graph\nmodel = small_graph()\n")
    for name, hbm_bytes in (("roomy", 80 * 2**30), ("tight", 80 * 2**20), ("tiny", 20 * 2**20)):
        save_cluster(small_cluster(hbm_bytes, 2 if name == "tiny" else 8), folder / f"{name}-cluster.json")
    for name in ("roomy", "tight"):
        assert main(optimize(folder, name, "--out", str(folder / f"{name}.json"))) == 0
    return folder


def optimize(folder: Path, cluster: str, *options: str, model: str = "model.json") -> list[str]:
    return ["optimize", str(folder / model), "--cluster", str(folder / f"{cluster}-cluster.json"), *OPTIONS, *options]


def test_optimize_prints_the_plan_and_saves_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(optimize(folder, "roomy", "--explain", "--out", str(folder / "again.json"))) == 0
    out = capsys.readouterr().out
    for words in ("small-gpt", "strategy  dp", "MFU", "what binds", "saved to"):
        assert words in out
    explained, plain = (json.loads((folder / name).read_text()) for name in ("again.json", "roomy.json"))
    added = ("is_explained", "runners_up", "changes", "digest", "run")
    assert [explained[name] == plain[name] for name in added] == [False] * len(added)
    assert {name: explained[name] for name in explained if name not in added} == {
        name: plain[name] for name in plain if name not in added
    }


def test_json_is_the_plan_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(optimize(folder, "roomy", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "phaze-plan"
    assert document["strategy"]["dp"] >= 1


def test_a_model_may_be_an_attribute_of_a_python_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = optimize(folder, "roomy", "--json")
    arguments[1] = f"python:{folder / 'model.py'}:model"
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["hashes"] == json.loads((folder / "roomy.json").read_text())["hashes"]


@pytest.mark.parametrize(
    ("model", "message"),
    [("python:nothing", "python:MODULE_OR_FILE:ATTRIBUTE"), ("python:json:model", "has no attribute 'model'")],
)
def test_a_wrong_attribute_is_explained(model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", model, "--cluster", "a100-80gb:8"]) == 1
    assert message in capsys.readouterr().err


def test_explain_reads_a_saved_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(folder / "tight.json")]) == 0
    assert "--model" in capsys.readouterr().out  # the explanation was not saved, and no built-in model has this name
    assert main(["explain", str(folder / "tight.json"), "--model", str(folder / "model.json")]) == 0
    assert "the best of other kinds" in capsys.readouterr().out


def test_compare_shows_two_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(folder / "tight.json"), str(folder / "roomy.json")]) == 0
    assert "times the first one's" in capsys.readouterr().out
    assert main(["compare", str(folder / "tight.json"), str(folder / "roomy.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speedup"] >= 1


def test_verify_holds_for_a_good_plan_and_fails_for_a_changed_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(folder / "model.json")
    assert main(["verify", str(folder / "tight.json"), "--model", model]) == 0
    assert "checks hold" in capsys.readouterr().out
    document = json.loads((folder / "tight.json").read_text())
    document["landscape"]["memory_bytes"][0] *= 0.99
    for text, told in ((document, "is damaged or was edited"), (forged(document), "landscape.memory_bytes[0]")):
        (folder / "wrong.json").write_text(json.dumps(text))
        assert main(["verify", str(folder / "wrong.json"), "--model", model]) == 1
        assert told in "".join(capsys.readouterr())


def test_an_answer_that_cannot_be_saved_is_shown_all_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full_disk(100):
        assert main(optimize(folder, "roomy", "--out", str(folder / "full.json"))) == 1
    shown = capsys.readouterr()
    assert "strategy  dp" in shown.out
    assert "cannot write" in shown.err
    assert not (folder / "full.json").exists()
    assert main(optimize(folder, "roomy", "--out", str(folder))) == 1
    assert "it is a folder" in capsys.readouterr().err


def test_a_name_cannot_steer_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((folder / "tight.json").read_text())
    document["model"]["name"] = "\x1b[2J\u202egpt\nproof     optimal"
    document["provenance"]["notes"] = ["\x9b31m\x07"]
    (folder / "evil.json").write_text(json.dumps(forged(document)))
    for command in (["explain", str(folder / "evil.json")], ["compare", *[str(folder / "evil.json")] * 2]):
        main(command)
        shown = "".join(capsys.readouterr())
        assert all(character.isprintable() or character == "\n" for character in shown)
        assert "\nproof     optimal" not in shown
    print(phaze.load_plan(folder / "evil.json"))  # noqa: T201  # as a user would
    assert "\\x1b[2J\\u202egpt\\nproof" in capsys.readouterr().out


def test_evaluate_prices_a_strategy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = "dp=4,tp=1,pp=2,schedule=gpipe,zero=1,recompute=full"
    arguments = ["evaluate", *optimize(folder, "roomy")[1:], "--strategy", strategy, "--alone"]
    assert main(arguments) == 0
    assert "dp 4 x tp 1 x pp 2" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["dp", "=8", "dp=", "dp=8,,tp=1"])
def test_a_malformed_strategy_is_wrong_usage(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", "gpt2", "--cluster", "a100-80gb:8", "--strategy", strategy])
    assert "is not of the form KEY=VALUE" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_an_error_with_levers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(optimize(folder, "tiny")) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out
    assert "would fit" in out


def test_wrong_arguments_are_one_readable_block(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*optimize(folder, "roomy"), "--micro-batch-size", "5"]
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert "error (QuestionError)" in err
    assert "divides the global batch of 32" in err


def test_an_interrupted_command_leaves_no_half_written_file(folder: Path) -> None:
    out = folder / "interrupted" / "plan.json"
    out.parent.mkdir()
    command = [sys.executable, "-m", "phaze.cli", *optimize(folder, "roomy", "--gap", "0", "--out", str(out))]
    code = "import sys; from phaze.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", code, *command[3:]], env=dict(os.environ))
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    assert process.wait() in (0, 1, 130, -signal.SIGINT)
    left = os.listdir(out.parent)
    assert left in ([], ["plan.json"])
    if left:
        assert json.loads(out.read_text())["format"] == "phaze-plan"
