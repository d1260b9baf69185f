"""The answer of a search: the accelerator, its plans, what is proven about everything else, and what was looked at."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from phaze.json_records import to_document, write_whole
from phaze.plan.plan import Plan
from phaze.report.plan_text import seconds_text

__all__ = ["Certificate", "Design", "Explored", "MemoryRow", "ModelRow", "PrunedBox", "SearchProgress", "SearchResult"]

FORMAT = "phaze-search"
VERSION = 2
"""Version 2 spells the keys of the question as `phaze.search` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """Where a search stands. `remaining_s` is a guess from the accelerators that are still open; None at first."""

    doing: str
    points: int
    left: int
    evaluated: int
    best: float | None
    bound: float | None
    elapsed_s: float
    remaining_s: float | None

    @property
    def gap(self) -> float | None:
        """How much better something that is still open could be."""
        return None if self.best is None or self.bound is None else max(0.0, self.bound / self.best - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One model on one accelerator: its fastest plan and the bound under all of them.

    `ratio` is the objective's, to that of the model's best plan on tpuv4-paper; None for a single model.
    """

    model: str
    samples_per_s: float
    step_time_s: float
    bound_s: float
    joules_per_sample: float | None
    strategy: Mapping[str, object]
    needed_bytes: float
    ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """One accelerator with its memory; `value` is the objective's."""

    name: str
    hbm_gib: float
    area_mm2: float
    value: float
    fields: Mapping[str, object]
    models: tuple[ModelRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """The best accelerator with another memory; the value is None where some model does not fit."""

    hbm_gib: float
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedBox:
    """Accelerators that were pruned together: no one's value exceeds the bound."""

    name: str
    points: int
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What is proven: no accelerator's value exceeds `bound`, for the slices, pipelines and choices that are named.

    `points` counts accelerators times memories, all of them bounded (the largest memory only, where energy counts);
    `scheduled` and `placed` accelerators of which layers were scheduled and placed at least once. `bounds` counts
    corners that were bounded by placement.
    """

    value: float
    bound: float
    gap: float
    points: int
    scheduled: int
    placed: int
    bounds: int
    is_finished: bool
    scope: str
    pruned: tuple[PrunedBox, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """One accelerator of the space with the largest memory, and how it was dealt with: evaluated, pruned or still open.

    `value` is None where it was not evaluated, or only as far as it took to see that it is not the best.
    """

    name: str
    area_mm2: float
    state: str
    bound: float
    value: float | None
    box: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The answer. `front` has no accelerator that another one beats in throughput, area and energy.

    `is_front_proven` says whether that holds for the whole space (up to the gap), or for what was evaluated only.
    """

    question: Mapping[str, object]
    objective: str
    best: Design
    memories: tuple[MemoryRow, ...]
    front: tuple[Design, ...]
    is_front_proven: bool
    certificate: Certificate
    plans: Mapping[str, Plan]
    refused: Mapping[str, str]
    seconds: float
    explored: tuple[Explored, ...] = field(repr=False)

    def to_json(self) -> str:
        """Everything but the explored table, as a document."""
        document = {name: value for name, value in to_document(self).items() if name != "explored"}
        return json.dumps({"format": FORMAT, "version": VERSION, **document}, indent=2)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document."""
        write_whole(path, self.to_json())

    def explored_csv(self) -> str:
        """A line an accelerator of the space, in its order."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(Explored.__slots__)
        for row in self.explored:
            writer.writerow(["" if (cell := getattr(row, name)) is None else cell for name in Explored.__slots__])
        return text.getvalue()

    def __str__(self) -> str:
        best, proof = self.best, self.certificate
        lines = [
            f"{best.name}, {best.hbm_gib:g} GiB of HBM, {best.area_mm2:.1f} mm2: {_value(self.objective, best.value)}",
            *(_model_line(row) for row in best.models),
            "memory    " + ", ".join(_memory_text(self.objective, row) for row in self.memories),
            f"proof     {_proof(self.objective, proof)}",
            f"          {proof.scope}",
            f"work      {proof.points:,} bounded, {proof.scheduled} scheduled, {proof.placed} placed, {proof.bounds} "
            f"corners; {seconds_text(self.seconds)}",
        ]
        if self.is_front_proven or len(self.front) > 1:
            about = "of the space" if self.is_front_proven else "of the accelerators that were evaluated"
            lines += ["", f"front of throughput, area and energy, {about}:"]
            lines += [_front_line(self.objective, one) for one in self.front]
        return "\n".join(lines)


def _value(objective: str, value: float) -> str:
    unit = {
        "throughput": "samples/s",
        "throughput-per-area": "samples/s of all devices per mm2 of one",
        "throughput-per-energy": "samples/J",
        "ratio": "times tpuv4-paper",
    }[objective]
    return f"{value:,.5g} {unit}" if value < 1e4 else f"{value:,.0f} {unit}"


def _model_line(row: ModelRow) -> str:
    shown = {key: value for key, value in row.strategy.items() if key in ("dp", "tp", "pp", "micro_batch_size", "zero")}
    told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shown.items())
    schedule = row.strategy.get("schedule")
    schedule = "no pipeline" if schedule == "none" else schedule
    ratio = "" if row.ratio is None else f" (ratio {row.ratio:.4g})"
    energy = "" if row.joules_per_sample is None else f", {row.joules_per_sample:.4g} J a sample"
    return (
        f"{row.model}: {row.samples_per_s:,.5g} samples/s{ratio}, step {seconds_text(row.step_time_s)}{energy}; {told}"
        f"{f', {schedule}' if schedule else ''}"
    )


def _memory_text(objective: str, row: MemoryRow) -> str:
    told = "does not fit" if row.value is None else _value(objective, row.value)
    return f"{row.hbm_gib:g} GiB {told}"


def _proof(objective: str, proof: Certificate) -> str:
    if not proof.is_finished:
        return f"not finished: what was not looked at may reach {_value(objective, proof.bound)}, {proof.gap:.2%} more"
    if proof.gap <= 1e-9:
        return "the best of the space"
    return f"within {proof.gap:.2%} of the best: no accelerator exceeds {_value(objective, proof.bound)}"


def _front_line(objective: str, one: Design) -> str:
    energy = [row.joules_per_sample for row in one.models if row.joules_per_sample is not None]
    mean = f", {sum(energy) / len(energy):.4g} J a sample" if energy else ""
    rate = " ".join(f"{row.samples_per_s:,.5g}" for row in one.models)
    return f"  {one.name}, {one.hbm_gib:g} GiB: {rate} samples/s, {one.area_mm2:.1f} mm2{mean}"
