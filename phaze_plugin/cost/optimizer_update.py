"""The work of the optimizer's update, done once per batch after gradients are reduced.

A device updates the parameters that it holds, or its part of them where ZeRO divides them. Each parameter moves
`PrecisionRecipe.update_bytes` over HBM (gradient read, master or parameter and state read and written, parameter copy
written) and takes a dozen lane operations. Stacks that do not fuse the update make a copy of gradients in the master's
type, read it for their norm and scale it.
"""

from __future__ import annotations

from phaze.cost.calibration import PERFECT_STACK, Stack
from phaze.cost.operator_work import Work, vector_work
from phaze.cost.size_checks import check_sizes
from phaze.hardware import PrecisionRecipe

__all__ = [
    "update_work",
]

_OPERATIONS_PER_PARAMETER = 12
"""Lane operations of Adam's update of one parameter, counted by hand; memory decides its time on real chips."""
_PASSES_OVER_GRADIENTS = 4
"""Copies are written, read for the norm, read and written to be scaled."""


def update_work(recipe: PrecisionRecipe, parameters: int, *, stack: Stack = PERFECT_STACK) -> Work:
    """The update of the ``parameters`` that one device updates; where there are none, it is a `CostError`."""
    check_sizes("update", parameters=parameters)
    moved = recipe.update_bytes
    if not stack.fuses_update:
        size = recipe.master_bytes or recipe.gradient_bytes
        moved += recipe.gradient_bytes + _PASSES_OVER_GRADIENTS * size
    return vector_work(float(_OPERATIONS_PER_PARAMETER) * parameters, moved * parameters)
