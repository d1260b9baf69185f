"""`phaze verify`: every number of a saved plan, derived again."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show
from phaze.commands.question import add_model_argument, find_model, shown_progress

__all__ = ["verify_plan"]


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("plan", metavar="PLAN", help="a plan that was saved")
    add_model_argument(parser, "--model", required=True)
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Check the plan and print what does not hold."""
    import phaze
    from phaze.planner.audit import check_plan
    from phaze.planner.watch import Watch
    from phaze.records import to_document

    plan = phaze.load_plan(arguments.plan)
    model, inputs = find_model(arguments.model)
    with shown_progress() as progress:
        findings = check_plan(plan, model, inputs, watch=Watch(listener=progress))
    wrong = [finding for finding in findings if not finding.holds]
    document = {"holds": not wrong, "findings": to_document(findings)}
    verdict = f"{arguments.plan}: {len(findings) - len(wrong)} of {len(findings)} checks hold"
    rows = [(finding.what, finding.claimed, finding.found) for finding in wrong]
    tables = [plain_table(["does not hold", "the plan says", "found"], rows)] if rows else []
    show(console, arguments, document, *tables, verdict)
    return ExitCode.ERROR if wrong else ExitCode.FINE


verify_plan = Command(
    name="verify",
    group=CommandGroup.PLANS,
    summary="derive every number of a saved plan again, in another way",
    configure=configure,
    run=run,
)
