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

On a dimension of a torus, w bytes/s on a link in one direction, devices send both ways at once: the rate r is 2w on a
closed ring and w on an open line, whose ends have one neighbour.

    all-gather, reduce-scatter   h a + (n-1)/n S/r              h: n/2 messages on a ring, n-1 on a line, rounded down
    all-to-all                   h a + floor(n^2/4)/n S/r       what crosses the middle of the row

An axis over m dimensions runs them at the same time: the tensor is cut into m parts, and part j goes through the
dimensions in order j, j+1, ..; a step takes as long as its slowest dimension (`_transfer_s_per_byte`). On m equal
dimensions of n this is (1 - 1/n^m) S / (m r), as in "How to Scale Your Model" (jax-ml.github.io/scaling-book). Where
dimensions differ so much that one after the other is faster, that is taken.

On a GPU's own links, where a calibration has the library's protocols for them, latency and rate are those of a
protocol, and the price is the least over protocols: increasing and concave in size (`phaze.cost.measured_kernels`).
Parameters and gradients of whole layers are priced as ``is_bulk``: by the protocol of large tensors at any size, so
that prices of placements are straight lines.

A broadcast goes around one ring in chunks of c bytes, each device passing on what it has. Beside the time of its bytes,
that of an all-gather, it takes until the first chunk is around (`broadcast_fill_s`): a + c/b for every hop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phaze.cost.calibration import IDEAL, Calibration
from phaze.cost.measured_kernels import LinkProtocol
from phaze.errors import CostError, shown
from phaze.hardware import Cluster, InterconnectLevel, Links
from phaze.hardware.accelerator import EnergyModel, energy_model
from phaze.hardware.cluster import AxisSpan

__all__ = [
    "Collective",
    "CollectiveEstimate",
    "Line",
    "broadcast_fill_s",
    "collective_lines",
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
    is_bulk: bool = False,
) -> CollectiveEstimate:
    """Price a collective on tensors of ``tensor_bytes`` over one mesh axis of ``cluster``.

    ``is_bulk`` takes the protocol of large tensors whatever the size is. An unknown collective, and a size that is
    negative or no finite number, is a `CostError`; an axis that does not fit the cluster a `HardwareError`.
    """
    if not isinstance(collective, str) or collective not in set(Collective):
        raise CostError(f"unknown collective {shown(collective)}; known are {', '.join(Collective)}.")
    try:
        sizes = np.asarray(tensor_bytes, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        sizes = np.array(np.nan)
    if not (np.isfinite(sizes) & (sizes >= 0)).all():
        raise CostError(f"{collective} of {shown(tensor_bytes)} bytes; expected finite sizes of at least 0.")
    costs = _costs(Collective(collective), cluster, axis_size, axis_stride, calibration, is_bulk)
    seconds = np.minimum.reduce([cost.latency_s + sizes * cost.s_per_byte for cost in costs])
    sent = sizes * costs[0].sent_share
    per_byte = (energy or energy_model()).link_j_per_byte
    return CollectiveEstimate(seconds=seconds, sent_bytes=sent, energy_j=sent * per_byte)


_CHUNK_BYTES = 2**18
"""What a device passes on at once: NCCL's own tuning counts a hop of a pipeline in large chunks as a latency and 256 kB
over the link (src/graph/tuning.cc)."""


def broadcast_fill_s(cluster: Cluster, axis_size: int, axis_stride: int = 1) -> float:
    """Seconds until the first chunk of a broadcast over a mesh axis is at its last device."""
    seconds, groups = 0.0, 1
    for span in reversed(cluster.axis_spans(axis_size, axis_stride)):
        hops = (span.level.size - 1) * groups
        seconds += hops * (span.level.latency_s + _CHUNK_BYTES / span.level.bandwidth_bytes_per_s)
        groups *= span.level.size
    return seconds


class Line(NamedTuple):
    """Seconds as a straight line in the bytes of a tensor."""

    latency_s: float
    s_per_byte: float


def collective_lines(
    collective: Collective,
    cluster: Cluster,
    axis_size: int,
    axis_stride: int = 1,
    *,
    calibration: Calibration = IDEAL,
    copies: int = 1,
) -> tuple[Line, ...]:
    """The straight lines whose least is the price of a collective, one for each protocol.

    Of what an all-to-all sends, so many ``copies`` in a row are of one token, which goes to a group of devices once.
    """
    costs = _costs(collective, cluster, axis_size, axis_stride, calibration, is_bulk=False, copies=copies)
    return tuple(Line(cost.latency_s, cost.s_per_byte) for cost in costs)


def _costs(
    collective: Collective,
    cluster: Cluster,
    axis_size: int,
    axis_stride: int,
    calibration: Calibration,
    is_bulk: bool,
    copies: int = 1,
) -> list[_Cost]:
    """The price of a collective under every protocol; under one that is none where no links were measured."""
    spans, links = cluster.axis_spans(axis_size, axis_stride), calibration.links
    protocols: Sequence[LinkProtocol | None] = (None,)
    if links is not None and any(span.is_inner and links.hold_for(span.level) for span in spans):
        protocols = (links.bulk,) if is_bulk else links.protocols
    sent = [_sent_once(math.prod(span.level.size for span in spans[index:]), copies) for index in range(len(spans))]
    return [
        _priced(
            collective,
            [_Hop.of(span, calibration, protocol, once) for span, once in zip(spans, sent, strict=True)],
        )
        for protocol in protocols
    ]


def _sent_once(groups: int, copies: int) -> float:
    """The share of a token's copies that is sent where each of so many groups of devices gets one at most.

    Experts are chosen evenly, so that a group has none of the copies with the probability (1 - 1/groups)^copies.
    """
    return groups * (1 - (1 - 1 / groups) ** copies) / copies


def _priced(collective: Collective, hops: Sequence[_Hop]) -> _Cost:
    """The price on hops under their protocol, which starts once."""
    return _PRICES[collective](hops) + _Cost(latency_s=sum(hop.start_s for hop in hops))


@dataclass(frozen=True, slots=True)
class _Cost:
    """A price for a tensor of S bytes: ``latency_s + S * s_per_byte``, each device sending ``S * sent_share`` bytes."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0
    sent_share: float = 0.0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(
            self.latency_s + other.latency_s, self.s_per_byte + other.s_per_byte, self.sent_share + other.sent_share
        )

    def on_part(self, share: float) -> _Cost:
        """The price of the same on a part of the tensor."""
        return _Cost(self.latency_s, self.s_per_byte * share, self.sent_share * share)


@dataclass(frozen=True, slots=True)
class _Hop:
    """One level of an axis: its members and their links, with the share of the bandwidth that is reached.

    Measured links have a protocol; of its rate all-to-alls reach the share ``exchanged``.
    """

    level: InterconnectLevel
    efficiency: float
    protocol: LinkProtocol | None = None
    exchanged: float = 1.0
    sent_once: float = 1.0

    @classmethod
    def of(cls, span: AxisSpan, calibration: Calibration, protocol: LinkProtocol | None, sent_once: float) -> _Hop:
        links = calibration.links
        if protocol is None or links is None or not (span.is_inner and links.hold_for(span.level)):
            efficiency = calibration.link if span.is_inner else calibration.network
            return cls(span.level, efficiency, sent_once=sent_once)
        return cls(span.level, calibration.link * protocol.share, protocol, links.exchanged, sent_once)

    @property
    def size(self) -> int:
        return self.level.size

    @property
    def is_row(self) -> bool:
        return self.level.links.is_row

    @property
    def rate_bytes_per_s(self) -> float:
        return self.level.rate_bytes_per_s * self.efficiency

    @property
    def latency_s(self) -> float:
        """Of all messages in sequence: around a ring they go both ways."""
        if self.protocol is not None:
            return (self.size - 1) * self.protocol.step_s
        messages = self.size // 2 if self.level.links is Links.RING else self.size - 1
        return messages * self.level.latency_s

    @property
    def start_s(self) -> float:
        """Before the first message."""
        return self.protocol.start_s if self.protocol is not None else 0.0

    @property
    def message_s(self) -> float:
        """Of one message."""
        return self.protocol.step_s if self.protocol is not None else self.level.latency_s

    @property
    def exchange_latency_s(self) -> float:
        """Of all messages of an all-to-all, whose pairs talk at once where a protocol is known."""
        return self.message_s if self.protocol is not None else self.latency_s

    @property
    def gathered_share(self) -> float:
        """What a device sends of the tensor in an all-gather: all but its own part."""
        return (self.size - 1) / self.size

    @property
    def exchanged_share(self) -> float:
        """What a device sends in an all-to-all; in a row it also passes on what others sent."""
        crossing = (self.size**2 // 4) / self.size if self.is_row else (self.size - 1) / self.size
        return crossing * self.sent_once

    @property
    def exchange_time_share(self) -> float:
        """The same in time at the rate of other collectives, which all-to-alls may not reach."""
        return self.exchanged_share / self.exchanged


_Share = Callable[[_Hop], float]
"""The part of a tensor that a device sends on one level."""


def _groups(hops: Sequence[_Hop]) -> Iterator[tuple[_Hop, ...]]:
    """The levels of an axis, rows that stand beside each other as one torus."""
    for is_row, members in groupby(hops, key=lambda hop: hop.is_row):
        group = tuple(members)
        yield from (group,) if is_row else ((hop,) for hop in group)


def _scatter(hops: Sequence[_Hop]) -> _Cost:
    """Reduce-scatter or all-gather: each level works on what the levels inside it leave to a device."""
    total, left = _Cost(), 1.0
    for group in _groups(hops):
        members = math.prod(hop.size for hop in group)
        cost = _Cost(
            sum(hop.latency_s for hop in group),
            _transfer_s_per_byte(group, lambda hop: hop.gathered_share, shrinks=True),
            (members - 1) / members,
        )
        total, left = total + cost.on_part(left), left / members
    return total


def _reduce(hops: Sequence[_Hop]) -> _Cost:
    """All-reduce: a reduce-scatter and an all-gather."""
    return _scatter(hops) + _scatter(hops)


def _exchange(hops: Sequence[_Hop]) -> _Cost:
    """All-to-all: every byte crosses each level once."""
    total = _Cost()
    for group in _groups(hops):
        total += _Cost(
            sum(hop.exchange_latency_s for hop in group),
            _transfer_s_per_byte(group, lambda hop: hop.exchange_time_share, shrinks=False),
            sum(hop.exchanged_share for hop in group),
        )
    return total


def _transfer_s_per_byte(group: Sequence[_Hop], share: _Share, *, shrinks: bool) -> float:
    """Seconds per byte of the tensor, on one level or on the dimensions of a torus together.

    Orders are the rotations of the dimensions. Either one part for each order goes at the same time, or the whole
    tensor goes in the best order. ``shrinks`` says whether a dimension leaves 1/n of the tensor to the next.
    """
    count = len(group)
    orders = [[*group[start:], *group[:start]] for start in range(count)]
    costs = [_seconds_by_step(order, share, shrinks) for order in orders]
    together: float = sum(max(step) for step in zip(*costs, strict=True)) / count
    return min([together, *(sum(steps) for steps in costs)])


def _seconds_by_step(order: Sequence[_Hop], share: _Share, shrinks: bool) -> list[float]:
    """Seconds per byte in each dimension, one after the other."""
    steps, left = [], 1.0
    for hop in order:
        steps.append(left * share(hop) / hop.rate_bytes_per_s)
        left /= hop.size if shrinks else 1
    return steps


def _send(hops: Sequence[_Hop]) -> _Cost:
    """Point to point: one message on the outermost level."""
    if not hops:
        return _Cost()
    farthest = hops[-1]
    return _Cost(farthest.message_s, 1 / (farthest.level.bandwidth_bytes_per_s * farthest.efficiency), 1.0)


_PRICES = {
    Collective.ALL_REDUCE: _reduce,
    Collective.ALL_GATHER: _scatter,
    Collective.REDUCE_SCATTER: _scatter,
    Collective.ALL_TO_ALL: _exchange,
    Collective.POINT_TO_POINT: _send,
}
