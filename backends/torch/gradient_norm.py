"""The norm of all gradients of an arranged model, and clipping by it: each element counts once, wherever it lies.

Parameters are DTensors on meshes of their own: some are split over tensor-parallel devices and some are whole on them,
all are split over ZeRO's shards, and stages of a pipeline hold different ones. The local sums are therefore collected
by the mesh axes over which a parameter is split, and each collection is summed over just these axes. A parameter that
several stages hold has the same gradient on all of them and counts on the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

__all__ = ["clip_gradients"]

_SMALL = 1e-6
"""Added to the norm before it divides, as torch's own `clip_grad_norm_` does, so that no gradient divides by zero."""

_AXES = ("shard", "expert_shard", "ep", "tp")
_POSSIBLE_AXES = tuple(
    axes
    for axes in itertools.chain.from_iterable(itertools.combinations(_AXES, count) for count in range(len(_AXES)))
    if not {"shard", "expert_shard"} <= set(axes) and not {"shard", "ep"} <= set(axes)
)
"""Every set of mesh axes that a parameter may be split over; experts have axes of their own."""


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter],
    mesh: DeviceMesh,
    *,
    expert_mesh: DeviceMesh | None,
    counted_elsewhere: Collection[int],
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; the norm that they had before.

    `counted_elsewhere` are ids of parameters that an earlier stage counts.
    """
    is_largest = math.isinf(norm_type)
    gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    by_axes: dict[tuple[str, ...], torch.Tensor] = {}
    device = gradients[0][1].device if gradients else torch.device(mesh.device_type)
    for parameter, gradient in gradients:
        if id(parameter) in counted_elsewhere:
            continue
        local = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach().float()
        if not local.numel():
            size = torch.zeros((), device=device)
        elif is_largest:
            size = local.abs().max()
        else:
            size = torch.linalg.vector_norm(local, norm_type) ** norm_type
        axes = _split_axes(gradient)
        known = by_axes.get(axes)
        by_axes[axes] = size if known is None else _joined(known, size, is_largest)
    total, mesh_axes = torch.zeros((), device=device), mesh.mesh_dim_names or ()
    # Stages hold different parameters, so that their processes agree on an order of collectives by all possible axes.
    for axes in _POSSIBLE_AXES:
        size = by_axes.get(axes, torch.zeros((), device=device)).clone()
        for axis in axes:
            _reduce(size, mesh if axis in mesh_axes else expert_mesh, axis, is_largest)
        total = _joined(total, size, is_largest)
    _reduce(total, mesh, "pp", is_largest)
    norm = total if is_largest else total ** (1.0 / norm_type)
    scale = torch.clamp(max_norm / (norm + _SMALL), max=1.0)
    for _, gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm


def _split_axes(gradient: torch.Tensor) -> tuple[str, ...]:
    """The mesh axes over which a gradient is split, in the mesh's order."""
    if not isinstance(gradient, DTensor):
        return ()
    names = gradient.device_mesh.mesh_dim_names or ()
    split = {name for name, placement in zip(names, gradient.placements, strict=True) if placement != Replicate()}
    return tuple(name for name in _AXES if name in split)


def _joined(first: torch.Tensor, second: torch.Tensor, is_largest: bool) -> torch.Tensor:
    return torch.maximum(first, second) if is_largest else first + second


def _reduce(value: torch.Tensor, mesh: DeviceMesh | None, axis: str, is_largest: bool) -> None:
    if mesh is not None and mesh[axis].size() > 1:
        operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        dist.all_reduce(value, op=operation, group=mesh[axis].get_group())
