"""`phaze report`: the page of a saved plan or search, one HTML file that needs nothing else."""

from __future__ import annotations

import webbrowser
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, show
from phaze.commands.question_arguments import add_model_argument, find_model

__all__ = ["write_report"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    what = "a plan or a search that was saved, or the journal of a search"
    parser.add_argument("file", metavar="FILE", type=Path, help=what)
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page (default: beside the file, as .html)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument("--trace", metavar="FILE", help="of a plan: also write its timeline as a Chrome trace")
    more = "; of a journal, once for each model in their order (default: by the names in it)"
    add_model_argument(parser, "--model", more, required=False, action="append")
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Write the page, say where it is, and open it if that is wanted."""
    from phaze.file_writing import write_whole

    path: Path = arguments.out or arguments.file.with_suffix(".html")
    write_whole(path, _page(arguments))
    texts = [f"wrote {path}"]
    if arguments.trace is not None:
        texts.append(f"trace written to {arguments.trace}; chrome://tracing and ui.perfetto.dev show it")
    show(console, arguments, {"written": str(path)}, *texts)
    if arguments.open:
        webbrowser.open(path.resolve().as_uri())
    return ExitCode.FINE


def _page(arguments: Namespace) -> str:
    """The page of whatever the file holds."""
    from phaze.errors import QuestionError
    from phaze.explore.journal import is_journal
    from phaze.explore.saved_search import is_saved_search, read_search, result_of_journal

    if is_journal(arguments.file) or is_saved_search(arguments.file):
        if arguments.trace is not None:
            raise QuestionError("--trace writes the timeline of a plan; a search has none.")
        if not is_journal(arguments.file):
            return read_search(arguments.file).to_html()
        models = None if arguments.model is None else [find_model(text)[0] for text in arguments.model]
        return result_of_journal(arguments.file, models).to_html()

    import phaze

    plan = phaze.load_plan(arguments.file)
    if arguments.trace is not None:
        plan.save_trace(arguments.trace)
    return plan.to_html()


write_report = Command(
    name="report",
    group=CommandGroup.PLANS,
    summary="write a saved plan or search as a page with charts, one HTML file",
    configure=configure,
    run=run,
)
