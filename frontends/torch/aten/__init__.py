"""The table of all aten operators that Phaze knows: which function translates each of them into ops with factor rules.

There is a file for each kind of work. Each has a table that maps an operator's name, without its overload, to the
function that adds the ops of one call. An operator that stands in no table is elementwise where torch tags it as
pointwise, and opaque otherwise.
"""

from __future__ import annotations

from phaze.frontends.torch.aten.data_movement import DATA_MOVEMENT
from phaze.frontends.torch.aten.elementwise import ELEMENTWISE
from phaze.frontends.torch.aten.indexing import INDEXING
from phaze.frontends.torch.aten.products_and_convolutions import CONVOLUTIONS, PRODUCTS
from phaze.frontends.torch.aten.reductions_and_norms import NORMS_AND_LOSSES, REDUCTIONS
from phaze.frontends.torch.operator_call import OperatorTable

__all__ = ["OPERATORS"]

OPERATORS: OperatorTable = {
    **CONVOLUTIONS,
    **ELEMENTWISE,
    **INDEXING,
    **DATA_MOVEMENT,
    **NORMS_AND_LOSSES,
    **PRODUCTS,
    **REDUCTIONS,
}
