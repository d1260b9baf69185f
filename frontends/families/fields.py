"""Typed reading of a config's fields: missing and malformed ones are named, unknown ones ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phaze.errors import ImportModelError, shown
from phaze.ir.rule import LARGEST_FACTOR

__all__ = ["Fields"]

MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Fields:
    """A config with what the caller overrides; `where` names it in errors."""

    values: Mapping[str, Any]
    where: str
    length: int | None = None

    def has(self, name: str) -> bool:
        """Whether the config gives this field a value."""
        return self.values.get(name) is not None

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive integer under the first of these names that is there."""
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            if default is not None:
                return default
            raise ImportModelError(f"{self.where} lacks {' or '.join(names)}; add it to the config.")
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_FACTOR:
            raise ImportModelError(f"{self.where}: {name} is {shown(value)}; expected a positive integer.")
        return value

    def count(self, *names: str, default: int | None = None) -> int:
        """A number of things that are written out one by one, such as layers."""
        value = self.size(*names, default=default)
        if value > MOST_LAYERS:
            raise ImportModelError(
                f"{self.where}: {' or '.join(names)} is {value}; at most {MOST_LAYERS} are supported."
            )
        return value

    def number(self, name: str, default: float) -> float:
        """A number from 0 to 1: a probability or an epsilon."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ImportModelError(
                f"{self.where}: {name} is {shown(value)}; expected a number of at least 0 and below 1."
            )
        return float(value)

    def text(self, name: str, default: str) -> str:
        """A word."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise ImportModelError(f"{self.where}: {name} is {shown(value)}; expected text.")
        return value or default

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise ImportModelError(f"{self.where}: {name} is {shown(value)}; expected true or false.")
        return default if value is None else value

    def names(self, name: str) -> tuple[str, ...]:
        """A list of words; empty where there is none."""
        value = self.values.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ImportModelError(f"{self.where}: {name} is {shown(value)}; expected a list of words.")
        return tuple(value)

    def sequence_length(self, max_length: int | None) -> int:
        """The length asked for, or the config's own; refused beyond the positions that a model learned."""
        own = ("seq_length", "max_position_embeddings", "n_positions")
        if self.length is None and max_length is None and not any(self.has(name) for name in own):
            raise ImportModelError(f"{self.where} names no sequence length; pass sequence_length.")
        length = self.length if self.length is not None else self.size(*own, default=max_length)
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LARGEST_FACTOR:
            raise ImportModelError(f"sequence_length is {shown(length)}; expected a positive integer.")
        if max_length is not None and length > max_length:
            raise ImportModelError(
                f"{self.where} has {max_length} learned positions, fewer than the sequence length {shown(length)}; "
                f"pass sequence_length of at most {max_length}."
            )
        return length
