"""`phaze search`: from saved models and a space's file to an accelerator, tables and plans."""

import csv
import json
from pathlib import Path

import pytest
from designs import tiny_model

from phaze.cli import main
from phaze.commands.search_designs import goes_on, progress_text
from phaze.explore.search_result import SearchProgress

SPACE = {
    "format": "phaze-space",
    "version": 1,
    "tensor_cores": [1, 4],
    "tensor_rows": [64, 128],
    "tensor_cols": 128,
    "vector_cores": 2,
    "buffer_mib": 16,
}
OPTIONS = ["--devices", "4", "--hbm", "1,2", "--micro-batch-size", "2", "--tp", "1", "--global-batch", "8"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model and a space."""
    tiny_model().save(tmp_path / "model.json")
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    return tmp_path


def arguments(folder: Path, *more: str) -> list[str]:
    space = str(folder / "space.json")
    return ["search", str(folder / "model.json"), *OPTIONS, "--space", space, "--executor", "serial", *more]


def test_search_prints_the_accelerator_and_saves_answer_table_and_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: str(folder / name) for name in ("out", "csv", "plan", "journal")}
    assert main(arguments(folder, *(part for name, path in files.items() for part in (f"--{name}", path)))) == 0
    out = capsys.readouterr().out
    for words in ("samples/s", "proof", "slices as on tpuv4-paper", "saved to", "accelerators listed in"):
        assert words in out
    answer = json.loads(Path(files["out"]).read_text())
    with Path(files["csv"]).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert answer["best"]["name"] in [row["name"] for row in rows]
    plan = json.loads(Path(files["plan"]).read_text())
    assert plan["step_time_s"] == pytest.approx(answer["best"]["models"][0]["step_time_s"])


@pytest.mark.parametrize("name", ["out", "csv", "plan"])
@pytest.mark.parametrize("path", ["missing/file", ".", ""])
def test_an_answer_that_cannot_be_saved_is_refused_before_the_search(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, path: str
) -> None:
    journal = folder / "journal"
    assert main(arguments(folder, f"--{name}", f"{folder}/{path}" if path else "", "--journal", str(journal))) == 1
    assert "cannot write" in capsys.readouterr().err
    assert not journal.exists()


@pytest.mark.parametrize("pair", [("journal", "out"), ("out", "csv"), ("csv", "plan")])
def test_one_file_for_two_answers_is_refused_before_the_search(
    folder: Path, capsys: pytest.CaptureFixture[str], pair: tuple[str, str]
) -> None:
    paths = [str(folder / "same"), f"{folder}/./same"]
    assert main(arguments(folder, *(part for at in (0, 1) for part in (f"--{pair[at]}", paths[at])))) == 1
    assert f"--{pair[0]} and --{pair[1]} both name" in capsys.readouterr().err
    assert not (folder / "same").exists()


def test_an_interruption_before_there_is_an_answer_says_how_to_go_on(folder: Path) -> None:
    for journal, told in ((None, "nothing is kept"), ("kept.jsonl", "the same command goes on from kept.jsonl")):
        with pytest.raises(KeyboardInterrupt, match=f"there is no answer yet; {told}"), goes_on(journal):
            raise KeyboardInterrupt


def test_a_search_whose_time_is_over_says_that_its_journal_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--journal", str(folder / "journal"), "--gap", "0")
    code = main(arguments(folder, *options, "--time-limit", "1e-9"))
    assert (code, "journal" in capsys.readouterr().err) == (1, True)
    assert main(arguments(folder, *options)) == 0
    assert "goes on" not in capsys.readouterr().out


def test_a_baseline_prints_its_spread_and_saves_its_convergence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = folder / "csv"
    method = ("--method", "random", "--seeds", "2", "--evaluations", "3", "--csv", str(table))
    assert main(arguments(folder, *method)) == 0
    assert "random, 2 seeds: median" in capsys.readouterr().out
    assert len(table.read_text().splitlines()) == 1 + 2 * 3


@pytest.mark.parametrize(
    ("options", "told"),
    [(("--seeds", "2"), "--seeds is for methods that draw designs"), (("--method", "tpe", "--plan", "p"), "--plan")],
)
def test_options_of_another_method_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    assert main(arguments(folder, *options)) == 1
    assert told in capsys.readouterr().err


def test_counting_as_the_paper_makes_no_plan_to_save(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, "--plan", str(folder / "plan"), "--compatibility", "paper")) == 1
    assert "makes no plans to save" in capsys.readouterr().err


def test_weights_of_several_models_are_asked_one_for_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = folder / "other.json"
    tiny_model(4, name="other").save(other)
    asked = arguments(folder, "--json")
    asked.insert(2, str(other))
    assert main([*asked, "--weights", "3,1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    first, second = (row["ratio"] for row in answer["best"]["models"])
    assert answer["question"]["weights"] == [3, 1]
    assert answer["best"]["value"] == pytest.approx((3 * first + second) / 4)
    assert main([*asked, "--weights", "3,1,1"]) == 1
    assert "each of the 2 models" in capsys.readouterr().err


def test_json_is_the_answer_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "phaze-search"


def test_a_space_that_cannot_be_is_an_error_with_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "space.json").write_text(json.dumps({**SPACE, "max_area_mm2": 0.1}))
    assert main(arguments(folder)) == 1
    assert "max_area_mm2 is 0.1 and leaves nothing" in capsys.readouterr().err


def test_progress_says_what_is_settled_and_left_the_best_its_gap_and_the_time_left() -> None:
    progress = SearchProgress(
        doing="bound/all", points=100, left=40, evaluated=3, best=10.0, bound=11.0, elapsed_s=6.0, remaining_s=4.0
    )
    told = "60 of 100 settled, 40 left, 3 evaluated; best 10 (gap 10.00%); about 4 s left; bound/all"
    assert progress_text(progress) == told
