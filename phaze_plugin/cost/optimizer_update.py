"""The optimizer's update: once per batch, after gradients are reduced.

Local parameters are divided by the ZeRO shard; each moves `PrecisionRecipe.update_bytes` over HBM (gradient read,
master or parameter and state read and written, parameter copy written) and takes a dozen lane operations. Stacks that
do not fuse the update make a copy of gradients in the master's type, read it for their norm and scale it. ZeRO-1 and
ZeRO-2 then gather the updated parameters over the shard's mesh axis.
"""

from __future__ import annotations

from phaze.cost.calibration import PERFECT_STACK, Stack
from phaze.cost.operator_work import Work, vector_work
from phaze.cost.size_checks import check_sizes
from phaze.errors import CostError
from phaze.hardware import PrecisionRecipe

__all__ = [
    "gathered_bytes",
    "update_work",
]

_OPERATIONS_PER_PARAMETER = 12
_PASSES_OVER_GRADIENTS = 4
"""Copies are written, read for the norm, read and written to be scaled."""
_LAST_STAGE = 3


def update_work(
    recipe: PrecisionRecipe, parameters: int, *, zero_shards: int = 1, stack: Stack = PERFECT_STACK
) -> Work:
    """The update of ``parameters`` parameters that one device holds, shared by ``zero_shards`` devices.

    Where there is nothing to update, or no device to do it, it is a `CostError`.
    """
    check_sizes("update", parameters=parameters, zero_shards=zero_shards)
    local = -(-parameters // zero_shards)
    moved = recipe.update_bytes
    if not stack.fuses_update:
        size = recipe.master_bytes or recipe.gradient_bytes
        moved += recipe.gradient_bytes + _PASSES_OVER_GRADIENTS * size
    return vector_work(float(_OPERATIONS_PER_PARAMETER) * local, moved * local)


def gathered_bytes(recipe: PrecisionRecipe, parameters: int, *, zero_stage: int, zero_shards: int) -> float:
    """Bytes of the all-gather that ZeRO-1 and ZeRO-2 owe after the update; ZeRO-3 gathers layer by layer instead.

    A stage other than 0 to 3 is a `CostError`.
    """
    check_sizes("all-gather after the update", zero_shards=zero_shards)
    check_sizes("all-gather after the update", least=0, parameters=parameters, zero_stage=zero_stage)
    if zero_stage > _LAST_STAGE:
        raise CostError(f"all-gather after the update: zero_stage is {zero_stage}; expected 0 to {_LAST_STAGE}.")
    return recipe.parameter_bytes * parameters if zero_stage in (1, 2) and zero_shards > 1 else 0.0
