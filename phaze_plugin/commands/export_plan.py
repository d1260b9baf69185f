"""`phaze export`: a saved plan for the tool that is to run it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, show
from phaze.commands.question_arguments import add_model_argument, find_model

__all__ = ["export_plan"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("plan", metavar="PLAN", help="a plan that was saved")
    parser.add_argument("--target", metavar="NAME", required=True, help="the tool; `phaze doctor` lists them")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, help="write the files here, print none")
    add_model_argument(parser, "--model", required=False)
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Print the files, or write them."""
    import phaze
    from phaze.json_records import write_whole

    plan = phaze.load_plan(arguments.plan)
    model = None if arguments.model is None else find_model(arguments.model)[0]
    files = plan.export(arguments.target, model)
    if arguments.output is None:
        show(console, arguments, {"target": arguments.target, "files": dict(files)})
        for name, text in () if arguments.json else files.items():
            console.out(text if len(files) == 1 else f"# ---- {name}\n{text}", highlight=False)
        return ExitCode.FINE
    arguments.output.mkdir(parents=True, exist_ok=True)
    paths = [arguments.output / name for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        write_whole(path, text)
    written = [str(path) for path in paths]
    show(console, arguments, {"target": arguments.target, "written": written}, *(f"wrote {path}" for path in written))
    return ExitCode.FINE


export_plan = Command(
    name="export",
    group=CommandGroup.PLANS,
    summary="write a saved plan for the tool that is to run it",
    configure=configure,
    run=run,
)
