"""`phaze completion`: bash completes commands, options, names and files by the script; the other shells have theirs."""

import subprocess
from pathlib import Path

import pytest

from phaze.cli import main
from phaze.commands import COMMANDS

COMPLETE = """
source "$1"
shift
completer=$(complete -p phaze | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_LINE="$*"
COMP_POINT=${#COMP_LINE}
"$completer" phaze "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does when somebody presses the tabulator key: it calls the function that `complete` was given."""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "phaze.bash"
    with path.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


def completed(script: Path, *words: str, folder: Path | None = None) -> set[str]:
    """What bash offers for the last word."""
    command = ["bash", "--norc", "--noprofile", "-c", COMPLETE, "bash", str(script), "phaze", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return {line.rstrip() for line in done.stdout.splitlines() if line.strip()}


def test_commands_complete(script: Path) -> None:
    assert completed(script, "opt") == {"optimize"}
    assert {command.name for command in COMMANDS} <= completed(script, "")


def test_options_complete(script: Path) -> None:
    assert completed(script, "optimize", "--prec") == {"--precision"}
    assert "--from" in completed(script, "evaluate", "--f")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("optimize", "gpt2-x"), {"gpt2-xl"}),
        (("search", "bert-l"), {"bert-large"}),
        (("optimize", "gpt2", "--cluster", "a100-8"), {"a100-80gb:8"}),
        (("chips", "a100"), {"a100-40gb", "a100-80gb"}),
        (("optimize", "gpt2", "--target", "torcht"), {"torchtitan"}),
        (("optimize", "gpt2", "--precision", "mx"), {"mxfp8"}),
        (("optimize", "gpt2", "--objective", "e"), {"energy"}),
        (("search", "gpt2", "--objective", "throughput-per-a"), {"throughput-per-area"}),
        (("optimize", "gpt2", "--attention", "f"), {"fused"}),
        (("help", "stra"), {"strategy"}),
        (("schema", "pl"), {"plan"}),
        (("completion", "z"), {"zsh"}),
    ],
    ids=lambda value: " ".join(sorted(value) if isinstance(value, set) else value),
)
def test_names_complete(script: Path, words: tuple[str, ...], expected: set[str], tmp_path: Path) -> None:
    assert completed(script, *words, folder=tmp_path) == expected


def test_files_complete_where_files_are_taken_and_beside_models(script: Path, tmp_path: Path) -> None:
    (tmp_path / "gpt2-mine.json").touch()
    assert completed(script, "explain", "gp", folder=tmp_path) == {"gpt2-mine.json"}
    assert {"gpt2-mine.json", "gpt2-medium"} == completed(script, "optimize", "gpt2-m", folder=tmp_path)


@pytest.mark.parametrize(("shell", "words"), [("zsh", "#compdef phaze"), ("fish", "complete -c phaze")])
def test_the_other_shells_have_scripts_with_the_same_names(
    shell: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    told = capsys.readouterr().out
    for word in (words, "optimize", "gpt2-xl", "a100-80gb:8", "torchtitan", "objectives"):
        assert word in told
