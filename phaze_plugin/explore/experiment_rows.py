"""The rows of the paper's experiments as values, as text, and as CSV.

Ratios are to tpuv4-paper with the experts' placement. A ratio on the network `paper` that is far above the same ratio
on `paper-artifact` is mostly the reading of the network (`network_notes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phaze.report.plan_text import csv_text

__all__ = ["Baseline", "Contender", "ModelExperiment", "convergence_csv", "experiments_csv", "network_notes"]

_READING_FACTOR = 2.0
"""From how many times the ratio on `paper-artifact` a ratio on `paper` counts as mostly the reading of the network."""

_LARGE_RATIO = 5.0
"""From which ratio on `paper` alone, without the other network beside it, a reader is warned."""

UNIT_STORY = (
    "network paper: 4 GiB/s a device, as the paper states. network paper-artifact: 4 GiB per millisecond, as its "
    "artifact ran: it divides cycles by 1.05e6 (milliseconds) and bytes by 4 GiB/s (seconds) and adds them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A chip with a placement.

    Attributes:
        chip: its name.
        hbm_gib: its memory.
        samples_per_s: throughput; 0 where nothing fits.
        fits: whether the plan fits into its memory.
        plan: the strategy, as text.
        bound: no chip and placement that were searched exceed it; None where nothing was searched.
        processor_s: processor seconds that it took to find.
        found_by: the baseline that found it within the gap of the exact search; empty where that search did.
        search_samples_per_s: what the search found by itself, where a baseline found it; else None.
    """

    chip: str
    hbm_gib: float
    samples_per_s: float
    fits: bool
    plan: str = ""
    bound: float | None = None
    processor_s: float = 0.0
    found_by: str = ""
    search_samples_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A method that draws designs, over its seeds.

    Attributes:
        method: its name.
        seeds: how many runs.
        median: median throughput of the runs' best designs.
        least: the lowest of them.
        most: the highest of them.
        with_experts_median: the median of the same chips with the experts' placement; None where it was not looked at.
        evaluations: designs of a run.
        processor_s: median processor seconds of a run.
        chip: the chip that most runs found.
        convergence: the median over runs of the best so far after each evaluation, by the method's own objective.
    """

    method: str
    seeds: int
    median: float
    least: float
    most: float
    with_experts_median: float | None
    evaluations: int
    processor_s: float
    chip: str
    convergence: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExperiment:
    """One model on one network: the four ways to give it a chip and a placement, and the baselines."""

    model: str
    network: str
    experts: Contender
    placement_only: Contender
    hardware_only: Contender
    both: Contender
    baselines: tuple[Baseline, ...]

    def ratio(self, samples_per_s: float) -> float:
        """A throughput over that of the experts."""
        return samples_per_s / self.experts.samples_per_s

    def four_way(self) -> list[str]:
        """The cells of the four-way table."""
        contenders = (self.experts, self.placement_only, self.hardware_only, self.both)
        cells = [
            f"{self.ratio(contender.samples_per_s):.2f}" if contender.samples_per_s else "-" for contender in contenders
        ]
        mark = "" if self.experts.fits else " (does not fit)"
        assert self.both.bound is not None
        gap = self.both.bound / self.both.samples_per_s - 1
        return [
            self.model,
            self.network,
            f"{self.experts.samples_per_s:,.5g}{mark}",
            *cells[1:],
            f"{self.both.chip}, {self.both.hbm_gib:g} GiB",
            f"{gap:.2%}",
            f"{self.both.processor_s:.0f} s",
        ]

    def baseline_rows(self) -> list[list[str]]:
        """The cells of the table of methods: shares of what the exact search found."""
        found = self.both.samples_per_s
        rows = [[self.model, self.network, "exact", "100.0 %", "", "", "", f"{self.both.processor_s:.0f} s"]]
        for row in self.baselines:
            experts = "" if row.with_experts_median is None else f"{row.with_experts_median / found:.1%}"
            spread = f"{row.least / found:.1%} to {row.most / found:.1%}"
            cost = [f"{row.seeds} x {row.evaluations}", f"{row.processor_s:.0f} s"]
            rows.append([self.model, self.network, row.method, f"{row.median / found:.1%}", spread, experts, *cost])
        return rows


FOUR_WAY_HEADINGS = (
    "model",
    "network",
    ">experts, samples/s",
    ">placement only",
    ">hardware only",
    ">both",
    "our chip",
    ">gap",
    ">processor",
)
METHOD_HEADINGS = (
    "model",
    "network",
    "method",
    ">median",
    ">spread",
    ">with experts' placement",
    ">seeds x evaluations",
    ">processor, a run",
)


def network_notes(rows: Sequence[ModelExperiment]) -> list[str]:
    """What the reader must know: both readings, which ratios are mostly the reading, and who found what."""
    notes = [UNIT_STORY, *_finder_notes(rows)]
    by_network = {(row.model, row.network): row for row in rows}
    for row in rows:
        ratio = row.ratio(row.both.samples_per_s)
        other = by_network.get((row.model, "paper-artifact"))
        if row.network != "paper":
            continue
        if other is not None:
            as_run = other.ratio(other.both.samples_per_s)
            if ratio >= _READING_FACTOR * as_run:
                notes.append(
                    f"{row.model}: {ratio:.2f} on paper is {as_run:.2f} on paper-artifact; most of it is the network "
                    "reading, which punishes the experts' degrees."
                )
        elif ratio >= _LARGE_RATIO:
            notes.append(f"{row.model}: most of {ratio:.2f} may be the network reading; run it on paper-artifact, too.")
    return notes


def _finder_notes(rows: Sequence[ModelExperiment]) -> list[str]:
    """Where a baseline found something better than the exact search, within what that left open."""
    return [
        f"{row.model} on {row.network}: the chip is one that {row.both.found_by} found, "
        f"{row.both.samples_per_s / row.both.search_samples_per_s - 1:.3%} above what the exact search found by "
        "itself, and within its bound."
        for row in rows
        if row.both.search_samples_per_s is not None
    ]


def experiments_csv(rows: Sequence[ModelExperiment]) -> str:
    """Every contender and every baseline as a line."""
    names = (
        *("model", "network", "who", "samples_per_s", "ratio_to_experts", "least", "most", "bound", "fits", "chip"),
        *("hbm_gib", "plan", "seeds", "evaluations", "with_experts_median", "processor_s"),
    )
    lines: list[list[object]] = []
    for row in rows:
        ways = (row.experts, row.placement_only, row.hardware_only, row.both)
        for who, way in zip(("experts", "placement-only", "hardware-only", "both"), ways, strict=True):
            value = way.samples_per_s
            numbers = [value, row.ratio(value), None, None, way.bound, way.fits]
            lines.append(
                [
                    row.model,
                    row.network,
                    who,
                    *numbers,
                    way.chip,
                    way.hbm_gib,
                    way.plan,
                    None,
                    None,
                    None,
                    way.processor_s,
                ]
            )
        for drawn in row.baselines:
            numbers = [drawn.median, row.ratio(drawn.median), drawn.least, drawn.most, None, drawn.median > 0]
            work = [drawn.seeds, drawn.evaluations, drawn.with_experts_median, drawn.processor_s]
            lines.append([row.model, row.network, drawn.method, *numbers, drawn.chip, None, None, *work])
    return csv_text(names, lines)


def convergence_csv(rows: Sequence[ModelExperiment]) -> str:
    """The median of the best so far after each evaluation of each method."""
    return csv_text(
        ("model", "network", "method", "evaluations", "best_value"),
        (
            (row.model, row.network, drawn.method, index + 1, value)
            for row in rows
            for drawn in row.baselines
            for index, value in enumerate(drawn.convergence)
        ),
    )
