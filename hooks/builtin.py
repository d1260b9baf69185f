"""What the core itself brings, through the door that every plugin uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaze.hooks.spec import hookimpl

if TYPE_CHECKING:
    from phaze.hardware import Accelerator
    from phaze.solvers import LinearSolver

__all__ = ["phaze_accelerators", "phaze_solvers"]


@hookimpl
def phaze_accelerators() -> dict[str, Accelerator]:
    """The presets of real chips."""
    from phaze.hardware import presets

    return {preset.accelerator.name: preset.accelerator for preset in presets()}


@hookimpl
def phaze_solvers() -> tuple[LinearSolver, ...]:
    """HiGHS, SCIP, CP-SAT and Gurobi."""
    from phaze.solvers import BUILT_IN_SOLVERS

    return BUILT_IN_SOLVERS
