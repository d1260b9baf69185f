"""Which layers of a model differ from the others: those that see a window of positions, and those with experts.

A config's `layer_types` says it layer by layer; where a config has none, the rule of the reference implementation does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from phaze.errors import ImportModelError
from phaze.frontends.families.config_fields import ConfigFields
from phaze.ir import GraphBuilder

__all__ = ["AttentionSpan", "attention_spans", "layers_with_experts", "note_spans"]

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
