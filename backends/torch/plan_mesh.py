"""The device meshes of a plan: which process has which stage, copy, shard, context, expert and tensor-parallel part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phaze.backends.torch.contexts import Contexts
from phaze.errors import PlanError

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["contexts_of_plan", "expert_mesh_of_plan", "mesh_of_plan"]

MESH_AXES = ("pp", "replicate", "shard", "tp")
"""Pipeline stages, whole copies, shards of a copy (ZeRO), and tensor-parallel devices."""

EXPERT_MESH_AXES = ("pp", "expert_replicate", "expert_shard", "ep", "tp")
"""Stages, copies of a device's experts, shards of a copy, devices with different experts, tensor-parallel devices."""


def mesh_of_plan(plan: Plan, given: object) -> DeviceMesh:
    """A mesh with axes pp, replicate, shard, tp over the ranks of the given one (axes pp, dp, cp, tp), or over all.

    Data and context parallelism are `replicate` where every copy of parameters is whole, and `shard` where copies are
    sharded (ZeRO); hybrid sharding has both. Raises PlanError where the mesh, or the launch, does not have the plan's
    sizes.
    """
    strategy = plan.strategy
    sizes = {"pp": strategy.pp, "dp": strategy.dp, "cp": strategy.cp, "tp": strategy.tp}
    wanted = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if not dist.is_initialized():
        raise PlanError("torch.distributed has no process group; call torch.distributed.init_process_group() first.")
    ranks = _ranks_of_launch(sizes, wanted) if given is None else _ranks_of_mesh(given, sizes, wanted)
    shards = strategy.shard_devices if strategy.zero else 1
    shape = (strategy.pp, strategy.replicas // shards, shards, strategy.tp)
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    return DeviceMesh(device, ranks.reshape(shape), mesh_dim_names=MESH_AXES)


def contexts_of_plan(plan: Plan, mesh: DeviceMesh) -> Contexts | None:
    """The devices with which this process splits sequences; None where they are whole."""
    strategy = plan.strategy
    if strategy.cp == 1:
        return None
    ranks = mesh.mesh.reshape(strategy.pp, strategy.dp, strategy.cp, strategy.tp)
    axes = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("pp", "dp", "cp", "tp"))
    return Contexts(axes["cp"].get_group(), strategy.cp, axes.get_local_rank("cp"))


def expert_mesh_of_plan(plan: Plan, mesh: DeviceMesh) -> DeviceMesh | None:
    """A mesh of the same ranks for experts: neighbours on axis ep hold different ones; None where ep is 1."""
    strategy = plan.strategy
    if strategy.ep == 1:
        return None
    copies = strategy.replicas // strategy.ep
    shards = max(1, strategy.shard_devices // strategy.ep) if strategy.zero else 1
    ranks = mesh.mesh.reshape(strategy.pp, copies // shards, shards, strategy.ep, strategy.tp)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=EXPERT_MESH_AXES)


def _ranks_of_launch(sizes: Mapping[str, int], wanted: str) -> torch.Tensor:
    count = math.prod(sizes.values())
    if dist.get_world_size() != count:
        raise PlanError(
            f"the plan takes {count} processes ({wanted}), and {dist.get_world_size()} were launched; launch {count}, "
            "or plan for as many devices."
        )
    return torch.arange(count)


def _ranks_of_mesh(mesh: object, sizes: Mapping[str, int], wanted: str) -> torch.Tensor:
    """The ranks of a mesh in the order pp, dp, cp, tp."""
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(f"mesh is a {type(mesh).__name__}; expected a torch DeviceMesh with axes {wanted}.")
    names = list(mesh.mesh_dim_names or ())
    listed = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=False)) or "no names"
    if not names or not set(names) <= set(sizes):
        raise PlanError(f"mesh has the axes {listed}; the plan's are {wanted}. Name them so.")
    given_sizes = dict(zip(names, mesh.shape, strict=True))
    if any(given_sizes.get(name, 1) != size for name, size in sizes.items()):
        raise PlanError(f"mesh has the sizes {listed}; the plan needs {wanted}. Pass such a mesh, or none.")
    order = [names.index(name) for name in sizes if name in names]
    return mesh.mesh.permute(order)
