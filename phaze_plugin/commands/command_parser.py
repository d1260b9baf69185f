"""The parser of the whole command line, with the commands under their headings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import phaze
from phaze.commands.command import Command, CommandGroup

__all__ = ["build_parser"]

_MOST_GIBIBYTES = 2**30
"""No machine has as much memory: a larger limit is a mistake, and would not fit the system's own number."""


def build_parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    """The parser of the whole command line, with the commands under their headings."""
    parser = argparse.ArgumentParser(
        prog="phaze",
        usage="phaze [--help] [--version] [--debug] [--memory-limit GIB] COMMAND ...",
        description=phaze.__doc__,
        epilog=_command_list(commands),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"phaze {phaze.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    limit_help = "end with an error when a process of the command takes more than so many GiB of memory"
    parser.add_argument("--memory-limit", type=gibibytes, metavar="GIB", help=limit_help)
    parser.set_defaults(command=None)
    subparsers = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS, prog="phaze")
    for command in commands:
        # The help of a subparser is not shown, since that of all of them is suppressed; shells complete with it.
        subparser = subparsers.add_parser(
            command.name, description=f"{command.summary}.", help=command.summary.replace("%", "%%")
        )
        subparser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        subparser.add_argument(
            "--memory-limit", type=gibibytes, default=argparse.SUPPRESS, help=argparse.SUPPRESS, metavar="GIB"
        )
        subparser.set_defaults(command=command)
        command.configure(subparser)
    return parser


def _command_list(commands: Sequence[Command]) -> str:
    lines: list[str] = []
    for group in CommandGroup:
        members = [command for command in commands if command.group is group]
        if members:
            lines += [f"{group}:", *(f"  {command.name:<12}{command.summary}" for command in members), ""]
    return "\n".join([*lines, "`phaze COMMAND --help` explains one command, `phaze help` lists topics to read about."])


def gibibytes(text: str) -> float:
    """An argument's type: a positive number of GiB."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < _MOST_GIBIBYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of GiB")
    return value
