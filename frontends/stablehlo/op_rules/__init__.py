"""Operations of StableHLO as factor rules, a file for each kind of work.

Each table maps an operation's name, without its dialect, to a function that adds the ops for it and returns what its
results stand for. An operation that stands in no table is opaque.
"""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.stablehlo.op_rules.collectives import COMMUNICATING
from phaze.frontends.stablehlo.op_rules.data_movement import MOVING
from phaze.frontends.stablehlo.op_rules.elementwise import ELEMENTWISE
from phaze.frontends.stablehlo.op_rules.indexing import INDEXING
from phaze.frontends.stablehlo.op_rules.products_and_reductions import PRODUCTS, REDUCTIONS
from phaze.frontends.stablehlo.symbols import Call, Values

__all__ = ["OPERATIONS"]

OPERATIONS: dict[str, Callable[[Call], Values]] = {
    **COMMUNICATING,
    **ELEMENTWISE,
    **INDEXING,
    **MOVING,
    **PRODUCTS,
    **REDUCTIONS,
}
