"""The frame of the command line: `phaze [--debug] [--memory-limit GIB] COMMAND ...`.

Exit codes: 0 fine; 1 a PhazeError or an unreadable file, shown in one block without a traceback; 2 wrong usage; 130
interrupted. `--debug`, before or after the command, shows the traceback as well. Where a topic of `phaze help` explains
more, an error's last line names it. `--memory-limit` ends a command that
takes more, with an error. Results go to standard output, errors and warnings to standard error. Whatever is printed is
printable: names from files cannot steer a terminal, and no encoding fails.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from phaze.commands import COMMANDS
from phaze.commands.command import Command, ExitCode, build_parser
from phaze.errors import LimitError, PhazeError
from phaze.printable_text import printable

__all__ = ["main"]

PIPE_WIDTH = 120
"""Columns of a table that is not shown on a terminal, unless COLUMNS says otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` defaults to the process's arguments.

    Raises SystemExit as argparse does: 0 after `--help` and `--version`, 2 on wrong usage.
    """
    parser = build_parser(COMMANDS)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        # The command's own parser knows the options that may have been meant; argparse would ask the outer one.
        (arguments.parser if arguments.command else parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    console, error_console = make_console(), make_console(stderr=True)
    with warnings.catch_warnings():
        warnings.showwarning = _shown_on(error_console)
        limit_memory(arguments.memory_limit)
        return run_command(arguments.command, arguments, console, error_console)


def run_command(command: Command, arguments: argparse.Namespace, console: Console, error_console: Console) -> int:
    """Run a parsed command; what it raises on purpose becomes one readable block and an exit code."""
    try:
        return command.run(arguments, console)
    except (PhazeError, OSError) as error:
        if isinstance(error, PhazeError) and error.topic is None:
            error.add_note(f"see: phaze {command.name} --help")
        show_error(error, error_console, with_traceback=arguments.debug)
        return ExitCode.ERROR
    except MemoryError as error:
        show_error(_out_of_memory(error, arguments.memory_limit), error_console, with_traceback=arguments.debug)
        return ExitCode.ERROR
    except KeyboardInterrupt as error:
        error_console.print(f"interrupted: {error}" if error.args else "interrupted")
        return ExitCode.INTERRUPTED


def limit_memory(limit_gib: float | None) -> None:
    """Let this process and those that it starts take no more memory than so many GiB each; None limits nothing."""
    if limit_gib is None:
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(limit_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _out_of_memory(error: MemoryError, limit_gib: float | None) -> LimitError:
    """What to tell of a command that had no memory left."""
    limit = "this machine has" if limit_gib is None else f"the {limit_gib:g} GiB of --memory-limit"
    advice = "Ask a smaller question (fewer values of tp and micro_batch_size, fewer workers), or allow more."
    told = LimitError(f"the command needs more memory than {limit}. {advice}")
    told.__cause__ = error
    return told


class PrintableConsole(Console):
    """A console on which text cannot steer the terminal: see `phaze.printable_text`."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Text as it is shown, in tables too."""
        return super().render_str(printable(text, keeps_lines=True), **options)

    def out(self, *objects: Any, **options: Any) -> None:
        """Text as it is written: exact in a pipe or a file, printable on a terminal."""
        shown = [printable(str(value), keeps_lines=True) for value in objects] if self.is_terminal else objects
        super().out(*shown, **options)


def make_console(*, stderr: bool = False) -> Console:
    """A console that prints names as they are: no markup, no highlighting, and a fixed width in a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):  # what the terminal's encoding lacks is written out
        stream.reconfigure(errors="backslashreplace")
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return PrintableConsole(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def show_error(error: Exception, console: Console, *, with_traceback: bool) -> None:
    """One readable block: what kind of error, its message, which says what to do next, and a topic that helps."""
    if with_traceback:
        console.out("".join(traceback.format_exception(error)), highlight=False)
    kind = type(error).__name__
    notes = sorted(getattr(error, "__notes__", ()), key=lambda note: note.startswith("see: "))
    lines = [printable(line, keeps_lines=True) for line in (str(error) or kind, *notes)]
    console.print(Text.assemble(("error", "bold red"), f" ({kind}): ", "\n".join(lines)), soft_wrap=True)


def _shown_on(console: Console) -> Callable[..., None]:
    def show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
        text = printable(str(message), keeps_lines=True)
        console.print(Text.assemble(("warning", "bold yellow"), f" ({category.__name__}): {text}"), soft_wrap=True)

    return show_warning
