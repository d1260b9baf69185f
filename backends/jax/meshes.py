"""The mesh of a plan, axes pp, dp, tp: stages in order, in each its copies, in each tensor-parallel devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from phaze.errors import PlanError
from phaze.plan.plan import Plan

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["AXES", "mesh_of"]

AXES = ("pp", "dp", "tp")


def mesh_of(plan: Plan, mesh: Any) -> Mesh:
    """The given mesh, checked, or one of the first devices that JAX sees; all axes are automatic.

    Raises PlanError for a mesh of other names or sizes, and where JAX sees too few devices.
    """
    import jax
    from jax.sharding import Mesh

    sizes = {"dp": plan.strategy.dp, "pp": plan.strategy.pp, "tp": plan.strategy.tp}
    wanted = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if mesh is None:
        count = plan.strategy.dp * plan.strategy.pp * plan.strategy.tp
        devices = jax.devices()
        if len(devices) < count:
            raise PlanError(
                f"the plan takes {count} devices ({wanted}); JAX sees {len(devices)} of kind {devices[0].platform}. "
                "Start as many processes or devices (on a host: XLA_FLAGS=--xla_force_host_platform_device_count), or "
                "plan for those there are."
            )
        return _placed(devices[:count], sizes)
    if not isinstance(mesh, Mesh):
        raise PlanError(f"mesh is a {type(mesh).__name__}; expected a jax.sharding.Mesh with axes {wanted}.")
    given = dict(mesh.shape)
    listed = ", ".join(f"{name}={size}" for name, size in given.items())
    if not set(given) <= set(AXES):
        raise PlanError(f"mesh has the axes {listed}; the plan's are {wanted}. Name them so.")
    if any(given.get(name, 1) != size for name, size in sizes.items()):
        raise PlanError(f"mesh has the sizes {listed}; the plan needs {wanted}. Pass such a mesh, or none.")
    order = [list(mesh.axis_names).index(name) for name in AXES if name in given]
    return _placed(mesh.devices.transpose(order).reshape(-1), sizes)


def _placed(devices: Any, sizes: dict[str, int]) -> Mesh:
    """Devices in the order of the mesh (pp, dp, tp)."""
    from jax.sharding import AxisType, Mesh

    array = np.asarray(devices, dtype=object).reshape(tuple(sizes[name] for name in AXES))
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))
