"""What a command is, and the one way in which commands print.

A command's file holds one `Command` value and is listed in `phaze.commands.COMMANDS`. Its `run` prints its result with
`show`, which serves people (rich text and tables) or machines (`--json`: one document on standard output, nothing
else), and returns an exit code. Errors are raised as PhazeError: the frame in `phaze.cli` shows them. Whatever is heavy
is imported inside `run`, so that `phaze --help` stays quick.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table

if TYPE_CHECKING:
    from argparse import _ActionsContainer

__all__ = [
    "Command",
    "CommandGroup",
    "ExitCode",
    "add_attention_option",
    "add_json_option",
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
        "--attention", choices=("fused", "unfused"), help="one kernel, or products (default: as the chip's software)"
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
