"""The plugin of the core itself: its chips, networks and solvers come in through the door that every plugin uses."""

from __future__ import annotations

from phaze.hardware import Accelerator, Network, networks, presets
from phaze.hooks.spec import hookimpl
from phaze.solvers import BUILT_IN_SOLVERS, LinearSolver

__all__ = ["phaze_accelerators", "phaze_networks", "phaze_solvers"]


@hookimpl
def phaze_accelerators() -> dict[str, Accelerator]:
    """The presets of real chips."""
    return {preset.accelerator.name: preset.accelerator for preset in presets()}


@hookimpl
def phaze_networks() -> tuple[Network, ...]:
    """The networks that are shipped by name."""
    return networks()


@hookimpl
def phaze_solvers() -> tuple[LinearSolver, ...]:
    """HiGHS, SCIP, CP-SAT and Gurobi."""
    return BUILT_IN_SOLVERS
