"""What a command is, the one way in which commands print, and the parser of the whole command line.

A command's file holds its `Command` value, which is listed in `phaze.commands.COMMANDS`. Its `run` prints its result
with `show`, which serves people (rich text and tables) or machines (`--json`: one document on standard output, nothing
else), and returns an exit code. Errors are raised as PhazeError: the frame in `phaze.cli` shows them. Whatever is heavy
is imported inside `run`, so that `phaze --help` stays quick.

The parser (`build_parser`) lists commands under headings, keeps usage short, and its errors offer what was meant.
"""

from __future__ import annotations

import argparse
import json
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, NoReturn

from rich import box
from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table

import phaze
from phaze.commands.help_topics import topic_of_option
from phaze.errors import near_names

if TYPE_CHECKING:
    from argparse import _ActionsContainer

__all__ = [
    "Command",
    "CommandGroup",
    "CommandParser",
    "ExitCode",
    "add_attention_option",
    "add_json_option",
    "build_parser",
    "command_help",
    "plain_table",
    "positive_integer",
    "show",
]


class CommandGroup(StrEnum):
    """The headings of `phaze --help`, in the order in which they are shown."""

    MODELS = "models"
    HARDWARE = "hardware"
    PLANS = "plans"
    INSTALLATION = "installation"


class ExitCode(IntEnum):
    """What a command returns to the shell."""

    FINE = 0
    ERROR = 1
    USAGE = 2
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of `phaze`.

    `summary` is its line in `phaze --help`; `configure` adds its arguments; `run` does it and returns an exit code.
    """

    name: str
    group: CommandGroup
    summary: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Console], int]

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").isalpha() or self.name != self.name.lower():
            raise ValueError(f"command name is {self.name!r}; expected lower-case letters and hyphens")
        if not self.summary or "\n" in self.summary or self.summary.endswith("."):
            raise ValueError(f"{self.name}: summary is {self.summary!r}; expected one line without a full stop")


def add_json_option(parser: ArgumentParser) -> None:
    """Let a machine read the command's result: `show` looks at it."""
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def add_attention_option(parser: _ActionsContainer) -> None:
    """Let somebody say how attention runs."""
    parser.add_argument(
        "--attention",
        choices=("fused", "unfused"),
        help="one kernel, or separate products (default: what the chip's software does)",
    )


def show(console: Console, arguments: Namespace, document: Mapping[str, object], *renderables: RenderableType) -> None:
    """Print a result: the document if `--json` was given, else what people read."""
    if getattr(arguments, "json", False):
        console.out(json.dumps(document, indent=2, allow_nan=False), highlight=False)
        return
    for renderable in renderables:
        console.print(renderable)


def positive_integer(text: str) -> int:
    """An argument's type: a whole number of at least 1."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def plain_table(columns: Iterable[str], rows: Iterable[Iterable[str]], *, title: str | None = None) -> Table:
    """A table in the one look that all commands share; a column whose heading starts with `>` is flush right."""
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, title_justify="left", title_style="bold")
    for column in columns:
        justify: JustifyMethod = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


_MOST_GIBIBYTES = 2**30
"""No machine has as much memory: a larger limit is a mistake, and would not fit the system's own number."""


_OPTION = re.compile(r"--[a-z][-a-z]*")
"""An option in one of argparse's messages."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose usage is one line and whose errors are three: what is wrong, what was meant, where more stands."""

    def shorten_usage(self) -> None:
        """Let the usage name only what must be given; the help lists the options."""
        arguments = [action for action in self._actions if not action.option_strings]
        options = [action for action in self._actions if action.option_strings]
        self.usage = " ".join(
            [
                self.prog,
                *(_value_text(action) for action in arguments),
                *(f"{action.option_strings[-1]} {_value_text(action)}" for action in options if action.required),
                *(["[options]"] if not all(action.required or action.dest == "help" for action in options) else []),
            ]
        ).replace("%", "%%")

    def error(self, message: str) -> NoReturn:
        """End with what is wrong and what to do; the near names of an unknown option or command are offered."""
        lines = [self.format_usage().rstrip(), f"{self.prog}: error: {_without_list(message)}{self._meant(message)}"]
        topics = dict.fromkeys(topic_of_option(option) for option in _OPTION.findall(message))
        seen = [f"phaze help {topic}" for topic in topics if topic]
        self.exit(ExitCode.USAGE, "\n".join([*lines, f"see: {', '.join([f'{self.prog} --help', *seen])}", ""]))

    def _meant(self, message: str) -> str:
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        if "unrecognized arguments" in message:
            unknown = _OPTION.findall(message)
            if set(unknown) & set(known):
                return ". Options stand behind their command"
            near = [name for option in unknown for name in near_names(option, known)]
        else:
            chosen = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
            near = near_names(chosen[1], re.findall(r"'([^']*)'", chosen[2])) if chosen else []
        return f". Did you mean {' or '.join(near)}?" if near else ""


def _value_text(action: argparse.Action) -> str:
    """What stands for an argument's value in a usage."""
    named = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    shown = "{" + ",".join(map(str, action.choices)) + "}" if action.choices and not action.metavar else named
    return {"?": f"[{shown}]", "*": f"[{shown} ...]", "+": f"{shown} [{shown} ...]"}.get(str(action.nargs), shown)


def _without_list(message: str) -> str:
    """The message without a list of more than a dozen choices."""
    head, opened, listed = message.partition(" (choose from ")
    return head if opened and listed.count(",") >= 12 else message


def build_parser(commands: Sequence[Command]) -> CommandParser:
    """The parser of the whole command line, with the commands under their headings."""
    parser = CommandParser(
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
            command.name, description=_sentence(command.summary), help=command.summary.replace("%", "%%")
        )
        _configure(subparser, command)
        subparser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        subparser.add_argument(
            "--memory-limit", type=gibibytes, default=argparse.SUPPRESS, help=argparse.SUPPRESS, metavar="GIB"
        )
        subparser.set_defaults(command=command, parser=subparser)
    return parser


def command_help(command: Command) -> str:
    """What `phaze COMMAND --help` prints."""
    parser = CommandParser(prog=f"phaze {command.name}", description=_sentence(command.summary))
    _configure(parser, command)
    return parser.format_help()


def _configure(parser: CommandParser, command: Command) -> None:
    command.configure(parser)
    parser.shorten_usage()


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


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
