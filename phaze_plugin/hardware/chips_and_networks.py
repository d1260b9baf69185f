"""Real chips and networks by name, each number with its source and whether that source was checked.

The numbers live in ``data/chips.json`` and ``data/networks.json``. A verified cell is a fact; any other is an estimate
and is shown as one: a number that nobody checked, that was derived from others, that was chosen among several, or that
is a drawing (a unit of 64 multiply-accumulates as an array of 8x8). Plugins add chips of their own, which
`known_accelerator` finds beside these.

A network's outermost level has no size of its own: it joins as many groups as a cluster needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaze.errors import UnknownNameError
from phaze.hardware.accelerator import Accelerator, MatrixRates
from phaze.hardware.cluster import InterconnectLevel
from phaze.hardware.packaged_data import Fact, Table, fact_of, packaged_table

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = [
    "Network",
    "NetworkLevel",
    "Preset",
    "known_accelerator",
    "network",
    "network_levels",
    "network_names",
    "preset",
    "preset_names",
    "presets",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A chip with the origin of each of its numbers.

    ``facts`` has one for each field of the accelerator, and one for each rate as ``rates.<dtype>``. The published peak
    is the vendor's figure at ``published_dtype``, absent for generic machines. The default network is the one that
    `phaze.hardware.parse_cluster` uses when none is named.
    """

    accelerator: Accelerator
    title: str
    facts: dict[str, Fact]
    published_peak_flops_per_s: Fact | None
    published_dtype: str | None
    default_network: str

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the accelerator's fields that have a fact of their own; rates are listed by ``facts`` only."""
        return tuple(name for name in self.facts if "." not in name)

    @property
    def source(self) -> str:
        """What the sources of all fields have in common; empty where that is nothing."""
        parts = [self.facts[name].source.split("; ") for name in self.fields]
        return "; ".join(part for part in dict.fromkeys(parts[0]) if all(part in field_parts for field_parts in parts))

    @property
    def estimates(self) -> tuple[str, ...]:
        """Those of the fields that are estimates."""
        return tuple(name for name in self.fields if not self.facts[name].is_verified)


def preset_names() -> tuple[str, ...]:
    """Names of the built-in chips."""
    return tuple(_chips())


def presets() -> tuple[Preset, ...]:
    """All built-in chips."""
    return tuple(_preset(name, entry) for name, entry in _chips().items())


def preset(name: str) -> Preset:
    """The built-in chip called ``name``; an `UnknownNameError` lists near names where there is none."""
    chips = _chips()
    if name not in chips:
        raise UnknownNameError("accelerator", name, chips)
    return _preset(name, chips[name])


def _chips() -> Table:
    chips: Table = packaged_table("chips")["chips"]
    return chips


def _preset(name: str, entry: Table) -> Preset:
    facts = {field: fact_of(cell) for field, cell in entry["fields"].items()}
    rates = {dtype: fact_of(cell) for dtype, cell in entry["rates"].items()}
    peak = entry["published_peak_flops_per_s"]
    return Preset(
        accelerator=Accelerator(
            name=name,
            **{field: fact.value for field, fact in facts.items()},  # type: ignore[arg-type]
            rates=MatrixRates(**{dtype: fact.value for dtype, fact in rates.items()}),
        ),
        title=entry["title"],
        facts=facts | {f"rates.{dtype}": fact for dtype, fact in rates.items()},
        published_peak_flops_per_s=fact_of(peak) if peak else None,
        published_dtype=peak["dtype"] if peak else None,
        default_network=entry["default_network"],
    )


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
    networks: Table = packaged_table("networks")["networks"]
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


def known_accelerator(name: str, plugins: PluginManager | None) -> Accelerator:
    """The accelerator called ``name``: a preset, or one that a plugin adds.

    Where ``plugins`` is None, the installed ones are looked up anew. A name that nobody knows is an `UnknownNameError`
    that lists near ones; one that plugins clash over a `PluginError`.
    """
    from phaze.installed import installed_plugins

    return (plugins or installed_plugins()).accelerators().get(name)
