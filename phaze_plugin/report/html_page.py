"""HTML made of escaped parts, and one self-contained page of it: style, scripts and data inside, nothing is fetched.

A text becomes markup only here (`Markup`, `element`), so that no name of a model can bring its own. A page's
Content-Security-Policy allows exactly the scripts that are written here, by their hashes, and no network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

import phaze

__all__ = ["CHART_LIBRARIES", "Markup", "build_page", "chart", "data_script", "element", "joined", "section", "table"]

_VOID = frozenset({"meta", "input", "br", "wbr"})
"""Elements of HTML that have no content and no end."""


class Markup(str):
    """Text that is HTML already; every other text is escaped where it is put in."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | bool | None) -> Markup:
    """One element. `class_` is spelled so because of Python, `data_x` becomes `data-x`; True is a bare attribute."""
    written = [
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(value)}"')
        for name, value in attributes.items()
        if isinstance(value, str) or value is True
    ]
    start = f"<{tag}{''.join(written)}>"
    return Markup(start if tag in _VOID else f"{start}{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Markup:
    """Markup and texts one after the other, texts escaped."""
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], **attributes: str) -> Markup:
    """A table whose rows are headed by their first cell; columns whose heading begins with ">" hold numbers."""
    names = [heading.removeprefix(">") for heading in headings]
    kinds = ["number" if heading.startswith(">") else None for heading in headings]
    head = element(
        "tr", *(element("th", name, scope="col", class_=kind) for name, kind in zip(names, kinds, strict=True))
    )
    body = [
        element(
            "tr",
            element("th", row[0], scope="row", class_=kinds[0]),
            *(element("td", cell, class_=kind) for cell, kind in zip(row[1:], kinds[1:], strict=True)),
        )
        for row in rows
    ]
    whole = element("table", element("thead", head), element("tbody", *body), **attributes)
    return element(
        "div", whole, class_="scrolled", tabindex="0", role="region", aria_label=attributes.get("aria_label")
    )


def data_script(name: str, data: object) -> Markup:
    """Data for scripts, as JSON that cannot end its element or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return element("script", Markup(text), type="application/json", id=name)


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
