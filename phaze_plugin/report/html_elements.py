"""HTML made of escaped parts: a text becomes markup only here, so that no name of a model can bring its own."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence

__all__ = ["Markup", "data_script", "element", "joined", "table"]

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
