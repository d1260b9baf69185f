"""HTML views: the page of two plans side by side, and what notebooks show of plans, graphs, searches and comparisons.

`comparison_page` marks what differs between the plans. Notebooks get plain HTML without any script; a comparison shows
the same table there as on its page (`difference_table`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from phaze.ir import Graph, Phase
from phaze.plan.plan import Plan
from phaze.plan.plan_integrity import BESIDE_ITEMS
from phaze.report.html_page import Markup, build_page, chart, element, joined, section, table
from phaze.report.plan_page import GIB, plan_chart_data, step_bar
from phaze.report.plan_text import seconds_text, strategy_text, verdict

__all__ = [
    "comparison_page",
    "comparison_view",
    "difference_table",
    "evaluation_view",
    "graph_view",
    "plan_view",
    "search_view",
]

_CONTENTS = {"first-look": "Overview", "differences": "What differs", "timelines": "Timelines", "memories": "Memory"}


def comparison_page(first: Plan, second: Plan, rows: Sequence[tuple[str, str, str, str]], speedup: float) -> str:
    """The whole page; `rows` are names, both values as text, and how the second differs."""
    titles = ("First", "Second")
    plans = (first, second)
    data = {
        name: {
            key: value
            for key, value in plan_chart_data(plan).items()
            if key in ("timeline", "memory", "capacity", "margin")
        }
        for name, plan in zip(("first", "second"), plans, strict=True)
    }
    heads = [
        element(
            "div",
            element("h3", f"{title}: {seconds_text(plan.step_time_s)} a step"),
            element("p", element("code", strategy_text(plan.strategy))),
            step_bar(plan),
            element("p", verdict(plan), class_="note"),
        )
        for title, plan in zip(titles, plans, strict=True)
    ]
    body = joined(
        (
            element(
                "header",
                element("h1", f"{first.model.name} ", element("small", f"against {second.model.name}")),
                element("p", speedup_text(speedup), class_="lead"),
                element("div", *heads, class_="pair"),
                id="first-look",
            ),
            section("differences", "What differs", difference_table(rows)),
            section("timelines", "Timelines", _pair("timeline", "Timeline of the {} plan")),
            section("memories", "Memory", _pair("memory", "Memory of the {} plan in GiB")),
        )
    )
    return build_page(
        f"{first.model.name}: two plans compared",
        body,
        data,
        contents=_CONTENTS,
        scripts=("timeline.js", "memory.js", "compare.js"),
    )


def speedup_text(speedup: float) -> str:
    """How the second plan's throughput relates to the first one's."""
    if abs(speedup - 1) < 5e-5:
        return "Both plans have the same throughput."
    return f"The second plan has {speedup:.4g} times the throughput of the first."


def _pair(kind: str, label: str) -> Markup:
    charts = [
        element("div", element("h3", name.capitalize()), chart(f"{name}-{kind}", label.format(name)))
        for name in ("first", "second")
    ]
    return element("div", *charts, class_="pair")


def difference_table(rows: Sequence[tuple[str, str, str, str]]) -> Markup:
    """Both plans row by row; those that differ are marked, not by colour alone."""
    head = element(
        "tr", *(element("th", name, scope="col") for name in ("", "first", "second", "second against first"))
    )
    body = [
        element(
            "tr",
            element("th", name, scope="row"),
            element("td", before),
            element("td", after),
            element("td", "differs" if before != after and not change else change),
            class_="differs" if before != after else None,
        )
        for name, before, after, change in rows
    ]
    whole = element("table", element("thead", head), element("tbody", *body))
    return element("div", whole, class_="scrolled", tabindex="0", role="region", aria_label="What differs")


_COLOURS = ("#2f6fc4", "#e08a1e", "#9da1ab", "#4c9a6a", "#8a63c6", "#c94f6d", "#3aa6a6", "#9c7a4d")
"""Colours that can be told apart on light and on dark notebooks."""

_MOST_BARS = 12
"""Places of a pipeline whose memory is drawn: more would fill a screen; `plan.report()` draws all."""


def plan_view(plan: Plan) -> str:
    """The plan in a cell of a notebook."""
    unit = "tokens" if plan.model.tokens_per_sample > 1 else "samples"
    parts = plan.step_time_parts
    step = {
        "compute": parts.compute_s,
        "exposed communication": parts.exposed_communication_s,
        "bubble": parts.bubble_s,
        "update": parts.update_s,
    }
    return element(
        "div",
        element(
            "p",
            element("strong", f"{plan.model.name} on {plan.cluster.device_count:,} x {plan.cluster.accelerator.name}"),
            f": {seconds_text(plan.step_time_s)} a step, {plan.tokens_per_s:,.0f} {unit}/s, MFU {plan.mfu:.1%}",
        ),
        element("p", strategy_text(plan.strategy), element("br"), verdict(plan)),
        bars([("step", {name: seconds for name, seconds in step.items() if seconds > 0})], plan.step_time_s, "s"),
        _memory_bars(plan),
        element("p", element("small", "plan.report('plan.html') writes the whole page.")),
        style="max-width:48em;line-height:1.5",
    )


def _memory_bars(plan: Plan) -> Markup:
    by_place = {stage.place: stage.memory_bytes for stage in plan.stages}
    capacity = plan.stages[0].memory_bytes["capacity"] / GIB
    rows = [
        (
            f"place {place}",
            {item: size / GIB for item, size in by_place[place].items() if item not in BESIDE_ITEMS and size},
        )
        for place in sorted(by_place)[:_MOST_BARS]
    ]
    return bars(rows, capacity, "GiB")


def bars(rows: list[tuple[str, dict[str, float]]], full: float, unit: str) -> Markup:
    """A horizontal bar of parts for each row against a full length, with a legend."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    scale = max(full, *(sum(parts.values()) for _, parts in rows))
    drawn = [
        element(
            "div",
            element("span", label, style="flex:0 0 5em;font-size:.85em"),
            element(
                "span", *(_part(name, value, scale, colours[name], unit) for name, value in parts.items()), style=_TRACK
            ),
            element("span", f"{sum(parts.values()):.3g} of {full:.3g} {unit}", style="flex:0 0 9em;font-size:.85em"),
            style="display:flex;gap:.5em;align-items:center",
        )
        for label, parts in rows
    ]
    legend = [
        element("span", element("span", "■ ", style=f"color:{colours[name]}"), name, style="margin-right:1em")
        for name in names
    ]
    return element("div", *drawn, element("div", *legend, style="font-size:.85em"), style="margin:.5em 0")


_TRACK = "flex:1;display:flex;height:.9em;background:rgba(127,127,127,.2);border-radius:.2em;overflow:hidden"


def _part(name: str, value: float, scale: float, colour: str, unit: str) -> Markup:
    width = f"width:{value / scale:.3%};background:{colour}"
    return element("span", style=width, title=f"{name}: {value:.3g} {unit}")


def evaluation_view(plan: Plan, best: Plan | None, change: str | None) -> str:
    """A priced strategy in a cell of a notebook, and the best plan below it."""
    if best is None:
        return plan_view(plan)
    slower = plan.step_time_s / best.step_time_s - 1
    told = f"The best plan takes {seconds_text(best.step_time_s)}; this strategy is {abs(slower):.2%} "
    told += f"{'slower' if slower >= 0 else 'faster'}. Most valuable single change: {change or 'none helps'}."
    return element("div", Markup(plan_view(plan)), element("p", told), Markup(plan_view(best)))


def comparison_view(rows: Sequence[tuple[str, str, str, str]], speedup: float) -> str:
    """Two plans in a cell of a notebook."""
    return element("div", element("p", speedup_text(speedup)), difference_table(rows))


def search_view(document: Mapping[str, Any], text: str) -> str:
    """The answer of a search in a cell of a notebook: its text, and the evaluated designs by their value."""
    rows = sorted((row for row in document["explored"] if row["value"]), key=lambda row: -row["value"])[:_MOST_BARS]
    drawn = [(row["name"], {"value": row["value"]}) for row in rows]
    best = document["best"]
    return element(
        "div",
        element("p", element("strong", f"{best['name']}, {best['hbm_gib']:g} GiB of HBM, {best['area_mm2']:.0f} mm²")),
        element("pre", text),
        bars(drawn, document["certificate"]["bound"], "(bound)") if drawn else "",
        element("p", element("small", "result.report('search.html') writes the whole page.")),
    )


def graph_view(graph: Graph) -> str:
    """A model in a cell of a notebook: its layers, their parameters and their share of the work."""
    counts = Counter(layer.key for layer in graph.layers)
    work = {layer.key: sum(op.flops for op in layer.forward) for layer in graph.distinct_layers}
    total = sum(work[layer.key] for layer in graph.layers) or 1
    rows = [
        (
            layer.name,
            f"{counts[layer.key]:,}",
            f"{len(layer.forward):,}",
            f"{sum(graph.tensors[name].elements for name in layer.parameters):,}",
            f"{counts[layer.key] * work[layer.key] / total:.1%}",
        )
        for layer in graph.distinct_layers
    ]
    about = (
        f": {graph.parameter_count:,} parameters, {len(graph.layers):,} layers, {len(graph.ops):,} ops, "
        f"{graph.matmul_flops(Phase.FORWARD) / graph.micro_batch_size / 1e12:.4g} Tflop of products a sample forward"
    )
    headings = ["layer", ">how many", ">forward ops", ">parameters each", ">forward work"]
    return element(
        "div",
        element("p", element("strong", graph.name), about),
        table(headings, rows, aria_label="Layers of the model"),
    )
