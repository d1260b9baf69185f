"""Clusters and networks: equal devices, the links between them in levels, and which levels a mesh axis uses.

Clusters (`Cluster`). Level 1 joins ``size`` devices, level 2 joins ``size`` groups of level 1, and so on: device ranks
are written in mixed radix with the innermost level as the fastest digit. Bandwidth is per device and direction. Behind
a switch, groups that communicate at the same time do not slow each other. The dimensions of a torus are levels too,
each a row of devices whose bandwidth is that of one link in one direction (`Links`).

A mesh axis of ``size`` devices at ``stride`` holds the ranks base + stride * (0 .. size-1), where the stride is the
product of the axes inside it. It uses a level by the factor by which it moves inside that level's blocks; where its
groups do not line up with the blocks (an axis of 6 in nodes of 8), every step is charged to the next level outside.
Where an axis takes every k-th device of a row, k such groups share the links of that row: each has 1/k of the
bandwidth, and a message passes k links.

Networks (`Network`) are levels of links with the origin of their numbers, and say what joins a given number of devices.
A network's outermost level has no size of its own: it joins as many groups as a cluster needs. A level that is a torus
becomes one `InterconnectLevel` for each of its dimensions, the smallest innermost; its shape is the most even one that
has exactly so many devices, unless one is given. A dimension is closed to a ring where its length is a multiple of
`Torus.closes_at`, and an open line otherwise.

The shipped networks live in ``data/networks.json``; plugins add others (`known_network` finds both), and
`phaze.hardware.cluster_text` reads them from text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

from phaze.errors import HardwareError, shown
from phaze.hardware.accelerator import Accelerator
from phaze.hardware.hardware_numbers import (
    Fact,
    Table,
    fact_of,
    non_negative,
    packaged_table,
    positive,
    positive_integer,
)
from phaze.name_spelling import spelled_alike

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = [
    "AxisSpan",
    "ChipLink",
    "Cluster",
    "HostLink",
    "InterconnectLevel",
    "Links",
    "Network",
    "NetworkLevel",
    "Torus",
    "known_network",
    "network_names",
    "networks",
    "torus_shape",
]


class Links(StrEnum):
    """How the members of a level are joined."""

    SWITCH = "switch"
    """Every member reaches every other one at its full bandwidth."""
    RING = "ring"
    """Neighbours are joined, and the last one to the first: a dimension of a torus."""
    LINE = "line"
    """Neighbours are joined: a dimension of a torus without the links that close it."""

    @property
    def is_row(self) -> bool:
        """Whether this is a dimension of a torus."""
        return self is not Links.SWITCH


@dataclass(frozen=True, slots=True)
class InterconnectLevel:
    """One level of links: ``size`` members, each with this bandwidth per direction and this latency per message.

    In a row (`Links`) the bandwidth is that of one link in one direction.
    """

    size: int
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    links: Links = Links.SWITCH

    def __post_init__(self) -> None:
        """Check every field and settle its type."""
        object.__setattr__(self, "size", positive_integer("interconnect level", "size", self.size))
        for field, check in (("bandwidth_bytes_per_s", positive), ("latency_s", non_negative)):
            object.__setattr__(self, field, check("interconnect level", field, getattr(self, field)))
        if self.links not in list(Links):
            raise HardwareError(
                f"interconnect level: links is {shown(self.links)}; expected one of {', '.join(Links)}."
            )
        object.__setattr__(self, "links", Links(self.links))

    @property
    def rate_bytes_per_s(self) -> float:
        """What one member can send at once: a ring has a link in either direction."""
        return self.bandwidth_bytes_per_s * (2 if self.links is Links.RING else 1)


@dataclass(frozen=True, slots=True)
class AxisSpan:
    """The part of a mesh axis that lies in one level: so many members, with the bandwidth that each has of the level.

    ``is_inner`` says whether these are links inside of a node or a torus, not those of the network between them.
    """

    level: InterconnectLevel
    is_inner: bool


@dataclass(frozen=True, slots=True)
class HostLink:
    """What each device has of its host: bandwidth per direction, both at once, and memory."""

    bandwidth_bytes_per_s: float
    memory_bytes: int

    def __post_init__(self) -> None:
        """Check both fields."""
        bandwidth = positive("host link", "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        object.__setattr__(self, "bandwidth_bytes_per_s", bandwidth)
        object.__setattr__(self, "memory_bytes", positive_integer("host link", "memory_bytes", self.memory_bytes))


@dataclass(frozen=True, slots=True)
class Cluster:
    """``device_count`` equal accelerators joined by ``levels``, innermost first.

    ``price_per_device_hour`` is the money that one device costs in an hour, and ``host`` what it has of its host, where
    these are known. Levels that join fewer devices than there are, and fields of other types, are a `HardwareError`.
    """

    accelerator: Accelerator
    device_count: int
    levels: tuple[InterconnectLevel, ...] = ()
    price_per_device_hour: float | None = None
    host: HostLink | None = None

    def __post_init__(self) -> None:
        """Check types, and that the levels join all devices."""
        if not isinstance(self.accelerator, Accelerator):
            raise HardwareError(
                f"cluster: accelerator is {shown(self.accelerator)}; expected an Accelerator, such as "
                "phaze.hardware.find_accelerator gives."
            )
        levels = tuple(self.levels) if isinstance(self.levels, Iterable) else (None,)
        if not all(isinstance(level, InterconnectLevel) for level in levels):
            raise HardwareError(
                f"cluster: levels is {shown(self.levels)}; expected InterconnectLevels, innermost first."
            )
        object.__setattr__(self, "device_count", positive_integer("cluster", "device_count", self.device_count))
        object.__setattr__(self, "levels", levels)
        if self.price_per_device_hour is not None:
            price = positive("cluster", "price_per_device_hour", self.price_per_device_hour)
            object.__setattr__(self, "price_per_device_hour", price)
        if self.host is not None and not isinstance(self.host, HostLink):
            raise HardwareError(f"cluster: host is {shown(self.host)}; expected a HostLink, or None.")
        joined = math.prod(level.size for level in self.levels)
        if joined < self.device_count:
            sizes = " x ".join(str(level.size) for level in self.levels) or "no levels"
            raise HardwareError(
                f"cluster of {self.device_count} {self.accelerator.name}: its interconnect levels ({sizes}) join "
                f"{joined} devices; enlarge the outermost level."
            )

    def axis_levels(self, size: int, stride: int = 1) -> tuple[InterconnectLevel, ...]:
        """The levels of `axis_spans` alone."""
        return tuple(span.level for span in self.axis_spans(size, stride))

    def axis_spans(self, size: int, stride: int = 1) -> tuple[AxisSpan, ...]:
        """The part of a mesh axis that lies in each level, innermost first; sizes multiply to ``size``.

        An axis that needs more devices than the cluster has is a `HardwareError`.
        """
        extent = positive_integer("mesh axis", "size", size) * positive_integer("mesh axis", "stride", stride)
        if extent > self.device_count:
            raise HardwareError(
                f"mesh axis of {size} devices at stride {stride} needs {extent} devices; the cluster has "
                f"{self.device_count} {self.accelerator.name}. Use a smaller axis or a larger cluster."
            )
        spans: list[AxisSpan] = []
        covered, inside = stride, 1
        for level, is_inner in zip(self.levels, self.inner_levels, strict=True):
            block = inside * level.size
            end = extent if block >= self.device_count else _reach(block, covered, extent)
            if end > covered:
                part = _part_of_level(level, end // covered, hop=max(1, math.ceil(covered / inside)))
                spans.append(AxisSpan(part, is_inner))
                covered = end
            inside = block
        return tuple(spans)

    @property
    def inner_levels(self) -> tuple[bool, ...]:
        """For each level, whether it joins the devices of a node or a torus: the innermost one, and all rows."""
        return tuple(index == 0 or level.links.is_row for index, level in enumerate(self.levels))

    @property
    def node_devices(self) -> int:
        """The devices of one node, torus or slice; all of them where there is no more than a part of one."""
        sizes = [level.size for level, is_inner in zip(self.levels, self.inner_levels, strict=True) if is_inner]
        return min(self.device_count, math.prod(sizes))

    @property
    def has_whole_nodes(self) -> bool:
        """Whether the devices fill their nodes (or tori, or slices)."""
        return self.device_count % self.node_devices == 0


def _part_of_level(level: InterconnectLevel, size: int, hop: int) -> InterconnectLevel:
    """The links that ``size`` members have, of a level of which they are every ``hop``-th one."""
    if not level.links.is_row:
        return InterconnectLevel(size, level.bandwidth_bytes_per_s, level.latency_s)
    links = level.links if size * hop >= level.size else Links.LINE
    return InterconnectLevel(size, level.bandwidth_bytes_per_s / hop, level.latency_s * hop, links)


def _reach(block: int, covered: int, extent: int) -> int:
    """How far an axis that covers ``covered`` of ``extent`` ranks gets inside blocks of ``block`` ranks."""
    if block % extent == 0:
        return extent
    return block if block % covered == 0 and extent % block == 0 else covered


@dataclass(frozen=True, slots=True)
class Torus:
    """So many dimensions; a dimension of a multiple of ``closes_at`` devices is a ring, any other one a line."""

    dimensions: int
    closes_at: int


@dataclass(frozen=True, slots=True)
class ChipLink:
    """A chip's own links: bandwidth per device and direction, or of one link in one direction in a torus."""

    name: str
    bandwidth_bytes_per_s: Fact
    latency_s: Fact
    torus: Torus | None = None


@dataclass(frozen=True, slots=True)
class NetworkLevel:
    """Links of one level with the origin of their numbers.

    Attributes:
        size: members; None for as many as are needed.
        bandwidth_bytes_per_s: per member and direction; in a torus, of one link in one direction.
        latency_s: of one message.
        torus: set where members are joined to their neighbours only.
        shape: the lengths of a torus' dimensions where they are given; they multiply to the size.
        name: what the text called it; empty for levels of shipped networks.
    """

    size: int | None
    bandwidth_bytes_per_s: Fact
    latency_s: Fact
    torus: Torus | None = None
    shape: tuple[int, ...] = ()
    name: str = ""

    def joining(self, members: int) -> tuple[InterconnectLevel, ...]:
        """The links between ``members``, one level or one for each dimension."""
        bandwidth, latency = self.bandwidth_bytes_per_s.value, self.latency_s.value
        if self.torus is None:
            return (InterconnectLevel(members, bandwidth, latency),)
        shape = self.shape if self.shape and members == self.size else torus_shape(members, self.torus.dimensions)
        return tuple(
            InterconnectLevel(length, bandwidth, latency, Links.LINE if length % self.torus.closes_at else Links.RING)
            for length in shape
            if length > 1
        )


@dataclass(frozen=True, slots=True)
class Network:
    """A network's levels, innermost first."""

    name: str
    title: str
    levels: tuple[NetworkLevel, ...]

    def joining(self, device_count: int) -> tuple[InterconnectLevel, ...]:
        """The levels that ``device_count`` devices need, innermost first."""
        joined: list[InterconnectLevel] = []
        groups = device_count
        for level in self.levels:
            size = groups if level.size is None else _used_size(level.size, groups)
            if size > 1:
                joined += level.joining(size)
            groups = math.ceil(groups / size)
        return tuple(joined)


def _used_size(size: int, groups: int) -> int:
    """How many members of a level are used.

    Where the level's size does not divide what there is, but the power of two below it does, that many are used: 256
    devices in racks of 72 are four racks of 64.
    """
    power = 1 << (size.bit_length() - 1)
    if groups > size and groups % size and groups % power == 0:
        return power
    return min(size, groups)


@cache
def torus_shape(members: int, dimensions: int) -> tuple[int, ...]:
    """The most even lengths of so many dimensions that multiply to ``members``, smallest first."""
    if dimensions == 1:
        return (members,)
    most = int(members ** (1 / dimensions) + 1e-9)
    shapes = [
        (length, *torus_shape(members // length, dimensions - 1))
        for length in range(1, most + 1)
        if members % length == 0
    ]
    return min((tuple(sorted(shape)) for shape in shapes), key=sum)


def network_names() -> tuple[str, ...]:
    """Names of the shipped networks."""
    return tuple(packaged_table("networks")["networks"])


def networks() -> tuple[Network, ...]:
    """All shipped networks."""
    table: Table = packaged_table("networks")["networks"]
    return tuple(
        Network(
            name,
            entry["title"],
            tuple(
                NetworkLevel(level["size"], fact_of(level["bandwidth_bytes_per_s"]), fact_of(level["latency_s"]))
                for level in entry["levels"]
            ),
        )
        for name, entry in table.items()
    )


def known_network(name: str, plugins: PluginManager | None) -> Network | None:
    """The network called ``name``, shipped or a plugin's, or None; one that plugins clash over is a `PluginError`."""
    from phaze.installed import installed_plugins

    offered = (plugins or installed_plugins()).networks()
    meant = spelled_alike(name, (*offered.names, *network_names())) or name
    if meant in offered.names:
        return offered.get(meant)
    return next((shipped for shipped in networks() if shipped.name == meant), None)
