"""What several families share."""

from __future__ import annotations

from phaze.errors import ImportModelError
from phaze.frontends.families.fields import Fields
from phaze.frontends.families.writer import Attention, Writer
from phaze.ir import GraphBuilder

__all__ = [
    "activation_function",
    "attend_separately",
    "head_size",
    "masked_language_head",
    "split_fused",
    "start",
    "tied_table",
]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def start(fields: Fields, builder: GraphBuilder, *, max_length: int | None = None, **sizes: int) -> Writer:
    """A writer with the sizes that every family has."""
    length = fields.sequence_length(max_length)
    origin = "as asked" if fields.length is not None else "the model's own; pass sequence_length to change it"
    builder.notes.append(f"sequences of {length:,} positions ({origin})")
    return Writer(
        builder,
        b=builder.micro_batch_size,
        s=length,
        t=length,
        v=fields.size("padded_vocab_size", "vocab_size"),
        **sizes,
    )


def head_size(fields: Fields, hidden: int, heads: int, own: str = "head_dim") -> int:
    """The size of one head: the config's own field for it, or the hidden size over the heads, which must divide it."""
    if fields.has(own):
        return fields.size(own)
    if hidden % heads:
        raise ImportModelError(
            f"{fields.where}: hidden size {hidden} is not a multiple of {heads} attention heads; add {own}."
        )
    return hidden // heads


def activation_function(fields: Fields, field: str, default: str) -> str:
    """The function that a config's field for an activation names."""
    name = fields.text(field, default)
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ImportModelError(f"{fields.where}: {field} is {name!r}; expected one of {known}.")
    return ACTIVATIONS[name]


def tied_table(fields: Fields, table: str, default: bool) -> str | None:
    """The embedding's table where logits share it, else None."""
    return table if fields.flag("tie_word_embeddings", default) else None


def split_fused(writer: Writer, path: str, x: str, dims: str, attention: Attention) -> tuple[str, ...]:
    """Query, key and value as views of one tensor."""
    part = dims.replace("c ", "")
    text = f"{dims} -> {part}, {part}, {part}"
    return writer.split(path, x, text, ("query", "key", "value"), "c", sizes={"c": 3, **attention.sizes})


def attend_separately(
    writer: Writer,
    path: str,
    x: str,
    memory: str,
    attention: Attention,
    *,
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    out: str,
    bias: bool = False,
    out_bias: bool | None = None,
    tables: tuple[str, ...] = (),
    position_bias: str | None = None,
) -> str:
    """Attention with a weight each for query, key, value and result; `memory` is what keys and values come from."""
    h, g, sizes = attention.query_dims, attention.key_dims, attention.sizes
    query = writer.linear(f"{path}.{names[0]}", x, f"b s i, ({h} d) i -> b s {h} d", bias=bias, sizes=sizes)
    key = writer.linear(f"{path}.{names[1]}", memory, f"b s i, ({g} d) i -> b s {g} d", bias=bias, sizes=sizes)
    value = writer.linear(f"{path}.{names[2]}", memory, f"b s i, ({g} d) i -> b s {g} d", bias=bias, sizes=sizes)
    if tables:
        query = writer.rotary(f"{path}.{names[0]}", query, h, (tables[0], tables[1]), attention)
        key = writer.rotary(f"{path}.{names[1]}", key, g, (tables[0], tables[1]), attention)
    y = writer.attend(path, query, key, value, attention, position_bias)
    has_bias = bias if out_bias is None else out_bias
    return writer.linear(f"{path}.{out}", y, f"b s {h} d, i ({h} d) -> b s i", bias=has_bias, sizes=sizes)


def masked_language_head(writer: Writer, path: str, x: str, table: str, activation: str) -> str:
    """A dense layer, norm and logits over the vocabulary tied to the embedding, with their loss."""
    x = writer.linear(f"{path}.transform.dense", x, "b s i, j i -> b s j", bias=True, sizes={"j": writer.sizes["i"]})
    x = writer.elementwise(f"{path}.transform", activation, "b s i -> b s i", x)
    x = writer.norm(f"{path}.transform.LayerNorm", x, "layer_norm")
    return writer.head(path, x, writer.batch("labels"), tied_to=table, bias=True)
