"""Modules that a compiler has divided for several devices: their shardings, their strategy, the whole program again.

Shardings: `read_tiles` reads which tile of a tensor each device has, and into how many parts each dimension is divided.
XLA's:

{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}    tiles of 4 x 1, each on 2 devices; device order by iota
{devices=[2,1]0,1}                                        the devices of the tiles, one by one
{replicated}, {maximal device=0}, {manual}                one tile

Shardy's, which names axes of a mesh for each dimension:

#sdy.sharding<@mesh, [{"data"}, {"model", ?}]>            with sdy.mesh @mesh = <["data"=2, "model"=4]>

Strategy: `find_strategy` infers which one the module runs, from the shardings of its arguments and the groups of its
collectives. The devices that have the same part of the batch compute one copy of the model together. So with the tiles
of the batch arguments and of the parameters:

dp     parts of the first dimension of the batch, cp those of its second one
tp     different tiles of a parameter among the devices that share a part of the batch
zero   3 where parameters have more tiles than that, 1 where only the optimizer's state has

Where arguments have no shardings (replicas of `pmap`, torch_xla), the groups tell: collectives of forward run over the
tp devices, those that reduce gradients over the dp copies.

Whole program: `whole_program` gives every tensor its full size, and takes collectives and shards out. A partitioned
module has the shapes of one device. Each dimension of a tensor there is 1/k of the whole one; k is known for the
arguments (their shardings say it) and follows for the others by the rules: a factor is divided alike in all tensors of
an op. A collective that gathers or scatters changes k, one that reduces does not, and a slice that starts where a
device's number says begins a division. `_Divisions.follow` passes the k of dimensions on, to and fro, until nothing
changes; what then is not known is not divided. Where two tensors divide a factor differently, or where devices exchange
parts in another way, there is no whole program to be told (`WholeProgramError`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phaze.errors import GraphError
from phaze.frontends.stablehlo.argument_roles import ModuleRoles
from phaze.frontends.stablehlo.module import Module
from phaze.frontends.stablehlo.symbols import CONSTANT_PREFIX
from phaze.ir import Dim, Dims, FactorKind, Graph, Op, OpKind, Phase, Role, Rule
from phaze.ir.graph_builder import elementwise_rule

__all__ = [
    "DeviceTiles",
    "WholeProgramError",
    "argument_tiles",
    "find_strategy",
    "group_size",
    "read_tiles",
    "strategy_note",
    "whole_program",
]

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


def argument_tiles(module: Module) -> list[DeviceTiles | None]:
    """The tiles of every argument, None where its sharding does not say."""
    return [
        read_tiles(argument.sharding, len(argument.type.shape), module.partitions, module.meshes)
        for argument in module.main.arguments
    ]


def find_strategy(module: Module, roles: ModuleRoles, graph: Graph) -> dict[str, int]:
    """The fields of a strategy that the module shows; none where it shows nothing."""
    tiles = argument_tiles(module)
    by_role: dict[Role, list[DeviceTiles]] = {}
    for role, tiling in zip(roles.arguments, tiles, strict=True):
        if tiling is not None:
            by_role.setdefault(role, []).append(tiling)
    if by_role.get(Role.PARAMETER) and by_role.get(Role.BATCH):
        return _by_tiles(by_role)
    return _by_groups(graph, module.partitions * module.replicas)


def _by_tiles(by_role: Mapping[Role, Sequence[DeviceTiles]]) -> dict[str, int]:
    batch = max(by_role[Role.BATCH], key=lambda tiling: len(set(tiling.tile_of_device)))
    dp = batch.parts[0] if batch.parts else 1
    cp = batch.parts[1] if len(batch.parts) > 1 else 1
    peers = [device for device, tile in enumerate(batch.tile_of_device) if tile == batch.tile_of_device[0]]
    tp = max(_tiles_among(tiling, peers) for tiling in by_role[Role.PARAMETER])
    strategy = {"dp": dp, "tp": tp}
    if cp > 1:
        strategy["cp"] = cp
    if dp > 1:
        split = {role: _is_split_over_copies(by_role.get(role, ()), peers) for role in Role}
        strategy["zero"] = 3 if split[Role.PARAMETER] else 1 if split[Role.OPTIMIZER_STATE] else 0
    return strategy


def _tiles_among(tiling: DeviceTiles, devices: Sequence[int]) -> int:
    return len({tiling.tile_of_device[device] for device in devices})


def _is_split_over_copies(tilings: Sequence[DeviceTiles], peers: Sequence[int]) -> bool:
    """Whether copies of the model have different tiles of some tensor."""
    return any(len(set(tiling.tile_of_device)) > _tiles_among(tiling, peers) for tiling in tilings)


def _by_groups(graph: Graph, device_count: int) -> dict[str, int]:
    sizes: dict[bool, set[int]] = {True: set(), False: set()}
    for op in graph.ops:
        if op.kind is OpKind.COLLECTIVE and op.outputs and graph.tensors[op.outputs[0]].elements > 1:
            size = group_size(str(dict(op.attributes).get("replica_groups", "")), device_count)
            if size is not None and size > 1:
                sizes[op.phase is Phase.FORWARD].add(size)
    forward, later = sizes[True], sizes[False] - sizes[True]
    if len(forward) > 1 or len(later) > 1 or not forward | later:
        return {}
    tp = next(iter(forward), 1)
    dp = next(iter(later), device_count // tp)
    return {"dp": dp, "tp": tp} if dp * tp <= device_count else {}


def strategy_note(strategy: Mapping[str, int], device_count: int) -> str:
    """One sentence: what runs where."""
    zero = strategy.get("zero", 0)
    degrees = " x ".join(f"{name} {strategy[name]}" for name in ("dp", "cp", "tp") if name in strategy)
    return f"this runs {degrees} on {device_count} devices{f', ZeRO-{zero}' if zero else ''}"


MOST_SWEEPS = 40
"""Sweeps over the graph, to and fro: more than the turns that a division takes through the views of a model."""

_MOVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_slice", "cross-replica-sum"})
"""Collectives after which a tensor of the whole program is the same as before."""


class WholeProgramError(Exception):
    """The parts do not make a whole in a way that is known here; the text says why."""


def whole_program(graph: Graph, parts: Mapping[str, Sequence[int]]) -> Graph:
    """The graph of the whole program; `parts` has, for each argument that is divided or known not to be, the parts.

    Raises WholeProgramError.
    """
    divisions = _Divisions(graph, parts)
    divisions.follow()
    ops = tuple(divisions.whole_op(op) for op in graph.ops)
    shapes = {tensor_id: divisions.whole_shape(tensor_id) for tensor_id in graph.tensors}
    tensors = {tensor_id: replace(tensor, shape=shapes[tensor_id]) for tensor_id, tensor in graph.tensors.items()}
    try:
        return replace(graph, ops=ops, tensors=tensors)
    except GraphError as error:
        # Rules have no factor for a dimension of one element, such as one head a device.
        raise WholeProgramError("a dimension of which each device has one element cannot be followed") from error


class _Divisions:
    """Into how many parts each dimension of each tensor is divided, as far as it is known."""

    def __init__(self, graph: Graph, parts: Mapping[str, Sequence[int]]) -> None:
        self.graph = graph
        self.known: dict[tuple[str, int], int] = {}
        for tensor_id, counts in parts.items():
            self.known.update({(tensor_id, dim): count for dim, count in enumerate(counts)})

    def follow(self) -> None:
        for sweep in range(MOST_SWEEPS):
            before = len(self.known)
            for op in self.graph.ops if sweep % 2 == 0 else reversed(self.graph.ops):
                self._pass_through(op)
            if len(self.known) == before:
                return

    def _pass_through(self, op: Op) -> None:
        if _is_move(op):
            self._pass_through_move(op)
            return
        if op.kind is OpKind.COLLECTIVE:
            raise WholeProgramError(f"{op.function} exchanges parts between devices")
        factors = self.factors(op)
        for tensor_id, dims in zip((*op.inputs, *op.outputs), op.rule.tensors(), strict=True):
            for index, dim in enumerate(dims):
                if (tensor_id, index) in self.known or not dim.factors:
                    continue
                # A dimension of several factors is known once one of them is divided: only the others may be unknown.
                counts = [factors.get(name) for name in dim.factors]
                if all(count is not None for count in counts) or any(count not in (None, 1) for count in counts):
                    total = 1
                    for count in counts:
                        total *= count or 1
                    self.known[tensor_id, index] = total

    def factors(self, op: Op) -> dict[str, int]:
        """Into how many parts the factors of an op are divided, as far as the dimensions of its tensors say."""
        found: dict[str, int] = {}
        sides = list(zip((*op.inputs, *op.outputs), op.rule.tensors(), strict=True))
        for is_single in (True, False):
            for tensor_id, dims in sides:
                for index, dim in enumerate(dims):
                    count = self.known.get((tensor_id, index))
                    if count is None or (len(dim.factors) == 1) is not is_single or not dim.factors:
                        continue
                    if is_single:
                        self._agree(op, found, dim.factors[0], count)
                    else:
                        self._divide(op, found, dim, count)
        return found

    def _agree(self, op: Op, found: dict[str, int], name: str, count: int) -> None:
        if found.setdefault(name, count) != count:
            raise WholeProgramError(f"{op.id} reads a factor in {found[name]} parts and in {count}")

    def _divide(self, op: Op, found: dict[str, int], dim: Dim, count: int) -> None:
        """Divide a dimension of several factors: what known factors leave goes to the first other one."""
        for name in dim.factors:
            known = found.get(name, 1)
            if count % known:
                raise WholeProgramError(f"{op.id} divides a dimension in {count} parts and a factor of it in {known}")
            count //= known
        unknown = [name for name in dim.factors if name not in found]
        unknown.sort(key=lambda name: op.rule.factor(name).kind in (FactorKind.WHOLE, FactorKind.SERIAL))
        for index, name in enumerate(unknown):
            found[name] = count if index == 0 else 1
        if not unknown and count > 1:
            raise WholeProgramError(f"{op.id} divides a dimension in more parts than its factors")

    def _pass_through_move(self, op: Op) -> None:
        """What a collective or a shard's slice gathers or divides, both ways."""
        before, after = op.inputs[0], op.outputs[0]
        for dim, (small, large) in enumerate(zip(self._shape(before), self._shape(after), strict=True)):
            if (before, dim) in self.known and (after, dim) not in self.known:
                self.known[after, dim] = self._moved(op, self.known[before, dim], small, large)
            elif (after, dim) in self.known and (before, dim) not in self.known:
                self.known[before, dim] = self._moved(op, self.known[after, dim], large, small)

    def _moved(self, op: Op, count: int, size: int, new_size: int) -> int:
        if count * size % new_size:
            raise WholeProgramError(f"{op.id} does not move whole parts")
        return count * size // new_size

    def _shape(self, tensor_id: str) -> tuple[int, ...]:
        return self.graph.tensors[tensor_id].shape

    def whole_shape(self, tensor_id: str) -> tuple[int, ...]:
        shape = self._shape(tensor_id)
        return tuple(size * self.known.get((tensor_id, dim), 1) for dim, size in enumerate(shape))

    def whole_op(self, op: Op) -> Op:
        """The op on whole tensors; a collective, or a device's slice of a tensor, is a view of the same elements."""
        if _is_move(op):
            before, after = self.whole_shape(op.inputs[0]), self.whole_shape(op.outputs[0])
            if before != after:
                raise WholeProgramError(f"{op.id} joins {list(before)} to {list(after)}")
            rule = elementwise_rule(before, before)
            return replace(op, kind=OpKind.VIEW, function="moved", rule=rule, inputs=op.inputs[:1], attributes=())
        counts = self.factors(op)
        if all(count == 1 for count in counts.values()):
            return op
        factors = tuple(replace(factor, size=factor.size * counts.get(factor.name, 1)) for factor in op.rule.factors)
        sides = [
            tuple(self._whole_dims(tensor_id, dims) for tensor_id, dims in zip(ids, side, strict=True))
            for ids, side in ((op.inputs, op.rule.operands), (op.outputs, op.rule.results))
        ]
        return replace(op, rule=Rule(sides[0], sides[1], factors))

    def _whole_dims(self, tensor_id: str, dims: Dims) -> Dims:
        """Dimensions that a factor covers in part are as large as the whole tensor's."""
        shape = self.whole_shape(tensor_id)
        return tuple(dim if dim.size is None else Dim(dim.factors, shape[index]) for index, dim in enumerate(dims))


def _is_move(op: Op) -> bool:
    """Whether an op gives the same tensor of the whole program: collectives, and slices by the device's number."""
    if op.kind is OpKind.COLLECTIVE:
        return op.function in _MOVES
    # Start indices that are constants, and yet not known, come from the number of the device.
    is_slice = op.function == "dynamic_slice" and len(op.inputs) > 1
    return is_slice and all(tensor_id.startswith(CONSTANT_PREFIX) for tensor_id in op.inputs[1:])
