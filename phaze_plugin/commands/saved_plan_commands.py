"""What is done with a saved plan: `phaze explain`, `compare`, `verify`, `export` and `report`.

`phaze export` writes a plan as the files of the tool that is to run it, and lists such tools. `phaze report` writes the
page of a saved plan or search, one HTML file that needs nothing else.
"""

from __future__ import annotations

import json
import webbrowser
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show
from phaze.commands.question_arguments import add_model_argument, add_trust_option, find_model, shown_progress

if TYPE_CHECKING:
    from phaze.targets import Capabilities
    from phaze.verify.plan_checks import Finding

__all__ = ["compare_plans", "explain_plan", "export_plan", "verify_plan", "write_report"]


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
    from phaze.json_documents import to_document

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
    from phaze.json_documents import to_document

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
    summary="compute every number of a saved plan or of a search's journal again, by separate code",
    configure=_configure_verify,
    run=_run_verify,
)


def _configure_export(parser: ArgumentParser) -> None:
    """Add the arguments of `phaze export`."""
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="a plan that was saved")
    parser.add_argument("--list", action="store_true", help="show the targets, what each runs and how it was checked")
    parser.add_argument("--target", metavar="NAME", help="the tool that the files are for")
    parser.add_argument(
        "-o", "--out", "--output", dest="out", metavar="DIR", type=Path, help="write the files here, print none"
    )
    add_model_argument(parser, "--model", required=False)
    add_json_option(parser)


def _run_export(arguments: Namespace, console: Console) -> int:
    """Print the files, or write them; or list the targets."""
    import phaze
    from phaze.errors import QuestionError
    from phaze.file_access import write_whole

    if arguments.list:
        return _show_targets(arguments, console)
    if arguments.plan is None or arguments.target is None:
        raise QuestionError("phaze export needs PLAN and --target NAME; `phaze export --list` shows the targets.")
    plan = phaze.load_plan(arguments.plan)
    model = None if arguments.model is None else find_model(arguments.model)[0]
    files = plan.export(arguments.target, model)
    if arguments.out is None:
        show(console, arguments, {"target": arguments.target, "files": dict(files)})
        for name, text in () if arguments.json else files.items():
            console.out(text if len(files) == 1 else f"# ---- {name}\n{text}", highlight=False)
        return ExitCode.FINE
    arguments.out.mkdir(parents=True, exist_ok=True)
    paths = [arguments.out / name for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        write_whole(path, text)
    written = [str(path) for path in paths]
    show(console, arguments, {"target": arguments.target, "written": written}, *(f"wrote {path}" for path in written))
    return ExitCode.FINE


def _show_targets(arguments: Namespace, console: Console) -> int:
    """Print the targets: the tool and its version, what it runs, and what was done to check it."""
    from phaze.installed import installed_plugins

    targets = [offer.value for offer in sorted(installed_plugins().targets(), key=lambda offer: offer.name)]
    rows = [
        {
            "target": target.name,
            "tool": getattr(target, "tool", None) or ", ".join(target.libraries) or target.name,
            "runs": runs_text(target.capabilities),
            "checked": getattr(target, "checked", "by its plugin"),
        }
        for target in targets
    ]
    table = plain_table(["target", "for", "runs", "checked"], [list(row.values()) for row in rows])
    show(console, arguments, {"targets": rows}, table)
    return ExitCode.FINE


def runs_text(capabilities: Capabilities) -> str:
    """What a target runs, in few words."""
    zero_stages = sorted(capabilities.zero_stages | capabilities.master_zero_stages)
    axes = {
        "cp": capabilities.allows_context_parallel,
        "ep": capabilities.allows_expert_parallel,
        "ZeRO groups": capabilities.allows_shard_groups,
    }
    parts = [
        f"ZeRO {', '.join(map(str, zero_stages))}",
        f"pipelines {', '.join(sorted(capabilities.schedules))}" if capabilities.schedules else "one stage",
        *(name for name, is_there in axes.items() if is_there),
        f"recompute {', '.join(sorted(capabilities.recompute_modes))}",
        *sorted(capabilities.product_dtypes),
        *(f"no {first} beside {_axis_text(second)}" for first, second in sorted(capabilities.excluded_axes)),
        *_restricted_stages(capabilities),
    ]
    return "; ".join(parts)


def _axis_text(axis: str) -> str:
    return "ZeRO groups" if axis == "shard" else axis


def _restricted_stages(capabilities: Capabilities) -> list[str]:
    """The ZeRO stages beside tp, cp and ep, where the target does not run all of its stages there."""
    stages = {
        "tp": capabilities.tensor_parallel_zero_stages,
        "cp": capabilities.context_parallel_zero_stages if capabilities.allows_context_parallel else None,
        "ep": capabilities.expert_parallel_zero_stages if capabilities.allows_expert_parallel else None,
    }
    return [
        f"{axis} with ZeRO {', '.join(map(str, sorted(run & capabilities.zero_stages)))}"
        for axis, run in stages.items()
        if run is not None and not capabilities.zero_stages <= run
    ]


export_plan = Command(
    name="export",
    group=CommandGroup.PLANS,
    summary="write a saved plan for the tool that is to run it",
    configure=_configure_export,
    run=_run_export,
)


def _configure_report(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    what = "a plan or a search that was saved, or the journal of a search"
    parser.add_argument("file", metavar="FILE", type=Path, help=what)
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page (default: beside the file, as .html)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument("--trace", metavar="FILE", help="of a plan: also write its timeline as a Chrome trace")
    more = "; of a journal, once for each model in their order (default: by the names in it)"
    add_model_argument(parser, "--model", more, required=False, action="append")
    add_json_option(parser)


def _run_report(arguments: Namespace, console: Console) -> int:
    """Write the page, say where it is, and open it if that is wanted."""
    from phaze.file_access import write_whole

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
    configure=_configure_report,
    run=_run_report,
)
