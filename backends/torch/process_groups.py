"""The processes of a plan: the meshes that they form, those that share a sequence, and errors of one told to all.

Meshes (`mesh_of_plan`, `expert_mesh_of_plan`) say which process has which stage, copy, shard, context, expert and
tensor-parallel part.

Contexts are the devices that every sequence is split over (`Contexts`, `contexts_of_plan`). The integer tensors
[batch, positions] of a batch (ids, labels, masks, positions) become split tensors before the model sees them. The
model's own code then runs on parts, by the rules of split tensors: what it makes of whole positions (rotary tables,
position embeddings, masks) is cut where it meets a part, shifted labels are gathered first, and losses are summed over
the devices.

Errors. An error on one process leaves the others in a collective that never ends well: they see a closed connection.
Before its error leaves the step, a process writes it into the store of the process group, which all of them reach. One
whose collective fails looks there (`told_to_all`). What may fail on one of them alone, such as a user's function of its
own parameters, is called by all of them together (`made_by_all`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._pytree import tree_map

from phaze.backends.torch.split_collectives import Axis, local_part
from phaze.backends.torch.split_tensor import ContextTensor
from phaze.errors import PlanError, explained_by

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["Contexts", "contexts_of_plan", "expert_mesh_of_plan", "made_by_all", "mesh_of_plan", "told_to_all"]


@dataclass(frozen=True, slots=True)
class Contexts:
    """The devices of one context, and which of them this process has."""

    group: dist.ProcessGroup
    size: int
    index: int

    def axis(self, length: int) -> Axis:
        """The axis that splits sequences of this length: balanced wherever twice as many parts divide it."""
        is_balanced = length % (2 * self.size) == 0
        return Axis(self.group, self.size, self.index, is_context=True, is_balanced=is_balanced)

    def divides(self, shape: Sequence[int]) -> bool:
        """Whether a tensor between layers of this shape is split along its dimension 1."""
        return len(shape) >= 3 and shape[1] % self.size == 0

    def split_batch(self, batch: Any) -> Any:
        """A batch whose sequences are split; raises PlanError for sequences that the devices do not divide."""
        return tree_map(self._split, batch)

    def _split(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() != 2 or leaf.is_floating_point():
            return leaf
        length = leaf.shape[1]
        if length % self.size:
            raise PlanError(
                f"the batch has sequences of {length} positions, which cp {self.size} does not divide; pad them to a "
                f"multiple of {self.size} (of {2 * self.size} to balance causal attention), or plan with cp=1."
            )
        axis = self.axis(length)
        return ContextTensor(local_part(leaf, axis, 1, 1).contiguous(), axis, leaf.shape, 1)


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


_KEY = "phaze/failed-rank"
_LONGEST_MESSAGE = 2000
"""Characters of an error that are told to other processes: a message and its advice, not a dump of tensors."""

_PATIENCE = timedelta(seconds=5)
"""How long a process looks for the error of another: it is written before the connection closes."""

_LOST_CONNECTION = ("closed by peer", "reset by peer", "timed out", "connection", "broken pipe", "not connected")
"""Words of torch's messages where another process of the group is gone."""


@contextmanager
def told_to_all() -> Iterator[None]:
    """Tell an error to the other processes; where this one only lost them, raise PlanError with what they told."""
    try:
        with explained_by("torch"):
            yield
    except Exception as error:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        if not _is_lost_connection(error):
            _tell(error)
            raise
        message = _told()
        if message is None:
            raise
        lost = PlanError(f"another process of this launch failed: {message}")
        lost.lead_to("torch")
        raise lost from error


Made = TypeVar("Made")


def made_by_all(make: Callable[[], Made], mesh: DeviceMesh) -> Made:
    """What a function makes on this process; where it fails on another one, PlanError with what that one said."""
    made: list[Made] = []
    error: Exception | None = None
    try:
        made.append(make())
    except Exception as own_error:
        error = own_error
        _tell(own_error)
    failed = torch.tensor(float(error is not None), device=mesh.device_type)
    for name in mesh.mesh_dim_names or ():  # after the last axis, all have the largest of all processes
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=mesh[name].get_group())
    if error is not None:
        raise error
    if failed:
        raise PlanError(f"another process of this launch failed: {_told() or 'it did not say how'}")
    return made[0]


def _is_lost_connection(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _LOST_CONNECTION)


def _tell(error: Exception) -> None:
    """Write down the first error; a store that is gone, too, leaves the others as they were."""
    text = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
    with suppress(RuntimeError):
        _get_default_store().compare_set(_KEY, "", text)


def _told() -> str | None:
    """What another process wrote down, or None."""
    with suppress(RuntimeError):
        store = _get_default_store()
        store.wait([_KEY], _PATIENCE)
        return str(store.get(_KEY).decode())
    return None
