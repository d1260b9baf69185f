"""What plugins offered under which names, and what went wrong on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from phaze.errors import PluginError, UnknownNameError

__all__ = ["Offer", "Origin", "PluginFailure", "Registry"]

Value = TypeVar("Value", covariant=True)


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
    """A plugin raised, or answered with the wrong type, and was passed over."""

    origin: Origin
    doing: str
    reason: str

    def __str__(self) -> str:
        return f"{self.origin} failed in {self.doing} and was passed over: {self.reason}"


@dataclass(frozen=True, slots=True)
class Offer(Generic[Value]):
    """One thing that a plugin added."""

    name: str
    value: Value
    origin: Origin


@dataclass(frozen=True, slots=True)
class Registry(Generic[Value]):
    """All offers of one kind, in the order in which they are asked; `what` is the kind in a message's words.

    A name offered twice stays ambiguous until one of the plugins goes: asking for it raises, other names work.
    """

    what: str
    offers: tuple[Offer[Value], ...]

    def __iter__(self) -> Iterator[Offer[Value]]:
        return iter(self.offers)

    @property
    def names(self) -> tuple[str, ...]:
        """Every offered name, sorted."""
        return tuple(sorted({offer.name for offer in self.offers}))

    @property
    def clashes(self) -> tuple[PluginError, ...]:
        """One error for every name offered more than once; it names the parties."""
        return tuple(error for name in self.names if isinstance(error := self._find(name), PluginError))

    def offer(self, name: str) -> Offer[Value]:
        """The one offer of this name; raises UnknownNameError, or PluginError where plugins clash over it."""
        found = self._find(name)
        if isinstance(found, PluginError):
            raise found
        return found

    def get(self, name: str) -> Value:
        """What was offered under this name; raises as `offer` does."""
        return self.offer(name).value

    def to_mapping(self) -> dict[str, Value]:
        """Every offered value by its name; raises PluginError where plugins clash over one."""
        return {name: self.get(name) for name in self.names}

    def _find(self, name: str) -> Offer[Value] | PluginError:
        found = [offer for offer in self.offers if offer.name == name]
        if not found:
            raise UnknownNameError(self.what, name, self.names)
        if len(found) == 1:
            return found[0]
        parties = " and ".join(str(offer.origin) for offer in found)
        return PluginError(
            f"the {self.what} name {name!r} is claimed by {parties}; rename it or uninstall one of them."
        )
