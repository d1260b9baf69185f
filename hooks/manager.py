"""The plugin manager, which finds installed plugins and asks them what they add, and the registries of what they added.

Plugins are found through the entry-point group `phaze`. The built-in frontends, targets, solvers, accelerators and
networks come in through the same door. Other plugins are asked before the built-in ones, in the order of their names;
pluggy's `tryfirst` and `trylast` are respected. A plugin that raises, or that answers with the wrong type, is passed
over and does not stop the others: it is recorded in `failures` with its name, and a `PluginWarning` says so.

What plugins added stands in a `Registry`, by name, with where it came from (`Offer`, `Origin`). A plugin that was
passed over is a `PluginFailure`.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeGuard, TypeVar, cast

import pluggy

from phaze.errors import PhazeError, PluginError, PluginWarning, UnknownNameError
from phaze.hardware import Accelerator, Network
from phaze.hooks import spec
from phaze.interfaces import Frontend, ModelFactory, OpPricer, StageBuilder, Target, World
from phaze.name_spelling import spelled_alike
from phaze.solvers import LinearSolver

__all__ = ["BUILT_IN_DISTRIBUTION", "Offer", "Origin", "PluginFailure", "PluginManager", "Registry"]

Offered = TypeVar("Offered", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a plugin came from: its entry point, its distribution and version, and the file it was loaded from."""

    plugin: str
    distribution: str | None = None
    version: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        if self.distribution is None:
            return f"plugin {self.plugin!r}"
        return f"plugin {self.plugin!r} of {self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin raised, or answered with the wrong type, and was passed over.

    Attributes:
        origin: where the plugin came from.
        activity: what it was doing: `loading`, `registering`, or the hook or frontend that was asked.
        reason: the error's type and message.
    """

    origin: Origin
    activity: str
    reason: str

    def __str__(self) -> str:
        return f"{self.origin} failed in {self.activity} and was passed over: {self.reason}"


@dataclass(frozen=True, slots=True)
class Offer(Generic[Offered]):
    """One thing that a plugin added, under the name that users call it by."""

    name: str
    value: Offered
    origin: Origin


@dataclass(frozen=True, slots=True)
class Registry(Generic[Offered]):
    """All offers of one kind (`kind` is the word for it in messages), in the order in which they are asked.

    Where two plugins offer the same name, asking for that name raises until one of them is removed; other names work.
    """

    kind: str
    offers: tuple[Offer[Offered], ...]

    def __iter__(self) -> Iterator[Offer[Offered]]:
        return iter(self.offers)

    @property
    def names(self) -> tuple[str, ...]:
        """Every offered name, sorted."""
        return tuple(sorted({offer.name for offer in self.offers}))

    @property
    def clashes(self) -> tuple[PluginError, ...]:
        """One error for every name that is offered more than once; its message names the plugins."""
        groups = [[offer for offer in self.offers if offer.name == name] for name in self.names]
        return tuple(self._clash(offers) for offers in groups if len(offers) > 1)

    def offer(self, name: str) -> Offer[Offered]:
        """The one offer of this name, or of the only one that is spelled alike (`phaze.name_spelling`).

        Raises UnknownNameError, or PluginError where several plugins offer it.
        """
        meant = spelled_alike(name, self.names) or name
        offers = [offer for offer in self.offers if offer.name == meant]
        if not offers:
            raise UnknownNameError(self.kind, name, self.names)
        if len(offers) > 1:
            raise self._clash(offers)
        return offers[0]

    def get(self, name: str) -> Offered:
        """What was offered under this name; raises as `offer` does."""
        return self.offer(name).value

    def to_mapping(self) -> dict[str, Offered]:
        """Every offered value by its name; raises PluginError where several plugins offer one name."""
        return {name: self.get(name) for name in self.names}

    def _clash(self, offers: Sequence[Offer[object]]) -> PluginError:
        origins = " and ".join(str(offer.origin) for offer in offers)
        return PluginError(
            f"the {self.kind} name {offers[0].name!r} is claimed by {origins}; rename it or uninstall one of them."
        )


BUILT_IN_DISTRIBUTION = "phaze-plugin"
"""The distribution that this package is installed as; plugins of other distributions are asked before its own."""

_MARK = f"{spec.PROJECT_NAME}_impl"
"""The attribute by which `pluggy.HookimplMarker` marks a function."""

Value = TypeVar("Value")


class _MarkedFunctions(pluggy.PluginManager):
    """pluggy, which looks at every name of a plugin; in a module only those of marked functions are worth it."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        if inspect.ismodule(plugin) and not hasattr(vars(plugin).get(name), _MARK):
            return None
        return super().parse_hookimpl_opts(plugin, name)


class PluginManager:
    """The plugins of one process. `PluginManager.load()` finds the installed ones; a bare one starts empty."""

    def __init__(self) -> None:
        self._pluggy = _MarkedFunctions(spec.PROJECT_NAME)
        self._pluggy.add_hookspecs(spec)
        self._origins: dict[str, Origin] = {}
        self._failures: dict[tuple[Origin, str], PluginFailure] = {}
        self._registries: dict[str, Registry[object]] = {}

    @classmethod
    def load(cls) -> PluginManager:
        """A manager with every installed plugin; one that cannot be loaded is recorded in `failures`."""
        manager = cls()
        for origin, entry_point in _installed_entry_points():
            try:
                plugin = entry_point.load()
            # A plugin is foreign code: whatever it raises, even an attempt to exit, must not end the program.
            except (Exception, SystemExit) as error:
                manager.report_failure(origin, "loading", error)
                continue
            manager.register(plugin, origin)
        return manager

    def register(self, plugin: object, origin: Origin) -> None:
        """Add a plugin; the last one added is asked first. One that pluggy refuses is recorded in `failures`."""
        origin = _with_file(origin, plugin)
        try:
            self._check_hook_names(plugin)
            self._register_with_pluggy(plugin, _registered_name(origin))
        except PhazeError as error:
            self.report_failure(origin, "registering", error)
            return
        self._origins[_registered_name(origin)] = origin
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
        """The names of the hooks that a registered plugin implements, sorted."""
        plugin = self._pluggy.get_plugin(_registered_name(origin))
        callers = self._pluggy.get_hookcallers(plugin) if plugin is not None else None
        return tuple(sorted(caller.name for caller in callers or ()))

    def frontends(self) -> Registry[Frontend]:
        """All frontends: what turns models into graphs."""
        return self._collect("phaze_frontends", "frontend", _is_frontend)

    def named_models(self) -> Registry[ModelFactory]:
        """All models that are known by name."""
        return self._collect("phaze_named_models", "model", _is_model_factory)

    def accelerators(self) -> Registry[Accelerator]:
        """All accelerators, each called by the name that it is offered under."""
        offered = self._collect("phaze_accelerators", "accelerator", _is_accelerator)
        renamed = (Offer(offer.name, replace(offer.value, name=offer.name), offer.origin) for offer in offered)
        return Registry(offered.kind, tuple(renamed))

    def networks(self) -> Registry[Network]:
        """All networks that are known by name."""
        return self._collect("phaze_networks", "network", _is_network)

    def op_prices(self) -> Registry[OpPricer]:
        """All prices of ops that plugins brought."""
        return self._collect("phaze_op_prices", "op price", _is_op_pricer)

    def solvers(self) -> Registry[LinearSolver]:
        """All solvers of linear problems."""
        return self._collect("phaze_solvers", "solver", _is_solver)

    def targets(self) -> Registry[Target]:
        """All targets that a plan can be written for."""
        return self._collect("phaze_targets", "target", _is_target)

    def stage_builders(self) -> Registry[StageBuilder]:
        """All ways to cut models into pipeline stages."""
        return self._collect("phaze_stage_builders", "stage builder", _is_stage_builder)

    def worlds(self) -> Registry[World]:
        """All ways to see the other processes of a launch, and the devices."""
        return self._collect("phaze_worlds", "world", _is_world)

    def report_failure(self, origin: Origin, activity: str, error: BaseException) -> None:
        """Record that a plugin failed in an activity, and warn about it the first time."""
        if (origin, activity) in self._failures:
            return
        failure = PluginFailure(origin, activity, f"{type(error).__name__}: {error}")
        self._failures[origin, activity] = failure
        warnings.warn(str(failure), PluginWarning, stacklevel=2)

    def _collect(self, hook: str, kind: str, is_valid: Callable[[object], TypeGuard[Value]]) -> Registry[Value]:
        """What all plugins answer to a hook; each is asked once, until another plugin is registered."""
        if hook not in self._registries:
            offers: list[Offer[Value]] = []
            # pluggy lists the implementation that it would call last first. It would also stop at the first one that
            # raises, so each is called from here.
            for implementation in reversed(getattr(self._pluggy.hook, hook).get_hookimpls()):
                origin = self._origins.get(implementation.plugin_name)
                if origin is None:  # refused at registration; pluggy may have kept some of its hooks
                    continue
                try:
                    offers += _offers(implementation.function(), origin, kind, is_valid)
                except Exception as error:
                    self.report_failure(origin, hook, error)
            self._registries[hook] = Registry(kind, tuple(offers))
        # Every hook has one `is_valid`, so what is stored under the hook is of its type.
        return cast("Registry[Value]", self._registries[hook])

    def _register_with_pluggy(self, plugin: object, name: str) -> None:
        try:
            self._pluggy.register(plugin, name=name)
        except pluggy.PluginValidationError as error:
            if self._pluggy.is_registered(plugin):
                self._pluggy.unregister(plugin)
            raise PluginError(str(error)) from error
        except ValueError as error:
            raise PluginError(f"it is already registered, or another one is under the name {name!r}") from error

    def _check_hook_names(self, plugin: object) -> None:
        """Refuse a plugin that implements a hook which does not exist: a misspelt hook would never be called."""
        known_hooks = [name for name in vars(spec) if name.startswith("phaze_")]
        for name in dir(plugin):
            options = self._pluggy.parse_hookimpl_opts(plugin, name)
            if options is None:  # not marked with `hookimpl`
                continue
            hook = options.get("specname") or name
            if hook not in known_hooks:
                raise UnknownNameError("hook", hook, known_hooks)


def _offers(
    answer: object, origin: Origin, kind: str, is_valid: Callable[[object], TypeGuard[Value]]
) -> list[Offer[Value]]:
    """A hook's answer as offers; raises PluginError if it holds anything but named things of the right type."""
    if isinstance(answer, Mapping):
        named_values = list(answer.items())
    elif isinstance(answer, Iterable) and not isinstance(answer, str | bytes):
        named_values = [(getattr(value, "name", None), value) for value in answer]
    else:
        raise PluginError(f"it answered {answer!r}; expected a mapping from names, or an iterable of named things")
    offers = []
    for name, value in named_values:
        if not isinstance(name, str) or not name:
            raise PluginError(f"its {kind} has the name {name!r}; expected a non-empty text")
        if not is_valid(value):
            raise PluginError(f"its {kind} {name!r} is of type {type(value).__name__}, not what {kind}s must be")
        offers.append(Offer(name, value, origin))
    return offers


def _is_frontend(value: object) -> TypeGuard[Frontend]:
    return isinstance(value, Frontend)


def _is_model_factory(value: object) -> TypeGuard[ModelFactory]:
    return callable(value)


def _is_accelerator(value: object) -> TypeGuard[Accelerator]:
    return isinstance(value, Accelerator)


def _is_network(value: object) -> TypeGuard[Network]:
    return isinstance(value, Network)


def _is_op_pricer(value: object) -> TypeGuard[OpPricer]:
    return callable(value)


def _is_solver(value: object) -> TypeGuard[LinearSolver]:
    return isinstance(value, LinearSolver)


def _is_target(value: object) -> TypeGuard[Target]:
    return isinstance(value, Target)


def _is_stage_builder(value: object) -> TypeGuard[StageBuilder]:
    return isinstance(value, StageBuilder)


def _is_world(value: object) -> TypeGuard[World]:
    return isinstance(value, World)


def _installed_entry_points() -> list[tuple[Origin, importlib.metadata.EntryPoint]]:
    """Every installed plugin in the order of registration: built-in ones are registered first, and so asked last."""
    read: dict[int, tuple[str, str]] = {}  # name and version by distribution, which parses its file at every look
    found = []
    for entry_point in importlib.metadata.entry_points(group=spec.PROJECT_NAME):
        distribution = entry_point.dist
        if distribution is None:
            found.append((Origin(plugin=entry_point.name), entry_point))
            continue
        if id(distribution) not in read:
            read[id(distribution)] = distribution.name, distribution.version
        name, version = read[id(distribution)]
        found.append((Origin(plugin=entry_point.name, distribution=name, version=version), entry_point))
    return sorted(found, key=lambda pair: _order_of_registration(pair[0]), reverse=True)


def _order_of_registration(origin: Origin) -> tuple[bool, str, str]:
    distribution = origin.distribution or ""
    return distribution == BUILT_IN_DISTRIBUTION, distribution, origin.plugin


def _registered_name(origin: Origin) -> str:
    """The name that pluggy knows a plugin by: two distributions may call their plugins alike."""
    return f"{origin.distribution or ''}:{origin.plugin}"


def _with_file(origin: Origin, plugin: object) -> Origin:
    """The origin with the file that the plugin was loaded from, where the file was not known yet."""
    module = plugin if inspect.ismodule(plugin) else inspect.getmodule(type(plugin))
    return replace(origin, file=origin.file or getattr(module, "__file__", None))
