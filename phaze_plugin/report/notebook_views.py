"""What notebooks show of a plan: its numbers, its step and its memory as plain HTML without any script."""

from __future__ import annotations

from phaze.plan.plan import Plan
from phaze.report.html_elements import Markup, element
from phaze.report.plan_page import GIB
from phaze.report.plan_text import seconds_text, strategy_text, verdict

__all__ = ["plan_view"]

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
            {item: size / GIB for item, size in by_place[place].items() if item not in ("total", "capacity") and size},
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
