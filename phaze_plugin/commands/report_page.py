"""`phaze report`: the page of a saved plan, one HTML file that needs nothing else."""

from __future__ import annotations

import webbrowser
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, show

__all__ = ["write_report"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", metavar="PLAN", type=Path, help="a plan that was saved")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page (default: beside the plan, as .html)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Write the page, say where it is, and open it if that is wanted."""
    import phaze

    path: Path = arguments.out or arguments.file.with_suffix(".html")
    phaze.load_plan(arguments.file).report(path)
    show(console, arguments, {"written": str(path)}, f"wrote {path}")
    if arguments.open:
        webbrowser.open(path.resolve().as_uri())
    return ExitCode.FINE


write_report = Command(
    name="report",
    group=CommandGroup.PLANS,
    summary="write a saved plan as a page with charts, one HTML file",
    configure=configure,
    run=run,
)
