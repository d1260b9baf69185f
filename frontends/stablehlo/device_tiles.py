"""Read shardings: which tile of a tensor each device has, and into how many parts each dimension is divided.

XLA's:
{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}    tiles of 4 x 1, each on 2 devices; device order by iota
{devices=[2,1]0,1}                                        the devices of the tiles, one by one
{replicated}, {maximal device=0}, {manual}                one tile

Shardy's, which names axes of a mesh for each dimension:
#sdy.sharding<@mesh, [{"data"}, {"model", ?}]>            with sdy.mesh @mesh = <["data"=2, "model"=4]>
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["DeviceTiles", "group_size", "read_tiles"]

MOST_DEVICES = 2**20
"""More devices than any cluster has: damaged text may name far more, and every device takes memory here."""

_DEVICES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))?")
_SHARDY = re.compile(r"sdy\.sharding<@(\w+), \[(.*?)\][^\[\]]*>", re.DOTALL)
_SHARDY_MESH = re.compile(r"sdy\.mesh @(\w+) = <\[([^\]]*)\](.*?)>", re.DOTALL)
_AXIS = re.compile(r'"([^"]+)"')
_AXIS_SIZE = re.compile(r'"([^"]+)"=(\d+)')


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """The parts of each dimension, and for every device the number of the tile that it has."""

    parts: tuple[int, ...]
    tile_of_device: tuple[int, ...]


def read_tiles(sharding: str, rank: int, device_count: int, meshes: Sequence[str] = ()) -> DeviceTiles | None:
    """The tiles of a tensor of so many dimensions; None where the text does not say. `meshes` are those of Shardy."""
    if "sdy.sharding" in sharding:
        return _read_shardy(sharding, rank, device_count, meshes)
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


def _read_shardy(sharding: str, rank: int, device_count: int, meshes: Sequence[str]) -> DeviceTiles | None:
    """The tiles of a sharding by axes; None where it divides axes, or where its mesh is not there."""
    found = _SHARDY.search(sharding)
    dimensions = re.findall(r"\{([^{}]*)\}", found[2]) if found is not None else []
    mesh = next((m for m in map(_SHARDY_MESH.search, meshes) if m and found and m[1] == found[1]), None)
    if found is None or mesh is None or mesh[3].strip() or len(dimensions) != rank or ":(" in found[2]:
        return None
    sizes = {name: int(size) for name, size in _AXIS_SIZE.findall(mesh[2])}
    if math.prod(sizes.values()) != device_count or device_count > MOST_DEVICES or 0 in sizes.values():
        return None
    named = [[axis for axis in _AXIS.findall(dimension) if axis in sizes] for dimension in dimensions]
    coordinates = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), -1), strict=True))
    tiles = np.zeros(device_count, dtype=np.int64)
    for axis in (axis for axes in named for axis in axes):
        tiles = tiles * sizes[axis] + coordinates[axis]
    parts = tuple(math.prod(sizes[axis] for axis in axes) for axes in named)
    return DeviceTiles(parts, tuple(tiles.tolist()))


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
