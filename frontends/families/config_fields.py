"""Typed reading of a model config's fields: missing and malformed ones are named in errors, unknown ones ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phaze.errors import ImportModelError, shown
from phaze.ir.rule import LARGEST_FACTOR
from phaze.limits import check_limit

__all__ = ["ConfigFields"]

_LIMITED = {
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "vocab_size": "vocabulary",
}
"""Fields whose sizes have a limit of their own (`phaze.limits`)."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by the names that configs have for them, and the functions of the graph that they are."""


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """A config, how errors name it, and the sequence length that the caller asks for instead of the config's own."""

    values: Mapping[str, object]
    where: str
    requested_length: int | None = None

    def has(self, name: str) -> bool:
        """Whether the config gives this field a value."""
        return self.values.get(name) is not None

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive integer under the first of these names that the config has."""
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            if default is not None:
                return default
            raise ImportModelError(f"{self.where} lacks {' or '.join(names)}; add it to the config.")
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_FACTOR:
            raise ImportModelError(f"{self.where}: {name} is {shown(value)}; expected a positive integer.")
        if limit := _LIMITED.get(name):
            check_limit(limit, value, f"{self.where}: {name}")
        return value

    def count(self, *names: str, default: int | None = None) -> int:
        """A number of things that are written out one by one, such as layers."""
        value = self.size(*names, default=default)
        check_limit("layers", value, f"{self.where}: {' or '.join(names)}")
        return value

    def first_layers(self, name: str, default: int) -> int:
        """How many of the first layers are of a kind: 0 or more."""
        value = self.values.get(name)
        return 0 if value == 0 and not isinstance(value, bool) else self.size(name, default=default)

    def number(self, name: str, default: float) -> float:
        """A number of at least 0 and below 1: a probability or an epsilon."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ImportModelError(
                f"{self.where}: {name} is {shown(value)}; expected a number of at least 0 and below 1."
            )
        return float(value)

    def positive(self, name: str, default: float | None) -> float | None:
        """A positive number such as a scale or a cap; the default where the config lacks the field, None for null."""
        value = self.values.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ImportModelError(f"{self.where}: {name} is {shown(value)}; expected a positive number.")
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
        """A list of words; empty where the config has none."""
        value = self.values.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ImportModelError(f"{self.where}: {name} is {shown(value)}; expected a list of words.")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; empty where the config has none."""
        value = self.values.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
            raise ImportModelError(f"{self.where}: {name} is {shown(value)}; expected a list of whole numbers.")
        return tuple(value)

    def sequence_length(self, max_length: int | None) -> int:
        """The length asked for, or the config's own; refused beyond the positions that a model learned."""
        names = ("seq_length", "max_position_embeddings", "n_positions")
        if self.requested_length is None and max_length is None and not any(self.has(name) for name in names):
            raise ImportModelError(f"{self.where} names no sequence length; pass sequence_length.")
        length = self.size(*names, default=max_length) if self.requested_length is None else self.requested_length
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LARGEST_FACTOR:
            raise ImportModelError(f"sequence_length is {shown(length)}; expected a positive integer.")
        if max_length is not None and length > max_length:
            raise ImportModelError(
                f"{self.where} has {max_length} learned positions, fewer than the sequence length {shown(length)}; "
                f"pass sequence_length of at most {max_length}."
            )
        return length

    def head_size(self, hidden: int, heads: int, name: str = "head_dim") -> int:
        """The size of one attention head: the field of this name, else the hidden size over the heads."""
        if self.has(name):
            return self.size(name)
        if hidden % heads:
            raise ImportModelError(
                f"{self.where}: hidden size {hidden} is not a multiple of {heads} attention heads; add {name}."
            )
        return hidden // heads

    def key_value_heads(self, heads: int, default: int, name: str = "num_key_value_heads") -> int:
        """How many keys and values the query heads share: a divisor of their number."""
        shared = self.size(name, default=default)
        if heads % shared:
            raise ImportModelError(
                f"{self.where}: {heads} attention heads cannot share {shared} key/value heads ({name}): not a multiple."
            )
        return shared

    def activation(self, name: str, default: str) -> str:
        """The function of the graph that the field of this name, or the default, stands for."""
        activation = self.text(name, default)
        if activation not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise ImportModelError(f"{self.where}: {name} is {activation!r}; expected one of {known}.")
        return ACTIVATIONS[activation]

    def tied_table(self, table: str, default: bool) -> str | None:
        """The embedding's table where the logits share it, else None."""
        return table if self.flag("tie_word_embeddings", default) else None
