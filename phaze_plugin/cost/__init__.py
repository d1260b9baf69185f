"""What one op and one collective cost, vectorised over accelerators."""

from phaze.cost.attention import fuse_attention
from phaze.cost.calibration import EAGER_STACK, IDEAL, LIBRARY_STACK, PERFECT_STACK, Calibration, Fusion, Stack
from phaze.cost.calibration_files import load_calibration, save_calibration
from phaze.cost.cast import cast_graph
from phaze.cost.collective import Collective, CollectiveEstimate, price_collective
from phaze.cost.estimate import BINDINGS, Binding, CoreKind, Estimate, stack_estimates, total_estimate
from phaze.cost.fitted import calibration_of
from phaze.cost.fusion import OpGroup, format_groups, fuse_epilogues, group_work, single_groups
from phaze.cost.graph import price_groups, price_ops
from phaze.cost.op_work import op_work
from phaze.cost.plugin_price import plugin_prices
from phaze.cost.price import price_works
from phaze.cost.reasons import explain
from phaze.cost.report import CostReport, CostRow, cost_report
from phaze.cost.update import gathered_bytes, update_work
from phaze.cost.work import VIEW, Product, Work, matmul_work, vector_work

__all__ = [
    "BINDINGS",
    "EAGER_STACK",
    "IDEAL",
    "LIBRARY_STACK",
    "PERFECT_STACK",
    "VIEW",
    "Binding",
    "Calibration",
    "Collective",
    "CollectiveEstimate",
    "CoreKind",
    "CostReport",
    "CostRow",
    "Estimate",
    "Fusion",
    "OpGroup",
    "Product",
    "Stack",
    "Work",
    "calibration_of",
    "cast_graph",
    "cost_report",
    "explain",
    "format_groups",
    "fuse_attention",
    "fuse_epilogues",
    "gathered_bytes",
    "group_work",
    "load_calibration",
    "matmul_work",
    "op_work",
    "plugin_prices",
    "price_collective",
    "price_groups",
    "price_ops",
    "price_works",
    "save_calibration",
    "single_groups",
    "stack_estimates",
    "total_estimate",
    "update_work",
    "vector_work",
]
