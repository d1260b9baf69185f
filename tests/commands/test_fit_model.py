"""`phaze fit`, and how `phaze optimize` prints on terminals and in pipes."""

import io
import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from phaze.cli import build_parser, main
from phaze.commands.plan_commands import optimize_model
from phaze.commands.question_arguments import progress_text
from phaze.planner.progress import Progress

QUESTION = ["gpt2", "--cluster", "a100-80gb:2", "--global-batch", "8", "--micro-batch-size", "1", "--tp", "1"]


def test_it_says_in_one_screen_whether_a_strategy_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *QUESTION, "--strategy", "dp=2,zero=1"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("FITS: gpt2 on 2 x a100-80gb")
    assert re.search(r"how sure  a100, fitted to published runs: measured runs held up to 1\d% more", told)
    assert len(told.splitlines()) < 24


def test_a_file_of_another_tool_is_its_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}')
    assert main(["fit", *QUESTION, "--strategy-file", str(tmp_path / "ds.json"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["fit"], document["strategy"]["zero"], document["strategy"]["dp"]) == ("fits", 3, 2)


def run_optimize(console: Console, *options: str) -> int:
    arguments: Namespace = build_parser([optimize_model]).parse_args(["optimize", *QUESTION, *options])
    return optimize_model.run(arguments, console)


def test_a_terminal_shows_bars_and_a_timeline_and_a_pipe_does_not() -> None:
    for is_terminal in (True, False):
        text = io.StringIO()
        assert run_optimize(Console(file=text, force_terminal=is_terminal, width=120)) == 0
        assert "of 80 GiB" in text.getvalue()
        assert (" idle  " in text.getvalue()) == is_terminal
        assert ("\x1b[" in text.getvalue()) == is_terminal


def test_quiet_prints_nothing_and_writes_the_files(tmp_path: Path) -> None:
    text = io.StringIO()
    out, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    assert run_optimize(Console(file=text), "--quiet", "--out", str(out), "--trace", str(trace)) == 0
    assert text.getvalue() == ""
    assert out.exists()
    assert json.loads(trace.read_text())["otherData"]["model"] == "gpt2"


def test_progress_tells_the_best_the_bound_and_the_gap() -> None:
    known = Progress(done=3, total=8, doing="placing", best_step_time_s=2.0, elapsed_s=1.0, bound_s=1.5)
    assert progress_text(known) == "best 2 s; bound 1.5 s (gap 25.0%); placing"
    unknown = Progress(done=0, total=8, doing="slicing", best_step_time_s=None, elapsed_s=1.0, bound_s=1.5)
    assert progress_text(unknown) == "slicing"
