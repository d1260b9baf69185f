"""Read XLA's shardings: which tile of a tensor each device has, and into how many parts each dimension is divided.

{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}    tiles of 4 x 1, each on 2 devices; device order by iota
{devices=[2,1]0,1}                                        the devices of the tiles, one by one
{replicated}, {maximal device=0}, {manual}                one tile
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

__all__ = ["DeviceTiles", "group_size", "read_tiles"]

MOST_DEVICES = 2**20
"""More devices than any cluster has: damaged text may name far more, and every device takes memory here."""

_DEVICES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))?")


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """The parts of each dimension, and for every device the number of the tile that it has."""

    parts: tuple[int, ...]
    tile_of_device: tuple[int, ...]


def read_tiles(sharding: str, rank: int, device_count: int) -> DeviceTiles | None:
    """The tiles of a tensor of so many dimensions; None where the text does not say."""
    whole = DeviceTiles((1,) * rank, (0,) * device_count)
    if "replicated}" in sharding.replace("last_tile_dims={replicated}", "") or "maximal" in sharding:
        return whole
    match = _DEVICES.search(sharding)
    if match is None:
        return None
    sizes = _integers(match[1])
    count = math.prod(sizes)
    if count != device_count or count > MOST_DEVICES or len(sizes) < rank or 0 in sizes:
        return None
    devices = _device_order(match, count)
    if devices is None or sorted(devices) != list(range(count)):
        return None
    parts = sizes[:rank]
    copies = math.prod(sizes[rank:])
    tile_of_device = [0] * count
    for position, device in enumerate(devices):
        tile_of_device[device] = position // copies
    return DeviceTiles(parts, tuple(tile_of_device))


def _device_order(match: re.Match[str], count: int) -> list[int] | None:
    """The devices in the order of the tiles: listed, or counted through a reshaped and transposed range."""
    if match[4]:
        return list(_integers(match[4]))
    order = np.arange(count)
    if match[2]:
        shape = _integers(match[2])
        axes = _integers(match[3]) if match[3] else tuple(range(len(shape)))
        if math.prod(shape) != count or sorted(axes) != list(range(len(shape))):
            return None
        order = order.reshape(shape).transpose(axes).reshape(-1)
    listed: list[int] = order.tolist()
    return listed


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


def group_size(replica_groups: str, device_count: int) -> int | None:
    """How many devices take part in one group of a collective; None where the text does not say.

    The text is a list of groups, `[groups,size]<=[...]`, axes of a mesh, or empty for all devices.
    """
    text = replica_groups.strip()
    iota = re.match(r"\[(\d+),(\d+)\]<=", text)
    if iota is not None:
        return int(iota[2])
    if text.startswith("mesh["):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", text)}
        named = re.findall(r"'(\w+)'", text.rpartition("]")[2])
        return math.prod(sizes.get(name, 1) for name in named) if named else None
    groups = re.findall(r"\{([\d,\s]+)\}", text)
    if groups:
        return len(_integers(groups[0].replace(" ", "")))
    return device_count if text in ("", "{}", "{{}}") else None
