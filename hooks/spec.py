"""The hooks that a plugin may implement: each takes nothing and returns what the plugin adds.

Things that carry a `name` come as an iterable, others as a mapping from names. A manager calls a hook once, and only
when somebody asks for what it adds. A hook may import the core; it must not import a framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pluggy

from phaze.hardware import Accelerator, Network
from phaze.interfaces import Frontend, ModelFactory, OpPricer, StageBuilder, Target, World
from phaze.solvers import LinearSolver

__all__ = ["PROJECT_NAME", "hookimpl"]

PROJECT_NAME = "phaze"
"""The name of the pluggy project and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
"""Marks a function of this module as a hook."""
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""Marks a plugin's function as its answer to the hook of the same name."""


@hookspec
def phaze_frontends() -> Iterable[Frontend]:  # type: ignore[empty-body]
    """Add frontends: each turns one kind of model into a Graph. The first one that accepts a model imports it."""


@hookspec
def phaze_named_models() -> Mapping[str, ModelFactory]:  # type: ignore[empty-body]
    """Add models that are known by name, as `phaze import NAME` and `phaze.import_graph(NAME)` take them."""


@hookspec
def phaze_accelerators() -> Mapping[str, Accelerator]:  # type: ignore[empty-body]
    """Add accelerators by the name that clusters call them (`NAME:64`)."""


@hookspec
def phaze_networks() -> Iterable[Network]:  # type: ignore[empty-body]
    """Add networks by the name that clusters call them (`h100:64@NAME`) and `phaze search --network NAME` takes."""


@hookspec
def phaze_op_prices() -> Mapping[str, OpPricer]:  # type: ignore[empty-body]
    """Price ops, instead of the built-in price: by kind and function (`elementwise.gelu`), by function, or by kind."""


@hookspec
def phaze_solvers() -> Iterable[LinearSolver]:  # type: ignore[empty-body]
    """Add solvers for linear problems, which users choose by name as `solver=` or `--solver`."""


@hookspec
def phaze_targets() -> Iterable[Target]:  # type: ignore[empty-body]
    """Add targets that a plan can be written for; each states in its Capabilities what it runs."""


@hookspec
def phaze_stage_builders() -> Iterable[StageBuilder]:  # type: ignore[empty-body]
    """Add ways to cut a kind of model into pipeline stages."""


@hookspec
def phaze_worlds() -> Iterable[World]:  # type: ignore[empty-body]
    """Add ways to find out which processes and devices belong to the launch that this process is a part of."""
