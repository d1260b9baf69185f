"""`phaze verify`: every number of a saved plan, or of a search with its journal, derived again."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show
from phaze.commands.question_arguments import add_model_argument, find_model, shown_progress

if TYPE_CHECKING:
    from phaze.verify.plan_checks import Finding

__all__ = ["verify_plan"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("plan", metavar="FILE", help="a plan that was saved, or the journal of a search")
    more = "; once for each model of a search, in their order"
    add_model_argument(parser, "--model", more, required=True, action="append")
    parser.add_argument("--executor", metavar="NAME", help="of a search: processes[:N] (default), serial, dask://...")
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Check the plan or the search and print what does not hold."""
    from phaze.explore.journal import is_journal
    from phaze.json_records import to_document

    findings = _search_findings(arguments) if is_journal(arguments.plan) else _plan_findings(arguments)
    wrong = [finding for finding in findings if not finding.holds]
    document = {"holds": not wrong, "findings": to_document(findings)}
    verdict = f"{arguments.plan}: {len(findings) - len(wrong)} of {len(findings)} checks hold"
    rows = [(finding.what, finding.claimed, finding.found) for finding in wrong]
    tables = [plain_table(["does not hold", "it says", "found"], rows)] if rows else []
    show(console, arguments, document, *tables, verdict)
    return ExitCode.ERROR if wrong else ExitCode.FINE


def _plan_findings(arguments: Namespace) -> list[Finding]:
    import phaze
    from phaze.errors import QuestionError
    from phaze.planner.progress import Watch
    from phaze.verify.plan_checks import check_plan

    plan = phaze.load_plan(arguments.plan)
    if len(arguments.model) > 1:
        raise QuestionError(f"{arguments.plan} is the plan of one model; give --model once.")
    model, inputs = find_model(arguments.model[0])
    with shown_progress() as progress:
        return check_plan(plan, model, inputs, watch=Watch(listener=progress))


def _search_findings(arguments: Namespace) -> list[Finding]:
    from phaze.explore.executors import open_workers
    from phaze.verify.search_checks import check_search

    found = [find_model(text) for text in arguments.model]
    inputs = found[0][1] if len(found) == 1 else [one for _, one in found]
    with open_workers(arguments.executor) as workers:
        return check_search(arguments.plan, [model for model, _ in found], inputs, workers=workers)


verify_plan = Command(
    name="verify",
    group=CommandGroup.PLANS,
    summary="derive every number of a saved plan or of a search's journal again",
    configure=configure,
    run=run,
)
