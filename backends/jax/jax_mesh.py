"""The JAX mesh of a plan: made of the devices that JAX sees, or checked where one is given.

Every mesh has the axes pp (stages), dp (data-parallel copies) and tp (tensor parallelism). Three more are there where a
plan uses them: shard, the copies among which ZeRO divides its states where these are not all (then dp counts the groups
of such copies); ep, those of the copies (or of such a group) that experts are divided over, which dp (or shard) then
counts the groups of; and cp, the devices that a sequence is split over. The order is pp, dp, shard, ep, cp, tp, last
fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from phaze.errors import PlanError
from phaze.plan.plan import Plan

__all__ = ["MeshAxes", "axis_names", "mesh_axes", "mesh_for_plan", "with_explicit_axes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxes:
    """The axes of a plan's mesh, and what they divide.

    Attributes:
        sizes: how many devices each axis has, in the order of the mesh.
        batch: the axes that divide the samples of a batch.
        shards: the axes over which ZeRO divides its states; none where it divides nothing.
        context: the axis that divides sequences; none where they are whole.
        experts: the axis that divides experts; none where every device has all.
    """

    sizes: Mapping[str, int]
    batch: tuple[str, ...]
    shards: tuple[str, ...]
    context: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    @property
    def copies(self) -> tuple[str, ...]:
        """The axes over which parameters have copies (experts but over `experts`): gradients are summed over them."""
        return (*self.batch, *self.context)

    @property
    def copy_count(self) -> int:
        """How many copies of the parameters of one stage there are."""
        return self.size(self.copies)

    @property
    def shard_count(self) -> int:
        """How many parts ZeRO divides a state into; 1 where it divides nothing."""
        return self.size(self.shards)

    @property
    def in_traces(self) -> dict[str, int]:
        """The axes with collectives in rewritten traces, and their sizes."""
        return {axis: self.sizes[axis] for axis in (*self.context, *self.experts)}

    @property
    def manual(self) -> frozenset[str]:
        """The axes whose collectives are written by hand; the tensor axis is left to the compiler."""
        return frozenset(self.sizes) - {"tp"}

    def size(self, axes: Sequence[str]) -> int:
        """How many devices some axes have together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def batch_spec(self, *, has_sequence: bool = False) -> PartitionSpec:
        """The layout of an array (samples, ...), or of one (samples, sequence, ...)."""
        rows = self.batch if len(self.batch) > 1 else self.batch[0]
        return PartitionSpec(rows, *self.context) if has_sequence else PartitionSpec(rows)


def mesh_axes(plan: Plan) -> MeshAxes:
    """The axes of a plan's mesh. Raises PlanError for groups of ZeRO that no axis divides off."""
    strategy = plan.strategy
    cp, ep, in_group = strategy.cp, strategy.ep, strategy.shard_devices
    divides = strategy.zero > 0 and in_group > 1
    has_groups = divides and in_group < strategy.replicas
    context, experts = ("cp",) if cp > 1 else (), ("ep",) if ep > 1 else ()
    if has_groups and in_group % (cp * ep):
        raise PlanError(
            f"the plan shards over groups of {in_group} devices, which the {cp} devices of a sequence and the {ep} of "
            "experts do not divide; plan with a shard that is a multiple of cp x ep."
        )
    sizes = {"pp": strategy.pp, "dp": strategy.dp // ep, "ep": ep, "cp": cp, "tp": strategy.tp}
    if has_groups:
        sizes |= {"shard": in_group // (cp * ep), "dp": strategy.replicas // in_group}
    groups = ("shard",) if has_groups else ()
    order = ["pp", "dp", *groups, *experts, *context, "tp"]
    sharing = (*(groups or ("dp",)), *experts, *context)
    return MeshAxes(
        sizes={axis: sizes[axis] for axis in order},
        batch=("dp", *groups, *experts),
        shards=tuple(axis for axis in sharing if sizes[axis] > 1) if divides else (),
        context=context,
        experts=experts,
    )


_OTHER_NAMES = {
    "dp": ("data", "batch", "replica", "fsdp"),
    "shard": ("fsdp", "zero"),
    "ep": ("expert", "experts"),
    "cp": ("context", "sequence", "seq"),
    "tp": ("model", "tensor", "mp"),
    "pp": ("stage", "pipe", "pipeline"),
}
"""What users call the axes, where they do not call them as plans do."""


def mesh_for_plan(plan: Plan, mesh: object) -> Mesh:
    """The given mesh, checked and with the plan's axes, or (for None) one of the first devices that JAX sees.

    All axes are automatic. Raises PlanError for a mesh of other sizes, and where JAX sees too few devices.
    """
    sizes = mesh_axes(plan).sizes
    if mesh is None:
        count = math.prod(sizes.values())
        devices = jax.devices()
        if len(devices) < count:
            raise PlanError(
                f"the plan takes {count} devices ({_listed(sizes)}); JAX sees {len(devices)} of kind "
                f"{devices[0].platform}. Start as many processes or devices (on a host: "
                f"jax.config.update('jax_num_cpu_devices', {count}) at first), or plan for those there are."
            )
        return _mesh(devices[:count], sizes)
    names = axis_names(plan, mesh)
    assert isinstance(mesh, Mesh)
    order = [mesh.axis_names.index(names[axis]) for axis in sizes if axis in names]
    unused = [dim for dim in range(len(mesh.axis_names)) if dim not in order]
    return _mesh(mesh.devices.transpose([*order, *unused]).reshape(-1), sizes)


def with_explicit_axes(mesh: Mesh) -> Mesh:
    """The same mesh with axes that are part of the types of arrays."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))


def axis_names(plan: Plan, mesh: object) -> dict[str, str]:
    """For each of the plan's axes that a mesh has, the mesh's name of it: known by name, else by its size alone."""
    sizes = mesh_axes(plan).sizes
    wanted = _listed(sizes)
    if not isinstance(mesh, Mesh):
        raise PlanError(f"mesh is a {type(mesh).__name__}; expected a jax.sharding.Mesh with axes {wanted}.")
    given = dict(mesh.shape)
    names: dict[str, str] = {}
    for axis in sizes:
        known = [name for name in (axis, *_OTHER_NAMES[axis]) if name in given and name not in names.values()]
        names |= {axis: known[0]} if known else {}
    for name, size in given.items():
        if size > 1 and name not in names.values():
            fitting = [axis for axis in sizes if axis not in names and sizes[axis] == size]
            if len(fitting) != 1:
                raise PlanError(
                    f"mesh has the axes {_listed(given)}; the plan's are {wanted}, and which of them {name!r} is "
                    "cannot be told. Name its axes so."
                )
            names[fitting[0]] = name
    if any((given[names[axis]] if axis in names else 1) != size for axis, size in sizes.items()):
        raise PlanError(f"mesh has the sizes {_listed(given)}; the plan needs {wanted}. Pass such a mesh, or none.")
    return names


def _listed(sizes: Mapping[str, int]) -> str:
    """The axes in words, copies first."""
    order = [*(axis for axis in ("dp", "shard", "ep", "cp") if axis in sizes), *sizes]
    return ", ".join(f"{name}={sizes[name]}" for name in dict.fromkeys(order))


def _mesh(devices: Sequence[jax.Device], sizes: Mapping[str, int]) -> Mesh:
    """The mesh of devices that are listed in the order of the axes."""
    array = np.asarray(devices, dtype=object).reshape(tuple(sizes.values()))
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
