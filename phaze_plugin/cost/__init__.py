"""What one op and one collective cost on an accelerator (time, traffic, energy), for many accelerators at once."""

from phaze.cost.attention_fusion import fuse_attention
from phaze.cost.calibration import (
    EAGER_STACK,
    IDEAL,
    LIBRARY_STACK,
    PERFECT_STACK,
    Calibration,
    ComparableRuns,
    Fusion,
    Stack,
    calibration_of,
    load_calibration,
    save_calibration,
)
from phaze.cost.collective_prices import Collective, CollectiveEstimate, broadcast_fill_s, price_collective
from phaze.cost.cost_breakdown import CostReport, CostRow, cost_report, explain
from phaze.cost.estimate import BINDINGS, Binding, CoreKind, Estimate, stack_estimates, total_estimate
from phaze.cost.graph_prices import (
    OpGroup,
    fuse_epilogues,
    group_work,
    plugin_prices,
    price_groups,
    price_ops,
    single_groups,
)
from phaze.cost.operator_work import VIEW, Product, Work, matmul_work, op_work, update_work, vector_work
from phaze.cost.stack_fusions import AttentionMode, fuses_loss, planned_graph, settled_attention
from phaze.cost.work_prices import PriceTable, PriceTables, price_works

__all__ = [
    "BINDINGS",
    "EAGER_STACK",
    "IDEAL",
    "LIBRARY_STACK",
    "PERFECT_STACK",
    "VIEW",
    "AttentionMode",
    "Binding",
    "Calibration",
    "Collective",
    "CollectiveEstimate",
    "ComparableRuns",
    "CoreKind",
    "CostReport",
    "CostRow",
    "Estimate",
    "Fusion",
    "OpGroup",
    "PriceTable",
    "PriceTables",
    "Product",
    "Stack",
    "Work",
    "broadcast_fill_s",
    "calibration_of",
    "cost_report",
    "explain",
    "fuse_attention",
    "fuse_epilogues",
    "fuses_loss",
    "group_work",
    "load_calibration",
    "matmul_work",
    "op_work",
    "planned_graph",
    "plugin_prices",
    "price_collective",
    "price_groups",
    "price_ops",
    "price_works",
    "save_calibration",
    "settled_attention",
    "single_groups",
    "stack_estimates",
    "total_estimate",
    "update_work",
    "vector_work",
]
