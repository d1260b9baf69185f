"""Clusters, accelerators and networks as users type them: ``CHIP:COUNT[@NETWORK][/host=LINK,MEMORY]``.

Clusters (`parse_cluster`). CHIP is a known accelerator's name or the path of an accelerator's JSON file, COUNT a number
of devices, NETWORK a known network's name or its levels; the chip's own one when left out, `paper` where it has none.
LINK and MEMORY, such as ``25GB/s,200GiB``, are what each device has of its host. The path of a cluster's JSON file
stands for the whole.

Networks (`network`). A network is the name of one, or its levels with ``+`` between, innermost first.

    nvlink8+ib400              8 devices by the chip's own NVLink, then one 400 Gb/s InfiniBand adapter a device (rails)
    nvlink72+roce400/2         racks of 72, then RoCE with half of its bandwidth: 2 to 1 oversubscribed
    nvlink8+4xib200            four adapters of 200 Gb/s for every 8 devices
    nvlink8+ib400x32+ib400/4   leaves of 32 nodes at full bandwidth, then a spine that is 4 to 1 oversubscribed
    nvlink8-gen4+ib400*0.9     NVLink4 on a chip that has none of its own; adapters at 90 % of their bandwidth
    8x8x16, 16x16+dcn100       a torus of the chip's own links in this shape; slices of one over the data centre's links
    ici256+dcn25               slices of at most 256 in the most even shape
    8x450GB/s+50GB/s           8 members at this bandwidth per device and direction, then all others

A level is one of

    LINKn[-genG]    n members joined by links of the chip (nvlink, xgmi, pcie, ici, neuronlink, ..), of generation G
    AxBxC           a torus of these lengths, on the chip's links that form one
    [Kx]NAMEs[xN]   a fabric (ib, roce, eth, efa, slingshot, opa, dcn) by its speed of s Gb/s, K adapters for each of
                    the groups inside (otherwise one a device), N members (otherwise as many as are needed)
    [Nx]RATE        N members (otherwise as many as are needed) at a rate such as 450GB/s or 400Gb/s

each with ``/F`` behind it where it is oversubscribed F to 1, and ``*S`` where only the share S of its bandwidth is
there. Only the last level may go without a number of members. For what cannot be said so, write the levels into a
cluster's file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phaze.errors import HardwareError, UnknownNameError, shown
from phaze.hardware.accelerator import Accelerator
from phaze.hardware.chip_presets import known_accelerator, links_of, preset, preset_names
from phaze.hardware.cluster import ChipLink, Cluster, HostLink, Network, NetworkLevel, known_network, network_names
from phaze.hardware.hardware_files import load_accelerator, load_cluster
from phaze.hardware.hardware_numbers import LARGEST_BYTES, Fact, Table, fact_of, packaged_table

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["fabric_names", "find_accelerator", "network", "network_of", "parse_cluster", "read_network"]

_MOST_MEMBERS = 2**20
"""Of one level that is written with a size: more than any machine has, and few enough to look for a torus' shape."""
_BITS_PER_BYTE = 8
_ALL_NETWORKS = "`phaze cluster` lists the networks and speeds that are known."
_GIGA = 1e9
_UNITS = {"GB/s": 1e9, "GBps": 1e9, "TB/s": 1e12, "TBps": 1e12, "Gb/s": 1e9 / 8, "Gbps": 1e9 / 8}

_CHANGES = r"(?P<changes>(?:[/*][0-9.]+)*)"
_SHAPE = re.compile(rf"(?P<shape>\d+(?:x\d+)+){_CHANGES}")
_RATE = re.compile(rf"(?:(?P<size>\d+)x)?(?P<rate>\d+(?:\.\d+)?)(?P<unit>{'|'.join(_UNITS)}){_CHANGES}")
_NAMED = re.compile(
    rf"(?:(?P<adapters>\d+)x)?(?P<name>[A-Za-z]+)(?P<number>\d*)(?:-gen(?P<generation>\d+))?(?:x(?P<size>\d+))?{_CHANGES}"
)


@dataclass(frozen=True, slots=True)
class _Context:
    """What a level's text is read with: the whole text, the chip and its links, and the devices inside of the level."""

    text: str
    chip: str
    links: Mapping[str, ChipLink]
    inside: int

    def wrong(self, part: str, why: str) -> HardwareError:
        """The error for one level."""
        where = "" if part == self.text else f" in {self.text!r}"
        return HardwareError(f"network {part!r}{where}: {why}")


def network(
    text: str, chip: str = "", links: Mapping[str, ChipLink] | None = None, plugins: PluginManager | None = None
) -> Network:
    """The network that ``text`` means on a chip with these own links.

    A name that nobody knows is an `UnknownNameError` with near ones, a level that cannot be a `HardwareError` that
    names it.
    """
    text = "".join(text.split())
    known = known_network(text, plugins)
    if known is not None:
        return known
    levels: list[NetworkLevel] = []
    for part in text.split("+"):
        if not part.strip():
            raise HardwareError(
                f"network {text!r}: nothing stands on one side of a +; write for example nvlink8+ib400."
            )
        inside = math.prod(level.size or 1 for level in levels)
        if levels and levels[-1].size is None:
            raise HardwareError(
                f"network {text!r}: {levels[-1].name!r} already joins all devices that are left, so that {part!r} "
                f"behind it joins none. Write the innermost level first, and how many {levels[-1].name!r} joins, as in "
                f"{levels[-1].name}x32."
            )
        levels.append(_level(part.strip(), _Context(text, chip, links or {}, inside), plugins))
    return Network(text, ", then ".join(_titles(levels)), tuple(levels))


def read_network(text: str, device_count: int, network: Network) -> None:
    """Raise where a network that was written level by level contradicts the number of devices."""
    left = device_count
    for level in network.levels:
        if level.size is None or left <= level.size:
            return
        if left % level.size:
            raise HardwareError(
                f"cluster {text!r}: {level.name!r} joins {level.size}, and {left} is no multiple of that. Change the "
                f"number of devices, or the size of {level.name!r}."
            )
        left //= level.size
    last = network.levels[-1]
    raise HardwareError(
        f"cluster {text!r}: {last.name!r} leaves {left} groups that nothing joins; add what does behind it, as in "
        f"{network.name}+ib400."
    )


def _titles(levels: list[NetworkLevel]) -> Iterator[str]:
    for level in levels:
        size = "x".join(map(str, level.shape)) or level.size
        yield f"{size} by {level.name}" if size else level.name


def _level(part: str, context: _Context, plugins: PluginManager | None) -> NetworkLevel:
    readers: tuple[tuple[re.Pattern[str], Callable[[str, re.Match[str], _Context], NetworkLevel]], ...] = (
        (_SHAPE, _shaped),
        (_RATE, _rated),
        (_NAMED, _named),
    )
    for pattern, read in readers:
        match = pattern.fullmatch(part)
        if match is not None:
            return _changed(read(part, match, context), match["changes"], part, context)
    if known_network(part, plugins) is not None:
        raise context.wrong(part, "it is a whole network and cannot be a level of another one.")
    raise UnknownNameError("network", part, _known_names(context), _ALL_NETWORKS)


def _shaped(part: str, match: re.Match[str], context: _Context) -> NetworkLevel:
    """A torus of the chip's own links in a given shape."""
    shape = tuple(int(length) for length in match["shape"].split("x"))
    link = next((link for link in context.links.values() if link.torus is not None), None)
    if link is None or link.torus is None:
        have = ", ".join(context.links) or "none"
        why = f"has no links that form a torus, only {have}; write levels, as in nvlink8+ib400."
        raise context.wrong(part, f"{context.chip or 'this chip'} {why}")
    if len(shape) > link.torus.dimensions:
        raise context.wrong(part, f"the {link.name} links of {context.chip} form {link.torus.dimensions} dimensions.")
    size = _size(math.prod(shape), part, context)
    return NetworkLevel(size, link.bandwidth_bytes_per_s, link.latency_s, link.torus, tuple(sorted(shape)), part)


def _rated(part: str, match: re.Match[str], context: _Context) -> NetworkLevel:
    """Any links, by their bandwidth per device and direction."""
    size = _size(int(match["size"]), part, context) if match["size"] else None
    bandwidth = float(match["rate"]) * _UNITS[match["unit"]]
    if bandwidth <= 0:
        raise context.wrong(part, "expected a bandwidth above 0.")
    fabric = packaged_table("networks")["fabrics"]["ib"]
    latency = fact_of(fabric["latency_s"]) if size is None else Fact(1e-6, "order of magnitude; not measured", False)
    return NetworkLevel(size, Fact(bandwidth, f"given as {part}", True), latency, name=part)


def _named(part: str, match: re.Match[str], context: _Context) -> NetworkLevel:
    """A chip's own links, links of a given generation, or a fabric by its speed."""
    table = packaged_table("networks")
    name, number = match["name"].lower(), match["number"]
    if not number and name in table["aliases"]:
        name, number = re.fullmatch(r"([a-z]+)(\d+)", table["aliases"][name]).groups()  # type: ignore[union-attr]
    if name in table["fabrics"]:
        return _fabric(part, match, context, table["fabrics"][name], name, number)
    if match["adapters"] or match["size"]:
        raise UnknownNameError("network", part, _known_names(context), _ALL_NETWORKS)
    link = _link(part, match["generation"], name, context, table["generations"])
    size = _size(int(number), part, context) if number else None
    return NetworkLevel(size, link.bandwidth_bytes_per_s, link.latency_s, link.torus, name=part)


def _link(part: str, generation: str | None, name: str, context: _Context, generations: Table) -> ChipLink:
    """The chip's own links called ``name``, or those of a generation that is named."""
    if generation is None and name in context.links:
        return context.links[name]
    if name in generations:
        known = generations[name]["bandwidth_bytes_per_s"]
        if generation in known:
            return ChipLink(name, fact_of(known[generation]), fact_of(generations[name]["latency_s"]))
        if generation is not None:
            raise context.wrong(part, f"unknown generation {generation} of {name}; known are {', '.join(known)}.")
        have = f"its own links are {', '.join(context.links)}" if context.links else "it has no links of its own"
        raise context.wrong(
            part, f"{context.chip or 'this chip'} has no {name}; {have}. Say which generation, as in {part}-gen4."
        )
    if any(name in links for links in _links_of_all_chips()):
        have = ", ".join(context.links) or "none"
        raise context.wrong(part, f"{context.chip or 'this chip'} has no {name}; its own links are {have}.")
    raise UnknownNameError("network", part, _known_names(context), _ALL_NETWORKS)


def _fabric(part: str, match: re.Match[str], context: _Context, fabric: Table, name: str, number: str) -> NetworkLevel:
    """A network of adapters by their speed in Gb/s."""
    if match["generation"] or not number or int(number) not in fabric["speeds"]:
        speeds = ", ".join(f"{name}{speed}" for speed in fabric["speeds"])
        what = f"{number} Gb/s" if number else "no speed"
        raise context.wrong(part, f"there is no {fabric['title']} of {what}; known are {speeds}.")
    speed = int(number) * _GIGA / _BITS_PER_BYTE
    share, source = 1.0, f"one {number} Gb/s adapter per device"
    if match["adapters"]:
        adapters = _size(int(match["adapters"]), part, context)
        share = adapters / context.inside
        source = f"{adapters} adapters of {number} Gb/s for {context.inside} devices"
    size = _size(int(match["size"]), part, context) if match["size"] else None
    return NetworkLevel(size, Fact(speed * share, source, True), fact_of(fabric["latency_s"]), name=part)


def _changed(level: NetworkLevel, changes: str, part: str, context: _Context) -> NetworkLevel:
    """The level with the bandwidth that oversubscription (/F) and degraded links (*S) leave."""
    bandwidth = level.bandwidth_bytes_per_s
    for sign, text in re.findall(r"([/*])([0-9.]+)", changes):
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if (sign == "/" and factor < 1) or (sign == "*" and not 0 < factor <= 1):
            what = "a factor of at least 1" if sign == "/" else "a share above 0 and at most 1"
            raise context.wrong(part, f"{sign}{text} is not {what}.")
        value = bandwidth.value / factor if sign == "/" else bandwidth.value * factor
        why = f"{text} to 1 oversubscribed" if sign == "/" else f"{factor:.0%} of it there"
        bandwidth = Fact(value, f"{bandwidth.source}; {why}", bandwidth.is_verified)
    return replace(level, bandwidth_bytes_per_s=bandwidth)


def _size(size: int, part: str, context: _Context) -> int:
    if not 1 <= size <= _MOST_MEMBERS:
        raise context.wrong(part, f"{shown(size)} members; expected 1 to {_MOST_MEMBERS}.")
    return size


def _links_of_all_chips() -> Iterator[Mapping[str, object]]:
    for chip in packaged_table("chips")["chips"].values():
        yield chip["links"]


def _known_names(context: _Context) -> tuple[str, ...]:
    """Everything that a level may be called, for near names."""
    table = packaged_table("networks")
    links = (f"{name}8" for name in (*table["generations"], *context.links))
    return tuple(dict.fromkeys((*network_names(), *links, *fabric_names())))


def fabric_names() -> tuple[str, ...]:
    """Networks between nodes by name and speed in Gb/s, such as ib400, and the other names that they have."""
    table = packaged_table("networks")
    speeds = (f"{name}{speed}" for name, fabric in table["fabrics"].items() for speed in fabric["speeds"])
    return (*speeds, *table["aliases"])


_NETWORK_OF_OTHER_CHIPS = "paper"
_SLICE = re.compile(r"[0-9]{1,6}(x[0-9]{1,6}){1,2}", re.ASCII)
"""The sides of a slice of a torus, as makers of TPUs name slices."""

_COUNTED = re.compile(r"(?P<count>[0-9]+) ?[x*] ?(?P<chip>[A-Za-z][\w .-]*?)(?P<rest>[@/].*)?", re.ASCII)
"""The number of devices in front of the chip, as in ``8xh100`` and as clusters are shown."""

_HOST = "/host="
_MOST_DIGITS = 40
"""A count with more digits is not converted to a number: Python takes long over huge ones, and none is a cluster's."""


def find_accelerator(text: str, plugins: PluginManager | None = None) -> Accelerator:
    """The accelerator that ``text`` names: a preset, one that a plugin added, or the path of a JSON file.

    Without ``plugins`` the installed ones are looked up anew. A name that nobody knows is an `UnknownNameError`
    that lists near ones, one that plugins clash over a `PluginError`, a file with something else a `FormatError`.
    """
    return load_accelerator(text) if text.endswith(".json") else known_accelerator(text, plugins)


def parse_cluster(text: str, plugins: PluginManager | None = None) -> Cluster:
    """The cluster that ``text`` describes, such as ``a100-80gb:64`` or ``h100:512@nvlink8+ib400``.

    Sides of a torus in the place of the count, ``tpuv5p:4x4x8``, are a slice: ``tpuv5p:128@4x4x8``, and the count may
    stand in front: ``8xh100``. Another form, a
    count that no cluster has and levels that contradict it are a `HardwareError`, unknown chips and networks an
    `UnknownNameError`.
    """
    counted = _COUNTED.fullmatch(text.strip())
    chip, colon, rest = text.strip().rpartition(":")
    if counted:
        chip, rest = counted["chip"], f"{counted['count']}{counted['rest'] or ''}"
    if not colon and rest.endswith(".json"):
        return load_cluster(rest, plugins)
    rest, has_host, host_text = rest.partition(_HOST)
    count_text, separator, network_text = rest.partition("@")
    if _SLICE.fullmatch(count_text) and (network_text or not separator):
        network_text = f"{count_text}+{network_text}" if network_text else count_text
        count_text = str(math.prod(map(int, count_text.split("x"))))
    if not chip or (separator and not network_text) or not (count_text.isascii() and count_text.isdigit()):
        raise HardwareError(
            f"cluster {shown(text)} is not of the form CHIP:COUNT[@NETWORK]; write for example a100-80gb:64 or "
            "h100:512@nvlink8+ib400."
        )
    count = int(count_text) if len(count_text) <= _MOST_DIGITS else LARGEST_BYTES + 1
    if not 1 <= count <= LARGEST_BYTES:
        raise HardwareError(
            f"cluster {shown(text)} has {count_text[:_MOST_DIGITS]} devices; expected 1 to {LARGEST_BYTES}."
        )
    accelerator = find_accelerator(chip, plugins)
    joining = network_of(chip if chip.endswith(".json") else accelerator.name, network_text, plugins)
    if network_text and any(level.name for level in joining.levels):
        read_network(text, count, joining)
    return Cluster(accelerator, count, joining.joining(count), host=_host(text, host_text) if has_host else None)


def _host(text: str, host_text: str) -> HostLink:
    """What text such as ``25GB/s,200GiB`` says of a host."""
    found = re.fullmatch(r"([0-9.]+)GB/s,([0-9.]+)(GiB|GB)", host_text)
    try:
        link, memory, unit = found.groups() if found else ("", "", "")
        return HostLink(float(link) * 1e9, int(float(memory) * (2**30 if unit == "GiB" else 1e9)))
    except ValueError as error:
        raise HardwareError(
            f"cluster {shown(text)} says host={shown(host_text)}; expected bandwidth per direction and memory of each "
            "device, such as host=25GB/s,200GiB."
        ) from error


def network_of(chip: str, text: str = "", plugins: PluginManager | None = None) -> Network:
    """The network that ``text`` means for a chip, or the one that the chip comes with where there is no text."""
    if not text:
        text = preset(chip).default_network if chip in preset_names() else _NETWORK_OF_OTHER_CHIPS
    return network(text, chip, links_of(chip), plugins)
