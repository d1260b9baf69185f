"""What each distinct op of a graph costs on one accelerator, most expensive first, and why it takes that long.

`cost_report` prices a graph. Ops of one phase with the same functions and the same work make one row; where a plugin
prices an op of a group, those with the same rules, element types and attributes do. The total is the time of all ops
one after the other, each spread over all cores: what a schedule that overlaps ops improves on. Update ops that were
captured with the model are counted and left out; the optimizer's update is priced from the precision recipe instead,
once.

`explain` says in a sentence why one work takes as long as it does.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaze.cost.calibration import Calibration, calibration_of
from phaze.cost.estimate import Binding, CoreKind, Estimate
from phaze.cost.graph_prices import OpGroup, fuse_epilogues, group_work, plugin_price_name, price_groups, single_groups
from phaze.cost.operator_work import Product, Work, update_work
from phaze.cost.work_prices import price_works
from phaze.errors import CostError
from phaze.hardware import Accelerator, AcceleratorArray, PrecisionRecipe, precision_recipe
from phaze.hardware.accelerator import energy_model
from phaze.hardware.precision import rate_name
from phaze.ir import Graph, Op, Phase
from phaze.tolerances import EQUAL_RESULTS

if TYPE_CHECKING:
    from phaze.interfaces import OpPricer

__all__ = [
    "CostReport",
    "CostRow",
    "cost_report",
    "explain",
    "least_tensor_s",
    "work_shape",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One distinct op: how often it occurs, and its price when it occurs once.

    ``peak_share`` is the reached share of the tensor cores' peak, 0 for ops without matrix work and for those that a
    plugin prices.
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
    """Rows, most expensive first, and the update that follows each batch (none where there are no parameters)."""

    rows: tuple[CostRow, ...]
    update: CostRow | None
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
    """Price every distinct op of ``graph``; ``is_fused`` joins elementwise epilogues to their matrix ops.

    ``prices`` win over the built-in ones, as in `price_groups`.
    """
    calibration = calibration_of(accelerator)
    ops = [op for op in graph.ops if op.phase is not Phase.UPDATE]
    groups = fuse_epilogues(graph, ops) if is_fused else single_groups(ops)
    distinct: dict[tuple[str, Phase, Hashable], list[OpGroup]] = {}
    for group in groups:
        functions = " + ".join(op.function for op in group.ops)
        content = _content(graph, group, prices or {})
        distinct.setdefault((functions, group.head.phase, content), []).append(group)
    representatives = [members[0] for members in distinct.values()]
    estimate = price_groups(graph, representatives, accelerator, calibration=calibration, prices=prices)
    rows = []
    for index, ((functions, phase, content), members) in enumerate(distinct.items()):
        work = content if isinstance(content, Work) else None
        shape = work_shape(work) if work is not None else _op_shape(members[0].head)
        rows.append(_row(functions, phase, shape, work, len(members), estimate.rows([index]), accelerator))
    return CostReport(
        rows=tuple(sorted(rows, key=lambda row: (-row.total_s, row.functions, row.shape))),
        update=_update(
            recipe or precision_recipe(), graph.parameter_count - graph.frozen_parameter_count, accelerator, calibration
        ),
        calibration=calibration,
        static_power_w=float(energy_model().static_power_w(AcceleratorArray.of([accelerator]))[0]),
        skipped_update_ops=len(graph.ops) - len(ops),
    )


def least_tensor_s(work: Work, accelerator: Accelerator) -> float:
    """Seconds of the matrix products at peak."""
    return work.trips * sum(2 * product.macs / accelerator.peak_flops_per_s(product.dtype) for product in work.products)


def _content(graph: Graph, group: OpGroup, prices: Mapping[str, OpPricer]) -> Hashable:
    """What makes a group's price: its work, or, where a plugin prices an op, all that a price can see of its ops."""
    if not any(plugin_price_name(op, prices) for op in group.ops):
        return group_work(group, graph.tensors)
    return tuple(
        (op.rule, tuple(graph.tensors[name].dtype for name in (*op.inputs, *op.outputs)), op.attributes)
        for op in group.ops
    )


def _update(
    recipe: PrecisionRecipe, parameters: int, accelerator: Accelerator, calibration: Calibration
) -> CostRow | None:
    if not parameters:
        return None
    work = update_work(recipe, parameters, stack=calibration.stack)
    estimate = price_works([work], accelerator, calibration=calibration)
    return _row("optimizer update", Phase.UPDATE, work_shape(work), work, 1, estimate, accelerator)


def _row(
    functions: str,
    phase: Phase,
    shape: str,
    work: Work | None,
    count: int,
    estimate: Estimate,
    accelerator: Accelerator,
) -> CostRow:
    """A row from the estimate of one op on one accelerator; ``work`` is None where a plugin prices it."""
    seconds = float(estimate.spread_s[0, 0])
    least_s = least_tensor_s(work, accelerator) if work is not None else 0.0
    return CostRow(
        functions=functions,
        phase=str(phase),
        shape=shape,
        kind=estimate.kinds[0],
        count=count,
        spread_s=seconds,
        core_s=float(estimate.core_s[0, 0]),
        binding=estimate.binding(),
        off_chip_bytes=float(estimate.spread_bytes[0, 0]),
        energy_j=float(estimate.spread_energy_j[0, 0]),
        peak_share=least_s / seconds if seconds else 0.0,
    )


def _op_shape(op: Op) -> str:
    """The shapes of an op's results."""
    return " and ".join("x".join(map(str, op.rule.shape(dims))) or "scalar" for dims in op.rule.results)


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


_WELL_USED = 0.8
"""From this share of peak on, padding and idle arrays are not worth a word."""


def explain(work: Work, accelerator: Accelerator, *, calibration: Calibration | None = None) -> str:
    """One sentence: how long ``work`` takes when spread over all cores, how near to peak, what binds and why.

    A view takes no time that could be explained and is refused with a `CostError`.
    """
    if work.kind is CoreKind.NONE:
        raise CostError("a view costs nothing and nothing binds it; explain a work that computes.")
    chosen = calibration or calibration_of(accelerator)
    estimate = price_works([work], accelerator, calibration=chosen)
    seconds, moved, binding = float(estimate.spread_s[0, 0]), float(estimate.spread_bytes[0, 0]), estimate.binding()
    reasons = {
        Binding.COMPUTE: lambda: _compute_reason(work, accelerator, chosen, seconds - chosen.op_overhead_s),
        Binding.MEMORY: lambda: f"{moved:.3g} bytes cross to HBM while the cores wait",
        Binding.FILL: lambda: (
            f"arrays of {accelerator.tensor_rows}x{accelerator.tensor_cols} spend more than half of the time filling "
            "and draining"
        ),
        Binding.OVERHEAD: lambda: f"{_seconds(chosen.op_overhead_s)} of overhead per op exceed the work itself",
    }
    reached = f", {least_tensor_s(work, accelerator) / seconds:.1%} of peak" if work.products else ""
    return (
        f"{work_shape(work)} on {accelerator.name} ({chosen.name}): {_seconds(seconds)}{reached}; "
        f"{binding} binds: {reasons[binding]()}."
    )


def _compute_reason(work: Work, accelerator: Accelerator, calibration: Calibration, seconds: float) -> str:
    """Which cores decide, and whether the tensor cores' time is spent on the work or on padding."""
    lanes = accelerator.vector_cores * accelerator.vector_lanes
    vector_s = math.ceil(work.vector_operations / lanes) / (accelerator.clock_hz * calibration.vector)
    if vector_s >= seconds * (1 - EQUAL_RESULTS):
        idle = "; the tensor cores wait" if work.products else ""
        return f"the vector cores are busy with {work.vector_operations:.3g} lane operations{idle}"
    useful = least_tensor_s(work, accelerator) / (seconds * calibration.matrix)
    if useful < _WELL_USED:
        size = f"{accelerator.tensor_rows}x{accelerator.tensor_cols}"
        return (
            f"the tensor cores need {_seconds(seconds)} but multiply for {useful:.0%} of it; the rest is padding the "
            f"shape to {accelerator.tensor_cores} arrays of {size}, idle arrays and fill"
        )
    return "the tensor cores are busy throughout"


def _seconds(value: float) -> str:
    """Seconds as people read them."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
