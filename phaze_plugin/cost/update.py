"""The optimizer's update: once per batch, after gradients are reduced.

Local parameters are divided by the ZeRO shard; each moves `PrecisionRecipe.update_bytes` over HBM (gradient read,
master or parameter and state read and written, parameter copy written) and takes a dozen lane operations. ZeRO-1 and
ZeRO-2 then gather the updated parameters over the shard's mesh axis.
"""

from __future__ import annotations

import math

from phaze.cost.work import Work, vector_work
from phaze.errors import CostError
from phaze.hardware import PrecisionRecipe

__all__ = ["gathered_bytes", "update_work"]

_OPERATIONS_PER_PARAMETER = 12


def update_work(recipe: PrecisionRecipe, parameters: int, *, zero_shards: int = 1) -> Work:
    """The update of ``parameters`` parameters that one device holds, shared by ``zero_shards`` devices.

    Raises:
        CostError: there is nothing to update, or no device to do it.
    """
    if parameters < 1 or zero_shards < 1:
        raise CostError(f"update of {parameters} parameters on {zero_shards} shards; expected at least 1 of each.")
    local = math.ceil(parameters / zero_shards)
    return vector_work(float(_OPERATIONS_PER_PARAMETER) * local, recipe.update_bytes * local)


def gathered_bytes(recipe: PrecisionRecipe, parameters: int, *, zero_stage: int, zero_shards: int) -> float:
    """Bytes of the all-gather that ZeRO-1 and ZeRO-2 owe after the update; ZeRO-3 gathers layer by layer instead."""
    return recipe.parameter_bytes * parameters if zero_stage in (1, 2) and zero_shards > 1 else 0.0
