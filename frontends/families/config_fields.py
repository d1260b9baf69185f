"""Reading a model's config: its fields with their types, and which of its layers differ from the others.

Fields (`ConfigFields`): missing and malformed ones are named in errors, unknown ones are ignored.

Layers: those that see a window of positions (`attention_spans`), and those with experts (`layers_with_experts`). A
config's `layer_types` says it layer by layer; where a config has none, the rule of the reference implementation does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from phaze.errors import ImportModelError, shown
from phaze.ir import GraphBuilder
from phaze.ir.rule import LARGEST_FACTOR
from phaze.limits import check_limit

__all__ = ["AttentionSpan", "ConfigFields", "attention_spans", "layers_with_experts", "note_spans"]

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


SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"
"""The words of `layer_types`."""


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """The keys that a layer's queries see: the last `window`, those of a chunk, or all; whether heads are rotated."""

    window: int | None = None
    chunk: int | None = None
    has_positions: bool = True


def attention_spans(fields: ConfigFields, kind: str, layers: int, length: int) -> tuple[AttentionSpan, ...]:
    """The span of every layer. A window or chunk that is as long as the sequence is none."""
    types = fields.names("layer_types") or tuple(_layer_type(fields, kind, index) for index in range(layers))
    unknown = sorted(set(types) - {SLIDING, CHUNKED, FULL})
    if unknown or len(types) != layers:
        what = f"has {unknown[0]!r}" if unknown else f"has {len(types)} entries for {layers} layers"
        raise ImportModelError(
            f"{fields.where}: layer_types {what}; expected {SLIDING}, {CHUNKED} or {FULL} for every layer."
        )
    window = fields.size("sliding_window", default=length) if SLIDING in types else length
    chunk = fields.size("attention_chunk_size", default=8192) if CHUNKED in types else length
    rotated = _rotated_layers(fields, kind, layers)
    return tuple(
        AttentionSpan(
            window if kind_of_layer == SLIDING and window < length else None,
            chunk if kind_of_layer == CHUNKED and chunk < length else None,
            rotated[index],
        )
        for index, kind_of_layer in enumerate(types)
    )


def note_spans(builder: GraphBuilder, spans: tuple[AttentionSpan, ...]) -> None:
    """Say which windows there are, and that flops count the whole square all the same."""
    for name in ("window", "chunk"):
        sizes = Counter(size for span in spans if (size := getattr(span, name)) is not None)
        for size, count in sorted(sizes.items()):
            builder.notes.append(
                f"{count} of {len(spans)} layers see a {name} of {size:,} positions; matmul flops count all of them"
            )


def layers_with_experts(fields: ConfigFields, kind: str, layers: int) -> tuple[bool, ...]:
    """Which layers have experts, in families that have any."""
    if kind in ("deepseek_v2", "deepseek_v3"):
        first = fields.first_layers("first_k_dense_replace", 3 if kind == "deepseek_v3" else 0)
        return tuple(index >= first for index in range(layers))
    if kind == "llama4_text":
        named, step = fields.integers("moe_layers"), fields.size("interleave_moe_layer_step", default=1)
        return tuple(index in named if named else (index + 1) % step == 0 for index in range(layers))
    if kind in ("qwen2_moe", "qwen3_moe"):
        dense, step = fields.integers("mlp_only_layers"), fields.size("decoder_sparse_step", default=1)
        return tuple(index not in dense and (index + 1) % step == 0 for index in range(layers))
    return (kind in ("mixtral", "gpt_oss"),) * layers


def _layer_type(fields: ConfigFields, kind: str, index: int) -> str:
    if kind in ("gemma2", "gpt_oss"):
        return SLIDING if index % 2 == 0 else FULL
    if kind == "gemma3_text":
        pattern = fields.size("_sliding_window_pattern", "sliding_window_pattern", default=6)
        return FULL if (index + 1) % pattern == 0 else SLIDING
    if kind == "llama4_text":
        return CHUNKED if _is_rotated(fields, index) else FULL
    if not fields.values.get("sliding_window"):
        return FULL
    if kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
        is_beyond = index >= fields.first_layers("max_window_layers", 28)
        return SLIDING if fields.flag("use_sliding_window", False) and is_beyond else FULL
    return SLIDING


def _rotated_layers(fields: ConfigFields, kind: str, layers: int) -> tuple[bool, ...]:
    return tuple(kind != "llama4_text" or _is_rotated(fields, index) for index in range(layers))


def _is_rotated(fields: ConfigFields, index: int) -> bool:
    """Llama 4 leaves out the rotation in every fourth layer."""
    named = fields.integers("no_rope_layers")
    if named:
        return index < len(named) and bool(named[index])
    return (index + 1) % fields.size("no_rope_layer_interval", default=4) != 0
