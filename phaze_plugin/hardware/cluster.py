"""Clusters: many equal devices and the links between them, in levels; which levels a mesh axis uses.

Level 1 joins ``size`` devices, level 2 joins ``size`` groups of level 1, and so on: device ranks are written in mixed
radix with the innermost level as the fastest digit. Bandwidth is per device and direction, so that groups which
communicate at the same time do not slow each other.

A mesh axis of ``size`` devices at ``stride`` holds the ranks base + stride * (0 .. size-1), where the stride is the
product of the axes inside it. It uses a level by the factor by which it moves inside that level's blocks; where its
groups do not line up with the blocks (an axis of 6 in nodes of 8), every step is charged to the next level outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from phaze.errors import HardwareError, shown
from phaze.hardware.accelerator import Accelerator
from phaze.hardware.field_checks import non_negative, positive, positive_integer

__all__ = ["Cluster", "InterconnectLevel"]


@dataclass(frozen=True, slots=True)
class InterconnectLevel:
    """One level of links: ``size`` members, each with this bandwidth per direction and this latency per message."""

    size: int
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Check every field and settle its type."""
        object.__setattr__(self, "size", positive_integer("interconnect level", "size", self.size))
        for field, check in (("bandwidth_bytes_per_s", positive), ("latency_s", non_negative)):
            object.__setattr__(self, field, check("interconnect level", field, getattr(self, field)))


@dataclass(frozen=True, slots=True)
class Cluster:
    """``device_count`` equal accelerators joined by ``levels``, innermost first.

    Levels that join fewer devices than there are, and fields of other types, are a `HardwareError`.
    """

    accelerator: Accelerator
    device_count: int
    levels: tuple[InterconnectLevel, ...] = ()

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
        joined = math.prod(level.size for level in self.levels)
        if joined < self.device_count:
            sizes = " x ".join(str(level.size) for level in self.levels) or "no levels"
            raise HardwareError(
                f"cluster of {self.device_count} {self.accelerator.name}: its interconnect levels ({sizes}) join "
                f"{joined} devices; enlarge the outermost level."
            )

    def axis_levels(self, size: int, stride: int = 1) -> tuple[InterconnectLevel, ...]:
        """The part of a mesh axis that lies in each level, innermost first; sizes multiply to ``size``.

        An axis that needs more devices than the cluster has is a `HardwareError`.
        """
        extent = positive_integer("mesh axis", "size", size) * positive_integer("mesh axis", "stride", stride)
        if extent > self.device_count:
            raise HardwareError(
                f"mesh axis of {size} devices at stride {stride} needs {extent} devices; the cluster has "
                f"{self.device_count} {self.accelerator.name}. Use a smaller axis or a larger cluster."
            )
        spans: list[InterconnectLevel] = []
        covered, block = stride, 1
        for level in self.levels:
            block *= level.size
            end = extent if block >= self.device_count else _reach(block, covered, extent)
            if end > covered:
                spans.append(InterconnectLevel(end // covered, level.bandwidth_bytes_per_s, level.latency_s))
                covered = end
        return tuple(spans)


def _reach(block: int, covered: int, extent: int) -> int:
    """How far an axis that covers ``covered`` of ``extent`` ranks gets inside blocks of ``block`` ranks."""
    if block % extent == 0:
        return extent
    return block if block % covered == 0 and extent % block == 0 else covered
