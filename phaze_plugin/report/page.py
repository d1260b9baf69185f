"""One self-contained HTML file: its text, style, scripts and data inside, and nothing fetched from anywhere.

A page's Content-Security-Policy allows exactly the scripts that are written here, by their hashes, and no network.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files

import phaze
from phaze.report.html_elements import Markup, data_script, element, joined

__all__ = ["CHART_LIBRARIES", "build_page", "chart", "section"]

CHART_LIBRARIES = ("d3.min.js", "plot.umd.min.js")
"""What charts are drawn with; `page_assets/LICENSES.txt` says whose they are."""


def build_page(
    title: str,
    body: Markup,
    data: Mapping[str, object],
    *,
    contents: Mapping[str, str],
    scripts: tuple[str, ...],
) -> str:
    """A whole page.

    `contents` are the headings of its sections by their ids; `scripts` are files of `page_assets`, which read `data`.
    """
    programs = [_asset(name) for name in (*CHART_LIBRARIES, "page.js", *scripts)]
    allowed = " ".join(f"'sha256-{_sha256(program)}'" for program in programs)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"phaze {phaze.__version__}"),
        element("title", title),
        element("style", Markup(_asset("page.css"))),
    )
    page_body = element(
        "body",
        element("a", "Skip to the content", class_="skip", href="#content"),
        _navigation(contents),
        element("main", body, id="content"),
        element(
            "footer", f"Made by phaze {phaze.__version__}. The charts are drawn with d3 and Observable Plot (ISC)."
        ),
        element("div", id="tip", role="status", hidden=True),
        data_script("data", data),
        *(element("script", Markup(program)) for program in programs),
    )
    return "<!doctype html>\n" + element("html", head, page_body, lang="en") + "\n"


def chart(name: str, label: str) -> Markup:
    """The place of a chart that a script draws."""
    missing = element("noscript", "This chart is drawn by a script, which is switched off.")
    place = element("div", missing, id=f"{name}-chart", class_="chart", role="group", aria_label=label)
    return element("figure", place)


def section(name: str, heading: str, *children: str) -> Markup:
    """A section of a page that its contents link to."""
    return element(
        "section", element("h2", heading, id=f"{name}-heading"), *children, id=name, aria_labelledby=f"{name}-heading"
    )


def _navigation(contents: Mapping[str, str]) -> Markup:
    links = joined(element("li", element("a", heading, href=f"#{name}")) for name, heading in contents.items())
    theme = element(
        "button", "Dark", type="button", id="theme", aria_pressed="false", title="Switch between dark and light"
    )
    return element("nav", element("strong", "phaze"), element("ul", links), theme, aria_label="Contents")


def _asset(name: str) -> str:
    return files("phaze.report.page_assets").joinpath(name).read_text(encoding="utf-8")


def _sha256(program: str) -> str:
    return base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
