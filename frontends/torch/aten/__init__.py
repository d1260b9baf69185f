"""aten operators as factor rules, a file for each kind of work.

Each table maps an operator's name, without its overload, to a function that adds the ops for one call. An operator that
stands in no table is elementwise where torch tags it so, and opaque otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.torch.aten.attention import ATTENTION
from phaze.frontends.torch.aten.elementwise import ELEMENTWISE
from phaze.frontends.torch.aten.indexing import INDEXING
from phaze.frontends.torch.aten.losses import LOSSES
from phaze.frontends.torch.aten.moving import MOVING
from phaze.frontends.torch.aten.normalizing import NORMALIZING
from phaze.frontends.torch.aten.products import PRODUCTS
from phaze.frontends.torch.aten.reductions import REDUCTIONS
from phaze.frontends.torch.aten.views import VIEWS
from phaze.frontends.torch.aten.windows import WINDOWS
from phaze.frontends.torch.call import Call, Value

__all__ = ["OPERATORS"]

OPERATORS: dict[str, Callable[[Call], Value]] = {
    **ATTENTION,
    **ELEMENTWISE,
    **INDEXING,
    **LOSSES,
    **MOVING,
    **NORMALIZING,
    **PRODUCTS,
    **REDUCTIONS,
    **VIEWS,
    **WINDOWS,
}
