"""Networks: levels of links with the origin of their numbers, and what joins a given number of devices.

A network's outermost level has no size of its own: it joins as many groups as a cluster needs. A level that is a torus
becomes one `InterconnectLevel` for each of its dimensions, the smallest innermost; its shape is the most even one that
has exactly so many devices, unless one is given. A dimension is closed to a ring where its length is a multiple of
`Torus.closes_at`, and an open line otherwise.

The shipped networks live in ``data/networks.json``; plugins add others (`known_network` finds both), and
`phaze.hardware.network_text` reads them from text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from phaze.hardware.cluster import InterconnectLevel, Links
from phaze.hardware.packaged_data import Fact, Table, fact_of, packaged_table

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = [
    "ChipLink",
    "Network",
    "NetworkLevel",
    "Torus",
    "known_network",
    "network_names",
    "networks",
    "torus_shape",
]


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
    if name in offered.names:
        return offered.get(name)
    return next((shipped for shipped in networks() if shipped.name == name), None)
