"""`phaze chips`: accelerators known by name, by maker, with their numbers and where these come from."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show

if TYPE_CHECKING:
    from phaze.cost import Calibration
    from phaze.hardware import Accelerator, Network, Preset

__all__ = ["chips"]

_GIB = 2**30


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show one chip with the source of every field")
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """List every accelerator, or show one in full."""
    from phaze.hardware import find_accelerator, presets
    from phaze.installed import installed_plugins

    plugins = installed_plugins()
    if arguments.name is not None:
        accelerators = [find_accelerator(arguments.name, plugins)]
    else:
        accelerators = [offer.value for offer in plugins.accelerators()]
    known = {preset.accelerator: preset for preset in presets()}
    chips = [(chip, known.get(chip)) for chip in accelerators]
    document = {"chips": [_document(chip, preset) for chip, preset in chips]}
    lines = _one(*chips[0]) if arguments.name is not None else _all(chips)
    show(console, arguments, document, *lines)
    return ExitCode.FINE


def _document(chip: Accelerator, preset: Preset | None) -> dict[str, object]:
    from phaze.cost import calibration_of
    from phaze.hardware import area_mm2, network_of

    document = asdict(chip) | {"peak_flops_per_s": chip.peak_flops_per_s(), "model_area_mm2": area_mm2(chip)}
    document["prices"] = calibration_of(chip).name
    if preset is not None:
        document |= {
            "title": preset.title,
            "maker": preset.maker,
            "power_w": preset.power_w and preset.power_w.value,
            "published_peak_flops_per_s": preset.published_peak_flops_per_s and preset.published_peak_flops_per_s.value,
            "published_dtype": preset.published_dtype,
            "links": {name: asdict(link) for name, link in preset.links.items()},
            "default_network": preset.default_network,
            "network": asdict(network_of(chip.name)),
            "sources": {field: asdict(fact) for field, fact in preset.facts.items()},
        }
    return document


def _all(chips: Sequence[tuple[Accelerator, Preset | None]]) -> Iterator[RenderableType]:
    makers = dict.fromkeys(_maker(preset) for _, preset in chips)
    for maker in makers:
        yield plain_table(
            ["chip", ">bf16 TF/s", ">fp8", ">fp4", ">HBM GiB", ">TB/s", ">W", ">area mm2", "prices", ">estimates"],
            [_row(chip, preset) for chip, preset in chips if _maker(preset) == maker],
            title=maker,
        )
        yield ""
    yield "sources (of every field: `phaze chips NAME`)"
    for chip, preset in chips:
        yield f"  {chip.name}: {(preset.source or 'field by field') if preset else 'a plugin'}"
    yield (
        "\nTF/s are without sparsity; W is what a device may draw, where it is published; area follows the paper's 22 "
        "nm model, which has no HBM interface, links or network on chip and does not compare with real dies. Prices "
        "are calibrated where a chip was fitted to measured runs, and ideal otherwise. Estimates are not published "
        "facts."
    )


def _maker(preset: Preset | None) -> str:
    return preset.maker if preset else "plugins"


def _row(chip: Accelerator, preset: Preset | None) -> tuple[str, ...]:
    from phaze.cost import calibration_of
    from phaze.hardware import area_mm2

    power = preset.power_w if preset else None
    return (
        chip.name,
        *(_teraflops(chip.peak_flops_per_s(dtype)) for dtype in ("bf16", "fp8", "fp4")),
        f"{chip.hbm_bytes / _GIB:.4g}",
        f"{chip.hbm_bandwidth_bytes_per_s / 1e12:.4g}",
        f"{power.value:.0f}" if power else "",
        f"{area_mm2(chip):.1f}",
        _prices(calibration_of(chip)),
        f"{len(preset.estimates)} of {len(preset.fields)}" if preset else "plugin",
    )


def _prices(calibration: Calibration) -> str:
    """What prices rest on, in a word."""
    if calibration.is_ideal:
        return "ideal"
    return "kernels" if calibration.has_measured_kernels_only else "calibrated"


def _teraflops(flops_per_s: float) -> str:
    value = flops_per_s / 1e12
    return f"{value:.0f}" if value >= 1e3 else f"{value:.4g}"


def _one(chip: Accelerator, preset: Preset | None) -> Iterator[RenderableType]:
    from phaze.cost import calibration_of
    from phaze.hardware import area_mm2, network_of

    yield f"{chip.name}: {preset.title if preset else 'added by a plugin or read from a file'}"
    yield f"prices: {calibration_of(chip).name}"
    yield f"peak {chip.peak_flops_per_s() / 1e12:.4g} TF/s, model area {area_mm2(chip):.3f} mm2 at 22 nm"
    if preset is None:
        yield plain_table(["field", ">value"], [(name, f"{value}") for name, value in asdict(chip).items()])
        return
    if preset.published_peak_flops_per_s is not None:
        published = preset.published_peak_flops_per_s
        yield f"published {published.value / 1e12:.4g} TF/s at {preset.published_dtype} ({published.source})"
    if preset.power_w is not None:
        yield f"draws {preset.power_w.value:.4g} W ({preset.power_w.status}: {preset.power_w.source})"
    yield ""
    yield plain_table(
        ["field", ">value", "status", "source"],
        [(name, f"{fact.value:.6g}", fact.status, fact.source) for name, fact in preset.facts.items()],
    )
    yield from _links(network_of(chip.name))


def _links(network: Network) -> Iterator[RenderableType]:
    yield f"\nnetwork {network.name}: {network.title}"
    yield plain_table(
        [">joins", "field", ">value", "status", "source"],
        [
            (str(level.size or "all"), name, f"{fact.value:.6g}", fact.status, fact.source)
            for level in network.levels
            for name, fact in (
                ("bandwidth_bytes_per_s", level.bandwidth_bytes_per_s),
                ("latency_s", level.latency_s),
            )
        ],
    )


chips = Command(
    name="chips",
    group=CommandGroup.HARDWARE,
    summary="list accelerators by maker with peak, memory and area, or one with its sources",
    configure=configure,
    run=run,
)
