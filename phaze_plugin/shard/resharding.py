"""Resharding: the collective that takes a tensor from one layout to another, and its seconds on the tensor axis.

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
from numpy.typing import NDArray

from phaze.cost import IDEAL, Calibration, Collective, price_collective
from phaze.cost.collective_prices import Line, collective_lines
from phaze.hardware import Cluster
from phaze.ir import Graph, Op
from phaze.shard.layout import Layout
from phaze.shard.mesh_axes import CONTEXT_AXIS, EXPERT_AXIS, TENSOR_AXIS, axis_of, is_ring, whole_bytes

__all__ = ["IMPOSSIBLE", "Axis", "collective_of", "is_possible"]

IMPOSSIBLE = float("inf")
"""The seconds of a move that no collective makes."""

_PROBED_BYTES = 2**40
"""The size at which a collective's energy is asked for."""


@dataclass(frozen=True, slots=True)
class _CollectiveCost:
    """A collective's time, the least of some straight lines in its bytes, and its energy; no bytes have no energy."""

    lines: tuple[Line, ...]
    j_per_byte: float

    def seconds(self, size: float) -> float:
        """The time of a size."""
        return min(line.latency_s + line.s_per_byte * size for line in self.lines)


@dataclass(frozen=True, slots=True)
class Axis:
    """The tensor-parallel mesh axis: the innermost `tp` devices of a cluster, and what collectives cost on them.

    Collectives of contexts and experts run on axes of `cp` and `ep` devices that lie around this one: every tp-th
    device of the cluster (`link_s`).
    """

    cluster: Cluster
    tp: int
    calibration: Calibration = IDEAL
    cp: int = 1
    ep: int = 1
    _costs: Mapping[str, Mapping[Collective, _CollectiveCost]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axes = {TENSOR_AXIS: (self.tp, 1), CONTEXT_AXIS: (self.cp, self.tp), EXPERT_AXIS: (self.ep, self.tp)}
        costs = {
            name: self._probed(size, stride) for name, (size, stride) in axes.items() if name == TENSOR_AXIS or size > 1
        }
        object.__setattr__(self, "_costs", costs)

    def _probed(self, size: int, stride: int) -> dict[Collective, _CollectiveCost]:
        """The cost of every collective on so many devices at a stride; one device talks to nobody."""
        if size == 1:
            return dict.fromkeys(Collective, _CollectiveCost((Line(0.0, 0.0),), 0.0))
        costs = {}
        for collective in Collective:
            price = price_collective(collective, float(_PROBED_BYTES), self.cluster, size, stride)
            lines = collective_lines(collective, self.cluster, size, stride, calibration=self.calibration)
            costs[collective] = _CollectiveCost(lines, float(price.energy_j) / _PROBED_BYTES)
        return costs

    def devices_of(self, axis: str) -> int:
        """How many devices a mesh axis has."""
        return {TENSOR_AXIS: self.tp, CONTEXT_AXIS: self.cp, EXPERT_AXIS: self.ep}[axis]

    def seconds(self, collective: Collective, tensor_bytes: float, axis: str = TENSOR_AXIS) -> float:
        """The time of a collective on a tensor of so many bytes in all; an all-to-all moves only a device's share."""
        return self._costs[axis][collective].seconds(self._priced_bytes(collective, tensor_bytes, axis))

    def seconds_of_many(self, collective: Collective, tensor_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The times of a collective on tensors of so many bytes each; equal to `seconds` on each of them."""
        cost = self._costs[TENSOR_AXIS][collective]
        priced = tensor_bytes / self.tp if collective is Collective.ALL_TO_ALL else tensor_bytes
        times: NDArray[np.float64] = np.minimum.reduce(
            [line.latency_s + line.s_per_byte * priced for line in cost.lines]
        )
        return times

    def link_s(self, graph: Graph, op: Op) -> float:
        """The time of a collective op of a sliced graph, on the mesh axis that it names.

        In a ring, every step takes one device's part to the next device.
        """
        axis = axis_of(op)
        devices = self.devices_of(axis)
        size_bytes = whole_bytes(graph, op, devices)
        if is_ring(op):
            return (devices - 1) * self.seconds(Collective.POINT_TO_POINT, size_bytes / devices, axis)
        return self.seconds(Collective(op.function), size_bytes, axis)

    def link_j(self, graph: Graph, op: Op) -> float:
        """The energy of one device's part of a collective op; a ring sends what an all-gather sends."""
        axis = axis_of(op)
        collective = Collective(op.function)
        size_bytes = whole_bytes(graph, op, self.devices_of(axis))
        return self._costs[axis][collective].j_per_byte * self._priced_bytes(collective, size_bytes, axis)

    def _priced_bytes(self, collective: Collective, tensor_bytes: float, axis: str) -> float:
        """The bytes that a collective is priced by: a device's share for an all-to-all, else the whole tensor."""
        return tensor_bytes / self.devices_of(axis) if collective is Collective.ALL_TO_ALL else tensor_bytes

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
