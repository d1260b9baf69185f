"""Clusters as text: ``CHIP:COUNT[@NETWORK]``.

CHIP is a known accelerator's name or the path of an accelerator's JSON file, COUNT a number of devices, NETWORK a known
network's name (the chip's own one when left out; `paper` where it has none). The path of a cluster's JSON file
stands for the whole.
"""

from __future__ import annotations

from phaze.errors import HardwareError
from phaze.hardware.accelerator import Accelerator
from phaze.hardware.cluster import Cluster
from phaze.hardware.files import load_accelerator, load_cluster
from phaze.hardware.presets import network_levels, preset, preset_names

__all__ = ["find_accelerator", "parse_cluster"]

_NETWORK_OF_OTHER_CHIPS = "paper"


def find_accelerator(text: str) -> Accelerator:
    """The accelerator that ``text`` names: a preset, one that a plugin added, or the path of a JSON file.

    Raises:
        UnknownNameError: nobody knows the name; near names are listed.
        PluginError: plugins clash over the name.
        FormatError: the file is not an accelerator.
    """
    from phaze.hooks import PluginManager

    return load_accelerator(text) if text.endswith(".json") else PluginManager.load().accelerators().get(text)


def parse_cluster(text: str) -> Cluster:
    """The cluster that ``text`` describes, such as ``a100-80gb:64`` or ``tpuv4-paper:1024@paper``.

    Raises:
        HardwareError: the text has another form, or counts no devices.
        UnknownNameError: nobody knows the chip or the network.
    """
    chip, colon, rest = text.strip().rpartition(":")
    if not colon and rest.endswith(".json"):
        return load_cluster(rest)
    count_text, at, network = rest.partition("@")
    if not chip or (at and not network) or not (count_text.isascii() and count_text.isdigit()):
        raise HardwareError(
            f"cluster {text!r} is not of the form CHIP:COUNT[@NETWORK]; write for example a100-80gb:64."
        )
    if (count := int(count_text)) < 1:
        raise HardwareError(f"cluster {text!r} has {count} devices; expected at least 1.")
    accelerator = find_accelerator(chip)
    return Cluster(accelerator, count, network_levels(network or _network_of(chip), count))


def _network_of(chip: str) -> str:
    return preset(chip).default_network if chip in preset_names() else _NETWORK_OF_OTHER_CHIPS
