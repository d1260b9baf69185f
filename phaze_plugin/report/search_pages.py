"""The page of a search for an accelerator, and the page of the paper's experiments.

`search_page` shows designs by area and value, what is proven of them, and the winner beside the reference. It is built
from the document that `SearchResult.to_json` writes. `experiments_page` shows tables of text, made by whoever ran the
experiments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phaze.hardware import preset
from phaze.hardware.accelerator import area_mm2
from phaze.report.html_page import Markup, build_page, chart, element, joined, section, table
from phaze.report.plan_text import seconds_text

__all__ = ["UTILISATIONS", "experiments_page", "search_page", "strategy_text"]

REFERENCE = "tpuv4-paper"
"""The accelerator that people know; values of several models are ratios to it."""

_UNITS = {
    "throughput": "samples/s",
    "throughput-per-area": "samples/s of all devices per mm² of one",
    "throughput-per-energy": "samples/J",
    "ratio": f"times {REFERENCE}",
}

_AXES = {
    "tensor_cores": "tensor cores",
    "tensor_rows": "rows",
    "tensor_cols": "columns",
    "vector_cores": "vector cores",
    "vector_lanes": "lanes",
    "buffer_bytes": "buffer, MiB",
}

UTILISATIONS = ("tensor_utilisation", "vector_utilisation", "peak_tensor_utilisation", "peak_vector_utilisation")
"""What a document says of a model's plan: how busy it keeps the units, over a step and in its busiest pass."""

_CONTENTS = {
    "answer": "The answer",
    "designs": "Designs",
    "shapes": "What they are made of",
    "models": "Models",
    "neighbours": "Around the best",
    "proof": "What is proven",
}


def search_page(document: Mapping[str, Any]) -> str:
    """The whole page of a search's document."""
    best = document["best"]
    neighbours = _neighbours(document)
    parts = [_headline(document), _designs(document), _shapes(document), _models(document)]
    parts += [] if neighbours is None else [neighbours]
    contents = {name: text for name, text in _CONTENTS.items() if name != "neighbours" or neighbours is not None}
    return build_page(
        f"The accelerator to build: {best['name']}",
        joined((*parts, _proof(document))),
        _chart_data(document),
        contents=contents,
        scripts=("search.js",),
    )


def _chart_data(document: Mapping[str, Any]) -> dict[str, object]:
    best, proof = document["best"], document["certificate"]
    chip = preset(REFERENCE).accelerator
    is_ratio = document["objective"] == "ratio"
    front = {design["name"] for design in document["front"]}
    return {
        "unit": _UNITS[document["objective"]],
        "axes": _AXES,
        "bound": proof["bound"],
        "designs": [
            {
                "name": row["name"],
                "area": row["area_mm2"],
                "value": row["value"],
                "bound": row["bound"],
                "state": row["state"],
                "isFront": row["name"] in front,
                "fields": _fields(row["fields"]),
            }
            for row in document["explored"]
        ],
        "boxes": [
            {
                "name": box["name"],
                "points": box["points"],
                "bound": box["bound"],
                "from": box["least_area_mm2"],
                "to": box["most_area_mm2"],
            }
            for box in proof["pruned"]
        ],
        "best": {
            "name": best["name"],
            "area": best["area_mm2"],
            "value": best["value"],
            "fields": _fields(best["fields"]),
        },
        "reference": {
            "name": REFERENCE,
            "area": area_mm2(chip),
            "value": 1.0 if is_ratio else None,
            "fields": _fields({name: getattr(chip, name) for name in _AXES}),
        },
    }


def _fields(fields: Mapping[str, Any]) -> dict[str, float]:
    """The sizes of a design by the names of the axes, as far as they are numbers."""
    known = {name: size for name in _AXES if isinstance(size := fields.get(name), int | float)}
    return {name: size / (2**20 if name == "buffer_bytes" else 1) for name, size in known.items()}


def _value_text(document: Mapping[str, Any], value: float) -> str:
    return f"{value:,.5g}" if value < 1e4 else f"{value:,.0f}"


def _headline(document: Mapping[str, Any]) -> Markup:
    best, proof = document["best"], document["certificate"]
    unit = _UNITS[document["objective"]]
    gap = "optimal" if proof["gap"] <= 1e-9 and proof["is_finished"] else f"≤ {proof['gap']:.2%}"
    note = "of the whole space, proven" if proof["is_finished"] else "not finished"
    tiles = (
        ("Objective", _value_text(document, best["value"]), unit),
        ("Area", f"{best['area_mm2']:.0f} mm²", f"{best['hbm_gib']:g} GiB of HBM"),
        ("Gap", gap, note),
        ("Designs", f"{proof['points']:,}", f"{proof['scheduled']:,} scheduled, {proof['placed']:,} placed"),
        ("Search", seconds_text(document["seconds"]), f"{proof['bounds']:,} bounds by placement"),
    )
    fields = {name: f"{size:g}" for name, size in _fields(best["fields"]).items()}
    cores, rows, columns, vectors, lanes, buffer = (fields.get(name, "?") for name in _AXES)
    sentence = (
        f"{cores} tensor cores of {rows} x {columns} and {vectors} vector cores of {lanes} lanes over a buffer of "
        f"{buffer} MiB and {best['hbm_gib']:g} GiB of HBM."
    )
    return element(
        "header",
        element("h1", "The accelerator to build ", element("small", best["name"])),
        element("p", ", ".join(row["model"] for row in best["models"]), class_="subtitle"),
        element(
            "dl",
            *(
                element(
                    "div", element("dt", name), element("dd", value), element("dd", text, class_="note"), class_="tile"
                )
                for name, value, text in tiles
            ),
            class_="tiles",
        ),
        element("p", sentence, class_="lead"),
        id="answer",
    )


def _designs(document: Mapping[str, Any]) -> Markup:
    front = "that no other design of the space beats" if document["is_front_proven"] else "of those that were evaluated"
    text = (
        "Filled points were evaluated. A line is a box of designs that were ruled out together: none of them exceeds "
        f"the value at which it stands. Ringed points are on the front of throughput, area and energy {front}."
    )
    rows = [
        (design["name"], f"{design['area_mm2']:.0f}", f"{design['hbm_gib']:g}", _value_text(document, design["value"]))
        for design in document["front"]
    ]
    listed = (
        table(
            ["on the front", ">area, mm²", ">HBM, GiB", f">{_UNITS[document['objective']]}"],
            rows,
            aria_label="The front",
        )
        if rows
        else element("p", "The front was not looked for.")
    )
    return section(
        "designs",
        "Designs by area and value",
        element("p", text),
        chart("designs", "Designs by area and value"),
        listed,
    )


def _shapes(document: Mapping[str, Any]) -> Markup:
    text = f"Every line is an evaluated design; the best one is drawn thick, {REFERENCE} dashed."
    names = list(_AXES.values())
    best = _fields(document["best"]["fields"])
    reference = preset(REFERENCE).accelerator
    beside = _fields({name: getattr(reference, name) for name in _AXES})
    rows = [(label, f"{best.get(name, 0):g}", f"{beside.get(name, 0):g}") for name, label in _AXES.items()]
    headings = ["", f">{document['best']['name']}", f">{REFERENCE}"]
    drawn = chart("shapes", f"Evaluated designs by {', '.join(names)}")
    return section(
        "shapes",
        "What they are made of",
        element("p", text),
        drawn,
        table(headings, rows, aria_label="The best beside the reference"),
    )


def _models(document: Mapping[str, Any]) -> Markup:
    rows = [
        (
            row["model"],
            f"{row['samples_per_s']:,.5g}",
            seconds_text(row["step_time_s"]),
            f"{1 - row['bound_s'] / row['step_time_s']:.2%}",
            "" if row["ratio"] is None else f"{row['ratio']:.3f}",
            "" if row["joules_per_sample"] is None else f"{row['joules_per_sample']:.4g}",
            *_busy(row),
            strategy_text(row["strategy"]),
        )
        for row in document["best"]["models"]
    ]
    headings = ["model", ">samples/s", ">step", ">gap of its plan", f">times {REFERENCE}", ">J a sample"]
    headings += [*_BUSY_HEADINGS, "strategy"]
    memories = [
        (
            f"{row['hbm_gib']:g} GiB",
            "some model does not fit" if row["value"] is None else _value_text(document, row["value"]),
        )
        for row in document["memories"]
    ]
    return section(
        "models",
        "Models on the best design",
        table(headings, rows, aria_label="Models on the best design"),
        element("p", _BUSY_TEXT),
        element("h3", "With other memories"),
        table(
            ["memory", f">{_UNITS[document['objective']]}"], memories, aria_label="The best design with other memories"
        ),
    )


_BUSY_HEADINGS = (">tensor units busy", ">vector units busy")
_BUSY_TEXT = (
    "Units are busy on average over a step and, in brackets, in the pass of a layer that keeps them busiest. What is "
    "computed again, fill, padding and waiting count as idle."
)


def _busy(row: Mapping[str, Any]) -> tuple[str, str]:
    """How busy tensor and vector units are: on average, and at most in brackets."""
    tensor, vector, most_tensor, most_vector = (row[name] for name in UTILISATIONS)
    return f"{tensor:.1%} ({most_tensor:.0%})", f"{vector:.1%} ({most_vector:.0%})"


def strategy_text(strategy: Mapping[str, Any]) -> str:
    """The parts of a strategy that a table shows."""
    names = ("dp", "tp", "pp", "zero", "micro_batch_size", "schedule")
    return ", ".join(f"{name.replace('_', ' ')} {strategy[name]}" for name in names if name in strategy)


def _neighbours(document: Mapping[str, Any]) -> Markup | None:
    """The best few designs, the steps along each axis and the networks, as far as they were asked for."""
    parts: list[Markup] = []
    if document["top"]:
        headings = ["", "design", f">{_UNITS[document['objective']]}", ">area, mm²", ">power, W", "model"]
        top = table([*headings, *_BUSY_HEADINGS, "strategy"], _top_rows(document), aria_label="The best few designs")
        parts += [element("h3", "The best few designs"), top]
    if document["sensitivity"]:
        headings = ["one step", "design", ">area, mm²", f">{_UNITS[document['objective']]}", ">change"]
        steps = table(headings, _step_rows(document), aria_label="One step along each axis")
        parts += [element("h3", "One step along each axis"), steps]
    if document["networks"]:
        headings = ["network", "design", f">{_UNITS[document['objective']]}", ">none exceeds"]
        rows = [
            (row["network"], row["name"], _found_text(document, row["value"]), _value_text(document, row["bound"]))
            for row in document["networks"]
        ]
        parts += [element("h3", "Networks"), table(headings, rows, aria_label="Networks")]
    return section("neighbours", "Around the best", *parts) if parts else None


def _top_rows(document: Mapping[str, Any]) -> list[Sequence[str]]:
    """A row for each model of each of the best few; the design is told in the first of them."""
    rows: list[Sequence[str]] = []
    for index, design in enumerate(document["top"]):
        named = design["name"] + (f" on {design['network']}" if design["network"] else "")
        value = _value_text(document, design["value"])
        own = (f"{index + 1}", named, value, f"{design['area_mm2']:.1f}", f"{design['power_w']:.0f}")
        for place, row in enumerate(design["models"]):
            rows.append((*(("",) * 5 if place else own), row["model"], *_busy(row), strategy_text(row["strategy"])))
    return rows


def _step_rows(document: Mapping[str, Any]) -> list[Sequence[str]]:
    """A row for each axis and direction; what the space does not have says so."""
    return [
        (
            f"{row['field'].replace('_', ' ')} {row['direction']}",
            row["name"] or "not in the space",
            "" if row["area_mm2"] is None else f"{row['area_mm2']:.1f}",
            _found_text(document, row["value"]) if row["name"] else "",
            "" if row["change"] is None else f"{row['change']:+.2%}",
        )
        for row in document["sensitivity"]
    ]


def _found_text(document: Mapping[str, Any], value: float | None) -> str:
    return "nothing fits, or nothing better" if value is None else _value_text(document, value)


def _proof(document: Mapping[str, Any]) -> Markup:
    proof = document["certificate"]
    largest: Sequence[Mapping[str, Any]] = sorted(proof["pruned"], key=lambda box: -box["bound"])[:_MOST_BOXES]
    rows = [(box["name"], f"{box['points']:,}", _value_text(document, box["bound"])) for box in largest]
    facts = [
        f"No accelerator of the space exceeds {_value_text(document, proof['bound'])} {_UNITS[document['objective']]}, "
        f"{proof['gap']:.2%} above the best.",
        f"This holds {proof['scope']}.",
        f"{proof['points']:,} designs were bounded, {proof['scheduled']:,} scheduled and {proof['placed']:,} placed.",
    ]
    facts += _refusals(document["refused"])
    return section(
        "proof",
        "What is proven",
        element("ul", *(element("li", fact) for fact in facts)),
        element("h3", f"The {len(rows)} boxes of designs with the highest bounds"),
        table(["designs", ">how many", ">none exceeds"], rows, aria_label="Boxes of designs that were ruled out"),
    )


def _refusals(refused: Mapping[str, str]) -> list[str]:
    """Why sizes and degrees were left out, every reason once."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        by_reason.setdefault(reason, []).append(name)
    return [
        f"Left out: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for reason, names in by_reason.items()
    ]


_MOST_BOXES = 20
"""Boxes that the page lists: the certificate rests on those with the highest bounds."""


_EXPERIMENTS_CONTENTS = {
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
    contents = {name: text for name, text in _EXPERIMENTS_CONTENTS.items() if name != "one-chip" or one_chip[1]}
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
