"""What a graph's distinct ops cost on one accelerator, most expensive first, and why.

Ops of one phase with the same functions and the same work are one row. The total is that of all ops one after the
other, each spread over all cores: what a schedule that overlaps ops improves on. Update ops that were captured with the
model are counted and left out; the optimizer's update is priced from the precision recipe instead, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaze.cost.calibration import Calibration, calibration_of
from phaze.cost.estimate import Binding, CoreKind, Estimate
from phaze.cost.fusion import OpGroup, fuse_epilogues, group_work, single_groups
from phaze.cost.graph import price_groups
from phaze.cost.price import price_works
from phaze.cost.update import update_work
from phaze.cost.work import Product, Work
from phaze.hardware import Accelerator, AcceleratorArray, PrecisionRecipe, precision_recipe
from phaze.hardware.dtypes import rate_name
from phaze.hardware.energy import energy_model
from phaze.ir import Graph, Phase

if TYPE_CHECKING:
    from phaze.interfaces import OpPricer

__all__ = ["CostReport", "CostRow", "cost_report", "explain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One distinct op: how often it occurs, and its price when it occurs once.

    ``peak_share`` is the reached share of the tensor cores' peak, 0 for ops without matrix work.
    """

    functions: str
    phase: str
    shape: str
    kind: CoreKind
    count: int
    spread_s: float
    core_s: float
    binding: Binding
    off_chip_bytes: float
    energy_j: float
    peak_share: float

    @property
    def total_s(self) -> float:
        """Seconds of all occurrences, one after the other."""
        return self.count * self.spread_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """Rows, most expensive first, and the update that follows each batch."""

    rows: tuple[CostRow, ...]
    update: CostRow
    calibration: Calibration
    static_power_w: float
    skipped_update_ops: int

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward, one op after the other."""
        return sum(row.total_s for row in self.rows)

    @property
    def energy_j(self) -> float:
        """Energy of forward and backward: what the ops use, and static power for as long as they take."""
        return sum(row.count * row.energy_j for row in self.rows) + self.static_power_w * self.total_s


def cost_report(
    graph: Graph,
    accelerator: Accelerator,
    *,
    recipe: PrecisionRecipe | None = None,
    is_fused: bool = False,
    prices: Mapping[str, OpPricer] | None = None,
) -> CostReport:
    """Price every distinct op of ``graph``; ``is_fused`` joins elementwise epilogues to their matrix ops."""
    calibration = calibration_of(accelerator.name)
    ops = [op for op in graph.ops if op.phase is not Phase.UPDATE]
    groups = fuse_epilogues(graph, ops) if is_fused else single_groups(ops)
    distinct: dict[tuple[str, str, Work], list[OpGroup]] = {}
    for group in groups:
        functions = " + ".join(op.function for op in group.ops)
        distinct.setdefault((functions, group.head.phase, group_work(group, graph.tensors)), []).append(group)
    first = [members[0] for members in distinct.values()]
    estimate = price_groups(graph, first, accelerator, calibration=calibration, prices=prices)
    rows = [
        _row(functions, phase, work, len(members), estimate, index, accelerator)
        for index, ((functions, phase, work), members) in enumerate(distinct.items())
    ]
    update = update_work(recipe or precision_recipe(), max(1, graph.parameter_count))
    update_estimate = price_works([update], accelerator, calibration=calibration)
    return CostReport(
        rows=tuple(sorted(rows, key=lambda row: (-row.total_s, row.functions, row.shape))),
        update=_row("optimizer update", Phase.UPDATE, update, 1, update_estimate, 0, accelerator),
        calibration=calibration,
        static_power_w=float(energy_model().static_power_w(AcceleratorArray.of([accelerator]))[0]),
        skipped_update_ops=len(graph.ops) - len(ops),
    )


def explain(work: Work, accelerator: Accelerator, *, calibration: Calibration | None = None) -> str:
    """One sentence: how long ``work`` takes when spread over all cores, how near to peak, what binds and why."""
    chosen = calibration or calibration_of(accelerator.name)
    estimate = price_works([work], accelerator, calibration=chosen)
    row = _row("", "", work, 1, estimate, 0, accelerator)
    memory_s = row.off_chip_bytes / (accelerator.hbm_bandwidth_bytes_per_s * chosen.memory)
    reasons = {
        Binding.COMPUTE: f"the cores are busy throughout, off-chip traffic needs only {_seconds(memory_s)}",
        Binding.MEMORY: f"{row.off_chip_bytes:.3g} bytes cross to HBM while the cores wait",
        Binding.FILL: (
            f"arrays of {accelerator.tensor_rows}x{accelerator.tensor_cols} spend more than half of the time filling "
            "and draining"
        ),
        Binding.OVERHEAD: f"{_seconds(chosen.overhead_s)} of overhead per op exceed the work itself",
    }
    reached = f", {row.peak_share:.1%} of peak" if work.products else ""
    return (
        f"{row.shape} on {chosen.name} {accelerator.name}: {_seconds(row.spread_s)}{reached}; "
        f"{row.binding} binds: {reasons[row.binding]}."
    )


def _row(
    functions: str, phase: str, work: Work, count: int, estimate: Estimate, at: int, accelerator: Accelerator
) -> CostRow:
    seconds = float(estimate.spread_s[at, 0])
    least_s = sum(2 * product.macs / accelerator.peak_flops_per_s(product.dtype) for product in work.products)
    return CostRow(
        functions=functions,
        phase=str(phase),
        shape=work_shape(work),
        kind=estimate.kinds[at],
        count=count,
        spread_s=seconds,
        core_s=float(estimate.core_s[at, 0]),
        binding=estimate.binding(at),
        off_chip_bytes=float(estimate.spread_bytes[at, 0]),
        energy_j=float(estimate.spread_energy_j[at, 0]),
        peak_share=least_s / seconds if seconds else 0.0,
    )


def work_shape(work: Work) -> str:
    """The size of a work as text: batch and m x n x k of products, or lane operations."""
    if len(work.products) > 1:
        return f"{_product_shape(work.products[0])} and {len(work.products) - 1} more"
    if work.products:
        return _product_shape(work.products[0])
    return f"{work.vector_operations:.3g} lane operations" if work.vector_operations else "view"


def _product_shape(product: Product) -> str:
    batch = f"{product.batch} x " if product.batch > 1 else ""
    return f"{batch}{product.m}x{product.n}x{product.k} {rate_name(product.dtype)}"


def _seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
