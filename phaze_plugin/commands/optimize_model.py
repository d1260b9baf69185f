"""`phaze optimize`: one command from a model to a plan."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, show
from phaze.commands.question_arguments import (
    add_model_argument,
    add_question_arguments,
    find_model,
    question_options,
    shown_progress,
)

__all__ = ["optimize_model"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_argument(parser)
    add_question_arguments(parser)
    parser.add_argument("--explain", action="store_true", help="also print why")
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Plan, print and save."""
    import phaze

    model, inputs = find_model(arguments.model)
    with shown_progress() as progress:
        plan = phaze.optimize(
            model, inputs, progress=progress, time_limit_s=arguments.time_limit, **question_options(arguments)
        )
    if arguments.out is not None:
        plan.save(arguments.out)
    texts = [str(plan)]
    if arguments.explain or not plan.is_feasible:
        texts += ["", plan.explain()]
    if arguments.out is not None:
        texts += ["", f"saved to {arguments.out}"]
    show(console, arguments, json.loads(plan.to_json()), *texts)
    return ExitCode.FINE if plan.is_feasible else ExitCode.ERROR


optimize_model = Command(
    name="optimize",
    group=CommandGroup.PLANS,
    summary="find the fastest way to train a model on a cluster",
    configure=configure,
    run=run,
)
