"""How far a real chip with its software stays behind the ideal one: calibrations, their files, their errors on runs.

A `Calibration` holds fitted numbers, of which a family of chips has at most six:

    tensor time = ideal / matrix,  vector time = ideal / vector,  memory time = ideal / memory; where a GPU's products
                  were measured, theirs are product time / matrix                  (`phaze.cost.measured_kernels`)
    attention   = the share of the rate of matrix products that fused attention reaches
    op          = the longest of tensor, vector and memory time + overhead; where the stack hides no memory behind
                  matrix products, the longer of tensor + memory time and vector time   (`phaze.cost.work_prices`)
    pass        = no less than overhead * ops, the host launching one after the other (for a backward pass
                  `BACKWARD_LAUNCHES` of that); where it launches them ahead of the device, overhead is no part of an op
                                                                                        (`phaze.profile.layer_jobs`)
    collective  = latencies + bytes / (bandwidth * efficiency) + overhead; the efficiency is `link` on a cluster's
                  innermost links and `network` on all others                     (`phaze.cost.collective_prices`);
                  on measured links of protocols                                   (`phaze.cost.measured_kernels`)
    overlap     = of the part of a data-parallel collective that later passes could hide, the share that they do hide;
                  nothing where the stack hides none of them
    reserve     = memory that allocator and libraries hold besides what is needed, as a part of that
    margin      = the part of a device's memory that must stay free, or a stage is called marginal: how far measured
                  runs went beyond their prediction

Facts about the software stack (`Stack`) are not fitted: which ops it fuses, and what it hides. Until a chip was fitted
its numbers are all 1.0, its stack is perfect and results say "ideal".

`calibration_of` gives the calibration of a shipped chip. ``hardware/data/calibrations.json`` has one for each family of
chips: the numbers that `benchmarks/fit_published.py` fitted to published runs, what the stack does, the runs behind
them, and the errors that remain (in sample, with each row left out, with each dataset left out). `save_calibration`
and `load_calibration` write and read the files of `phaze calibrate`.

`comparable_runs` says how far measured steps lay from their predictions in runs like the one that is asked about. Runs
are alike where the calibration's family of chips, the number of nodes (one, or many) and the width of products (two
bytes and more, or fewer) are the same. ``calibrations.json`` has, for each such class with at least `LEAST_RUNS`
published runs, the tenth and the ninetieth percentile of measured against predicted seconds, each run predicted by a
fit that had no run of its group (`benchmarks/fit_published.py`). Where there is no such class nothing is said: neither
of chips that were not fitted, nor under a calibration of the user's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

import numpy as np

from phaze.cost.measured_kernels import LinkProtocols, ProductKernels, link_protocols_of, product_kernels_of
from phaze.errors import FormatError, HardwareError, shown
from phaze.file_access import read_document, write_whole
from phaze.hardware import Accelerator, Cluster, PrecisionRecipe, preset
from phaze.hardware.chip_presets import preset_names
from phaze.hardware.hardware_numbers import Table, fraction, non_negative, packaged_table, positive_integer
from phaze.hardware.precision import dtype_bytes
from phaze.json_documents import from_document, to_document, with_digest, without_digest

__all__ = [
    "EAGER_STACK",
    "IDEAL",
    "KIND",
    "LEAST_RUNS",
    "LIBRARY_STACK",
    "PERFECT_STACK",
    "TERMS",
    "VERSION",
    "Calibration",
    "CalibrationFile",
    "ComparableRuns",
    "Fusion",
    "RunClass",
    "Stack",
    "calibration_of",
    "comparable_runs",
    "fitted_families",
    "load_calibration",
    "runs_by_class",
    "save_calibration",
    "why_ideal",
]

TERMS = ("matrix", "narrow_matrix", "attention", "vector", "memory", "link", "network", "overhead_s", "overlap")
"""The numbers of a calibration that can be fitted to measured steps."""
MOST_NARROW_MATRIX = 1.3
"""How much quicker than the measured ones 8-bit products may be: no measured kernel then exceeds its chip's peak."""

BACKWARD_LAUNCHES = 0.3
"""The host's time for an op of a backward pass as a part of that for one of a forward pass: autograd's engine launches
it from C++, Python the others. Passes of small layers in vTrain's runs on one node take 2.2 ms forward (14 ops) and
1.2 ms backward (25 ops)."""


class Fusion(StrEnum):
    """What a framework runs as one kernel: single ops, chains of elementwise ops, or these behind a matrix op.

    With the first two it may also have a loss that reads 16-bit logits as they are (`fuse_loss`), with chains a
    gated activation as one kernel (`fuse_gates`).
    """

    NONE = "none"
    LOSS = "loss"
    CHAINS = "chains"
    CHAINS_AND_LOSS = "chains+loss"
    CHAINS_AND_GATES = "chains+gates"
    EPILOGUES = "epilogues"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What frameworks and libraries do on a chip: facts about them, not fitted numbers.

    Attributes:
        fusion: which ops run as one.
        hides_memory: whether the traffic of matrix products runs behind their arithmetic, as that of vector work does.
        hides_links: whether collectives of tensor parallelism run behind independent ops of the layer.
        hides_reductions: whether collectives of data parallelism run beside passes; else they wait for all of them.
        owners_broadcast: whether ZeRO-1 gives whole tensors to devices (InternEvo): gradients are all-reduced over all
            copies, and after the update each owner sends its tensors by a broadcast of its own, one after the other.
        pipelines_products: whether gathers before a product and scatters behind one run in pieces beside it, as many as
            devices share it (Transformer Engine's userbuffers, torch's asynchronous tensor parallelism). Such a
            product is made in as many kernels. A fact of runs that did so and no choice of a search: priced as if all
            but the first piece were hidden, it seldom loses, but torchtitan's four published pairs of runs saved 0.28
            to 0.68 of the seconds that this says.
        overlaps_softmax: whether fused attention computes softmax beside its products (FlashAttention-3 and cuDNN on
            Hopper and Blackwell), which makes it `SOFTMAX_OVERLAP_GAIN` times as fast.
        accumulates_in_products: whether products add a microbatch's gradients to the sum so far without extra traffic.
        recomputes_ends: whether recompute also covers layers that do not repeat (embedding, logits and loss).
        alignment_bytes: batched products with a side of no multiple of this, and single ones whose rows are stored in
            no multiple of it, run at a third of their rate.
        launches_ahead: whether the host queues ops while the device works, so that its time per op shows only in passes
            with too little work; else ops run one after the other, each after its launch.
        sends_tokens_once: whether tokens go to the devices of experts once for each device and once for each node, and
            not once for each expert (DeepEP, HybridEP), and back likewise.
        hides_exchanges: whether all-to-alls of experts run beside the passes of another microbatch.
        keeps_narrow_inputs: whether the inputs of 8-bit products are kept for backward in 8 bits, as Transformer Engine
            does; what other ops read as well is kept in its own type besides.
        fuses_update: whether the update reads gradients once; else they are first copied to the master's type, checked
            for their norm and scaled, each in a pass of its own.
    """

    fusion: Fusion = Fusion.EPILOGUES
    hides_memory: bool = True
    hides_links: bool = True
    hides_reductions: bool = True
    owners_broadcast: bool = False
    pipelines_products: bool = False
    overlaps_softmax: bool = False
    accumulates_in_products: bool = True
    recomputes_ends: bool = True
    alignment_bytes: int = 1
    launches_ahead: bool = True
    sends_tokens_once: bool = False
    hides_exchanges: bool = False
    keeps_narrow_inputs: bool = False
    fuses_update: bool = True

    def __post_init__(self) -> None:
        """Settle types."""
        object.__setattr__(self, "fusion", Fusion(self.fusion))
        positive_integer("stack", "alignment_bytes", self.alignment_bytes)


SOFTMAX_OVERLAP_GAIN = 1.6
"""How much faster attention is whose softmax runs beside its products. FlashAttention-3 is 1.5 to 2.0 times as fast as
FlashAttention-2 forward on H100, and 1.5 to 1.75 times backward (arXiv:2407.08608); nothing here is fitted."""

PERFECT_STACK = Stack()
LIBRARY_STACK = Stack(
    fusion=Fusion.CHAINS,
    hides_memory=False,
    hides_links=False,
    accumulates_in_products=False,
    recomputes_ends=False,
    alignment_bytes=16,
    fuses_update=False,
)
"""Library products between fused elementwise kernels, as in Megatron-LM and torch.compile."""
EAGER_STACK = Stack(
    fusion=Fusion.NONE,
    hides_memory=False,
    hides_links=False,
    accumulates_in_products=False,
    recomputes_ends=False,
    alignment_bytes=16,
)
"""Every op a kernel of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How near a chip comes to its peak: efficiencies in (0, 1], a fixed cost per op, overlap, and what the stack does.

    The name is "ideal", or says what it was fitted on. Efficiencies are the reached shares of the tensor cores' and the
    vector cores' rates and of HBM, link and network bandwidth; the overhead is launch and synchronisation of each op.
    Where ``products`` says how a GPU's library runs matrix products, ``matrix`` is the share of that rate, and 8-bit
    products take ``narrow_matrix`` of it besides, which may be above 1: the measured library is one of inference, whose
    rows have scales of their own, and that of training may be quicker.
    Where ``links`` has the protocols of a GPU's own links, ``link`` is the share of theirs.
    """

    name: str = "ideal"
    matrix: float = 1.0
    narrow_matrix: float = 1.0
    attention: float = 1.0
    vector: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    network: float = 1.0
    overhead_s: float = 0.0
    overlap: float = 1.0
    reserve: float = 0.0
    margin: float = 0.05
    stack: Stack = field(default=PERFECT_STACK)
    products: ProductKernels | None = None
    links: LinkProtocols | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        owner = f"calibration {self.name}"
        for name in ("matrix", "attention", "vector", "memory", "link", "network"):
            fraction(owner, name, getattr(self, name))
        if not 0 < self.narrow_matrix <= MOST_NARROW_MATRIX:
            raise HardwareError(
                f"{owner}: narrow_matrix is {self.narrow_matrix}; expected a number above 0 and up to "
                f"{MOST_NARROW_MATRIX}."
            )
        non_negative(owner, "overhead_s", self.overhead_s)
        non_negative(owner, "reserve", self.reserve)
        if self.margin:
            fraction(owner, "margin", self.margin)
        if self.overlap:
            fraction(owner, "overlap", self.overlap)

    @property
    def op_overhead_s(self) -> float:
        """Seconds that every op takes beyond its work."""
        return 0.0 if self.stack.launches_ahead else self.overhead_s

    @property
    def is_ideal(self) -> bool:
        """Whether nothing was fitted."""
        return self == IDEAL

    @property
    def has_measured_kernels_only(self) -> bool:
        """Whether nothing was fitted to measured steps, and matrix products or collectives were measured."""
        is_measured = self.products is not None or self.links is not None
        return is_measured and all(getattr(self, term) == getattr(IDEAL, term) for term in TERMS)

    @property
    def between_nodes(self) -> Calibration:
        """The calibration whose innermost links are like those between nodes."""
        return replace(self, link=self.network, links=None)

    @property
    def hidden_share(self) -> float:
        """Of what passes could hide of data-parallel collectives, the share that they do hide."""
        return self.overlap if self.stack.hides_reductions else 0.0

    def product_share(self, dtype: str) -> float:
        """Of the rate at which a library ran products of a type, the share that is reached."""
        return self.matrix * (self.narrow_matrix if dtype_bytes(dtype) <= 1 else 1.0)

    @property
    def attention_share(self) -> float:
        """Of the rate that is assumed of fused attention, the share that is reached."""
        return min(1.0, self.attention * (SOFTMAX_OVERLAP_GAIN if self.stack.overlaps_softmax else 1.0))

    def together_s(self, first: float, second: float) -> float:
        """Seconds of passes and the collectives behind them: the longer, and what of the shorter is not hidden."""
        return max(first, second) + (1 - self.hidden_share) * min(first, second)


IDEAL = Calibration()


def fitted_families() -> Mapping[str, Table]:
    """Every fitted family as its file says it."""
    families: Mapping[str, Table] = packaged_table("calibrations")["families"]
    return families


def calibration_of(accelerator: Accelerator) -> Calibration:
    """The calibration that belongs to ``accelerator``; ideal where none was fitted.

    It takes the whole accelerator, because another chip under a preset's name has nothing of its calibration. A chip
    that has more or less memory is the same chip: its size is in no price.
    """
    family, products, links = _family_of(accelerator), product_kernels_of(accelerator), link_protocols_of(accelerator)
    measured = [name for name, kernels in (("matrix products", products), ("collectives", links)) if kernels]
    if (family is None and not measured) or _changed_fields(accelerator):
        return IDEAL
    if family is None:
        name = f"{accelerator.name}, {' and '.join(measured)} as measured, all else ideal"
        return Calibration(name=name, products=products, links=links)
    stack = Stack(**family["stack"])
    return Calibration(name=family["name"], **family["terms"], stack=stack, products=products, links=links)


def why_ideal(accelerator: Accelerator) -> str | None:
    """What keeps a chip that has a fitted one's name from its calibration, in words; None where nothing does."""
    changed = _changed_fields(accelerator)
    shipped = calibration_of(preset(accelerator.name).accelerator) if changed else IDEAL
    if shipped.is_ideal:
        return None
    return (
        f"{accelerator.name} has another {' and '.join(changed)} than the chip of that name, so that its calibration "
        f"({shipped.name}) is not used and prices are ideal; give a calibration to use one"
    )


def _family_of(accelerator: Accelerator) -> Table | None:
    return next((family for family in fitted_families().values() if accelerator.name in family["chips"]), None)


def _changed_fields(accelerator: Accelerator) -> list[str]:
    """Fields in which a chip differs from the preset of its name, but for its memory's size."""
    if accelerator.name not in preset_names():
        return []
    shipped = preset(accelerator.name).accelerator
    names = [field.name for field in fields(Accelerator) if field.name != "hbm_bytes"]
    return [name for name in names if getattr(shipped, name) != getattr(accelerator, name)]


KIND, VERSION = "phaze calibration", 5
"""What a calibration's file says of itself; a file of another version is refused instead of being read wrongly. Since
version 2 it carries a digest of its content, version 3 says how products and collectives are run, version 4 how 8-bit
products compare with the measured ones, and version 5 whether owners of parameters broadcast them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFile:
    """What a calibration's file holds: the calibration, and how it was obtained."""

    calibration: Calibration
    report: Mapping[str, object]


def save_calibration(
    path: str | os.PathLike[str], calibration: Calibration, *, report: Mapping[str, object] | None = None
) -> None:
    """Write a calibration; ``report`` says how it was obtained and is not read again."""
    body = to_document(CalibrationFile(calibration=calibration, report=report or {}))
    document = {"kind": KIND, "version": VERSION, **body}
    write_whole(path, json.dumps(with_digest(document), indent=2, allow_nan=False) + "\n")


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration; raises FormatError where the file is none, is damaged or is of another version."""
    document = read_document(path, "a calibration")
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise FormatError(f"{os.fspath(path)} is no calibration; expected a file that `phaze calibrate` wrote.")
    if document.get("version") != VERSION:
        raise FormatError(
            f"{os.fspath(path)} has version {shown(document.get('version'))}; this program reads version {VERSION}. "
            "Calibrate again."
        )
    document = without_digest(document, os.fspath(path))
    body = {name: value for name, value in document.items() if name not in ("kind", "version")}
    return from_document(CalibrationFile, body, os.fspath(path)).calibration


LEAST_RUNS = 8
"""Fewer runs say too little of a tenth of them."""
_MIDDLE_80_PERCENT = 2.563
"""Standard deviations between the tenth and the ninetieth percentile of a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClass:
    """What makes runs on one family of chips comparable."""

    has_many_nodes: bool
    has_narrow_products: bool

    @classmethod
    def of(cls, cluster: Cluster, recipe: PrecisionRecipe) -> RunClass:
        """The class of runs on a cluster at a precision."""
        node = cluster.levels[0].size if cluster.levels else 1
        return cls(has_many_nodes=cluster.device_count > node, has_narrow_products=recipe.quantizes_products)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparableRuns:
    """Measured over predicted seconds, less one, of so many runs: 80 % lie between ``tenth`` and ``ninetieth``."""

    runs: int
    tenth: float
    ninetieth: float

    @property
    def spread(self) -> float:
        """The relative difference below which predictions of two steps do not tell which is the quicker one."""
        return max(abs(self.tenth), abs(self.ninetieth))

    @property
    def deviation(self) -> float:
        """The standard deviation that a normal distribution with the same 80 % in the middle has."""
        return (self.ninetieth - self.tenth) / _MIDDLE_80_PERCENT

    def __str__(self) -> str:
        return f"80 % of {self.runs} comparable runs lie within {self.tenth:+.0%} and {self.ninetieth:+.0%}"


def comparable_runs(calibration: Calibration, cluster: Cluster, recipe: PrecisionRecipe) -> ComparableRuns | None:
    """The published runs that are like those on a cluster at a precision; None where too few are known."""
    family = next((family for family in fitted_families().values() if family["name"] == calibration.name), None)
    asked = RunClass.of(cluster, recipe)
    for entry in () if family is None else family.get("comparable", ()):
        if (entry["has_many_nodes"], entry["has_narrow_products"]) == (asked.has_many_nodes, asked.has_narrow_products):
            return ComparableRuns(runs=entry["runs"], tenth=entry["tenth"], ninetieth=entry["ninetieth"])
    return None


def runs_by_class(classes: Sequence[RunClass], errors: Sequence[float]) -> list[dict[str, object]]:
    """What is shipped of a family: of each class of its runs the quantiles of their errors, where they are enough.

    Errors are those of predictions (predicted over measured, less one), left out of the fit.
    """
    entries: list[dict[str, object]] = []
    for kind in dict.fromkeys(classes):
        ratios = [1 / (1 + error) - 1 for error, own in zip(errors, classes, strict=True) if own == kind]
        if len(ratios) >= LEAST_RUNS:
            tenth, ninetieth = np.quantile(ratios, [0.1, 0.9]).tolist()
            entries.append(
                {
                    "has_many_nodes": kind.has_many_nodes,
                    "has_narrow_products": kind.has_narrow_products,
                    "runs": len(ratios),
                    "tenth": round(tenth, 4),
                    "ninetieth": round(ninetieth, 4),
                }
            )
    return entries
