"""Moves between layouts, and what they cost.

partial -> whole         all-reduce
partial -> split         reduce-scatter
split   -> whole         all-gather
split   -> other split   all-to-all
whole   -> split         nothing: each device keeps its part
anything -> partial      impossible, unless it already is
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from phaze.cost import IDEAL, Calibration, Collective, price_collective
from phaze.hardware import Cluster
from phaze.shard.layout import Layout

__all__ = ["IMPOSSIBLE", "Axis", "collective_of", "is_possible"]

IMPOSSIBLE = float("inf")
LARGE = 2**40


@dataclass(frozen=True, slots=True)
class Axis:
    """The tensor-parallel mesh axis: the innermost `width` devices of a cluster.

    A collective's time and energy grow linearly with its bytes; `_costs` keeps the seconds of none, and the seconds and
    joules of one more byte.
    """

    cluster: Cluster
    width: int
    calibration: Calibration = IDEAL
    _costs: Mapping[Collective, tuple[float, float, float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        costs = {}
        for collective in Collective:
            sizes = np.array([0.0, float(LARGE)])
            price = price_collective(collective, sizes, self.cluster, self.width, calibration=self.calibration)
            none, large = price.seconds.tolist()
            costs[collective] = (none, (large - none) / LARGE, float(price.energy_j[1]) / LARGE)
        object.__setattr__(self, "_costs", costs)

    def seconds(self, collective: Collective, tensor_bytes: float) -> float:
        """Time of a collective on a tensor of so many bytes in all; an all-to-all moves only a device's share."""
        latency, per_byte, _ = self._costs[collective]
        return latency + per_byte * self._own_bytes(collective, tensor_bytes)

    def joules(self, collective: Collective, tensor_bytes: float) -> float:
        """Energy of one device's part of a collective."""
        return self._costs[collective][2] * self._own_bytes(collective, tensor_bytes)

    def _own_bytes(self, collective: Collective, tensor_bytes: float) -> float:
        return tensor_bytes / self.width if collective is Collective.ALL_TO_ALL else tensor_bytes

    def move_s(self, before: Layout, after: Layout, tensor_bytes: float) -> float:
        """Seconds from one layout to another; infinite where that is impossible."""
        if not is_possible(before, after):
            return IMPOSSIBLE
        collective = collective_of(before, after)
        return 0.0 if collective is None else self.seconds(collective, tensor_bytes)


def is_possible(before: Layout, after: Layout) -> bool:
    """Whether a tensor can get from one layout to another."""
    return before == after or not after.is_partial


def collective_of(before: Layout, after: Layout) -> Collective | None:
    """The collective of a possible move; None where no device needs another."""
    if before == after or before.is_whole:
        return None
    if before.is_partial:
        return Collective.REDUCE_SCATTER if after.splits else Collective.ALL_REDUCE
    return Collective.ALL_TO_ALL if after.splits else Collective.ALL_GATHER
