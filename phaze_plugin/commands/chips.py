"""`phaze chips`: accelerators known by name, with their numbers and where these come from."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show

if TYPE_CHECKING:
    from phaze.hardware import Accelerator, Preset

__all__ = ["chips"]

_GIB = 2**30
_MIB = 2**20


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show one chip with the source of every field")
    add_json_option(parser)


def run(arguments: Namespace, console: Console) -> int:
    """List every accelerator, or show one in full."""
    from phaze.hardware import find_accelerator, presets
    from phaze.hooks import PluginManager

    known = {preset.accelerator.name: preset for preset in presets()}
    if arguments.name is not None:
        found = [find_accelerator(arguments.name)]
    else:
        found = [offer.value for offer in PluginManager.load().accelerators()]
    document = {"chips": [_document(chip, known.get(chip.name)) for chip in found]}
    lines = _one(found[0], known.get(found[0].name)) if arguments.name is not None else _all(found, known)
    show(console, arguments, document, *lines)
    return ExitCode.FINE


def _document(chip: Accelerator, preset: Preset | None) -> dict[str, object]:
    from phaze.hardware.area import area_mm2

    document = asdict(chip) | {"peak_flops_per_s": chip.peak_flops_per_s(), "model_area_mm2": area_mm2(chip)}
    if preset is not None:
        document |= {
            "title": preset.title,
            "published_peak_flops_per_s": preset.published_peak_flops_per_s and preset.published_peak_flops_per_s.value,
            "published_dtype": preset.published_dtype,
            "default_network": preset.default_network,
            "sources": {field: asdict(fact) for field, fact in preset.facts.items()},
        }
    return document


def _all(found: list[Accelerator], known: dict[str, Preset]) -> Iterator[RenderableType]:
    from phaze.hardware.area import area_mm2

    columns = ["chip", ">peak TF/s", ">tensor cores", ">vector cores", ">area mm2", ">buffer MiB", ">HBM GiB", ">TB/s"]
    yield plain_table(
        [*columns, "sources"],
        [
            (
                chip.name,
                f"{chip.peak_flops_per_s() / 1e12:.4g}",
                f"{chip.tensor_cores} x {chip.tensor_rows}x{chip.tensor_cols}",
                f"{chip.vector_cores} x {chip.vector_lanes}",
                f"{area_mm2(chip):.1f}",
                f"{chip.buffer_bytes / _MIB:.4g}",
                f"{chip.hbm_bytes / _GIB:.4g}",
                f"{chip.hbm_bandwidth_bytes_per_s / 1e12:.4g}",
                _sources(known.get(chip.name)),
            )
            for chip in found
        ],
    )
    yield (
        "\npeak is that of the arrays' native type; area follows the paper's 22 nm model, which has no HBM interface, "
        "links or network on chip and does not compare with real dies. `phaze chips NAME` shows every field's source."
    )


def _sources(preset: Preset | None) -> str:
    if preset is None:
        return "plugin"
    estimates = f" ({len(preset.estimates)} of 9 fields are estimates)" if preset.estimates else ""
    return f"{preset.facts['clock_hz'].source}{estimates}"


def _one(chip: Accelerator, preset: Preset | None) -> Iterator[RenderableType]:
    from phaze.hardware.area import area_mm2

    yield f"{chip.name}: {preset.title if preset else 'added by a plugin or read from a file'}"
    yield f"peak {chip.peak_flops_per_s() / 1e12:.4g} TF/s, model area {area_mm2(chip):.3f} mm2 at 22 nm"
    if preset is None:
        yield plain_table(["field", ">value"], [(name, f"{value}") for name, value in asdict(chip).items()])
        return
    if preset.published_peak_flops_per_s is not None:
        published = preset.published_peak_flops_per_s
        yield f"published {published.value / 1e12:.4g} TF/s at {preset.published_dtype} ({published.source})"
    yield f"network {preset.default_network}\n"
    yield plain_table(
        ["field", ">value", "status", "source"],
        [
            (name, f"{fact.value:.6g}", "fact" if fact.is_verified else "estimate", fact.source)
            for name, fact in preset.facts.items()
        ],
    )


chips = Command(
    name="chips",
    group=CommandGroup.HARDWARE,
    summary="list accelerators with peak, area, memory and sources",
    configure=configure,
    run=run,
)
