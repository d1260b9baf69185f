"""`phaze cost`: the most expensive distinct ops of a model on one chip, and what binds them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from phaze.commands.command import (
    Command,
    CommandGroup,
    ExitCode,
    add_attention_option,
    add_json_option,
    plain_table,
    positive_integer,
    show,
)
from phaze.commands.file_arguments import add_file_arguments, file_options

if TYPE_CHECKING:
    from phaze.cost.cost_breakdown import CostReport, CostRow
    from phaze.ir import Graph

__all__ = ["cost"]

_TOP = 15


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a known model's name, or the path of a model or graph")
    parser.add_argument(
        "--chip", required=True, metavar="NAME", help="an accelerator's name (phaze chips) or JSON file"
    )
    parser.add_argument(
        "--top", type=positive_integer, default=_TOP, metavar="N", help=f"rows to show (default {_TOP})"
    )
    parser.add_argument("--sequence-length", type=positive_integer, metavar="N", help="instead of the model's own")
    parser.add_argument(
        "--micro-batch-size", type=positive_integer, metavar="N", help="sequences per microbatch (default 1)"
    )
    parser.add_argument("--precision", default="bf16-adam", metavar="RECIPE", help="default bf16-adam")
    parser.add_argument("--fuse", action="store_true", help="join elementwise epilogues to their matrix ops")
    add_attention_option(parser)
    add_json_option(parser)
    add_file_arguments(parser)


def run(arguments: Namespace, console: Console) -> int:
    """Price the model's ops and show the most expensive ones."""
    from phaze.cost import AttentionMode, calibration_of, fuses_loss, planned_graph, plugin_prices, settled_attention
    from phaze.cost.cost_breakdown import cost_report
    from phaze.hardware import cast_graph, find_accelerator, precision_recipe
    from phaze.installed import installed_plugins
    from phaze.ir.backward import has_loss
    from phaze.model_import import import_graph

    plugins = installed_plugins()
    chip = find_accelerator(arguments.chip, plugins)
    recipe = precision_recipe(arguments.precision)
    options = {} if arguments.sequence_length is None else {"sequence_length": arguments.sequence_length}
    mode = settled_attention(arguments.attention, chip)
    graph = import_graph(arguments.model, **options, **file_options(arguments))
    # A program for inference is priced as it is.
    has_fused_loss = fuses_loss(chip, calibration_of(chip))
    trains = recipe.trains and has_loss(graph)
    graph = planned_graph(graph, mode, trains=trains, has_fused_loss=has_fused_loss)
    if arguments.micro_batch_size is not None:
        graph = graph.with_micro_batch(arguments.micro_batch_size)
    graph = cast_graph(graph, recipe)
    prices = plugin_prices(plugins)
    report = cost_report(graph, chip, recipe=recipe, is_fused=arguments.fuse, prices=prices)
    title = f"{graph.name} on {chip.name}, microbatch {graph.micro_batch_size}, {recipe.name}"
    counts = _attention_counts(graph)
    document = _document(report, title) | counts
    lines = _for_people(report, title, arguments.top)
    fused = [_attention_line(counts)] if mode is AttentionMode.FUSED else []
    show(console, arguments, document, *lines, *fused)
    return ExitCode.FINE


def _attention_counts(graph: Graph) -> dict[str, int]:
    from phaze.ir import OpKind, Phase

    kinds = [op.kind for op in graph.ops_of(Phase.FORWARD)]
    return {"fused_attentions": kinds.count(OpKind.ATTENTION), "separate_softmaxes": kinds.count(OpKind.SOFTMAX)}


def _attention_line(counts: dict[str, int]) -> str:
    return (
        f"attentions fused: {counts['fused_attentions']}; softmaxes that stay apart (losses, routers, learned biases): "
        f"{counts['separate_softmaxes']}."
    )


def _document(report: CostReport, title: str) -> dict[str, object]:
    return {
        "title": title,
        "calibration": report.calibration.name,
        "total_s": report.total_s,
        "energy_j": report.energy_j,
        "update": asdict(report.update) if report.update else None,
        "skipped_update_ops": report.skipped_update_ops,
        "rows": [asdict(row) | {"total_s": row.total_s} for row in report.rows],
    }


def _for_people(report: CostReport, title: str, top: int) -> Iterator[RenderableType]:
    columns = ["op", "phase", "shape", ">count", ">each us", ">one core us", ">share", "binds", ">MB", ">peak"]
    shown = report.rows[:top]
    yield plain_table(columns, [_cells(row, report.total_s) for row in shown], title=title)
    distinct = len(report.rows)
    yield (
        f"\n{len(shown)} of {distinct} distinct ops; all together {report.total_s * 1e3:.4g} ms one after the other, "
        f"and about {report.energy_j:.3g} J."
    )
    if report.update is not None:
        update = report.update
        yield f"the update takes {update.spread_s * 1e3:.4g} ms once per batch ({update.binding})."
    else:
        yield "there are no parameters, and so no update."
    if report.skipped_update_ops:
        yield f"{report.skipped_update_ops} captured update ops are left out: the line above stands for them."
    yield f"calibration: {report.calibration.name}."


def _cells(row: CostRow, total_s: float) -> tuple[str, ...]:
    return (
        row.functions,
        row.phase,
        row.shape,
        str(row.count),
        f"{row.spread_s * 1e6:.4g}",
        f"{row.core_s * 1e6:.4g}",
        f"{row.total_s / total_s:.1%}" if total_s else "",
        row.binding,
        f"{row.off_chip_bytes / 1e6:.4g}",
        f"{row.peak_share:.0%}" if row.peak_share else "",
    )


cost = Command(
    name="cost",
    group=CommandGroup.HARDWARE,
    summary="price a model's distinct ops on a chip, most expensive first, with what binds them",
    configure=configure,
    run=run,
)
