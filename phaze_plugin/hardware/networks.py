"""Networks by name, each number with its source, in ``data/networks.json``.

A network's outermost level has no size of its own: it joins as many groups as a cluster needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phaze.errors import UnknownNameError
from phaze.hardware.cluster import InterconnectLevel
from phaze.hardware.fact import Fact, fact_of
from phaze.hardware.packaged import packaged_table

__all__ = ["Network", "NetworkLevel", "network", "network_levels", "network_names"]


@dataclass(frozen=True, slots=True)
class NetworkLevel:
    """Links of one level with the origin of their numbers; a ``size`` of None is as many as are needed."""

    size: int | None
    bandwidth_bytes_per_s: Fact
    latency_s: Fact


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
            size = groups if level.size is None else min(level.size, groups)
            if size > 1:
                joined.append(InterconnectLevel(size, level.bandwidth_bytes_per_s.value, level.latency_s.value))
            groups = math.ceil(groups / size)
        return tuple(joined)


def network_names() -> tuple[str, ...]:
    """Names of the built-in networks."""
    return tuple(packaged_table("networks")["networks"])


def network(name: str) -> Network:
    """The built-in network called ``name``; an `UnknownNameError` lists near names where there is none."""
    networks: Mapping[str, Any] = packaged_table("networks")["networks"]
    if name not in networks:
        raise UnknownNameError("network", name, networks)
    levels = (
        NetworkLevel(entry["size"], fact_of(entry["bandwidth_bytes_per_s"]), fact_of(entry["latency_s"]))
        for entry in networks[name]["levels"]
    )
    return Network(name, networks[name]["title"], tuple(levels))


def network_levels(name: str, device_count: int) -> tuple[InterconnectLevel, ...]:
    """The levels of network ``name`` that ``device_count`` devices need; raises as `network` does."""
    return network(name).joining(device_count)
