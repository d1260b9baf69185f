"""Clusters: many equal devices and the links between them, in levels; which levels a mesh axis uses.

Level 1 joins ``size`` devices, level 2 joins ``size`` groups of level 1, and so on: device ranks are written in mixed
radix with the innermost level as the fastest digit. Bandwidth is per device and direction. Behind a switch, groups that
communicate at the same time do not slow each other. The dimensions of a torus are levels too, each a row of devices
whose bandwidth is that of one link in one direction (`Links`).

A mesh axis of ``size`` devices at ``stride`` holds the ranks base + stride * (0 .. size-1), where the stride is the
product of the axes inside it. It uses a level by the factor by which it moves inside that level's blocks; where its
groups do not line up with the blocks (an axis of 6 in nodes of 8), every step is charged to the next level outside.
Where an axis takes every k-th device of a row, k such groups share the links of that row: each has 1/k of the
bandwidth, and a message passes k links.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from phaze.errors import HardwareError, shown
from phaze.hardware.accelerator import Accelerator
from phaze.hardware.field_checks import non_negative, positive, positive_integer

__all__ = ["AxisSpan", "Cluster", "HostLink", "InterconnectLevel", "Links"]


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
