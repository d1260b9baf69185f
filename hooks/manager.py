"""The one manager: finds plugins, asks them, and keeps one that fails from taking the others down.

Plugins are found through the entry-point group `phaze`; the built-in frontends, backends, solvers and accelerators come
in through the same door. Other plugins are asked before the built-in ones, in the order of their names; pluggy's
`tryfirst` and `trylast` are respected. A plugin that raises or answers with the wrong type is recorded in `failures`
with its name and warned about (`PluginWarning`).
"""

from __future__ import annotations

import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pluggy

from phaze.errors import PhazeError, PluginError, PluginWarning, UnknownNameError
from phaze.hooks import spec
from phaze.hooks.registry import Offer, Origin, PluginFailure, Registry

if TYPE_CHECKING:
    from phaze.hardware import Accelerator
    from phaze.interfaces import Frontend, ModelFactory, OpPricer, StageBuilder, Target, World
    from phaze.solvers import LinearSolver

__all__ = ["BUILT_IN_DISTRIBUTION", "PluginManager"]

BUILT_IN_DISTRIBUTION = "phaze-plugin"


class PluginManager:
    """The plugins of one process. `PluginManager.load()` finds the installed ones; a bare one starts empty."""

    def __init__(self) -> None:
        self._pluggy = pluggy.PluginManager(spec.PROJECT_NAME)
        self._pluggy.add_hookspecs(spec)
        self._origins: dict[str, Origin] = {}
        self._failures: dict[tuple[Origin, str], PluginFailure] = {}
        self._registries: dict[str, Registry[Any]] = {}

    @classmethod
    def load(cls) -> PluginManager:
        """A manager with every installed plugin; one that cannot be loaded is recorded in `failures`."""
        manager = cls()
        found = importlib.metadata.entry_points(group=spec.PROJECT_NAME)
        for entry_point in sorted(found, key=_order_of_registration, reverse=True):
            origin = _origin_of(entry_point)
            try:
                plugin = entry_point.load()
            except (Exception, SystemExit) as error:
                manager.report_failure(origin, "loading", error)
                continue
            manager.register(plugin, origin)
        return manager

    def register(self, plugin: object, origin: Origin) -> None:
        """Add a plugin; the last one added is asked first. One that pluggy refuses is recorded in `failures`."""
        name = f"{origin.distribution or ''}:{origin.plugin}"
        origin = _with_file(origin, plugin)
        try:
            self._check_hook_names(plugin)
            self._register(plugin, name)
        except PhazeError as error:
            self.report_failure(origin, "registering", error)
            return
        self._origins[name] = origin
        self._registries.clear()

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each registered plugin came from, in the order in which they are asked."""
        return tuple(reversed(self._origins.values()))

    @property
    def failures(self) -> tuple[PluginFailure, ...]:
        """What went wrong so far."""
        return tuple(self._failures.values())

    def hooks_of(self, origin: Origin) -> tuple[str, ...]:
        """The hooks that a registered plugin implements."""
        plugin = self._pluggy.get_plugin(f"{origin.distribution or ''}:{origin.plugin}")
        callers = self._pluggy.get_hookcallers(plugin) if plugin is not None else None
        return tuple(sorted(caller.name for caller in callers or ()))

    def frontends(self) -> Registry[Frontend]:
        """All frontends."""
        from phaze.interfaces import Frontend

        return self._collect("phaze_frontends", "frontend", _instance_of(Frontend))

    def named_models(self) -> Registry[ModelFactory]:
        """All models known by name."""
        return self._collect("phaze_named_models", "model", callable)

    def accelerators(self) -> Registry[Accelerator]:
        """All accelerators, each called by the name that it is offered under."""
        from phaze.hardware import Accelerator

        offered = self._collect("phaze_accelerators", "accelerator", _instance_of(Accelerator))
        renamed = (Offer(offer.name, replace(offer.value, name=offer.name), offer.origin) for offer in offered)
        return Registry(offered.what, tuple(renamed))

    def op_prices(self) -> Registry[OpPricer]:
        """All prices of op kinds that plugins brought."""
        return self._collect("phaze_op_prices", "op price", callable)

    def solvers(self) -> Registry[LinearSolver]:
        """All solvers."""
        from phaze.solvers import LinearSolver

        return self._collect("phaze_solvers", "solver", _instance_of(LinearSolver))

    def targets(self) -> Registry[Target]:
        """All targets that a plan can be written for."""
        from phaze.interfaces import Target

        return self._collect("phaze_targets", "target", _instance_of(Target))

    def stage_builders(self) -> Registry[StageBuilder]:
        """All ways to cut models into stages."""
        from phaze.interfaces import StageBuilder

        return self._collect("phaze_stage_builders", "stage builder", _instance_of(StageBuilder))

    def worlds(self) -> Registry[World]:
        """All ways to see other processes and devices."""
        from phaze.interfaces import World

        return self._collect("phaze_worlds", "world", _instance_of(World))

    def report_failure(self, origin: Origin, doing: str, error: BaseException) -> None:
        """Record that a plugin failed, and warn once."""
        if (origin, doing) in self._failures:
            return
        failure = PluginFailure(origin, doing, f"{type(error).__name__}: {error}")
        self._failures[origin, doing] = failure
        warnings.warn(str(failure), PluginWarning, stacklevel=2)

    def _collect(self, hook: str, what: str, is_valid: Callable[[object], bool]) -> Registry[Any]:
        if hook not in self._registries:
            offers: list[Offer[Any]] = []
            for implementation in reversed(getattr(self._pluggy.hook, hook).get_hookimpls()):
                origin = self._origins.get(implementation.plugin_name)
                if origin is None:  # refused at registration; pluggy may have kept some of its hooks
                    continue
                try:
                    offers += _offers(implementation.function(), origin, what, is_valid)
                except Exception as error:
                    self.report_failure(origin, hook, error)
            self._registries[hook] = Registry(what, tuple(offers))
        return self._registries[hook]

    def _register(self, plugin: object, name: str) -> None:
        try:
            self._pluggy.register(plugin, name=name)
        except pluggy.PluginValidationError as error:
            if self._pluggy.is_registered(plugin):
                self._pluggy.unregister(plugin)
            raise PluginError(str(error)) from error
        except ValueError as error:
            raise PluginError(f"it is already registered, or another one is under the name {name!r}") from error

    def _check_hook_names(self, plugin: object) -> None:
        """A misspelt hook would never be called: refuse the plugin instead."""
        known = [name for name in vars(spec) if name.startswith("phaze_")]
        for name in dir(plugin):
            options = self._pluggy.parse_hookimpl_opts(plugin, name)
            hook = (options.get("specname") or name) if options is not None else known[0]
            if hook not in known:
                raise UnknownNameError("hook", hook, known)


def _offers(answer: object, origin: Origin, what: str, is_valid: Callable[[object], bool]) -> list[Offer[Any]]:
    """A hook's answer as offers; raises PluginError if it holds anything but named things of the right type."""
    if isinstance(answer, Mapping):
        named = list(answer.items())
    elif isinstance(answer, Iterable) and not isinstance(answer, str | bytes):
        named = [(getattr(value, "name", None), value) for value in answer]
    else:
        raise PluginError(f"it answered {answer!r}; expected a mapping from names, or an iterable of named things")
    for name, value in named:
        if not isinstance(name, str) or not name:
            raise PluginError(f"its {what} has the name {name!r}; expected a non-empty text")
        if not is_valid(value):
            raise PluginError(f"its {what} {name!r} is of type {type(value).__name__}, not what {what}s must be")
    return [Offer(name, value, origin) for name, value in named]


def _instance_of(expected: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, expected)


def _order_of_registration(entry_point: importlib.metadata.EntryPoint) -> tuple[bool, str, str]:
    """Sorted in reverse: the built-in plugins are registered first, and so asked last."""
    distribution = entry_point.dist.name if entry_point.dist else ""
    return distribution == BUILT_IN_DISTRIBUTION, distribution, entry_point.name


def _origin_of(entry_point: importlib.metadata.EntryPoint) -> Origin:
    distribution = entry_point.dist
    if distribution is None:
        return Origin(plugin=entry_point.name)
    return Origin(plugin=entry_point.name, distribution=distribution.name, version=distribution.version)


def _with_file(origin: Origin, plugin: object) -> Origin:
    module = plugin if inspect.ismodule(plugin) else inspect.getmodule(type(plugin))
    return Origin(
        plugin=origin.plugin,
        distribution=origin.distribution,
        version=origin.version,
        file=origin.file or getattr(module, "__file__", None),
    )
