"""Time of collectives over a mesh axis that spans one or several interconnect levels.

A ring over n devices with latency a per message and b bytes/s per device and direction takes, for a tensor of S bytes
(Thakur, Rabenseifner, Gropp, 2005):

    all-gather, reduce-scatter   (n-1) a + (n-1)/n S/b          S: the whole tensor
    all-reduce                   2 (n-1) a + 2 (n-1)/n S/b      a reduce-scatter and an all-gather
    all-to-all                   (n-1) a + (n-1)/n S/b          S: what one device holds
    point to point               a + S/b                        between neighbours on the axis

Over levels n1, n2, ... (innermost first) the hierarchical forms do the inner level on the whole and the outer levels on
what the inner ones leave to each device:

    reduce-scatter   sum over levels of ring(n_l, S / (n_1 ... n_(l-1))); all-gather the same in reverse order
    all-reduce       twice that
    all-to-all       sum over levels of ring(n_l, S), every byte first going to its place inside a group
    point to point   on the outermost level, where neighbours are farthest apart

With inner links at least as fast as outer ones this is never slower than one ring on the outermost links. An axis of
one device has nobody to talk to and costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phaze.cost.calibration import IDEAL, Calibration
from phaze.errors import CostError, shown
from phaze.hardware import Cluster, InterconnectLevel
from phaze.hardware.area_energy import EnergyModel, energy_model

__all__ = [
    "Collective",
    "CollectiveEstimate",
    "price_collective",
]

_Floats = NDArray[np.float64]


class Collective(StrEnum):
    """What devices do together."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    POINT_TO_POINT = "point_to_point"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveEstimate:
    """Seconds, bytes that one device sends, and energy of those bytes; each has the shape of the sizes asked for."""

    seconds: _Floats
    sent_bytes: _Floats
    energy_j: _Floats


def price_collective(
    collective: Collective | str,
    tensor_bytes: ArrayLike,
    cluster: Cluster,
    axis_size: int,
    axis_stride: int = 1,
    *,
    calibration: Calibration = IDEAL,
    energy: EnergyModel | None = None,
) -> CollectiveEstimate:
    """Price a collective on tensors of ``tensor_bytes`` over one mesh axis of ``cluster``.

    An unknown collective, and a size that is negative or no finite number, is a `CostError`; an axis that does not fit
    the cluster a `HardwareError`.
    """
    if not isinstance(collective, str) or collective not in set(Collective):
        raise CostError(f"unknown collective {shown(collective)}; known are {', '.join(Collective)}.")
    try:
        sizes = np.asarray(tensor_bytes, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        sizes = np.array(np.nan)
    if not (np.isfinite(sizes) & (sizes >= 0)).all():
        raise CostError(f"{collective} of {shown(tensor_bytes)} bytes; expected finite sizes of at least 0.")
    levels = cluster.axis_levels(axis_size, axis_stride)
    steps = _STEPS[Collective(collective)](levels, sizes)
    sent = sum((step.sent_bytes for step in steps), start=np.zeros_like(sizes))
    seconds = sum(step.seconds(_efficiency(step.level, cluster, calibration)) for step in steps)
    per_byte = (energy or energy_model()).link_j_per_byte
    return CollectiveEstimate(
        seconds=np.asarray(seconds) + np.zeros_like(sizes), sent_bytes=sent, energy_j=sent * per_byte
    )


def _efficiency(level: InterconnectLevel, cluster: Cluster, calibration: Calibration) -> float:
    """The reached share of a level's bandwidth: that of the innermost links, or of the network outside."""
    inner = cluster.levels[0]
    is_inner = (level.bandwidth_bytes_per_s, level.latency_s) == (inner.bandwidth_bytes_per_s, inner.latency_s)
    return calibration.link if is_inner else calibration.network


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What a collective does on one level: the bytes that each device sends there, in so many messages in sequence."""

    level: InterconnectLevel
    sent_bytes: _Floats
    messages: int

    def seconds(self, efficiency: float) -> _Floats:
        """Latencies and transfer at this share of the level's bandwidth."""
        transfer_s = self.sent_bytes / (self.level.bandwidth_bytes_per_s * efficiency)
        return self.messages * self.level.latency_s + transfer_s


def _ring(level: InterconnectLevel, sizes: _Floats) -> _Step:
    """One pass around a ring: every device sends all but its own part, in n - 1 messages."""
    return _Step(level, sizes * (level.size - 1) / level.size, level.size - 1)


def _scatter(levels: Sequence[InterconnectLevel], sizes: _Floats) -> list[_Step]:
    """Reduce-scatter or all-gather: each level works on what the levels inside it leave to a device."""
    steps: list[_Step] = []
    for level in levels:
        steps.append(_ring(level, sizes))
        sizes = sizes / level.size
    return steps


def _reduce(levels: Sequence[InterconnectLevel], sizes: _Floats) -> list[_Step]:
    """All-reduce: a reduce-scatter and an all-gather."""
    return 2 * _scatter(levels, sizes)


def _exchange(levels: Sequence[InterconnectLevel], sizes: _Floats) -> list[_Step]:
    """All-to-all: every byte crosses each level once."""
    return [_ring(level, sizes) for level in levels]


def _send(levels: Sequence[InterconnectLevel], sizes: _Floats) -> list[_Step]:
    """Point to point: one message on the outermost level."""
    return [_Step(level, sizes, 1) for level in levels[-1:]]


_STEPS = {
    Collective.ALL_REDUCE: _reduce,
    Collective.ALL_GATHER: _scatter,
    Collective.REDUCE_SCATTER: _scatter,
    Collective.ALL_TO_ALL: _exchange,
    Collective.POINT_TO_POINT: _send,
}
