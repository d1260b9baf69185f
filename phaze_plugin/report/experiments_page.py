"""The page of the paper's experiments: tables of text, made by whoever ran them."""

from __future__ import annotations

from collections.abc import Sequence

from phaze.report.html_elements import element, joined, table
from phaze.report.page import build_page, section

__all__ = ["experiments_page"]

_CONTENTS = {
    "ways": "Chip and placement",
    "methods": "Methods",
    "convergence": "Convergence",
    "one-chip": "One chip for all",
}


def experiments_page(
    ways: tuple[Sequence[str], Sequence[Sequence[str]]],
    methods: tuple[Sequence[str], Sequence[Sequence[str]]],
    convergence: tuple[Sequence[str], Sequence[Sequence[str]]],
    one_chip: tuple[Sequence[str], Sequence[Sequence[str]]],
    notes: Sequence[str],
) -> str:
    """The whole page; each table is its headings and its rows."""
    ways_text = (
        "Times the throughput of tpuv4-paper with the experts' placement: the best placement on the same chip, the "
        "best chip for the experts' placement, and both chosen together, which is proven up to the gap."
    )
    methods_text = (
        "Parts of what the exact search found, over the same space with the same evaluator: the median and the spread "
        "over seeds. spotlight-delay looks at the layers of one device only; its chip is then placed by us, and by the "
        "experts."
    )
    one_chip_text = (
        "The chip whose ratios to tpuv4-paper with our placement are the largest, by their average or by the worst of "
        "them. It is proven up to the gap over all models at once. A part of 100 % means that a model loses nothing "
        "beside the chip of its own."
    )
    shared = [
        section("one-chip", "One chip for all", element("p", one_chip_text), table(*one_chip, aria_label="One chip"))
    ]
    contents = {name: text for name, text in _CONTENTS.items() if name != "one-chip" or one_chip[1]}
    body = joined(
        (
            element(
                "header",
                element("h1", "The paper's experiments"),
                element("ul", *(element("li", note) for note in notes)),
            ),
            section("ways", "Chip and placement", element("p", ways_text), table(*ways, aria_label="Four ways")),
            section("methods", "Methods", element("p", methods_text), table(*methods, aria_label="Methods")),
            section(
                "convergence",
                "Convergence",
                element("p", "The best so far after so many evaluations, as a part of the last: medians over seeds."),
                table(*convergence, aria_label="Convergence"),
            ),
            *(shared if one_chip[1] else []),
        )
    )
    return build_page("The paper's experiments", body, {}, contents=contents, scripts=())
