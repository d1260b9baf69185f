"""What is done with a saved plan: `phaze explain`, `compare` and `verify`."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show
from phaze.commands.question_arguments import add_model_argument, add_trust_option, find_model, shown_progress

if TYPE_CHECKING:
    from phaze.verify.plan_checks import Finding

__all__ = ["compare_plans", "explain_plan", "verify_plan"]


def _configure_explain(parser: ArgumentParser) -> None:
    """Add the arguments of `phaze explain`."""
    parser.add_argument("plan", metavar="PLAN", help="a plan that was saved")
    more = "; only where the plan was saved without its explanation and its model is not known by name"
    add_model_argument(parser, "--model", more, required=False)
    add_json_option(parser)


def _run_explain(arguments: Namespace, console: Console) -> int:
    """Print the plan and its explanation."""
    import phaze

    model, inputs = (None, None) if arguments.model is None else find_model(arguments.model)
    plan = phaze.load_plan(arguments.plan, model, inputs).explained()
    show(console, arguments, json.loads(plan.to_json()), str(plan), "", plan.explain())
    return ExitCode.FINE


explain_plan = Command(
    name="explain",
    group=CommandGroup.PLANS,
    summary="say why a saved plan is as it is, and what would change it",
    configure=_configure_explain,
    run=_run_explain,
)


def _configure_compare(parser: ArgumentParser) -> None:
    """Add the arguments of `phaze compare`."""
    parser.add_argument("first", metavar="FIRST", help="a plan that was saved")
    parser.add_argument("second", metavar="SECOND", help="another one")
    parser.add_argument("--html", metavar="FILE", help="also write them side by side as a page")
    add_json_option(parser)


def _run_compare(arguments: Namespace, console: Console) -> int:
    """Print what differs."""
    import phaze
    from phaze.json_records import to_document

    comparison = phaze.compare(phaze.load_plan(arguments.first), phaze.load_plan(arguments.second))
    document = {"speedup": comparison.speedup, "rows": to_document(comparison.rows)}
    written = []
    if arguments.html is not None:
        comparison.report(arguments.html)
        written.append(f"wrote {arguments.html}")
    show(console, arguments, document, str(comparison), *written)
    return ExitCode.FINE


compare_plans = Command(
    name="compare",
    group=CommandGroup.PLANS,
    summary="show what differs between two saved plans",
    configure=_configure_compare,
    run=_run_compare,
)


def _configure_verify(parser: ArgumentParser) -> None:
    """Add the arguments of `phaze verify`."""
    parser.add_argument("plan", metavar="FILE", help="a plan that was saved, or the journal of a search")
    more = "; once for each model of a search, in their order"
    add_model_argument(parser, "--model", more, required=True, action="append")
    parser.add_argument("--executor", metavar="NAME", help="of a search: processes[:N] (default), serial, dask://...")
    add_trust_option(parser)
    add_json_option(parser)


def _run_verify(arguments: Namespace, console: Console) -> int:
    """Check the plan or the search and print what does not hold."""
    from phaze.explore.journal import is_journal
    from phaze.json_records import to_document

    findings = _search_findings(arguments) if is_journal(arguments.plan) else _plan_findings(arguments)
    wrong = [finding for finding in findings if not finding.holds]
    document = {"holds": not wrong, "findings": to_document(findings)}
    verdict = f"{arguments.plan}: {len(findings) - len(wrong)} of {len(findings)} checks hold"
    rows = [(finding.what, finding.claimed, finding.found) for finding in wrong]
    tables = [plain_table(["does not hold", "it says", "found"], rows)] if rows else []
    told = [f"{finding.what}: {finding.found}" for finding in findings if finding.says_how and finding.holds]
    show(console, arguments, document, *tables, verdict, *told)
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

    models_and_inputs = [find_model(text) for text in arguments.model]
    inputs = models_and_inputs[0][1] if len(models_and_inputs) == 1 else [example for _, example in models_and_inputs]
    with open_workers(arguments.executor, trust_scheduler=arguments.trust_scheduler) as workers:
        return check_search(arguments.plan, [model for model, _ in models_and_inputs], inputs, workers=workers)


verify_plan = Command(
    name="verify",
    group=CommandGroup.PLANS,
    summary="derive every number of a saved plan or of a search's journal again",
    configure=_configure_verify,
    run=_run_verify,
)
