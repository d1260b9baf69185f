"""The page of a plan: what to do, how fast it is and how that is known, drawn from the saved plan alone."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

from phaze.parallelism import ALL_DEVICES, Parallelism
from phaze.plan.plan import Landscape, LayerKind, Plan, PlanStatus, SplitDim
from phaze.plan.plan_integrity import BESIDE_ITEMS
from phaze.report.html_page import Markup, build_page, chart, element, joined, section, table
from phaze.report.plan_page_contents import (
    link_traffic,
    places,
    plural,
    strategy_sentence,
    timeline_columns,
    uncertainty_text,
)
from phaze.report.plan_text import (
    degrees_text,
    objective_text,
    percent_up,
    provenance_lines,
    seconds_text,
    strategy_text,
    verdict,
    zero_text,
)

__all__ = ["GIB", "plan_chart_data", "plan_page", "step_bar", "tiles"]

GIB = 2**30
"""Bytes in a GiB, in which memory is shown."""

_PART_NAMES = {
    "compute_s": "compute",
    "exposed_communication_s": "exposed communication",
    "bubble_s": "bubble",
    "update_s": "update",
}

_PART_COLOURS = (0, 5, 2, 3)
"""The colours of a step's parts, which are those of the same things in the timeline."""

_CONTENTS = {
    "step": "Overview",
    "timeline": "Timeline",
    "memory": "Memory",
    "mesh": "Devices and links",
    "layers": "Where the time goes",
    "landscape": "What was searched",
    "others": "Other plans",
    "layouts": "Layouts",
    "proof": "How it is known",
}


def plan_page(plan: Plan) -> str:
    """The whole page."""
    body = joined(
        (
            _headline(plan),
            _timeline_section(plan),
            _memory_section(plan),
            _mesh_section(plan),
            _layers_section(plan),
            _landscape_section(plan),
            _others_section(plan),
            _layouts_section(plan),
            _proof_section(plan),
        )
    )
    return build_page(
        f"{plan.model.name} on {plan.cluster.device_count} x {plan.cluster.accelerator.name}",
        body,
        plan_chart_data(plan),
        contents=_CONTENTS,
        scripts=("timeline.js", "memory.js", "plan.js"),
    )


def plan_chart_data(plan: Plan) -> dict[str, object]:
    """What the page's scripts draw."""
    counts = Counter(layer.kind for stage in plan.stages for layer in stage.layers)
    met = plan.landscape
    return {
        "timeline": timeline_columns(plan.timeline()),
        "memory": [
            {"place": place, "items": _memory_items(memory), "total": memory["total"] / GIB}
            for place, memory in enumerate(_memory_by_place(plan))
        ],
        "capacity": plan.stages[0].memory_bytes["capacity"] / GIB,
        "margin": plan.question.calibration.margin,
        "places": [{"tp": tp, "first": ranks[0], "count": len(ranks)} for tp, ranks in places(plan)],
        "levels": [level.size for level in plan.cluster.levels],
        "devices": plan.cluster.device_count,
        "layers": [
            {
                "name": kind.name,
                "count": counts[number],
                "recompute": kind.recompute,
                "ops": [
                    [name, op.phase, op.seconds, op.binding]
                    for name, op in zip(_short_names(kind), kind.ops, strict=True)
                ],
            }
            for number, kind in enumerate(plan.layer_kinds)
        ],
        "landscape": {
            "strategies": [
                {
                    "seconds": seconds,
                    "gib": memory / GIB,
                    "state": state,
                    "text": _met_text(met, index),
                }
                for index, (state, seconds, memory) in enumerate(
                    zip(met.state, met.seconds, met.memory_bytes, strict=True)
                )
            ],
            "plan": {
                "seconds": plan.step_time_s,
                "gib": max(memory["total"] for memory in _memory_by_place(plan)) / GIB,
                "text": strategy_text(plan.strategy),
            },
            "bound": plan.bound_s,
        },
    }


def _met_text(met: Landscape, index: int) -> str:
    """One strategy that the search met, in the words of `strategy_text`."""
    replicas = met.dp[index] * met.cp[index]
    strategy = Parallelism(
        dp=met.dp[index],
        cp=met.cp[index],
        ep=met.ep[index],
        shard=met.shard[index] if met.zero[index] and met.shard[index] < replicas else ALL_DEVICES,
        zero=met.zero[index],
        tp=met.tp[index],
        pp=met.pp[index],
    )
    schedule = f", {met.schedule[index]}" if strategy.pp > 1 else ""
    chunks = f", {met.chunks[index]} chunks" if met.chunks[index] > 1 else ""
    size = met.micro_batch_size[index]
    return f"{degrees_text(strategy)}{chunks}{schedule}, {zero_text(strategy)}, microbatch {size}"


def _short_names(kind: LayerKind) -> list[str]:
    """The names of a layer's ops without the path of the layer, which ends with its number where layers repeat."""
    return [re.sub(r"^.*?\.\d+\.(?=.)", "", op.name) for op in kind.ops]


def _memory_by_place(plan: Plan) -> list[Mapping[str, float]]:
    by_place = {stage.place: stage.memory_bytes for stage in plan.stages}
    return [by_place[place] for place in sorted(by_place)]


def _memory_items(memory: Mapping[str, float]) -> dict[str, float]:
    return {item: size / GIB for item, size in memory.items() if item not in BESIDE_ITEMS and size > 0}


def tiles(plan: Plan) -> Markup:
    """The five numbers that people ask for first."""
    unit = "tokens" if plan.model.tokens_per_sample > 1 else "samples"
    fullest = max(_memory_by_place(plan), key=lambda memory: memory["total"])
    proven_gap = f"≤ {percent_up(plan.gap)}"
    proof = {
        PlanStatus.OPTIMAL: ("optimal", "proven: no plan is faster"),
        PlanStatus.WITHIN_GAP: (proven_gap, "from the best possible, proven"),
        PlanStatus.ABOVE_GAP: (proven_gap, f"from the best, proven; {plan.question.gap * 100:.4g} % was asked"),
        PlanStatus.INTERRUPTED: (proven_gap, "from the best; interrupted"),
        PlanStatus.DOES_NOT_FIT: ("does not fit", "priced as if it did"),
    }[plan.status]
    shown = (
        ("Step", seconds_text(plan.step_time_s), f"{plan.question.global_batch_size:,} samples"),
        ("Throughput", f"{plan.tokens_per_s:,.0f}", f"{unit} per second"),
        ("MFU", f"{plan.mfu:.1%}", "of peak matrix flops"),
        ("Fullest device", f"{fullest['total'] / GIB:.1f} GiB", f"of {fullest['capacity'] / GIB:.0f} GiB"),
        ("Gap", *proof),
    )
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value), element("dd", note, class_="note"), class_="tile")
            for name, value, note in shown
        ),
        class_="tiles" if plan.is_feasible else "tiles bad",
    )


def step_bar(plan: Plan) -> Markup:
    """The step as one bar of its parts, with a legend that says the numbers."""
    parts = [(name, getattr(plan.step_time_parts, field)) for field, name in _PART_NAMES.items()]
    total = sum(seconds for _, seconds in parts) or 1.0
    bar = [
        element("span", class_=f"part part-{_PART_COLOURS[number]}", style=f"flex-grow:{seconds / total:.5f}")
        for number, (_, seconds) in enumerate(parts)
        if seconds > 0
    ]
    legend = [
        element(
            "li",
            element("span", class_=f"swatch part-{_PART_COLOURS[number]}"),
            f"{name} ",
            element("strong", f"{seconds / total:.1%}"),
            f" {seconds_text(seconds)}",
        )
        for number, (name, seconds) in enumerate(parts)
    ]
    return element(
        "div",
        element("div", *bar, class_="bar", aria_hidden="true"),
        element("ul", *legend, class_="legend"),
        class_="step-bar",
    )


def _objective(plan: Plan) -> list[Markup]:
    """What was made small, and the cost, where either is known."""
    text = objective_text(plan)
    return [element("p", element("strong", "Objective. "), _sentence(text))] if text else []


def _headline(plan: Plan) -> Markup:
    cluster = plan.cluster
    size = f"{plan.model.parameter_count:,} parameters, {plural(plan.model.layers, 'layer')}"
    return element(
        "header",
        element("h1", plan.model.name, element("small", f" on {cluster.device_count:,} x {cluster.accelerator.name}")),
        element("p", f"{size}. Target {plan.provenance.target}.", class_="subtitle"),
        tiles(plan),
        step_bar(plan),
        element(
            "div",
            element(
                "div",
                element("p", strategy_sentence(plan), class_="lead"),
                element("p", element("code", strategy_text(plan.strategy))),
            ),
            element(
                "div",
                *(
                    [element("p", element("strong", "Objective. "), _sentence(text))]
                    if (text := objective_text(plan))
                    else []
                ),
                element("p", element("strong", "Proof. "), _sentence(verdict(plan))),
                element("p", element("strong", "Certainty. "), uncertainty_text(plan)),
                element("ul", *(element("li", _sentence(text)) for text in plan.binds), class_="findings"),
            ),
            class_="pair",
        ),
        id="step",
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _timeline_section(plan: Plan) -> Markup:
    rows = [(str(index), _busy(plan, index)) for index in range(len(plan.stages))]
    how = (
        "One copy of the pipeline; the others do the same at the same time. Zoom with the buttons, a pinch or Ctrl and "
        "the wheel, and drag; with the keyboard + and - zoom, the arrows move and 0 shows everything."
    )
    stages = table(
        ["stage", "layers", "forward", "backward", "of it recompute", "receive", "reduce gradients", "update"],
        [(index, *cells) for index, cells in rows],
        aria_label="Passes of every stage",
    )
    return section(
        "timeline",
        "Timeline of one step",
        element("p", how),
        chart("timeline", "Timeline of the pipeline"),
        element("details", element("summary", "The passes of every stage as a table"), stages),
    )


def _busy(plan: Plan, index: int) -> tuple[str, ...]:
    stage = plan.stages[index]
    passes = stage.passes
    return (
        f"{stage.layers[0].index}-{stage.layers[-1].index}",
        seconds_text(stage.forward_s),
        seconds_text(stage.backward_s),
        seconds_text(passes.recompute_s),
        f"{seconds_text(passes.receive_s)} and {seconds_text(passes.receive_gradient_s)}",
        seconds_text(passes.reduction_s + passes.shared_reduction_s),
        seconds_text(passes.update_s),
    )


def _memory_section(plan: Plan) -> Markup:
    memories = _memory_by_place(plan)
    items = list(dict.fromkeys(item for memory in memories for item in memory if item != "capacity"))
    fits = {stage.place: stage.fit for stage in plan.stages}
    rows = [
        (str(place), *(f"{memory.get(item, 0.0) / GIB:.2f}" for item in items), fits[place])
        for place, memory in enumerate(memories)
    ]
    margin = plan.question.calibration.margin
    text = f"GiB on one device of each place in the pipeline, against its {memories[0]['capacity'] / GIB:.0f} GiB"
    text += f" and the {margin:.0%} that should stay free." if margin else "."
    return section(
        "memory",
        "Memory",
        element("p", text),
        chart("memory", "Memory of every place in the pipeline by item"),
        element(
            "details",
            element("summary", "The same as a table"),
            table(["place", *(f">{item}" for item in items), "fit"], rows, aria_label="Memory by item in GiB"),
        ),
    )


def _mesh_section(plan: Plan) -> Markup:
    levels = plan.cluster.levels
    rows = [
        (
            traffic.name,
            str(traffic.devices),
            traffic.sends,
            "stays on one device"
            if traffic.level is None
            else f"level {traffic.level + 1}: {levels[traffic.level].bandwidth_bytes_per_s / 1e9:,.0f} GB/s",
        )
        for traffic in link_traffic(plan)
    ]
    used = sum(len(ranks) for _, ranks in places(plan))
    idle = plan.cluster.device_count - used
    sizes = [math.prod(level.size for level in levels[: number + 1]) for number in range(len(levels))]
    told = [
        f"level {number + 1} joins {size:,} devices at {level.bandwidth_bytes_per_s / 1e9:,.0f} GB/s each"
        for number, (level, size) in enumerate(zip(levels, sizes, strict=True))
    ]
    text = (
        f"Every square is a device, every row a place in the pipeline. {plural(idle, 'device')} idle. "
        if idle
        else ("Every square is a device, every row a place in the pipeline. ")
    )
    links = table(["traffic", ">devices", "what is sent", "outermost links"], rows, aria_label="Traffic and links")
    return section(
        "mesh",
        "Devices and links",
        element("p", text, "Links: " + "; ".join(told) + "." if told else ""),
        chart("mesh", "Devices by pipeline place, copy and tensor-parallel neighbour"),
        links if rows else element("p", "Nothing is sent between devices."),
    )


def _layers_section(plan: Plan) -> Markup:
    counts = Counter(layer.kind for stage in plan.stages for layer in stage.layers)
    rows = [
        (
            kind.name,
            str(counts[number]),
            kind.recompute,
            seconds_text(kind.forward_s),
            seconds_text(kind.backward_s),
            seconds_text(kind.recompute_s),
        )
        for number, kind in enumerate(plan.layer_kinds)
    ]
    return section(
        "layers",
        "Where the time goes",
        element(
            "p",
            "One microbatch through all layers: every area is an operator (with what is fused into it), as large as "
            "its time, in the colour of what decides it.",
        ),
        chart("layers", "Operators by time, grouped by layer"),
        table(
            ["layer", ">how many", "recompute", ">forward", ">backward", ">recompute time"],
            rows,
            aria_label="Time of every distinct layer",
        ),
    )


def _landscape_section(plan: Plan) -> Markup:
    met = plan.landscape
    states = Counter(met.state)
    left_out = f" Shown are the {len(met.state):,} with the least times." if met.met > len(met.state) else ""
    met_text = plural(met.met, "strategy").replace("strategys", "strategies")
    left_open = ", or left open" if states["open"] else ""
    text = (
        f"The search met {met_text} with microbatch sizes and tensor-parallel degrees that no bound ruled out as a "
        f"whole, and simulated {states['simulated']:,} of them. The others were ruled out by a bound under their time"
        f"{left_open}. A hollow point stands at its bounds: it takes at least this time and this memory.{left_out}"
    )
    if met.met <= 1:
        text = "The strategy was given, so that nothing else was searched."
    drawn = () if met.met <= 1 else (chart("landscape", "Strategies by step time and memory"),)
    return section("landscape", "What was searched", element("p", text), *drawn)


def _others_section(plan: Plan) -> Markup:
    parts: list[Markup] = []
    if plan.remedies:
        fitting = [(remedy.text, f"{remedy.argument}={remedy.value}") for remedy in plan.remedies]
        listed = [element("li", f"{text}: ", element("code", argument)) for text, argument in fitting]
        parts += [element("h3", "What would fit"), element("ul", *listed)]
    if plan.runners_up:
        runners_up = [
            (
                other.kind,
                "" if other.step_time_s is None else seconds_text(other.step_time_s),
                "" if other.step_time_s is None else f"{other.step_time_s / plan.step_time_s - 1:+.1%}",
                other.reason if other.strategy is None else strategy_text(other.strategy),
            )
            for other in plan.runners_up
        ]
        headings = ["the best with", ">step", ">against the plan", "strategy"]
        parts += [element("h3", "Runners-up"), table(headings, runners_up, aria_label="Runners-up")]
    if plan.changes:
        changes = [
            (
                change.text,
                "nothing fits" if change.step_time_s is None else seconds_text(change.step_time_s),
                "" if change.step_time_s is None else f"{plan.step_time_s / change.step_time_s - 1:+.1%}",
            )
            for change in plan.changes
        ]
        headings = ["with", ">step", ">throughput"]
        parts += [element("h3", "What if"), table(headings, changes, aria_label="What other hardware would bring")]
    if not parts:
        ways = (element("code", "phaze explain"), " does, and so does ", element("code", "plan.explained()"), ".")
        parts.append(element("p", "Nobody has looked for other plans yet: ", *ways))
    return section("others", "Other plans", *parts)


def _layouts_section(plan: Plan) -> Markup:
    rows = [
        (name, kind, ", ".join(map(_split_text, splits)))
        for kind, layouts in (("parameter", plan.layouts.parameters), ("between layers", plan.layouts.boundaries))
        for name, splits in layouts.items()
    ]
    if not rows:
        return section("layouts", "Layouts", element("p", "Every tensor is whole on each device of its stage."))
    control = element(
        "label",
        "Filter ",
        element("input", type="search", data_filters="layouts-table", placeholder="such as attn or dimension 0"),
        element("output", f"{len(rows)} of {len(rows)}", id="layouts-table-count"),
        class_="filter",
    )
    return section(
        "layouts",
        "Layouts",
        element("p", "Tensors that are split over the tensor-parallel devices; all others are whole on each of them."),
        control,
        table(["tensor", "kind", "split"], rows, id="layouts-table", aria_label="Layouts of tensors", class_="long"),
    )


def _split_text(split: SplitDim) -> str:
    strided = "" if split.outer == 1 else f", in {split.outer} strides"
    return f"dimension {split.dim} into {split.ways}{strided}"


def _proof_section(plan: Plan) -> Markup:
    facts = [_sentence(line) for line in (f"method: {plan.provenance.method}", *provenance_lines(plan))]
    hashes = plan.hashes
    name = plan.model.name
    commands = "\n".join(
        (
            f"phaze explain plan.json{'' if plan.is_explained else f' --model {name}'}",
            f"phaze verify plan.json --model {name}",
            "phaze report plan.json --open",
        )
    )
    return section(
        "proof",
        "How it is known",
        element("ul", *(element("li", fact) for fact in facts)),
        element("h3", "Check it"),
        element("p", "With the plan saved as plan.json, other and plainer code derives every number again:"),
        element("pre", element("code", commands)),
        element(
            "p",
            f"Graph {hashes.graph[:12]}, hardware {hashes.hardware[:12]}, question {hashes.question[:12]}, phaze "
            f"{hashes.version}, found in {seconds_text(plan.run.seconds)}.",
            class_="note",
        ),
    )
