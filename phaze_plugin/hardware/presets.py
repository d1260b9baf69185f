"""Real chips and networks by name, each number with its source and whether that source was checked.

The numbers live in ``data/chips.json`` and ``data/networks.json``. A verified cell is a fact; any other is an estimate
and is shown as one. A network's outermost level has no size of its own: it joins as many groups as a cluster needs.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Any

from phaze.errors import UnknownNameError
from phaze.hardware.accelerator import Accelerator, MatrixRates
from phaze.hardware.cluster import InterconnectLevel

__all__ = ["Fact", "Preset", "network_levels", "network_names", "preset", "preset_names", "presets"]


@dataclass(frozen=True, slots=True)
class Fact:
    """One number, where it comes from, and whether that was checked (otherwise it is an estimate)."""

    value: float
    source: str
    is_verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A chip with the origin of each of its numbers.

    Attributes:
        accelerator: the chip.
        title: its full name.
        facts: per field of the accelerator, and per rate as ``rates.<dtype>``.
        published_peak_flops_per_s: the vendor's figure, at ``published_dtype``; absent for generic machines.
        default_network: the network that `phaze.hardware.parse_cluster` uses when none is named.
    """

    accelerator: Accelerator
    title: str
    facts: dict[str, Fact]
    published_peak_flops_per_s: Fact | None
    published_dtype: str | None
    default_network: str

    @property
    def estimates(self) -> tuple[str, ...]:
        """Names of the accelerator's fields that are estimates; rates are listed by ``facts`` only."""
        return tuple(name for name, fact in self.facts.items() if not fact.is_verified and "." not in name)


def preset_names() -> tuple[str, ...]:
    """Names of the built-in chips."""
    return tuple(_read("chips"))


def presets() -> tuple[Preset, ...]:
    """All built-in chips."""
    return tuple(_preset(name, entry) for name, entry in _read("chips").items())


def preset(name: str) -> Preset:
    """The built-in chip called ``name``.

    Raises:
        UnknownNameError: there is none; near names are listed.
    """
    chips = _read("chips")
    if name not in chips:
        raise UnknownNameError("accelerator", name, chips)
    return _preset(name, chips[name])


def network_names() -> tuple[str, ...]:
    """Names of the built-in networks."""
    return tuple(_read("networks"))


def network_levels(name: str, device_count: int) -> tuple[InterconnectLevel, ...]:
    """The levels of network ``name`` that ``device_count`` devices need, innermost first.

    Raises:
        UnknownNameError: there is no such network; near names are listed.
    """
    networks = _read("networks")
    if name not in networks:
        raise UnknownNameError("network", name, networks)
    levels: list[InterconnectLevel] = []
    groups = device_count
    for entry in networks[name]["levels"]:
        size = groups if entry["size"] is None else min(entry["size"], groups)
        if size > 1:
            level = InterconnectLevel(size, entry["bandwidth_bytes_per_s"]["value"], entry["latency_s"]["value"])
            levels.append(level)
        groups = math.ceil(groups / size)
    return tuple(levels)


def _read(kind: str) -> dict[str, Any]:
    text = resources.files("phaze.hardware.data").joinpath(f"{kind}.json").read_text(encoding="utf-8")
    entries: dict[str, Any] = json.loads(text)[kind]
    return entries


def _preset(name: str, entry: dict[str, Any]) -> Preset:
    facts = {field: _fact(cell) for field, cell in entry["fields"].items()}
    rates = {dtype: _fact(cell) for dtype, cell in entry["rates"].items()}
    peak = entry["published_peak_flops_per_s"]
    return Preset(
        accelerator=Accelerator(
            name=name,
            **{field: fact.value for field, fact in facts.items()},  # type: ignore[arg-type]
            rates=MatrixRates(**{dtype: fact.value for dtype, fact in rates.items()}),
        ),
        title=entry["title"],
        facts=facts | {f"rates.{dtype}": fact for dtype, fact in rates.items()},
        published_peak_flops_per_s=_fact(peak) if peak else None,
        published_dtype=peak["dtype"] if peak else None,
        default_network=entry["default_network"],
    )


def _fact(cell: dict[str, Any]) -> Fact:
    return Fact(cell["value"], cell["source"], cell["verified"])
