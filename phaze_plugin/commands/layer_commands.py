"""What a model's layers take on one chip: `phaze cost` lists its ops, `phaze schedule` puts a layer on the cores.

`phaze cost` lists the most expensive distinct ops of a model on one chip, and what binds them.

`phaze schedule` schedules operators on the cores of an accelerator, with a proven bound. Without `--layer` every
distinct layer of the model gets a line; with it one layer is drawn as a Gantt chart.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
from phaze.commands.question_arguments import add_file_arguments, file_options

if TYPE_CHECKING:
    from phaze.cost.cost_breakdown import CostReport, CostRow
    from phaze.hooks import PluginManager
    from phaze.ir import Graph, Layer
    from phaze.profile.layer_passes import ProfileOptions
    from phaze.schedule import Method, Schedule
    from phaze.shard import Axis, ShardedLayer, ShardedModel
    from phaze.solvers import SolverChain

__all__ = ["cost", "schedule_command"]

_TOP = 15


def _configure_cost(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a known model's name, or the path of a model or graph")
    parser.add_argument(
        "--chip", required=True, metavar="NAME", help="an accelerator's name (phaze chips) or JSON file"
    )
    parser.add_argument(
        "--top", type=positive_integer, default=_TOP, metavar="N", help=f"rows to show (default {_TOP})"
    )
    parser.add_argument(
        "--sequence-length",
        type=positive_integer,
        metavar="N",
        help="positions of a sequence (default: the model's own)",
    )
    parser.add_argument(
        "--micro-batch-size", type=positive_integer, metavar="N", help="sequences per microbatch (default 1)"
    )
    parser.add_argument("--precision", default="bf16-adam", metavar="RECIPE", help="default bf16-adam")
    parser.add_argument(
        "--fuse", action="store_true", help="fuse elementwise operators into the matrix products before them"
    )
    add_attention_option(parser)
    add_json_option(parser)
    add_file_arguments(parser)


def _run_cost(arguments: Namespace, console: Console) -> int:
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
    document = _cost_document(report, title) | counts
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


def _cost_document(report: CostReport, title: str) -> dict[str, object]:
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
    yield plain_table(columns, [_cost_cells(row, report.total_s) for row in shown], title=title)
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


def _cost_cells(row: CostRow, total_s: float) -> tuple[str, ...]:
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
    summary="list what the operators of a model cost on a chip, the most expensive first, and what limits each",
    configure=_configure_cost,
    run=_run_cost,
)


_PHASES = ("forward", "backward")
_METHODS = "auto, exact, cp-sat, milp or list"

_SOLVER_WORK = 5.0
"""Work after which `cp-sat` and `milp` keep the gap that they have: roughly seconds, on HiGHS ten times as many.

Without it the paper's program can run for hours on a backward pass of 30 operators.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerSchedule:
    """One distinct layer, how often it occurs, and the schedule of one of its passes."""

    layer: Layer
    count: int
    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inquiry:
    """How the layers of the model are scheduled."""

    phase: str
    method: Method
    solver: SolverChain | None
    gap: float
    options: ProfileOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlicedModel:
    """The model in the types of its precision, and the layouts of its layers over the tensor-parallel devices."""

    graph: Graph
    axis: Axis
    sharded: ShardedModel | None  # None: each layer is whole on one device

    def sharded_layer(self, layer: Layer) -> ShardedLayer:
        """One layer as it lies on its devices."""
        from phaze.shard import ShardingProblem, unsharded

        if self.sharded is None:
            return unsharded(ShardingProblem(graph=self.graph, layer=layer, axis=self.axis))
        return self.sharded.layers[layer.index]


def _configure_schedule(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a known model's name, or the path of a model or graph")
    parser.add_argument(
        "--chip", required=True, metavar="NAME", help="an accelerator's name (phaze chips) or JSON file"
    )
    parser.add_argument("--layer", metavar="NAME", help="the layer to draw (none: a line for each distinct layer)")
    parser.add_argument("--phase", choices=_PHASES, default=_PHASES[0], help=f"the pass to show (default {_PHASES[0]})")
    parser.add_argument(
        "--tp", type=positive_integer, default=1, metavar="N", help="devices that share a layer (default 1)"
    )
    parser.add_argument(
        "--micro-batch-size", type=positive_integer, metavar="N", help="sequences per microbatch (default 1)"
    )
    parser.add_argument(
        "--sequence-length",
        type=positive_integer,
        metavar="N",
        help="positions of a sequence (default: the model's own)",
    )
    parser.add_argument("--precision", default="bf16-adam", metavar="RECIPE", help="default bf16-adam")
    parser.add_argument("--method", default="auto", metavar="NAME", help=f"{_METHODS} (default auto)")
    parser.add_argument(
        "--solver", metavar="NAME", help="run the paper's integer program on highs, scip, gurobi or a plugin's solver"
    )
    parser.add_argument(
        "--gap",
        type=gap,
        default=0.01,
        metavar="PART",
        help="end when the answer is proven to be this near to the best (default 0.01)",
    )
    add_attention_option(parser)
    parser.add_argument("--trace", metavar="FILE", help="write the layer's schedule as a Chrome trace")
    add_json_option(parser)


def gap(text: str) -> float:
    """An argument's type: a number of at least 0 and less than 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise ArgumentTypeError(f"{text!r} is not a gap; expected at least 0 and less than 1, such as 0.01")
    return value


def _run_schedule(arguments: Namespace, console: Console) -> int:
    """Schedule one layer or all distinct ones, and show what came out."""
    from phaze.installed import installed_plugins

    plugins = installed_plugins()
    inquiry = _inquiry(arguments, plugins)
    model = _sliced_model(arguments, plugins)
    if arguments.layer is not None:
        chosen = _schedule(model, _find_layer(model.graph, arguments.layer), inquiry)
        if arguments.trace is not None:
            _write_trace(chosen.schedule, Path(arguments.trace))
        title = _title(model, inquiry.phase)
        show(console, arguments, _schedule_document(chosen) | {"title": title}, *_chart(chosen, title, arguments.trace))
        return ExitCode.FINE
    schedules = [_schedule(model, layer, inquiry) for layer in model.graph.distinct_layers]
    title = _title(model, inquiry.phase)
    document = {"title": title, "layers": [_schedule_document(scheduled) for scheduled in schedules]}
    show(console, arguments, document, *_table(schedules, title))
    return ExitCode.FINE


def _inquiry(arguments: Namespace, plugins: PluginManager) -> _Inquiry:
    """The options that say how to schedule; ScheduleError and UnknownNameError on what cannot be."""
    from phaze.cost import plugin_prices
    from phaze.errors import ScheduleError, UnknownNameError
    from phaze.profile.layer_passes import ProfileOptions
    from phaze.schedule import Method
    from phaze.solvers import choose_solver

    if arguments.method not in list(Method):
        raise UnknownNameError("scheduling method", arguments.method, list(Method))
    method = Method(arguments.method)
    if arguments.solver is not None and method not in (Method.AUTO, Method.MILP):
        raise ScheduleError(f"--solver goes with the methods auto and milp; {method.value} uses no linear solver.")
    if arguments.trace is not None and arguments.layer is None:
        raise ScheduleError("--trace writes the schedule of one layer: name it with --layer.")
    return _Inquiry(
        phase=arguments.phase,
        method=method,
        solver=None if arguments.solver is None else choose_solver(arguments.solver, plugins),
        gap=arguments.gap,
        options=ProfileOptions(prices=plugin_prices(plugins)),
    )


def _sliced_model(arguments: Namespace, plugins: PluginManager) -> _SlicedModel:
    """Import, cast and slice the model."""
    from phaze.cost import calibration_of, fuses_loss, planned_graph, settled_attention
    from phaze.hardware import cast_graph, parse_cluster, precision_recipe
    from phaze.model_import import import_graph
    from phaze.shard import Axis, ShardOptions, shard_model
    from phaze.solvers import choose_solver

    cluster = parse_cluster(f"{arguments.chip}:{arguments.tp}", plugins)
    recipe = precision_recipe(arguments.precision)
    lengths = {} if arguments.sequence_length is None else {"sequence_length": arguments.sequence_length}
    mode = settled_attention(arguments.attention, cluster.accelerator)
    calibration = calibration_of(cluster.accelerator)
    has_fused_loss = fuses_loss(cluster.accelerator, calibration)
    graph = planned_graph(import_graph(arguments.model, **lengths), mode, has_fused_loss=has_fused_loss)
    if arguments.micro_batch_size is not None:
        graph = graph.with_micro_batch(arguments.micro_batch_size)
    axis = Axis(cluster, arguments.tp, calibration)
    graph = cast_graph(graph, recipe)
    if arguments.tp == 1:
        return _SlicedModel(graph=graph, axis=axis, sharded=None)
    options = ShardOptions(solver=choose_solver(arguments.solver, plugins))
    return _SlicedModel(graph=graph, axis=axis, sharded=shard_model(graph, axis, options))


def _find_layer(graph: Graph, name: str) -> Layer:
    """The first layer of that name; UnknownNameError lists the distinct ones."""
    from phaze.errors import UnknownNameError

    for layer in graph.layers:
        if layer.name == name:
            return layer
    raise UnknownNameError("layer", name, [layer.name for layer in graph.distinct_layers])


def _schedule(model: _SlicedModel, layer: Layer, inquiry: _Inquiry) -> _LayerSchedule:
    """Slice, price and schedule one pass of one layer."""
    from phaze.ir.layers import single_layer
    from phaze.profile.layer_passes import priced_pass
    from phaze.schedule import Method, schedule_layer
    from phaze.shard import slice_layer

    sharded = model.sharded_layer(layer)
    local = slice_layer(sharded)
    passes = single_layer(local)
    ops = passes.forward if inquiry.phase == "forward" else passes.backward
    problem = priced_pass(sharded, local, ops, inquiry.options).problem()
    schedule = schedule_layer(
        replace(problem, name=layer.name),
        gap=inquiry.gap,
        work=_SOLVER_WORK if inquiry.method in (Method.CP_SAT, Method.MILP) else None,
        method=inquiry.method,
        solver=inquiry.solver,
    )
    counts = Counter(each.key for each in model.graph.layers)
    return _LayerSchedule(layer=layer, count=counts[layer.key], schedule=schedule)


def _title(model: _SlicedModel, phase: str) -> str:
    chip, graph = model.axis.cluster.accelerator, model.graph
    shared = f", tp {model.axis.tp}" if model.axis.tp > 1 else ""
    return f"{graph.name} on {chip.name}, {phase}, microbatch {graph.micro_batch_size}{shared}"


def _table(schedules: list[_LayerSchedule], title: str) -> Iterator[RenderableType]:
    """A line for each distinct layer, and how to see one of them."""
    columns = ["layer", ">count", ">ops", ">makespan", ">memory", ">time", ">bound", ">gap", "method"]
    yield plain_table(columns, [_schedule_cells(scheduled) for scheduled in schedules], title=title)
    often = max(schedules, key=lambda scheduled: scheduled.count)
    yield f'\nadd --layer "{often.layer.name}" to see the schedule of one of them.'


def _schedule_cells(scheduled: _LayerSchedule) -> tuple[str, ...]:
    from phaze.schedule import format_seconds

    schedule = scheduled.schedule
    times = (schedule.makespan_s, schedule.problem.floor_s, schedule.time_s, schedule.time_bound_s)
    return (
        scheduled.layer.name,
        str(scheduled.count),
        str(len(schedule.problem.jobs)),
        *(format_seconds(seconds) for seconds in times),
        f"{schedule.gap:.2%}",
        schedule.method if schedule.is_feasible else schedule.report,
    )


def _chart(scheduled: _LayerSchedule, title: str, trace: str | None) -> Iterator[RenderableType]:
    """The Gantt chart with what is proven."""
    from phaze.schedule import format_gantt, format_seconds

    schedule = scheduled.schedule
    yield f"{title}; {scheduled.layer.name} (one of {scheduled.count} such layers)\n"
    yield format_gantt(schedule)
    yield (
        f"makespan {format_seconds(schedule.makespan_s)}, bound {format_seconds(schedule.bound_s)}; memory needs "
        f"{format_seconds(schedule.problem.floor_s)}, so the layer takes {format_seconds(schedule.time_s)}, at most "
        f"{schedule.gap:.2%} over the least possible."
    )
    if schedule.report:
        yield f"solver: {schedule.report}."
    if trace is not None:
        yield f"trace written to {trace}; chrome://tracing and ui.perfetto.dev show it."


def _write_trace(schedule: Schedule, path: Path) -> None:
    from phaze.file_access import write_whole
    from phaze.schedule import chrome_trace

    write_whole(path, json.dumps(chrome_trace(schedule)))


def _schedule_document(scheduled: _LayerSchedule) -> dict[str, object]:
    """Everything about one schedule for machines; times of what cannot run are null."""
    from phaze.schedule import utilization

    schedule = scheduled.schedule
    jobs = zip(schedule.problem.jobs, schedule.problem.resources, schedule.jobs, strict=False)
    times = {"makespan_s": schedule.makespan_s, "bound_s": schedule.bound_s, "time_s": schedule.time_s}
    times |= {"time_bound_s": schedule.time_bound_s, "gap": schedule.gap}
    return {
        "layer": scheduled.layer.name,
        "count": scheduled.count,
        "status": schedule.status.value,
        "method": schedule.method,
        "report": schedule.report,
        "memory_s": schedule.problem.floor_s,
        **(times if schedule.is_feasible else dict.fromkeys(times)),
        "utilization": {resource.value: asdict(share) for resource, share in utilization(schedule).items()},
        "jobs": [{"name": job.name, "resource": resource.value} | asdict(entry) for job, resource, entry in jobs],
    }


schedule_command = Command(
    name="schedule",
    group=CommandGroup.HARDWARE,
    summary="show one layer's operators on an accelerator's cores, with the proven bound",
    configure=_configure_schedule,
    run=_run_schedule,
)
