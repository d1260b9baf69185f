"""`phaze reproduce`: rows that are kept are not run again; tables, CSV and page of them."""

import csv
import json
from pathlib import Path

import pytest

from phaze.cli import main
from phaze.explore.experiment_rows import Baseline, Contender, ModelExperiment
from phaze.explore.paper_experiments import OneChip, OneChipModel
from phaze.json_documents import to_document

SETTINGS = {
    "method": ["random"],
    "seeds": 3,
    "evaluations": 2,
    "devices": 1024,
    "global_batch": 4096,
    "space": "paper",
    "hbm": [32, 64, 80],
    "gap": 0.01,
}


def contender(samples_per_s: float, bound: float | None = None) -> Contender:
    return Contender(
        chip="t4x256x256-v16x256-b16m", hbm_gib=80, samples_per_s=samples_per_s, fits=True, plan="dp 8", bound=bound
    )


def row(network: str, both: float) -> ModelExperiment:
    drawn = Baseline(
        method="random",
        seeds=3,
        median=0.8 * both,
        least=0.7 * both,
        most=0.9 * both,
        with_experts_median=None,
        evaluations=2,
        processor_s=1.0,
        chip="t1x2x2-v1x2-b2m",
        convergence=(0.4 * both, 0.8 * both),
    )
    return ModelExperiment(
        model="megatron-gpt2-72",
        network=network,
        experts=contender(100.0),
        placement_only=contender(150.0),
        hardware_only=contender(200.0),
        both=contender(both, 1.01 * both),
        baselines=(drawn,),
    )


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    rows = [row("paper", 1884.0), row("paper-artifact", 400.0)]
    shared = OneChip(
        network="paper",
        combine="worst",
        models=(OneChipModel(model="megatron-gpt2-72", samples_per_s=942.0, ratio=6.28),),
        chip="t8x128x128-v8x128-b8m",
        hbm_gib=80,
        value=6.28,
        bound=6.3428,
        processor_s=1.0,
    )
    document = {
        "format": "phaze-experiments",
        "version": 1,
        "settings": SETTINGS,
        "rows": to_document(rows),
        "one_chip": to_document([shared]),
    }
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(document))
    return path


OPTIONS = ["reproduce", "megatron-gpt2-72", "--method", "random", "--seeds", "3", "--evaluations", "2"]


def test_rows_that_are_kept_become_tables_a_page_and_the_story_of_the_units(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("csv", "convergence", "one-chip-csv", "html")}
    more = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    assert main([*OPTIONS, "--out", str(kept), *more]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "18.84" in out
    assert "18.84 on paper is 4.00 on paper-artifact; most of it is the network reading" in out
    assert "4 GiB per millisecond, as its artifact ran" in out
    lines = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert [line["who"] for line in lines[:5]] == ["experts", "placement-only", "hardware-only", "both", "random"]
    assert len(files["convergence"].read_text().splitlines()) == 1 + 2 * 2
    page = files["html"].read_text()
    assert "most of it is the network reading" in page
    assert "50.0%" in page  # random after one evaluation, of what it has after two


def test_the_chip_that_all_models_share_stands_beside_each_models_own(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, lines = tmp_path / "page.html", tmp_path / "chips.csv"
    options = [*OPTIONS, "--network", "paper", "--one-chip", "worst", "--out", str(kept), "--html", str(page)]
    assert main([*options, "--one-chip-csv", str(lines)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "50.0%" in out  # of what the model reaches on a chip of its own
    (line,) = csv.DictReader(lines.read_text().splitlines())
    assert (line["combine"], float(line["ratio"]), float(line["bound"])) == ("worst", 6.28, 6.3428)
    assert "One chip for all" in page.read_text()
    assert "t8x128x128-v8x128-b8m" in page.read_text()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["reproduce", "gpt5"], "MODEL has 'gpt5'"),
        (["reproduce", "--method", "annealing"], "--method has 'annealing'"),
        (["reproduce", "--one-chip", "median"], "--one-chip has 'median'"),
        (["reproduce", "--csv", "missing/file"], "cannot write"),
        (["reproduce", "--journals", "missing"], "--journals is 'missing'; expected a folder that exists"),
    ],
)
def test_what_cannot_be_run_or_saved_is_refused_at_once(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 1
    assert told in capsys.readouterr().err


def test_rows_of_other_settings_are_not_mixed(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIONS, "--gap", "0.05", "--out", str(kept)]) == 1
    assert "other settings" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_row_is_run_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = {"format": "phaze-space", "version": 1, "tensor_cores": [4, 8], "tensor_rows": 128, "tensor_cols": 128}
    space |= {"vector_cores": 16, "buffer_mib": 16}
    (tmp_path / "space.json").write_text(json.dumps(space))
    kept = tmp_path / "rows.json"
    options = ["reproduce", "opt-350m", "--network", "paper", "--space", str(tmp_path / "space.json"), "--hbm", "32"]
    options += ["--method", "random,spotlight-delay", "--seeds", "1", "--evaluations", "2", "--out", str(kept)]
    for _ in range(2):  # the second time nothing is run
        assert main(options) == 0
        assert "opt-350m" in capsys.readouterr().out
    (saved,) = json.loads(kept.read_text())["rows"]
    assert saved["both"]["samples_per_s"] >= saved["hardware_only"]["samples_per_s"]
