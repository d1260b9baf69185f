"""`phaze compare`: two saved plans side by side."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, show

__all__ = ["compare_plans"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("first", metavar="FIRST", help="a plan that was saved")
    parser.add_argument("second", metavar="SECOND", help="another one")
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Print what differs."""
    import phaze
    from phaze.json_records import to_document

    comparison = phaze.compare(phaze.load_plan(arguments.first), phaze.load_plan(arguments.second))
    document = {"speedup": comparison.speedup, "rows": to_document(comparison.rows)}
    show(console, arguments, document, str(comparison))
    return ExitCode.FINE


compare_plans = Command(
    name="compare",
    group=CommandGroup.PLANS,
    summary="show what differs between two saved plans",
    configure=configure,
    run=run,
)
