"""What says how a model file is to be read: the roles of its arguments, its loss, its entry, the trips of its loops."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from phaze.commands.command import positive_integer

__all__ = ["add_file_arguments", "file_options"]


def add_file_arguments(parser: ArgumentParser) -> None:
    """Add the options of HLO and StableHLO files."""
    group = parser.add_argument_group("HLO and StableHLO files")
    for role in ("parameters", "batch"):
        group.add_argument(
            f"--{role}", action="append", metavar="ARGUMENT", help=f"{role} of the file, by index or path; repeatable"
        )
    group.add_argument("--loss", metavar="OUTPUT", help="the result to train, by index or name")
    group.add_argument("--module", metavar="NAME", help="which of several modules (default: most flops)")
    group.add_argument("--entry", metavar="NAME", help="the function to import (default main)")
    group.add_argument(
        "--trips", type=positive_integer, metavar="N", help="trips of loops that depend on data (default 1)"
    )


def file_options(arguments: Namespace) -> dict[str, Any]:
    """What was asked for; an argument's index is a number, its path a text."""
    options: dict[str, Any] = {}
    for name in ("parameters", "batch"):
        given = getattr(arguments, name)
        if given is not None:
            options[name] = [_selector(text) for text in given]
    if arguments.loss is not None:
        options["loss"] = _selector(arguments.loss)
    for name in ("module", "entry", "trips"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    return options


def _selector(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text
