"""Real chips by name, each number with its source and whether that source was checked.

The numbers live in ``data/chips.json``. A verified cell is a fact; any other is an estimate and is shown as one: a
number that nobody checked, that was derived from others, that was chosen among several, or that is a drawing (a unit of
64 multiply-accumulates as an array of 8x8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phaze.errors import UnknownNameError
from phaze.hardware.accelerator import Accelerator, MatrixRates
from phaze.hardware.fact import Fact, fact_of
from phaze.hardware.packaged import packaged_table

__all__ = ["Preset", "preset", "preset_names", "presets"]


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
        return "; ".join(part for part in dict.fromkeys(parts[0]) if all(part in others for others in parts))

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


def _chips() -> Mapping[str, Any]:
    chips: Mapping[str, Any] = packaged_table("chips")["chips"]
    return chips


def _preset(name: str, entry: Mapping[str, Any]) -> Preset:
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
