"""What plugins added, by name, with where it came from; and the failures of plugins that were passed over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
class Offer(Generic[Value]):
    """One thing that a plugin added, under the name that users call it by."""

    name: str
    value: Value
    origin: Origin


@dataclass(frozen=True, slots=True)
class Registry(Generic[Value]):
    """All offers of one kind (`kind` is the word for it in messages), in the order in which they are asked.

    Where two plugins offer the same name, asking for that name raises until one of them is removed; other names work.
    """

    kind: str
    offers: tuple[Offer[Value], ...]

    def __iter__(self) -> Iterator[Offer[Value]]:
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

    def offer(self, name: str) -> Offer[Value]:
        """The one offer of this name; raises UnknownNameError, or PluginError where several plugins offer it."""
        offers = [offer for offer in self.offers if offer.name == name]
        if not offers:
            raise UnknownNameError(self.kind, name, self.names)
        if len(offers) > 1:
            raise self._clash(offers)
        return offers[0]

    def get(self, name: str) -> Value:
        """What was offered under this name; raises as `offer` does."""
        return self.offer(name).value

    def to_mapping(self) -> dict[str, Value]:
        """Every offered value by its name; raises PluginError where several plugins offer one name."""
        return {name: self.get(name) for name in self.names}

    def _clash(self, offers: Sequence[Offer[object]]) -> PluginError:
        origins = " and ".join(str(offer.origin) for offer in offers)
        return PluginError(
            f"the {self.kind} name {offers[0].name!r} is claimed by {origins}; rename it or uninstall one of them."
        )
