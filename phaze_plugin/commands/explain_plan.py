"""`phaze explain`: why a saved plan is as it is."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, show

__all__ = ["explain_plan"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("plan", metavar="PLAN", help="a plan that was saved")
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Print the plan and its explanation."""
    import phaze

    plan = phaze.load_plan(arguments.plan)
    show(console, arguments, json.loads(plan.to_json()), str(plan), "", plan.explain())
    return ExitCode.FINE


explain_plan = Command(
    name="explain",
    group=CommandGroup.PLANS,
    summary="say why a saved plan is as it is, and what would change it",
    configure=configure,
    run=run,
)
