"""What MkDocs asks while it builds the site: pages and figures that are made from the code, and mathematics.

Nothing that is made here is stored: pages of the reference come from the parser and the schemas, figures are drawn
from plans that are made while the site is built. Formulas between dollars become MathML, which browsers draw
themselves, so that the site needs no script for them.
"""

from __future__ import annotations

import html
import re
from typing import Any

import examples_page
import figures
import reference_pages
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
"""How the Markdown extension `pymdownx.arithmatex` leaves a formula: inline in a span, on lines of its own in a div."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add what is made from the code to the files of the site."""
    made = {
        "reference/command-line.md": reference_pages.command_line(),
        "reference/file-formats.md": reference_pages.file_formats(),
        **reference_pages.schema_files(),
        "reference/examples.md": examples_page.examples(),
        **{f"figures/{name}.svg": picture for name, picture in figures.all_figures().items()},
    }
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Draw the formulas of a page as MathML."""
    return _FORMULA.sub(_mathml, content)


def _mathml(formula: re.Match[str]) -> str:
    text = html.unescape(formula[2]).strip()
    if formula[1] == "div":
        return f'<div class="formula">{convert(text, display="block")}</div>'
    return convert(text)
