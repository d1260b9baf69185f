"""The JAX mesh of a plan, with axes pp, dp, tp: made of the devices that JAX sees, or checked where one is given.

Stages come in order, in each stage its data-parallel copies, and in each copy its tensor-parallel devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from phaze.errors import PlanError
from phaze.plan.plan import Plan

__all__ = ["AXES", "axis_names", "mesh_for_plan"]

AXES = ("pp", "dp", "tp")


_OTHER_NAMES = {
    "dp": ("data", "batch", "replica", "fsdp"),
    "tp": ("model", "tensor", "mp"),
    "pp": ("stage", "pipe", "pipeline"),
}
"""What users call the axes, where they do not call them as plans do."""


def mesh_for_plan(plan: Plan, mesh: object) -> Mesh:
    """The given mesh, checked and with the axes `AXES`, or (for None) one of the first devices that JAX sees.

    All axes are automatic. Raises PlanError for a mesh of other sizes, and where JAX sees too few devices.
    """
    # The order in which messages list the axes.
    sizes = {"dp": plan.strategy.dp, "pp": plan.strategy.pp, "tp": plan.strategy.tp}
    if mesh is None:
        count = plan.strategy.dp * plan.strategy.pp * plan.strategy.tp
        devices = jax.devices()
        if len(devices) < count:
            raise PlanError(
                f"the plan takes {count} devices ({_listed(sizes)}); JAX sees {len(devices)} of kind "
                f"{devices[0].platform}. Start as many processes or devices (on a host: "
                "XLA_FLAGS=--xla_force_host_platform_device_count), or plan for those there are."
            )
        return _mesh(devices[:count], sizes)
    names = axis_names(plan, mesh)
    assert isinstance(mesh, Mesh)
    order = [mesh.axis_names.index(names[axis]) for axis in AXES if axis in names]
    unused = [dim for dim in range(len(mesh.axis_names)) if dim not in order]
    return _mesh(mesh.devices.transpose([*order, *unused]).reshape(-1), sizes)


def axis_names(plan: Plan, mesh: object) -> dict[str, str]:
    """For each of the plan's axes that a mesh has, the mesh's name of it: known by name, else by its size alone."""
    sizes = {"dp": plan.strategy.dp, "pp": plan.strategy.pp, "tp": plan.strategy.tp}
    wanted = _listed(sizes)
    if not isinstance(mesh, Mesh):
        raise PlanError(f"mesh is a {type(mesh).__name__}; expected a jax.sharding.Mesh with axes {wanted}.")
    given = dict(mesh.shape)
    names: dict[str, str] = {}
    for axis in AXES:
        known = [name for name in (axis, *_OTHER_NAMES[axis]) if name in given]
        names |= {axis: known[0]} if known else {}
    for name, size in given.items():
        if size > 1 and name not in names.values():
            fitting = [axis for axis in AXES if axis not in names and sizes[axis] == size]
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
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _mesh(devices: Sequence[jax.Device], sizes: Mapping[str, int]) -> Mesh:
    """The mesh of devices that are listed in the order of `AXES`."""
    array = np.asarray(devices, dtype=object).reshape(tuple(sizes[name] for name in AXES))
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))
