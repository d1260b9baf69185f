"""`phaze fit`: whether a model fits on a cluster, with a strategy of one's own, another tool's config, or any."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, show
from phaze.commands.plan_commands import strategy
from phaze.commands.question_arguments import add_model_argument, add_question_options, find_model, question_options

__all__ = ["fit_model"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model_argument(parser)
    add_question_options(parser)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--strategy", type=strategy, metavar="KEY=VALUE,...", help="such as dp=8,tp=8,zero=1 (default: any that fits)"
    )
    what = "a file of torchtitan, Megatron-LM, MaxText, DeepSpeed, Accelerate, ..; `phaze export --list` shows them"
    chosen.add_argument("--strategy-file", metavar="FILE", help=what)
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Say whether it fits, and what would."""
    import phaze
    from phaze.hardware import parse_cluster
    from phaze.json_records import to_document
    from phaze.strategy_files import read_strategy_file

    model, inputs = find_model(arguments.model)
    options = question_options(arguments)
    keys = arguments.strategy
    if arguments.strategy_file is not None:
        file = read_strategy_file(arguments.strategy_file, parse_cluster(arguments.cluster).device_count)
        keys = file.strategy
        if options["global_batch_size"] is None:
            options["global_batch_size"] = file.global_batch_size
    answer = phaze.fit(model, inputs, strategy=keys, **options)
    document = {
        "fit": answer.fit,
        "items_gib": dict(answer.items_gib),
        "total_gib": answer.total_gib,
        "capacity_gib": answer.capacity_gib,
        "margin": answer.margin,
        "strategy": to_document(answer.plan.strategy),
        "changes": to_document(answer.changes),
    }
    show(console, arguments, document, str(answer))
    return ExitCode.ERROR if answer.fit == "over" else ExitCode.FINE


fit_model = Command(
    name="fit",
    group=CommandGroup.PLANS,
    summary="say whether a model fits into memory, and the cheapest changes that make it fit",
    configure=configure,
    run=run,
)
