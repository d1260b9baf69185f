"""The frame of the command line: help, exit codes, errors in one block."""

import argparse
import json
import subprocess
import sys
import warnings

import pytest
from rich.console import Console

import phaze
from phaze.cli import build_parser, main, make_console, run_command
from phaze.commands import COMMANDS
from phaze.commands.command import Command, CommandGroup, add_json_option, plain_table, show
from phaze.errors import HardwareError, UnknownNameError


def command_that(run: object) -> Command:
    return Command(name="try", group=CommandGroup.MODELS, summary="try something", configure=add_json_option, run=run)  # type: ignore[arg-type]


def outcome(run: object, *arguments: str) -> int:
    parsed = build_parser([command_that(run)]).parse_args(["try", *arguments])
    return run_command(parsed.command, parsed, make_console(), make_console(stderr=True))


def raising(error: BaseException) -> object:
    def run(arguments: argparse.Namespace, console: Console) -> int:
        raise error

    return run


def test_help_lists_every_command_under_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"{command.group}:\n" in text
        assert command.summary in text


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_explains_itself(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command.name, "--help"])
    assert command.summary[1:20] in capsys.readouterr().out


def test_command_names_are_distinct() -> None:
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"phaze {phaze.__version__}\n"


@pytest.mark.parametrize("argv", [["no-such-command"], ["doctor", "--no-such-option"], ["--json", "doctor"]])
def test_wrong_usage_exits_with_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: phaze" in captured.err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("optimise gpt2", "invalid choice: 'optimise'. Did you mean optimize?\nsee: phaze --help"),
        ("optimize gpt2", "required: --cluster\nsee: phaze optimize --help, phaze help cluster"),
        ("optimize gpt2 --cluster h100:8 --globalbatch 8", "--globalbatch 8. Did you mean --global-batch?"),
        (
            "evaluate gpt2 --cluster h100:8 --strategy fsdp",
            "form KEY=VALUE\nsee: phaze evaluate --help, phaze help strategy",
        ),
        ("--json doctor", "--json. Options stand behind their command\nsee: phaze doctor --help"),
    ],
)
def test_wrong_usage_is_told_in_three_lines_with_what_was_meant(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(typed.split())
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 3


def test_no_command_shows_the_help_and_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "doctor" in captured.err


def test_a_phaze_error_is_one_block_on_standard_error_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    error = UnknownNameError("accelerator", "a10", ["a100-80gb", "h100"])
    assert outcome(raising(error)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error (UnknownNameError): unknown accelerator 'a10'. Did you mean a100-80gb? Known: a100-80gb, h100.\n"
        "see: phaze help cluster\n"
    )


def test_notes_of_an_error_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    error = HardwareError("clock_hz is 0; expected a positive number.")
    error.add_note("while reading chips.json")
    assert outcome(raising(error)) == 1
    assert capsys.readouterr().err.endswith(
        "expected a positive number.\nwhile reading chips.json\nsee: phaze help cluster\n"
    )


@pytest.mark.parametrize("argv", [["--debug", "try"], ["try", "--debug"]])
def test_debug_shows_the_traceback_before_the_block(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parsed = build_parser([command_that(raising(HardwareError("no such chip")))]).parse_args(argv)
    assert run_command(parsed.command, parsed, make_console(), make_console(stderr=True)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == ["error (HardwareError): no such chip", "see: phaze help cluster"]


def test_a_missing_file_is_an_error_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def run(arguments: argparse.Namespace, console: Console) -> int:
        with open("no-such-file.json"):
            return 0

    assert outcome(run) == 1
    assert "No such file or directory: 'no-such-file.json'" in capsys.readouterr().err


def test_a_mistake_of_our_own_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        outcome(raising(ZeroDivisionError()))


def test_an_interrupt_ends_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_result_is_one_json_document_or_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    def run(arguments: argparse.Namespace, console: Console) -> int:
        show(console, arguments, {"layers": 98}, "a model", plain_table(["what", ">count"], [["[layers]", "98"]]))
        return 0

    assert outcome(run, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"layers": 98}
    assert outcome(run) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "a model"
    assert lines[-1].split() == ["[layers]", "98"]


def test_a_warning_goes_to_standard_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace, console: Console) -> int:
        warnings.warn("the plugin raised", UserWarning, stacklevel=2)
        return 0

    monkeypatch.setattr("phaze.cli.COMMANDS", (command_that(run),))
    warnings.simplefilter("always")
    assert main(["try"]) == 0
    assert capsys.readouterr().err == "warning (UserWarning): the plugin raised\n"


@pytest.mark.parametrize(
    ("name", "summary"), [("Bad Name", "fine"), ("", "fine"), ("good", ""), ("good", "a sentence."), ("good", "a\nb")]
)
def test_a_command_is_validated(name: str, summary: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Command(name=name, group=CommandGroup.MODELS, summary=summary, configure=add_json_option, run=lambda a, c: 0)


def test_python_m_phaze_is_phaze() -> None:
    told = subprocess.run([sys.executable, "-m", "phaze", "--version"], check=True, capture_output=True, text=True)
    assert told.stdout == f"phaze {phaze.__version__}\n"
