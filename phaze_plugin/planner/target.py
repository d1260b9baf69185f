"""What a plan is for: the emitter that will run it, and so what the search may choose from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaze.capabilities import Capabilities
from phaze.errors import UnknownNameError, shown

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["ANALYSIS", "Target", "find_target"]


@dataclass(frozen=True, slots=True)
class Target:
    """A target's name, what it can run, and why it was chosen; no name means analysis: the plan is not executable."""

    name: str | None
    capabilities: Capabilities
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.name else f"none: not executable ({self.reason})"


ANALYSIS = Target(None, Capabilities.everything(), "analysis was asked for")


def find_target(name: str | None, model: object, plugins: PluginManager) -> Target:
    """The target called `name`; "auto" is the one of the framework that the model comes from.

    Raises UnknownNameError for a name that no emitter has.
    """
    if name is None:
        return ANALYSIS
    if not isinstance(name, str):
        raise TypeError(f"target is {shown(name)}; expected an emitter's name, 'auto', or None for analysis.")
    emitters = {offer.name: offer.value for offer in plugins.emitters()}
    if name != "auto":
        if name not in emitters:
            raise UnknownNameError("target", name, (*emitters, "auto"))
        return Target(name, emitters[name].capabilities, "asked for")
    frontend = _frontend_of(model, plugins)
    if frontend is None or frontend not in emitters:
        what = "a model that is not a framework's" if frontend is None else f"no emitter for {frontend!r} models"
        return Target(None, Capabilities.everything(), what)
    return Target(frontend, emitters[frontend].capabilities, "the model's own framework")


def _frontend_of(model: object, plugins: PluginManager) -> str | None:
    if isinstance(model, str):
        return None
    for offer in plugins.frontends():
        if offer.value.accepts(model):
            return offer.name
    return None
