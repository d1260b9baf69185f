"""The facts behind `phaze doctor`: libraries, solvers that were tried, frontends, targets, plugins and their problems.

Whether a solver works is found out by solving: a problem of one variable, and one of more than the 2,000 variables that
a size-limited licence allows. Whether a library is installed is found out without importing it.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import phaze
from phaze.errors import PluginWarning
from phaze.hooks import Offer, Origin, PluginManager, Registry
from phaze.installed import installed_plugins, installed_version, missing_libraries
from phaze.tolerances import SOLVER_OBJECTIVE

if TYPE_CHECKING:
    from phaze.solvers import LinearSolver

__all__ = ["Diagnosis", "Library", "Part", "PluginReport", "SolverReport", "SolverState", "diagnose"]

DISTRIBUTION = "phaze-plugin"
BEYOND_A_LIMITED_LICENCE = 2001


@dataclass(frozen=True, slots=True)
class Library:
    """A library that Phaze can use; `extra` is the extra that installs it, None for the core's own."""

    name: str
    version: str | None
    extra: str | None


class SolverState(StrEnum):
    """What a solver did when it was tried."""

    MISSING = "missing"
    SIZE_LIMITED = "size-limited"
    WORKS = "works"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class SolverReport:
    """A solver, how it fared, and in its own words why."""

    name: str
    state: SolverState
    detail: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Part:
    """A named thing that a plugin added, and the libraries that it needs but that are not installed."""

    name: str
    missing_libraries: tuple[str, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class PluginReport:
    """A plugin and the hooks that it implements."""

    origin: Origin
    hooks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that `phaze doctor` tells; `problems` are plugins that failed or clash."""

    phaze: str
    python: str
    platform: str
    libraries: tuple[Library, ...]
    solvers: tuple[SolverReport, ...]
    frontends: tuple[Part, ...]
    targets: tuple[Part, ...]
    stage_builders: tuple[Part, ...]
    accelerators: tuple[Part, ...]
    networks: tuple[Part, ...]
    op_prices: tuple[Part, ...]
    named_models: tuple[Part, ...]
    worlds: tuple[Part, ...]
    plugins: tuple[PluginReport, ...]
    problems: tuple[str, ...]


def diagnose() -> Diagnosis:
    """Look at this installation; failing plugins are among the problems and are not warned about as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        return _diagnose(installed_plugins())


def _diagnose(plugins: PluginManager) -> Diagnosis:
    solvers = plugins.solvers()
    registries: dict[str, Registry[object]] = {
        "frontends": plugins.frontends(),
        "targets": plugins.targets(),
        "stage_builders": plugins.stage_builders(),
        "accelerators": plugins.accelerators(),
        "networks": plugins.networks(),
        "op_prices": plugins.op_prices(),
        "named_models": plugins.named_models(),
        "worlds": plugins.worlds(),
    }
    clashes = [str(clash) for registry in (solvers, *registries.values()) for clash in registry.clashes]
    return Diagnosis(
        phaze=phaze.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        libraries=tuple(_libraries()),
        solvers=tuple(_try_solver(offer) for offer in solvers),
        **{kind: tuple(_part(offer) for offer in registry) for kind, registry in registries.items()},
        plugins=tuple(PluginReport(origin, plugins.hooks_of(origin)) for origin in plugins.origins),
        problems=(*(str(failure) for failure in plugins.failures), *clashes),
    )


def _libraries() -> Iterator[Library]:
    """Every library that the distribution names, without those of its developers."""
    if installed_version(DISTRIBUTION) is None:
        return
    for requirement in importlib.metadata.requires(DISTRIBUTION) or ():
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if name != DISTRIBUTION and (extra is None or extra[1] not in ("dev", "docs")):
            yield Library(name, installed_version(name), extra[1] if extra else None)


def _part(offer: Offer[object]) -> Part:
    return Part(offer.name, missing_libraries(getattr(offer.value, "libraries", ())), offer.origin)


def _try_solver(offer: Offer[LinearSolver]) -> SolverReport:
    try:
        state, detail = _state_of(offer.value)
    except Exception as error:
        state, detail = SolverState.FAILS, f"{type(error).__name__}: {error}"
    return SolverReport(offer.name, state, detail, offer.origin)


def _state_of(solver: LinearSolver) -> tuple[SolverState, str]:
    if not solver.is_importable():
        return SolverState.MISSING, "its library is not installed"
    trouble = _trouble_with(solver, 1)
    if trouble is not None:
        return SolverState.FAILS, trouble
    trouble = _trouble_with(solver, BEYOND_A_LIMITED_LICENCE)
    if trouble is not None:
        return SolverState.SIZE_LIMITED, trouble
    return SolverState.WORKS, f"solves {BEYOND_A_LIMITED_LICENCE:,} variables"


def _trouble_with(solver: LinearSolver, variable_count: int) -> str | None:
    """What keeps a solver from a problem of so many binary variables, each best at 1; None if nothing does."""
    from phaze.solvers import ProblemBuilder, SolveStatus, WorkLimits

    builder = ProblemBuilder("doctor")
    builder.rows(builder.binaries(variable_count, cost=-1.0), upper=float(variable_count))
    problem = builder.build()
    refusal = solver.refusal(problem)
    if refusal is not None:
        return refusal
    result = solver.solve(problem, WorkLimits())
    if result.status is not SolveStatus.OPTIMAL or abs(result.objective + variable_count) > SOLVER_OBJECTIVE:
        return result.report.message or f"it answered {result.status} {result.objective}, expected {-variable_count}"
    return None
