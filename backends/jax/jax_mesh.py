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

__all__ = ["AXES", "mesh_for_plan"]

AXES = ("pp", "dp", "tp")


def mesh_for_plan(plan: Plan, mesh: object) -> Mesh:
    """The given mesh, checked and in the order of `AXES`, or (for None) one of the first devices that JAX sees.

    All axes are automatic. Raises PlanError for a mesh of other names or sizes, and where JAX sees too few devices.
    """
    # The order in which messages list the axes.
    sizes = {"dp": plan.strategy.dp, "pp": plan.strategy.pp, "tp": plan.strategy.tp}
    wanted = _listed(sizes)
    if mesh is None:
        count = plan.strategy.dp * plan.strategy.pp * plan.strategy.tp
        devices = jax.devices()
        if len(devices) < count:
            raise PlanError(
                f"the plan takes {count} devices ({wanted}); JAX sees {len(devices)} of kind {devices[0].platform}. "
                "Start as many processes or devices (on a host: XLA_FLAGS=--xla_force_host_platform_device_count), or "
                "plan for those there are."
            )
        return _mesh(devices[:count], sizes)
    if not isinstance(mesh, Mesh):
        raise PlanError(f"mesh is a {type(mesh).__name__}; expected a jax.sharding.Mesh with axes {wanted}.")
    given = dict(mesh.shape)
    if not set(given) <= set(AXES):
        raise PlanError(f"mesh has the axes {_listed(given)}; the plan's are {wanted}. Name them so.")
    if any(given.get(name, 1) != size for name, size in sizes.items()):
        raise PlanError(f"mesh has the sizes {_listed(given)}; the plan needs {wanted}. Pass such a mesh, or none.")
    order = [list(mesh.axis_names).index(name) for name in AXES if name in given]
    return _mesh(mesh.devices.transpose(order).reshape(-1), sizes)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _mesh(devices: Sequence[jax.Device], sizes: Mapping[str, int]) -> Mesh:
    """The mesh of devices that are listed in the order of `AXES`."""
    array = np.asarray(devices, dtype=object).reshape(tuple(sizes[name] for name in AXES))
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))
