"""T5."""

from __future__ import annotations

from functools import partial

from phaze.frontends.families.common import activation_function, attend_separately, start, tied_table
from phaze.frontends.families.fields import Fields
from phaze.frontends.families.writer import Attention, Writer
from phaze.ir import GraphBuilder

__all__ = ["t5"]


def t5(fields: Fields, builder: GraphBuilder) -> str:
    """T5: encoder and decoder, relative position biases made in the first block of each and shared by the others."""
    hidden, heads, size = fields.size("d_model"), fields.size("num_heads"), fields.size("d_kv")
    writer = start(fields, builder, i=hidden, f=fields.size("d_ff"))
    layers = fields.size("num_layers", "num_hidden_layers")
    x = _t5_stack(fields, writer, "encoder", layers, Attention(heads=heads, head_size=size, is_causal=False, scale=1.0))
    attention = Attention(heads=heads, head_size=size, scale=1.0)
    x = _t5_stack(fields, writer, "decoder", fields.size("num_decoder_layers", default=layers), attention, encoded=x)
    tied = tied_table(fields, "shared.weight", True)
    if tied:
        x = writer.scale("lm_head", x, hidden**-0.5)
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied)


def _t5_stack(
    fields: Fields, writer: Writer, root: str, layers: int, attention: Attention, encoded: str | None = None
) -> str:
    norm = partial(writer.norm, function="rms_norm", epsilon=fields.number("layer_norm_epsilon", 1e-6))
    drop, length, sizes = fields.number("dropout_rate", 0.1), writer.sizes["s"], attention.sizes
    attention = Attention(
        heads=attention.heads, head_size=attention.head_size, is_causal=attention.is_causal, scale=1.0, dropout=drop
    )
    ids = writer.batch("input_ids" if encoded is None else "decoder_input_ids")
    buckets = fields.size("relative_attention_num_buckets", default=32)
    distances = writer.constant(f"{root}_distances", length, length)
    x = writer.embedding(f"{root}.embed_tokens", ids, writer.sizes["v"], table="shared.weight")
    x = writer.dropout(root, x, drop)
    names, cross = (
        ("q", "k", "v"),
        Attention(heads=attention.heads, head_size=attention.head_size, is_causal=False, scale=1.0, dropout=drop),
    )
    bias = ""
    for index in range(layers):
        path = f"{root}.block.{index}.layer"
        y = norm(f"{path}.0.layer_norm", x)
        if not bias:
            table = f"{path}.0.SelfAttention.relative_attention_bias"
            bias = writer.embedding(table, distances, buckets, "v h, s t -> h s t", sizes=sizes)
        y = attend_separately(
            writer, f"{path}.0.SelfAttention", y, y, attention, names=names, out="o", position_bias=bias
        )
        x = writer.residual(f"{path}.0", x, writer.dropout(f"{path}.0", y, drop))
        if encoded is not None:
            y = norm(f"{path}.1.layer_norm", x)
            y = attend_separately(writer, f"{path}.1.EncDecAttention", y, encoded, cross, names=names, out="o")
            x = writer.residual(f"{path}.1", x, writer.dropout(f"{path}.1", y, drop))
        last = f"{path}.{1 if encoded is None else 2}"
        y = _t5_feed_forward(fields, writer, f"{last}.DenseReluDense", norm(f"{last}.layer_norm", x), drop)
        x = writer.residual(last, x, writer.dropout(last, y, drop))
    x = norm(f"{root}.final_layer_norm", x)
    return writer.dropout(f"{root}.final_layer_norm", x, drop)


def _t5_feed_forward(fields: Fields, writer: Writer, path: str, x: str, drop: float) -> str:
    kind = fields.text("feed_forward_proj", "relu")
    activation = activation_function("gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-"))
    first = "wi_0" if kind.startswith("gated-") else "wi"
    y = writer.linear(f"{path}.{first}", x, "b s i, f i -> b s f")
    y = writer.elementwise(path, activation, "b s f -> b s f", y)
    if kind.startswith("gated-"):
        up = writer.linear(f"{path}.wi_1", x, "b s i, f i -> b s f")
        y = writer.elementwise(path, "multiply", "b s f, b s f -> b s f", y, up)
    y = writer.dropout(path, y, drop, "b s f")
    return writer.linear(f"{path}.wo", y, "b s f, i f -> b s i")
