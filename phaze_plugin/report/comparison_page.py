"""The page of a comparison: two plans side by side, what differs marked."""

from __future__ import annotations

from collections.abc import Sequence

from phaze.plan.plan import Plan
from phaze.report.html_elements import Markup, element, joined
from phaze.report.page import build_page, chart, section
from phaze.report.plan_page import plan_chart_data, step_bar
from phaze.report.plan_text import seconds_text, strategy_text, verdict

__all__ = ["comparison_page", "difference_table"]

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
