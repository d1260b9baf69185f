"""The commands that ask for a plan: `phaze optimize`, `phaze evaluate` and `phaze fit`.

They lead from a model to the best plan, to the price of one's own strategy, or to whether the model fits on a cluster:
with a strategy of one's own, another tool's config, or any.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, show
from phaze.commands.question_arguments import (
    add_model_argument,
    add_question_arguments,
    add_question_options,
    find_model,
    question_options,
    shown_progress,
)

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["evaluate_strategy", "fit_model", "optimize_model"]


def _configure_optimize(parser: ArgumentParser) -> None:
    """Add the arguments of `phaze optimize`."""
    add_model_argument(parser)
    add_question_arguments(parser)
    parser.add_argument("--explain", action="store_true", help="also print why")
    add_json_option(parser)
    parser.epilog = "For example: phaze optimize llama3.1-8b --cluster h100:8 --explain --out plan.json"


def _run_optimize(arguments: Namespace, console: Console) -> int:
    """Plan, print and save."""
    import phaze

    _check_files(arguments)
    model, inputs = find_model(arguments.model)
    with shown_progress(is_quiet=arguments.quiet) as progress:
        plan = phaze.optimize(
            model,
            inputs,
            explain=arguments.explain,
            progress=progress,
            time_limit_s=arguments.time_limit,
            **question_options(arguments),
        )
    texts: list[RenderableType] = [str(plan), *_pictures(plan, console)]
    if arguments.explain or not plan.is_feasible:
        texts += ["", plan.explain()]
    try:
        texts += _write(plan, arguments)
    finally:  # an answer that cannot be saved is shown all the same
        if not arguments.quiet:
            show(console, arguments, json.loads(plan.to_json()), *texts)
    return ExitCode.FINE if plan.is_feasible else ExitCode.ERROR


def _check_files(arguments: Namespace) -> None:
    """Raise now what would keep the answer from being saved."""
    from phaze.file_access import check_writable

    for path in (arguments.out, arguments.trace):
        if path is not None:
            check_writable(path)


def _pictures(plan: Plan, console: Console) -> list[RenderableType]:
    """Memory and the timeline as small pictures, where somebody looks at a terminal."""
    from phaze.report.terminal_pictures import memory_picture, timeline_picture

    return ["", memory_picture(plan), "", timeline_picture(plan)] if console.is_terminal else []


def _write(plan: Plan, arguments: Namespace) -> list[str]:
    """Write the files of a plan that are wanted, and say so."""
    written = []
    if arguments.out is not None:
        plan.save(arguments.out)
        written += ["", f"saved to {arguments.out}"]
    if arguments.trace is not None:
        plan.save_trace(arguments.trace)
        written += ["", f"trace written to {arguments.trace}; chrome://tracing and ui.perfetto.dev show it"]
    return written


optimize_model = Command(
    name="optimize",
    group=CommandGroup.PLANS,
    summary="find the fastest way to train a model on a cluster",
    configure=_configure_optimize,
    run=_run_optimize,
)


def _configure_evaluate(parser: ArgumentParser) -> None:
    """Add the arguments of `phaze evaluate`."""
    add_model_argument(parser, more="; may be left out where --from names its sizes", nargs="?")
    add_question_arguments(parser)
    parser.add_argument(
        "--strategy",
        type=strategy,
        metavar="KEY=VALUE,...",
        help="such as dp=8,tp=8,pp=1,zero=1,recompute=full; what is left out is chosen for you (default: what "
        "a dump of several devices shows)",
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="a tool's own file (torchtitan, Megatron-LM, DeepSpeed, ..): price it, and say what to change in it",
    )
    parser.add_argument("--alone", action="store_true", help="do not look for the best plan to compare with")
    add_json_option(parser)


def strategy(text: str) -> dict[str, object]:
    """An argument's type: keys and values; `+` joins the values of stages."""
    strategy_keys: dict[str, object] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise ArgumentTypeError(f"{part!r} is not of the form KEY=VALUE")
        values = [_value(part_of_value) for part_of_value in value.split("+")]
        strategy_keys[key.strip()] = values[0] if len(values) == 1 and key.strip() != "stages" else values
    return strategy_keys


def _value(text: str) -> object:
    if text.isascii() and text.isdigit():
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _run_evaluate(arguments: Namespace, console: Console) -> int:
    """Price the strategy, or that of a tool's file; print and save its plan."""
    import phaze
    from phaze.errors import QuestionError
    from phaze.json_documents import to_document
    from phaze.planner.plan_comparison import evaluate_file
    from phaze.strategy_files import find_source

    if arguments.source is None and arguments.model is None:
        raise QuestionError("phaze evaluate needs MODEL and --strategy KEY=VALUE,..., or --from FILE.")
    model, inputs = (None, None) if arguments.model is None else find_model(arguments.model)
    of_file = None
    with shown_progress(is_quiet=arguments.quiet) as progress:
        options = question_options(arguments)
        watched = {"progress": progress, "compares": not arguments.alone, "time_limit_s": arguments.time_limit}
        if arguments.source is None:
            evaluation = phaze.evaluate(model, inputs, strategy=arguments.strategy, **watched, **options)
        else:
            source = find_source(arguments.source)
            of_file = evaluate_file(source, model, inputs, strategy=arguments.strategy, **watched, **options)
            evaluation = of_file.evaluation
    written = _write(evaluation.plan, arguments)
    document: dict[str, object] = {
        "plan": json.loads(evaluation.plan.to_json()),
        "best": None if evaluation.best is None else json.loads(evaluation.best.to_json()),
        "slower_than_best": evaluation.slower_than_best,
        "change": evaluation.change,
    }
    if of_file is not None:
        document["file"] = {"tool": of_file.file.tool, "strategy": to_document(of_file.file.strategy)}
        document |= {"ignored": of_file.file.ignored, "unknown": of_file.file.unknown}
        document |= {"notes": of_file.remarks, "diff": of_file.diff}
    if not arguments.quiet:
        show(
            console,
            arguments,
            document,
            Text(str(of_file or evaluation)),
            *_pictures(evaluation.plan, console),
            *written,
        )
    return ExitCode.FINE if evaluation.is_feasible else ExitCode.ERROR


evaluate_strategy = Command(
    name="evaluate",
    group=CommandGroup.PLANS,
    summary="price a strategy of your own, and compare it with the best",
    configure=_configure_evaluate,
    run=_run_evaluate,
)


def _configure_fit(parser: ArgumentParser) -> None:
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


def _run_fit(arguments: Namespace, console: Console) -> int:
    """Say whether it fits, and what would."""
    import phaze
    from phaze.hardware import parse_cluster
    from phaze.json_documents import to_document
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
    configure=_configure_fit,
    run=_run_fit,
)
