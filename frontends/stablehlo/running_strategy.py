"""Infer which strategy a partitioned module runs, from the shardings of its arguments and the groups of collectives.

The devices that have the same part of the batch compute one copy of the model together. So with the tiles of the
batch arguments and of the parameters (`device_tiles.py`):

dp     parts of the first dimension of the batch, cp those of its second one
tp     different tiles of a parameter among the devices that share a part of the batch
zero   3 where parameters have more tiles than that, 1 where only the optimizer's state has

Where arguments have no shardings (replicas of `pmap`, torch_xla), the groups tell: collectives of forward run over the
tp devices, those that reduce gradients over the dp copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phaze.frontends.stablehlo.argument_roles import ModuleRoles
from phaze.frontends.stablehlo.device_tiles import DeviceTiles, group_size, read_tiles
from phaze.frontends.stablehlo.module import Module
from phaze.ir import Graph, OpKind, Phase, Role

__all__ = ["argument_tiles", "find_strategy", "strategy_note"]


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
