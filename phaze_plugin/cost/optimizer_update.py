"""The work of the optimizer's update, done once per batch after gradients are reduced.

A device updates the parameters that it holds, or its part of them where ZeRO divides them. Each parameter moves
`PrecisionRecipe.update_bytes` over HBM (gradient read, master or parameter and state read and written, parameter copy
written) and takes `PrecisionRecipe.update_operations` lane operations. Stacks that do not fuse the update make a copy
of gradients in the master's type, read it for their norm and scale it.

Muon also orthogonalizes its updates by five Newton-Schulz steps (Jordan et al., 2024), each three products on a matrix
X of m x n, m <= n: X X^T, its square, and their sum times X. The sizes of single matrices are not known here:
parameters are taken as matrices of m x 4m.
"""

from __future__ import annotations

import math
from dataclasses import replace

from phaze.cost.calibration import PERFECT_STACK, Stack
from phaze.cost.operator_work import Product, Work, vector_work
from phaze.cost.size_checks import check_sizes
from phaze.hardware import PrecisionRecipe

__all__ = [
    "update_work",
]

_NEWTON_SCHULZ_STEPS = 5
_LARGEST_SIDE = 4096
"""The shorter side of the matrices that Muon is priced on: that of models around ten billion parameters."""
_ASPECT = 4
"""The longer side over the shorter one, as in the feed-forward part of a transformer."""
_PASSES_OVER_GRADIENTS = 4
"""Copies are written, read for the norm, read and written to be scaled."""


def update_work(recipe: PrecisionRecipe, parameters: int, *, stack: Stack = PERFECT_STACK) -> Work:
    """The update of the ``parameters`` that one device updates; where there are none, it is a `CostError`."""
    check_sizes("update", parameters=parameters)
    moved = recipe.update_bytes
    if not stack.fuses_update:
        size = recipe.master_bytes or recipe.gradient_bytes
        moved += recipe.gradient_bytes + _PASSES_OVER_GRADIENTS * size
    work = vector_work(recipe.update_operations * parameters, moved * parameters)
    return replace(work, products=_newton_schulz(parameters)) if recipe.orthogonalizes_updates else work


def _newton_schulz(parameters: int) -> tuple[Product, ...]:
    """The products that orthogonalize the updates of so many parameters, in bf16."""
    side = min(_LARGEST_SIDE, max(1, math.isqrt(parameters // _ASPECT)))
    steps = _NEWTON_SCHULZ_STEPS * math.ceil(parameters / (_ASPECT * side * side))
    sizes = ((side, side, _ASPECT * side), (side, side, side), (side, _ASPECT * side, side))
    return tuple(Product(batch=steps, m=m, n=n, k=k, dtype="bfloat16") for m, n, k in sizes)
