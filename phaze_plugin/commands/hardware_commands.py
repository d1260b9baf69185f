"""The commands that show hardware: `phaze chips` and `phaze cluster`.

`phaze chips` lists the accelerators known by name, by maker, with their numbers and where these come from.
`phaze cluster TEXT` draws what was understood of a cluster's text, level by level.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from phaze.commands.command import Command, CommandGroup, ExitCode, add_json_option, plain_table, show

if TYPE_CHECKING:
    from phaze.cost import Calibration
    from phaze.hardware import Accelerator, Cluster, Network, Preset

__all__ = ["chips", "cluster_command"]

_GIB = 2**30


def _configure_chips(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show one chip with the source of every field")
    add_json_option(parser)


def _run_chips(arguments: Namespace, console: Console) -> int:
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
    document = {"chips": [_chip_document(chip, preset) for chip, preset in chips]}
    lines = _one(*chips[0]) if arguments.name is not None else _all(chips)
    show(console, arguments, document, *lines)
    return ExitCode.FINE


def _chip_document(chip: Accelerator, preset: Preset | None) -> dict[str, object]:
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
    configure=_configure_chips,
    run=_run_chips,
)


_SAMPLE_BYTES = 2**30
"""The tensor of the sample all-reduces: large enough that bandwidth decides, as for gradients."""
_DRAWN_MEMBERS = 4
"""Members of a level that are drawn before it is said how many more there are."""
_JOINTS = {"switch": ", each to all", "ring": ", in a ring", "line": ", in a line"}


_HELP = """\
TEXT is CHIP:COUNT[@NETWORK][/host=..], or a cluster's JSON file. Without NETWORK the chip's own is taken. NETWORK is a
known network's name, or levels with + between, innermost first:
  nvlink8+ib400              8 by the chip's own NVLink, then one 400 Gb/s InfiniBand adapter a device
  nvlink72+roce400/2         racks of 72, then Ethernet, 2 to 1 oversubscribed (*0.9: a tenth of the bandwidth is gone)
  nvlink8+4xib200            four adapters of 200 Gb/s for every 8 devices
  nvlink8+ib400x32+ib400/4   leaves of 32 nodes, then a spine that is 4 to 1 oversubscribed
  nvlink8-gen4+ib400         NVLink of a generation, on a chip that has none or another one
  8x8x16, 16x16+dcn100       a torus of the chip's own links, slices of one over the data centre's network
  8x450GB/s+50GB/s           any links, by bandwidth per device and direction
Behind it, /host=25GB/s,200GiB says what each device has of its host: bandwidth per direction, and memory.
`phaze chips NAME` shows the own links of a chip; `phaze cluster` alone lists the networks and speeds that are known.
"""


def _configure_cluster(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.formatter_class, parser.epilog = RawDescriptionHelpFormatter, _HELP
    parser.add_argument("text", nargs="?", metavar="TEXT", help="such as h100:512@nvlink8+ib400/2 or tpuv5p:512@8x8x8")
    parser.add_argument(
        "--price-per-hour",
        type=_price,
        metavar="X",
        help="what one device costs an hour, in your currency (no default)",
    )
    parser.add_argument("--out", metavar="FILE", help="save the cluster as JSON, to be changed by hand")
    add_json_option(parser)


def _price(text: str) -> float:
    """An argument's type: a price above 0."""
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a price above 0")
    return price


def _run_cluster(arguments: Namespace, console: Console) -> int:
    """Read the text, and show the levels with a sample collective on each."""
    from phaze.hardware import parse_cluster, save_cluster
    from phaze.installed import installed_plugins

    if arguments.text is None:
        return _list_networks(arguments, console)
    cluster = parse_cluster(arguments.text, installed_plugins())
    if arguments.price_per_hour is not None:
        cluster = replace(cluster, price_per_device_hour=arguments.price_per_hour)
    texts = list(_for_people(cluster, arguments.price_per_hour))
    if arguments.out is not None:
        save_cluster(cluster, arguments.out)
        texts.append(f"\nsaved to {arguments.out}")
    show(console, arguments, _cluster_document(cluster, arguments.price_per_hour), *texts)
    return ExitCode.FINE


def _list_networks(arguments: Namespace, console: Console) -> int:
    """Show every network that is known by name, and the speeds of those between nodes."""
    from phaze.hardware import fabric_names
    from phaze.installed import installed_plugins

    known = [(offer.name, offer.value.title, str(offer.origin)) for offer in installed_plugins().networks()]
    names = [{"name": name, "title": title, "from": origin} for name, title, origin in known]
    show(
        console,
        arguments,
        {"networks": names, "fabrics": list(fabric_names())},
        plain_table(["network", "what it is", "from"], known),
        f"\nbetween nodes, by Gb/s of an adapter: {', '.join(fabric_names())}",
        "how to write others: phaze cluster --help",
    )
    return ExitCode.FINE


def _cluster_document(cluster: Cluster, price: float | None) -> dict[str, object]:
    from phaze.hardware.hardware_files import cluster_to_json

    document: dict[str, object] = {"cluster": cluster_to_json(cluster), "all_reduce_bytes": _SAMPLE_BYTES}
    document["all_reduce_s"] = [seconds for _, seconds in _all_reduces(cluster)]
    if price is not None:
        document["price_per_hour"] = price * cluster.device_count
    return document


def _for_people(cluster: Cluster, price: float | None) -> Iterator[RenderableType]:
    chip, count = cluster.accelerator, cluster.device_count
    yield f"{count:,} x {chip.name}: {count * chip.peak_flops_per_s() / 1e15:.4g} PF/s, " + (
        f"{count * chip.hbm_bytes / _GIB:,.0f} GiB of HBM"
    )
    if price is not None:
        yield f"{price * count:,.2f} an hour, at {price:g} a device"
    if cluster.host is not None:
        rate, memory = cluster.host.bandwidth_bytes_per_s / 1e9, cluster.host.memory_bytes / _GIB
        yield f"each device has {rate:.4g} GB/s per direction to {memory:,.4g} GiB of its host"
    joined = math.prod(level.size for level in cluster.levels)
    if joined > count:
        yield f"the levels could join {joined:,} devices: some groups are not full"
    if not cluster.levels:
        yield "one device, no links"
        return
    yield ""
    yield from _drawing(cluster)
    yield ""
    yield _level_table(cluster)
    yield (
        "\nGB/s are per device and direction (of a torus: of one link in one direction); all-reduce is that of 1 GiB "
        "over all devices joined so far, ideal, each level working on what the levels inside leave to it."
    )


def _drawing(cluster: Cluster) -> Iterator[str]:
    """One line for each level, innermost at the bottom, its members as boxes with the devices that each holds."""
    lines, inside = [], 1
    for index, level in enumerate(cluster.levels, start=1):
        member = cluster.accelerator.name if inside == 1 else f"{inside} devices"
        shown = min(level.size, _DRAWN_MEMBERS)
        more = f" .. {level.size} of them" if level.size > shown else ""
        boxes = ("--" if level.links.is_row else "  ").join([f"[{member}]"] * shown)
        lines.append(f"level {index}: {boxes}{more}{_JOINTS[level.links.value]}")
        inside *= level.size
    yield from reversed(lines)


def _level_table(cluster: Cluster) -> RenderableType:
    return plain_table(
        ["level", "links", ">joins", ">devices", ">GB/s", ">latency us", ">all-reduce ms"],
        [
            (
                str(index),
                level.links.value,
                str(level.size),
                f"{devices:,}",
                f"{level.bandwidth_bytes_per_s / 1e9:.4g}",
                f"{level.latency_s * 1e6:.4g}",
                f"{seconds * 1e3:.4g}",
            )
            for index, (level, (devices, seconds)) in enumerate(
                zip(cluster.levels, _all_reduces(cluster), strict=True), start=1
            )
        ],
    )


def _all_reduces(cluster: Cluster) -> Iterator[tuple[int, float]]:
    """For every level, the devices joined so far and the seconds of the sample all-reduce over them."""
    from phaze.cost import price_collective

    joined = 1
    for level in cluster.levels:
        joined = min(joined * level.size, cluster.device_count)
        yield joined, float(price_collective("all_reduce", _SAMPLE_BYTES, cluster, joined).seconds)


cluster_command = Command(
    name="cluster",
    group=CommandGroup.HARDWARE,
    summary="show how the text of a cluster is understood, or list known networks",
    configure=_configure_cluster,
    run=_run_cluster,
)
