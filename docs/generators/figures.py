"""The figures of the site, each drawn from what Phaze computes while the site is built."""

from __future__ import annotations

import contextlib
import io
import json
import math
from typing import Any

from svg_drawing import BLUE, DARK, GREEN, GREY, LIGHT, ORANGE, RED, Drawing

import phaze
from phaze.cli import main
from phaze.cost.calibration import fitted_families
from phaze.ir import Graph
from phaze.ir.rule import names_of
from phaze.place.simulation.timeline import Timeline

__all__ = ["all_figures"]

_COLORS = {
    "forward": BLUE,
    "backward": ORANGE,
    "weight": GREEN,
    "recompute": RED,
    "receive": GREY,
    "reduce": GREY,
    "update": DARK,
}
"""The colour of what a device does in a timeline."""


def all_figures() -> dict[str, str]:
    """Every figure as SVG, by name."""
    graph = phaze.import_graph("gpt2")
    timelines = {name: _pipeline(graph, name).timeline() for name in ("gpipe", "1f1b", "zero-bubble")}
    return {
        "pipeline": str(_pipelines({"1f1b": timelines["1f1b"]})),
        "schedules": str(_pipelines(timelines)),
        "rules": str(_rules(graph)),
        "sharding": str(_sharding()),
        "cores": str(_cores()),
        "bounds": str(_bounds(graph)),
        "designs": str(_designs(graph)),
        "errors": str(_errors()),
    }


def _pipelines(timelines: dict[str, Timeline]) -> Drawing:
    """One training step of a pipeline of four stages with eight microbatches, under each schedule."""
    stages, row, top, left, width = 4, 18, 24, 70, 620
    longest_s = max(timeline.time_s for timeline in timelines.values())
    block = stages * row + top + 12
    drawing = Drawing(left + width + 20, block * len(timelines) + 30, "training steps of a pipeline of four stages")
    for index, (name, timeline) in enumerate(timelines.items()):
        y = index * block + top
        drawing.text(left, y - 7, f"{name}: {timeline.time_s * 1e3:.1f} ms")
        for stage in range(stages):
            drawing.text(left - 8, y + stage * row + 13, f"stage {stage}", anchor="end")
            drawing.box(left, y + stage * row, width * timeline.time_s / longest_s, row - 3, LIGHT)
        for event in timeline.events:
            x, length = (left + width * t / longest_s for t in (event.start_s, event.end_s))
            color, note = _COLORS[event.kind], f"{event.kind} of microbatch {event.micro_batch}"
            drawing.box(x, y + event.device * row, length - x, row - 3, color, note)
    entries = {"forward": BLUE, "backward": ORANGE, "idle": LIGHT, "links": GREY, "update": DARK}
    if "zero-bubble" in timelines:
        entries["weights"] = GREEN
    drawing.legend(left, block * len(timelines) + 20, entries, step=100)
    return drawing


def _pipeline(graph: Graph, schedule: str) -> phaze.Plan:
    strategy = {"dp": 1, "pp": 4, "micro_batch_size": 1, "zero": 0, "schedule": schedule, "recompute": "none"}
    return phaze.evaluate(graph, cluster="a100-80gb:4", global_batch_size=8, strategy=strategy, compares=False).plan


def _rules(graph: Graph) -> Drawing:
    """The factors of every forward op of a block: in its results, contracted, or only normalised."""
    (block,) = (layer for layer in graph.distinct_layers if layer.name == "transformer.h.0")
    ops = [op for op in block.forward if op.kind.value != "view"]
    names = list(dict.fromkeys(factor.name for op in ops for factor in op.rule.factors))
    row, cell, left, top = 18, 46, 330, 34
    drawing = Drawing(left + cell * len(names) + 20, top + row * len(ops) + 34, "factors of the operators of a block")
    for column, name in enumerate(names):
        drawing.text(left + cell * (column + 0.5), top - 10, name, anchor="middle")
    for index, op in enumerate(ops):
        y = top + index * row
        drawing.text(left - 10, y + 13, f"{op.id.removeprefix('transformer.h.0.')}  ({op.kind})", anchor="end")
        in_results = {name for dims in op.rule.results for name in names_of(dims)}
        for factor in op.rule.factors:
            color = ORANGE if factor.name not in in_results else BLUE
            color = GREEN if factor.kind.value == "~" else color
            drawing.box(left + cell * names.index(factor.name), y, cell - 3, row - 3, color, str(factor))
    legend = {"in the result": BLUE, "contracted": ORANGE, "normalised": GREEN}
    drawing.legend(left - 250, top + row * len(ops) + 22, legend, step=140)
    return drawing


def _sharding() -> Drawing:
    """What one block of llama3.2-1b takes on 1, 2, 4 and 8 A100s: compute and collectives of a microbatch."""
    drawing, left, scale = Drawing(660, 210, "a block of llama3.2-1b by tp"), 60, 0.0
    graph = phaze.import_graph("llama3.2-1b", sequence_length=2048)
    for index, tp in enumerate((1, 2, 4, 8)):
        strategy = {"dp": 1, "tp": tp, "pp": 1, "zero": 0, "micro_batch_size": 1, "recompute": "none"}
        plan = phaze.evaluate(
            graph, cluster=f"a100-80gb:{tp}", global_batch_size=1, strategy=strategy, compares=False
        ).plan
        (kind,) = (kind for kind in plan.layer_kinds if kind.name == "model.layers.0")
        links_s = sum(op.seconds for op in kind.ops if op.binding == "link")
        total_s = kind.forward_s + kind.backward_s
        scale = scale or 380 / total_s
        y = 30 + index * 38
        drawing.text(left - 8, y + 17, f"tp {tp}", anchor="end")
        drawing.box(left, y, (total_s - links_s) * scale, 26, BLUE, f"{(total_s - links_s) * 1e3:.2f} ms of compute")
        drawing.box(left + (total_s - links_s) * scale, y, links_s * scale, 26, ORANGE, "collectives")
        drawing.text(left + total_s * scale + 8, y + 17, f"{total_s * 1e3:.2f} ms, {links_s * 1e3:.2f} of it on links")
    drawing.legend(left, 200, {"compute": BLUE, "collectives": ORANGE})
    return drawing


def _cores() -> Drawing:
    """The forward pass of a block of gpt2 on the cores of the paper's baseline."""
    answer = _asked("schedule", "gpt2", "--chip", "tpuv4-paper", "--layer", "transformer.h.0")
    jobs = [job for job in answer["jobs"] if job["end_s"] > job["start_s"]]
    lanes = [("tensor", core) for core in range(8)] + [("vector", core) for core in range(2)]
    row, top, left, width = 16, 20, 80, 600
    drawing = Drawing(left + width + 20, top + row * len(lanes) + 34, "a layer's operators on the cores of a chip")
    for index, (resource, core) in enumerate(lanes):
        drawing.text(left - 8, top + index * row + 12, f"{resource} {core}", anchor="end", size=11)
        drawing.box(left, top + index * row, width, row - 2, LIGHT)
    for job in jobs:
        x, end = (left + width * job[name] / answer["makespan_s"] for name in ("start_s", "end_s"))
        for index, (resource, core) in enumerate(lanes):
            holds = resource in job["resource"] or job["resource"] == "both"
            if holds and (job["is_spread"] or job[f"{resource}_core"] == core):
                drawing.box(
                    x, top + index * row, end - x, row - 2, ORANGE if job["is_spread"] else BLUE, str(job["name"])
                )
    entries = {"on one core": BLUE, "spread over all": ORANGE, "idle": LIGHT}
    drawing.legend(left, top + row * len(lanes) + 22, entries, step=130)
    return drawing


def _asked(*arguments: str) -> dict[str, Any]:
    """What a command prints for machines."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main([*arguments, "--json"])
    assert code == 0, arguments
    answer: dict[str, Any] = json.loads(printed.getvalue())
    return answer


def _bounds(graph: Graph) -> Drawing:
    """Every strategy that the search for gpt2 on eight A100s met: its step time, or the bound that ruled it out."""
    plan = phaze.optimize(graph, cluster="a100-80gb:8", global_batch_size=64)
    landscape, left, top, width, height = plan.landscape, 60, 20, 600, 190
    seconds = sorted(zip(landscape.seconds, landscape.state, strict=True))
    low, high = math.log(seconds[0][0] * 0.97), math.log(seconds[-1][0])
    drawing = Drawing(left + width + 20, top + height + 50, "strategies that a search met")

    def y_of(value_s: float) -> float:
        return top + height * (high - math.log(value_s)) / (high - low)

    for index, (value_s, state) in enumerate(seconds):
        x, is_simulated = left + width * index / len(seconds), state == "simulated"
        note = f"{value_s * 1e3:.1f} ms, {state}"
        drawing.dot(x, y_of(value_s), BLUE if is_simulated else GREY, note, 4 if is_simulated else 2.4)
    drawing.line(left, y_of(plan.bound_s), left + width, y_of(plan.bound_s), RED, "4 3")
    drawing.text(left + width, y_of(plan.bound_s) - 5, f"bound {plan.bound_s * 1e3:.2f} ms", anchor="end", color=RED)
    for value_s in (seconds[0][0], seconds[-1][0]):
        drawing.text(left - 6, y_of(value_s) + 4, f"{value_s * 1e3:.0f} ms", anchor="end")
    words = f"{len(seconds)} of {landscape.met:,} strategies, fastest first"
    drawing.text(left + width / 2, top + height + 18, words, anchor="middle")
    drawing.legend(left, top + height + 40, {"simulated": BLUE, "bounded only": GREY})
    return drawing


def _designs(graph: Graph) -> Drawing:
    """How many accelerators of a space a search bounds, schedules and places until its answer is proven."""
    space = phaze.space.grid(
        tensor_cores=[2, 4, 8, 16],
        tensor_rows=[64, 128, 256],
        tensor_cols=[64, 128, 256],
        vector_cores=[2, 8],
        buffer_mib=[16, 32],
        max_area_mm2=280,
    )
    result = phaze.search(
        graph,
        devices=16,
        space=space,
        hbm_gib=[32],
        global_batch_size=64,
        tp=1,
        micro_batch_size=[2],
        executor="serial",
    )
    proof = result.certificate
    counts = {
        "bounded": proof.points,
        "scheduled": proof.scheduled,
        "placed": proof.placed,
    }
    left, row, width = 110, 30, 440
    drawing = Drawing(left + width + 110, 20 + row * len(counts) + 20, "accelerators that a search looked at")
    for index, (words, count) in enumerate(counts.items()):
        y, length = 18 + index * row, width * count / max(counts.values())
        drawing.text(left - 8, y + 15, words, anchor="end")
        drawing.box(left, y, length, row - 8, BLUE if index < 1 else RED, f"{count} accelerators")
        drawing.text(left + length + 8, y + 15, f"{count}")
    drawing.text(left, 18 + row * len(counts) + 12, f"best {result.best.name}, proven within {proof.gap:.2%}", size=11)
    return drawing


def _errors() -> Drawing:
    """Where 80 % of published runs lie around their prediction, each predicted by a fit that had not seen it."""
    rows = [(family, entry) for family, chip in fitted_families().items() for entry in chip.get("comparable") or ()]
    row, left, width, most = 26, 260, 340, 0.3
    drawing = Drawing(left + width + 90, 40 + row * len(rows), "measured against predicted step times")
    middle = left + width / 2
    for part in (-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3):
        x = middle + width / 2 * part / most
        drawing.line(x, 24, x, 30 + row * len(rows), DARK if part == 0 else LIGHT)
        drawing.text(x, 18, f"{part:+.0%}" if part else "predicted", anchor="middle", size=11)
    for index, (family, entry) in enumerate(rows):
        y = 32 + index * row
        kind = f"{'many nodes' if entry['has_many_nodes'] else 'one node'}, "
        kind += "8 bits or fewer" if entry["has_narrow_products"] else "16 bits"
        drawing.text(left - 10, y + 12, f"{family}, {kind}", anchor="end")
        low, high = (middle + width / 2 * entry[name] / most for name in ("tenth", "ninetieth"))
        drawing.box(low, y, high - low, row - 10, BLUE, f"{entry['tenth']:+.1%} to {entry['ninetieth']:+.1%}")
        drawing.text(left + width + 10, y + 12, f"{entry['runs']} runs")
    return drawing
