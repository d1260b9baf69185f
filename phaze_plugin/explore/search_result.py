"""The result of `phaze.search`: the accelerator to build, its plans, the certificate, what became of each design."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from phaze.file_access import write_whole
from phaze.json_documents import to_document, with_digest
from phaze.parallelism import PipelineSchedule
from phaze.plan.plan import Plan
from phaze.printable_text import printable
from phaze.report.html_views import search_view
from phaze.report.plan_text import csv_text, seconds_text
from phaze.report.search_pages import UTILISATIONS, search_page, strategy_text
from phaze.tolerances import EQUAL_RESULTS

__all__ = [
    "Certificate",
    "Design",
    "Explored",
    "MemoryRow",
    "ModelRow",
    "NetworkRow",
    "PrunedBox",
    "SearchProgress",
    "SearchResult",
    "SensitivityRow",
    "model_line",
    "value_text",
]

FORMAT = "phaze-search"
VERSION = 9
"""Version 9 tells the plans of all evaluated designs, and peaks of utilisation; version 8 has plans of version 8;
version 5 tells power, utilisation, networks, the best few and the best one's neighbours; version 4 carries a digest of
its content; version 3 has the designs that were evaluated."""

_SHOWN_DEGREES = ("dp", "tp", "pp", "micro_batch_size", "zero")
"""The parts of a strategy that a line about a model shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """Where a search stands.

    Attributes:
        doing: the task that was just done.
        points: accelerators of the space.
        left: accelerators that are neither evaluated nor pruned.
        evaluated: accelerators that were evaluated.
        best: the best value so far.
        bound: no accelerator's value exceeds it.
        elapsed_s: seconds since the search began.
        remaining_s: a guess from the accelerators that are left; None at first.
    """

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
    """One model on one accelerator: its fastest plan, and how fast any plan could be.

    Attributes:
        model: the model's name.
        samples_per_s: throughput.
        step_time_s: seconds of a step.
        bound_s: no plan takes fewer seconds.
        joules_per_sample: energy; None where it is not counted.
        strategy: what was chosen, in the form that `phaze.evaluate` takes.
        needed_bytes: memory of the fullest device.
        tensor_utilisation: the part of all tensor cores' cycles in a step that matrix products take at least.
        vector_utilisation: likewise of the vector lanes.
        peak_tensor_utilisation: the part in the pass of a layer that keeps the tensor cores busiest.
        peak_vector_utilisation: likewise of the vector lanes.
        ratio: the objective over that of the model's best plan on tpuv4-paper; None for a single model.
    """

    model: str
    samples_per_s: float
    step_time_s: float
    bound_s: float
    joules_per_sample: float | None
    strategy: Mapping[str, object]
    needed_bytes: float
    tensor_utilisation: float
    vector_utilisation: float
    peak_tensor_utilisation: float
    peak_vector_utilisation: float
    ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """One accelerator with its memory.

    Attributes:
        name: the accelerator's name in the space.
        hbm_gib: its memory.
        area_mm2: its area.
        value: the objective's value.
        fields: its cores, sizes, clock and bandwidth.
        models: every model on it.
        power_w: what it draws with everything at work in every cycle.
        network: how its devices are joined; None where the question named one network only.
    """

    name: str
    hbm_gib: float
    area_mm2: float
    value: float
    fields: Mapping[str, object]
    models: tuple[ModelRow, ...]
    power_w: float
    network: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """The best accelerator with another memory; the value is None where some model does not fit."""

    hbm_gib: float
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRow:
    """One of several networks that were searched.

    Attributes:
        network: its text.
        value: the best value on it, as far as it was looked for; None where no plan beat what was known before.
        bound: no accelerator exceeds it on this network.
        name: the accelerator with the value.
    """

    network: str
    value: float | None
    bound: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedBox:
    """Accelerators that were pruned together, the bound that none of their values exceeds, and their areas."""

    name: str
    points: int
    bound: float
    least_area_mm2: float
    most_area_mm2: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityRow:
    """The best design with one axis at the next value of the space, up or down.

    Attributes:
        field: the field that changes.
        direction: "up" or "down".
        name: the accelerator; empty where the space has none, because it ends there or a limit forbids it.
        area_mm2: its area.
        value: the objective's value with the largest memory; None where there is no such accelerator or nothing fits.
        change: the value over that of the best, less 1.
    """

    field: str
    direction: str
    name: str
    area_mm2: float | None
    value: float | None
    change: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What is proven: no accelerator's value exceeds `bound`, for the choices that `scope` names.

    Attributes:
        value: the best value.
        bound: the largest bound that is left.
        gap: how far the bound lies above the value, as a share of it.
        points: accelerators times memories, all of them bounded (the largest memory only, where energy counts).
        scheduled: accelerators whose layers were scheduled at least once.
        placed: accelerators for which some placement was searched.
        bounds: lower bounds that were computed by placement.
        is_finished: whether the search ran to its end.
        scope: the slices, pipelines and choices that the bound speaks about.
        pruned: boxes of accelerators that were pruned.
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
    """One accelerator of the space with the largest memory, and what became of it.

    Attributes:
        name: its name in the space.
        area_mm2: its area.
        state: "evaluated", "pruned" or "open".
        bound: its value is no higher.
        value: its value; None where it was not evaluated, or only as far as it took to see that it is not the best.
        box: the box that it was pruned or left open with.
        fields: its cores and sizes if it was evaluated, else nothing.
        power_w: what it draws with everything at work, if it was evaluated.
        models: its plans, if it was evaluated and all models fit.
    """

    name: str
    area_mm2: float
    state: str
    bound: float
    value: float | None
    box: str
    fields: Mapping[str, object] = field(default_factory=dict)
    power_w: float | None = None
    models: tuple[ModelRow, ...] = ()

    def cells(self) -> list[object]:
        """A line of CSV; what a design has of each model is joined with semicolons."""
        columns = (
            [f"{row.samples_per_s:.6g}" for row in self.models],
            [strategy_text(row.strategy) for row in self.models],
            *([f"{getattr(row, name):.4f}" for row in self.models] for name in UTILISATIONS),
        )
        own = (self.name, self.area_mm2, self.state, self.bound, self.value, self.box, self.power_w)
        return [*own, *("; ".join(column) for column in columns)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The accelerator to build, with a proof.

    Attributes:
        question: what was asked, but for models and space.
        objective: what was made large; "ratio" for several models.
        best: the best design.
        memories: the value of the best accelerator with each memory that was looked at.
        front: designs that no other beats in throughput, area and energy.
        is_front_proven: whether that holds for the whole space, up to the gap, or only for what was evaluated.
        certificate: what is proven about all other designs.
        plans: the plan of each model on the best design.
        refused: why microbatch sizes and tp are impossible, by model and sizes.
        seconds: how long the search took.
        explored: what became of every accelerator of the space, but for those that left a large one at once.
        networks: what was found on each network, where several were searched.
        top: the best designs that were asked for, best first.
        sensitivity: the best design with each axis one step either way.
        overtime: why the search took longer than its time limit; empty where it did not.
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
    networks: tuple[NetworkRow, ...] = ()
    top: tuple[Design, ...] = ()
    sensitivity: tuple[SensitivityRow, ...] = ()
    overtime: str = ""

    def to_json(self) -> str:
        """Everything as a JSON document; of the explored accelerators those that were evaluated."""
        evaluated = tuple(row for row in self.explored if row.state == "evaluated")
        document = to_document(replace(self, explored=evaluated))
        return json.dumps(with_digest({"format": FORMAT, "version": VERSION, **document}), indent=2, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document."""
        write_whole(path, self.to_json())

    def to_html(self) -> str:
        """The search's page: one self-contained HTML document."""
        return search_page(json.loads(self.to_json()))

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the search's page: whole or not at all."""
        write_whole(path, self.to_html())

    def _repr_html_(self) -> str:
        return search_view(json.loads(self.to_json()), str(self))

    def explored_csv(self) -> str:
        """The explored accelerators as CSV: a line for each, in the order of the space."""
        names = ("name", "area_mm2", "state", "bound", "value", "box", "power_w", "samples_per_s", "strategy")
        return csv_text((*names, *UTILISATIONS), (row.cells() for row in self.explored))

    def __str__(self) -> str:
        best, proof = self.best, self.certificate
        lines = [
            f"{best.name}{_on_network(best)}, {best.hbm_gib:g} GiB of HBM, {best.area_mm2:.1f} mm2: "
            f"{value_text(self.objective, best.value)}",
            *(model_line(row) for row in best.models),
            "memory    " + ", ".join(_memory_text(self.objective, row) for row in self.memories),
            f"proof     {_proof_text(self.objective, proof)}",
            f"          {proof.scope}",
            f"work      {proof.points:,} bounded, {proof.scheduled} scheduled, {proof.placed} placed, {proof.bounds} "
            f"bounds by placement; {seconds_text(self.seconds)}",
        ]
        lines += [f"limit     {self.overtime}"] if self.overtime else []
        lines += [_network_line(self.objective, row) for row in self.networks]
        lines += [_top_line(self.objective, index, design) for index, design in enumerate(self.top)]
        lines += [_sensitivity_line(self.objective, row) for row in self.sensitivity]
        if self.is_front_proven or len(self.front) > 1:
            about = "of the space" if self.is_front_proven else "of the accelerators that were evaluated"
            lines += ["", f"front of throughput, area and energy, {about}:"]
            lines += [_front_line(design) for design in self.front]
        return "\n".join(map(printable, lines))


def value_text(objective: str, value: float) -> str:
    """A value of an objective with its unit."""
    unit = {
        "throughput": "samples/s",
        "throughput-per-area": "samples/s of all devices per mm2 of one",
        "throughput-per-energy": "samples/J",
        "ratio": "times tpuv4-paper",
    }[objective]
    return f"{value:,.5g} {unit}" if value < 1e4 else f"{value:,.0f} {unit}"


def model_line(row: ModelRow) -> str:
    """One line about a model on a design."""
    degrees = ", ".join(
        f"{key.replace('_', ' ')} {value}" for key, value in row.strategy.items() if key in _SHOWN_DEGREES
    )
    schedule = row.strategy["schedule"]
    schedule_text = "no pipeline" if schedule == PipelineSchedule.NONE else schedule
    ratio = "" if row.ratio is None else f" (ratio {row.ratio:.4g})"
    energy = "" if row.joules_per_sample is None else f", {row.joules_per_sample:.4g} J a sample"
    return (
        f"{row.model}: {row.samples_per_s:,.5g} samples/s{ratio}, step {seconds_text(row.step_time_s)}{energy}; "
        f"{degrees}, {schedule_text}"
    )


def _memory_text(objective: str, row: MemoryRow) -> str:
    value = "does not fit" if row.value is None else value_text(objective, row.value)
    return f"{row.hbm_gib:g} GiB {value}"


def _proof_text(objective: str, proof: Certificate) -> str:
    bound = value_text(objective, proof.bound)
    if not proof.is_finished:
        return f"not finished: what was not looked at may reach {bound}, {proof.gap:.2%} more"
    if proof.gap <= EQUAL_RESULTS:
        return "the best of the space"
    return f"within {proof.gap:.2%} of the best: no accelerator exceeds {bound}"


def _on_network(design: Design) -> str:
    return "" if design.network is None else f" on {design.network}"


def _network_line(objective: str, row: NetworkRow) -> str:
    found = "nothing better" if row.value is None else f"{value_text(objective, row.value)} with {row.name}"
    return f"network   {row.network}: {found}, none exceeds {value_text(objective, row.bound)}"


def _top_line(objective: str, index: int, design: Design) -> str:
    use = ", ".join(
        f"{row.model} {row.tensor_utilisation:.0%} of tensor, {row.vector_utilisation:.0%} of vector units"
        for row in design.models
    )
    return (
        f"top {index + 1:<5} {design.name}{_on_network(design)}, {design.area_mm2:.1f} mm2, {design.power_w:.0f} W: "
        f"{value_text(objective, design.value)}; {use}"
    )


def _sensitivity_line(objective: str, row: SensitivityRow) -> str:
    what = f"{row.field.replace('_', ' ')} {row.direction}"
    if row.value is None or row.change is None:
        return f"step      {what}: {row.name or 'not in the space'}{', nothing fits' if row.name else ''}"
    return f"step      {what}: {row.change:+.2%}, {value_text(objective, row.value)}, {row.name}"


def _front_line(design: Design) -> str:
    energy = [row.joules_per_sample for row in design.models if row.joules_per_sample is not None]
    mean = f", {sum(energy) / len(energy):.4g} J a sample" if energy else ""
    rate = " ".join(f"{row.samples_per_s:,.5g}" for row in design.models)
    return f"  {design.name}, {design.hbm_gib:g} GiB: {rate} samples/s, {design.area_mm2:.1f} mm2{mean}"
