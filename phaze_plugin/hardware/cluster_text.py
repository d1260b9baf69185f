"""Accelerators and clusters as users type them: a chip's name or file, and ``CHIP:COUNT[@NETWORK][/host=LINK,MEMORY]``.

CHIP is a known accelerator's name or the path of an accelerator's JSON file, COUNT a number of devices, NETWORK a known
network's name or its levels, such as ``nvlink8+ib400`` (`phaze.hardware.network_text`); the chip's own one when left
out, `paper` where it has none. LINK and MEMORY, such as ``25GB/s,200GiB``, are what each device has of its host. The
path of a cluster's JSON file stands for the whole.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from phaze.errors import HardwareError, shown
from phaze.hardware.accelerator import Accelerator
from phaze.hardware.chip_presets import known_accelerator, links_of, preset, preset_names
from phaze.hardware.cluster import Cluster, HostLink
from phaze.hardware.field_checks import LARGEST_BYTES
from phaze.hardware.hardware_files import load_accelerator, load_cluster
from phaze.hardware.network_levels import Network
from phaze.hardware.network_text import network, read_network

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = [
    "find_accelerator",
    "network_of",
    "parse_cluster",
]

_NETWORK_OF_OTHER_CHIPS = "paper"
_SLICE = re.compile(r"[0-9]{1,6}(x[0-9]{1,6}){1,2}", re.ASCII)
"""The sides of a slice of a torus, as makers of TPUs name slices."""

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

    Sides of a torus in the place of the count, ``tpuv5p:4x4x8``, are a slice: ``tpuv5p:128@4x4x8``. Another form, a
    count that no cluster has and levels that contradict it are a `HardwareError`, unknown chips and networks an
    `UnknownNameError`.
    """
    chip, colon, rest = text.strip().rpartition(":")
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
    joining = network_of(chip, network_text, plugins)
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
