"""The mesh of a plan: stages, copies, shards of copies and tensor-parallel devices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phaze.errors import PlanError
from phaze.plan.plan import Plan

__all__ = ["mesh_of"]

AXES = ("pp", "replicate", "shard", "tp")


def mesh_of(plan: Plan, given: Any) -> DeviceMesh:
    """A mesh with axes pp, replicate, shard, tp over the ranks of the given one (axes pp, dp, tp), or over all.

    Data parallelism is `replicate` where every copy is whole, and `shard` where copies are sharded (ZeRO). Raises
    PlanError where the mesh, or the launch, does not have the plan's sizes.
    """
    chosen = plan.strategy
    sizes = {"pp": chosen.pp, "dp": chosen.dp, "tp": chosen.tp}
    wanted = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if not dist.is_initialized():
        raise PlanError("torch.distributed has no process group; call torch.distributed.init_process_group() first.")
    ranks = _all_ranks(sizes, wanted) if given is None else _ranks(given, sizes, wanted)
    copies = (1, chosen.dp) if chosen.zero else (chosen.dp, 1)
    shape = (chosen.pp, *copies, chosen.tp)
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    return DeviceMesh(device, ranks.reshape(shape), mesh_dim_names=AXES)


def _all_ranks(sizes: dict[str, int], wanted: str) -> torch.Tensor:
    count = sizes["pp"] * sizes["dp"] * sizes["tp"]
    if dist.get_world_size() != count:
        raise PlanError(
            f"the plan takes {count} processes ({wanted}), and {dist.get_world_size()} were launched; launch {count}, "
            "or plan for as many devices."
        )
    return torch.arange(count)


def _ranks(mesh: Any, sizes: dict[str, int], wanted: str) -> torch.Tensor:
    """The ranks of a mesh in the order pp, dp, tp."""
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(f"mesh is a {type(mesh).__name__}; expected a torch DeviceMesh with axes {wanted}.")
    names = list(mesh.mesh_dim_names or ())
    listed = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=False)) or "no names"
    if not names or not set(names) <= set(sizes):
        raise PlanError(f"mesh has the axes {listed}; the plan's are {wanted}. Name them so.")
    given = dict(zip(names, mesh.shape, strict=True))
    if any(given.get(name, 1) != size for name, size in sizes.items()):
        raise PlanError(f"mesh has the sizes {listed}; the plan needs {wanted}. Pass such a mesh, or none.")
    order = [names.index(name) for name in sizes if name in names]
    return mesh.mesh.permute(order)
