"""Real chips by name, each number with its source and whether that source was checked.

The numbers live in ``data/chips.json``. A verified cell is a fact; any other is an estimate and is shown as one: a
number that nobody checked, that was derived from others, that was chosen among several, or that is a drawing (a unit of
64 multiply-accumulates as an array of 8x8). Rates are without sparsity. Plugins add chips of their own, which
`known_accelerator` finds beside these. People have other names for many chips (``TPU v6e``, ``H100-SXM``,
``trillium``): `chip_name` knows the one that a chip has here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaze.errors import UnknownNameError
from phaze.hardware.accelerator import Accelerator, MatrixRates
from phaze.hardware.cluster import ChipLink, Torus
from phaze.hardware.hardware_numbers import Fact, Table, fact_of, packaged_table
from phaze.name_spelling import spelled_alike

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = [
    "AttentionKernel",
    "Preset",
    "chip_name",
    "known_accelerator",
    "links_of",
    "preset",
    "preset_names",
    "presets",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """A kernel that computes attention without storing its scores: what it is called, and who says so."""

    name: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A chip with the origin of each of its numbers.

    Attributes:
        accelerator: the chip, or the part of one that frameworks call a device.
        title: what people call it.
        maker: who makes it.
        also_called: further names that people have for it.
        attention_kernel: the fused attention that its usual software has, and where that is said; None where there is
            none that frameworks call, or the machine is to be priced as if there were none (the paper's).
        facts: one for each field of the accelerator, and one for each rate as ``rates.<dtype>``.
        published_peak_flops_per_s: the vendor's figure at ``published_dtype``; absent for generic machines.
        power_w: what the device may draw; absent where it is not published.
        links: the chip's own links by name, which networks are made of.
        default_network: the network that `phaze.hardware.parse_cluster` uses when none is named, as text.
    """

    accelerator: Accelerator
    title: str
    maker: str
    also_called: tuple[str, ...]
    attention_kernel: AttentionKernel | None
    facts: dict[str, Fact]
    published_peak_flops_per_s: Fact | None
    published_dtype: str | None
    power_w: Fact | None
    links: dict[str, ChipLink]
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
    chips, known = _chips(), chip_name(name)
    if known not in chips:
        raise UnknownNameError("accelerator", name, chips)
    return _preset(known, chips[known])


def chip_name(text: str) -> str:
    """The name here of the built-in chip that ``text`` means, with or without its maker; any other text as it is."""
    chips = _chips()
    others = {other: name for name, entry in chips.items() for other in entry.get("also_called", ())}
    with_maker = {f"{chips[name]['maker']} {other}": name for other, name in (others | {n: n for n in chips}).items()}
    return spelled_alike(text, chips, others | with_maker) or text


def links_of(chip: str) -> dict[str, ChipLink]:
    """The own links of the chip called ``chip``; none for chips that are no presets."""
    return preset(chip).links if chip in _chips() else {}


def _chips() -> Table:
    chips: Table = packaged_table("chips")["chips"]
    return chips


def _preset(name: str, entry: Table) -> Preset:
    facts = {field: fact_of(cell) for field, cell in entry["fields"].items()}
    rates = {dtype: fact_of(cell) for dtype, cell in entry["rates"].items()}
    peak, power = entry["published_peak_flops_per_s"], entry["power_w"]
    return Preset(
        accelerator=Accelerator(
            name=name,
            **{field: fact.value for field, fact in facts.items()},  # type: ignore[arg-type]
            rates=MatrixRates(**{dtype: fact.value for dtype, fact in rates.items()}),
        ),
        title=entry["title"],
        maker=entry["maker"],
        also_called=tuple(entry.get("also_called", ())),
        attention_kernel=AttentionKernel(**entry["attention_kernel"]) if entry["attention_kernel"] else None,
        facts=facts | {f"rates.{dtype}": fact for dtype, fact in rates.items()},
        published_peak_flops_per_s=fact_of(peak) if peak else None,
        published_dtype=peak["dtype"] if peak else None,
        power_w=fact_of(power) if power else None,
        links={link: _link(link, cells) for link, cells in entry["links"].items()},
        default_network=entry["default_network"],
    )


def _link(name: str, entry: Table) -> ChipLink:
    torus = entry.get("torus")
    return ChipLink(
        name,
        fact_of(entry["bandwidth_bytes_per_s"]),
        fact_of(entry["latency_s"]),
        Torus(torus["dimensions"], torus["closes_at"]) if torus else None,
    )


def known_accelerator(name: str, plugins: PluginManager | None) -> Accelerator:
    """The accelerator called ``name``: a preset, or one that a plugin adds.

    Where ``plugins`` is None, the installed ones are looked up anew. A name that nobody knows is an `UnknownNameError`
    that lists near ones; one that plugins clash over a `PluginError`.
    """
    from phaze.installed import installed_plugins

    accelerators = (plugins or installed_plugins()).accelerators()
    return accelerators.get(name if name in accelerators.names else chip_name(name))
