"""Examples do what they say: each is run by the command that its table has, with small sizes where it is slow."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from designs import tiny_model
from repository import ROOT

EXAMPLES = ROOT / "examples"
COMMANDS = {
    found[1]: found[2]
    for found in re.finditer(
        r"^\| \[(\S+)\]\(\1\) \|.*\| `(\S.*)` \| \d+ s \|$", (EXAMPLES / "README.md").read_text(), re.M
    )
}
"""The command of each example, as its table says it."""


def printed_by(example: str, folder: Path, *more: str) -> str:
    """What an example's command prints; `more` is added to it."""
    return printed(" ".join([COMMANDS[example], *more]), folder)


def printed(command: str, folder: Path) -> str:
    """What a command prints in a folder of its own, in which the examples lie as they do in the repository."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(EXAMPLES)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)]


def code_cells() -> list[str]:
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_table_has_every_example_and_a_command_that_names_it() -> None:
    entries = {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")}
    assert set(COMMANDS) == entries
    assert [name for name, command in COMMANDS.items() if f"examples/{name}" not in command] == []


@pytest.mark.parametrize("script", [name for name in COMMANDS if name.endswith(".py")])
def test_the_commands_in_the_text_of_a_script_have_options_of_the_script(script: str) -> None:
    text = (EXAMPLES / script).read_text()
    told = set(re.findall(r"(?:\s|`)(--[a-z-]+)", text.split('"""')[1])) - {"--nproc-per-node"}
    assert f"examples/{script}" in text.split('"""')[1]
    assert told <= set(re.findall(r'add_argument\("(--[a-z-]+)"', text))


@pytest.mark.exhaustive
def test_a_dump_of_ones_own_is_imported_as_the_script_says(tmp_path: Path) -> None:
    job = runpy.run_path(str(EXAMPLES / "import_hlo_dump.py"))["JOB"]
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path / 'dump'}"}
    subprocess.run([sys.executable, "-c", job], env=environment, check=True)
    told = printed_by("import_hlo_dump.py", tmp_path, f"--dump {tmp_path / 'dump'} --cluster h100:64 --batch 512")
    assert "on 64 x h100" in told


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in code_cells():
        exec(cell, names)
    told = capsys.readouterr().out
    for words in ("proof     within", "what binds:", "slower than the best", "DOES NOT FIT", "--- torchtitan_plan.py"):
        assert words in told


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(EXAMPLES / "tour.ipynb", as_version=4).cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells if cell.outputs or cell.execution_count] == []


def test_an_accelerator_is_designed_for_three_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [tmp_path / f"model{layers}.json" for layers in (2, 3, 4)]
    for layers, path in zip((2, 3, 4), models, strict=True):
        tiny_model(layers, name=path.stem).save(path)
    program, answer = str(EXAMPLES / "design_accelerator.py"), str(tmp_path / "search.json")
    monkeypatch.setattr(sys, "argv", [program, *map(str, models), "--devices", "2", "--batch", "8", "--out", answer])
    runpy.run_path(program, run_name="__main__")
    told = capsys.readouterr().out
    assert re.search(r"proof +within \d", told)
    assert len(re.findall(r"^model\d: \S+ times the samples per second of tpuv4-paper$", told, re.MULTILINE)) == 3
    assert Path(answer).exists()


def test_a_dump_of_a_running_job_is_imported_and_planned(tmp_path: Path) -> None:
    told = printed_by("import_hlo_dump.py", tmp_path, "--out", "plan.json")
    assert "imported train_step: 2,097,152 parameters" in told
    assert "on 8 x h100" in told
    assert (tmp_path / "plan.json").exists()


@pytest.mark.exhaustive
def test_a_gpt_in_plain_torch_learns_under_its_plan(tmp_path: Path) -> None:
    told = printed_by("torch_nanogpt.py", tmp_path)
    assert "GPT (865,024 parameters, 6 layers) on 2 x cpu" in told
    assert losses(told)[-1] < losses(told)[0] - 2


@pytest.mark.exhaustive
def test_a_llama_goes_on_from_its_checkpoint_on_another_number_of_processes(tmp_path: Path) -> None:
    first = printed_by("torch_llama_checkpoint.py", tmp_path, "--export exported")
    assert "starts anew" in first
    assert {path.name for path in (tmp_path / "exported").glob("*.json")} >= {"config.json"}
    alone = COMMANDS["torch_llama_checkpoint.py"].replace("--nproc-per-node 2", "--nproc-per-node 1")
    second = printed(alone, tmp_path)
    assert "goes on at step 5" in second
    assert max(losses(second)) < min(losses(first))


@pytest.mark.exhaustive
def test_a_scanned_llama_learns_on_eight_host_devices(tmp_path: Path) -> None:
    told = printed_by("jax_llama.py", tmp_path)
    assert "on 8 x cpu" in told
    assert losses(told) == sorted(losses(told), reverse=True)


@pytest.mark.exhaustive
def test_a_scanned_llama_is_planned_for_a_cluster_that_is_elsewhere(tmp_path: Path) -> None:
    told = printed_by(
        "jax_llama.py",
        tmp_path,
        "--layers 32 --width 4096 --heads 32 --words 32000 --length 2048 --batch 128 --cluster tpuv4:64",
    )
    assert "on 64 x tpuv4" in told
    assert losses(told) == []


@pytest.mark.exhaustive
def test_the_notebook_runs_in_jupyter(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copy(EXAMPLES / "tour.ipynb", tmp_path / "examples")
    printed_by("tour.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / "examples" / "tour-run.ipynb", as_version=4)
    shown = next(cell for cell in notebook.cells if cell.cell_type == "code").outputs[-1]["data"]["text/html"]
    assert "place 0" in shown
