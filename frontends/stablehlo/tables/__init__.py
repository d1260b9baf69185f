"""Operations of StableHLO as factor rules, a file for each kind of work.

Each table maps an operation's name, without its dialect, to a function that adds the ops for it and returns what its
results stand for. An operation that stands in no table is opaque.
"""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.stablehlo.call import Call, Values
from phaze.frontends.stablehlo.tables.communicating import COMMUNICATING
from phaze.frontends.stablehlo.tables.elementwise import ELEMENTWISE
from phaze.frontends.stablehlo.tables.indexing import INDEXING
from phaze.frontends.stablehlo.tables.moving import MOVING
from phaze.frontends.stablehlo.tables.products import PRODUCTS
from phaze.frontends.stablehlo.tables.reductions import REDUCTIONS

__all__ = ["OPERATIONS"]

OPERATIONS: dict[str, Callable[[Call], Values]] = {
    **COMMUNICATING,
    **ELEMENTWISE,
    **INDEXING,
    **MOVING,
    **PRODUCTS,
    **REDUCTIONS,
}
