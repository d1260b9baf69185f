"""What a plan is for: the emitter that will run it, and so what the search may choose from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaze.capabilities import Capabilities
from phaze.errors import QuestionError, UnknownNameError, shown

if TYPE_CHECKING:
    from phaze.hooks import PluginManager

__all__ = ["ANALYSIS", "Target", "find_target"]


@dataclass(frozen=True, slots=True)
class Target:
    """A target's name and what it can run; without a name the plan is analysis, and not executable."""

    name: str | None
    capabilities: Capabilities

    def __str__(self) -> str:
        return self.name or "none, not executable"


ANALYSIS = Target(None, Capabilities.everything())


def find_target(name: str | None, model: object, plugins: PluginManager) -> Target:
    """The target called `name`; "auto" is the emitter of the framework that the model comes from, if there is one.

    Raises UnknownNameError for a name that no emitter has.
    """
    if name is None:
        return ANALYSIS
    if not isinstance(name, str):
        raise QuestionError(f"target is {shown(name)}; expected an emitter's name, 'auto', or None for analysis.")
    emitters = {offer.name: offer.value for offer in plugins.emitters()}
    if name != "auto":
        if name not in emitters:
            raise UnknownNameError("target", name, (*emitters, "auto"))
        return Target(name, emitters[name].capabilities)
    frontend = _frontend_of(model, plugins)
    return ANALYSIS if frontend not in emitters else Target(frontend, emitters[str(frontend)].capabilities)


def _frontend_of(model: object, plugins: PluginManager) -> str | None:
    if isinstance(model, str):
        return None
    for offer in plugins.frontends():
        if offer.value.accepts(model):
            return offer.name
    return None
