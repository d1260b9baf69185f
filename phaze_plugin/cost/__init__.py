"""What one op and one collective cost, vectorised over accelerators."""

from phaze.cost.calibration import IDEAL, Calibration, calibration_of
from phaze.cost.estimate import BINDINGS, Binding, CoreKind, Estimate, stack_estimates
from phaze.cost.price import price_works
from phaze.cost.work import VIEW, Product, Work, matmul_work, vector_work

__all__ = [
    "BINDINGS",
    "IDEAL",
    "VIEW",
    "Binding",
    "Calibration",
    "CoreKind",
    "Estimate",
    "Product",
    "Work",
    "calibration_of",
    "matmul_work",
    "price_works",
    "stack_estimates",
    "vector_work",
]
