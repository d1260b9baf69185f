"""`phaze export`: a saved plan as the files of the tool that is to run it, and the list of such tools."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show
from phaze.commands.question_arguments import add_model_argument, find_model

if TYPE_CHECKING:
    from phaze.capabilities import Capabilities

__all__ = ["export_plan"]


def _configure(parser: ArgumentParser) -> None:
    """Add the arguments of `phaze export`."""
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="a plan that was saved")
    parser.add_argument("--list", action="store_true", help="show the targets, what each runs and how it was checked")
    parser.add_argument("--target", metavar="NAME", help="the tool that the files are for")
    parser.add_argument(
        "-o", "--out", "--output", dest="out", metavar="DIR", type=Path, help="write the files here, print none"
    )
    add_model_argument(parser, "--model", required=False)
    add_json_option(parser)


def _run(arguments: Namespace, console: Console) -> int:
    """Print the files, or write them; or list the targets."""
    import phaze
    from phaze.errors import QuestionError
    from phaze.file_writing import write_whole

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
    configure=_configure,
    run=_run,
)
