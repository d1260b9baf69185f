"""The frame of the command line: `phaze [--debug] COMMAND ...`.

Exit codes: 0 fine; 1 a PhazeError or an unreadable file, shown in one block without a traceback; 2 wrong usage; 130
interrupted. `--debug`, before or after the command, shows the traceback as well. Results go to standard output, errors
and warnings to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

import phaze
from phaze.commands import COMMANDS
from phaze.commands.command import Command, CommandGroup, ExitCode
from phaze.errors import PhazeError

__all__ = ["main"]

PIPE_WIDTH = 120
"""Columns of a table that is not shown on a terminal, unless COLUMNS says otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` defaults to the process's arguments.

    Raises SystemExit as argparse does: 0 after `--help` and `--version`, 2 on wrong usage.
    """
    parser = build_parser(COMMANDS)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    console, error_console = make_console(), make_console(stderr=True)
    with warnings.catch_warnings():
        warnings.showwarning = _shown_on(error_console)
        return run_command(arguments.command, arguments, console, error_console)


def run_command(command: Command, arguments: argparse.Namespace, console: Console, error_console: Console) -> int:
    """Run a parsed command; what it raises on purpose becomes one readable block and an exit code."""
    try:
        return command.run(arguments, console)
    except (PhazeError, OSError) as error:
        show_error(error, error_console, with_traceback=arguments.debug)
        return ExitCode.ERROR
    except KeyboardInterrupt as error:
        error_console.print(f"interrupted: {error}" if error.args else "interrupted")
        return ExitCode.INTERRUPTED


def build_parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    """The parser of the whole command line, with the commands under their headings."""
    parser = argparse.ArgumentParser(
        prog="phaze",
        usage="phaze [--help] [--version] [--debug] COMMAND ...",
        description=phaze.__doc__,
        epilog=_command_list(commands),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"phaze {phaze.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command=None)
    subparsers = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS, prog="phaze")
    for command in commands:
        subparser = subparsers.add_parser(command.name, description=f"{command.summary}.")
        subparser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        subparser.set_defaults(command=command)
        command.configure(subparser)
    return parser


def _command_list(commands: Sequence[Command]) -> str:
    lines: list[str] = []
    for group in CommandGroup:
        members = [command for command in commands if command.group is group]
        if members:
            lines += [f"{group}:", *(f"  {command.name:<12}{command.summary}" for command in members), ""]
    return "\n".join([*lines, "`phaze COMMAND --help` explains one command."])


def make_console(*, stderr: bool = False) -> Console:
    """A console that prints names as they are: no markup, no highlighting, and a fixed width in a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def show_error(error: Exception, console: Console, *, with_traceback: bool) -> None:
    """One readable block: what kind of error, and its message, which says what to do next."""
    if with_traceback:
        console.out("".join(traceback.format_exception(error)), highlight=False)
    kind = type(error).__name__
    lines = [str(error) or kind, *getattr(error, "__notes__", ())]
    console.print(Text.assemble(("error", "bold red"), f" ({kind}): ", "\n".join(lines)), soft_wrap=True)


def _shown_on(console: Console) -> Callable[..., None]:
    def show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
        console.print(Text.assemble(("warning", "bold yellow"), f" ({category.__name__}): {message}"), soft_wrap=True)

    return show_warning
