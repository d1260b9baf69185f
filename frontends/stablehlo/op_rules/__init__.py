"""The rule of every StableHLO operation: a name to the function that records its ops, a file for each kind of work.

Each table maps an operation's name, without its dialect, to a function that records the ops for it and returns the
symbols of its results. An operation that stands in no table is opaque. To add one, add a line to a table.
"""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.stablehlo.op_rules.collectives_and_custom_calls import COLLECTIVES, KERNELS
from phaze.frontends.stablehlo.op_rules.data_movement import DATA_MOVEMENT
from phaze.frontends.stablehlo.op_rules.elementwise import ELEMENTWISE
from phaze.frontends.stablehlo.op_rules.indexing import INDEXING
from phaze.frontends.stablehlo.op_rules.products_and_reductions import PRODUCTS, REDUCTIONS
from phaze.frontends.stablehlo.symbols import Call, Values

__all__ = ["OP_RULES"]

OP_RULES: dict[str, Callable[[Call], Values]] = {
    **COLLECTIVES,
    **ELEMENTWISE,
    **INDEXING,
    **KERNELS,
    **DATA_MOVEMENT,
    **PRODUCTS,
    **REDUCTIONS,
}
