"""T5."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from phaze.frontends.families.common import activation_function, attend_separately, start, tied_table
from phaze.frontends.families.fields import Fields
from phaze.frontends.families.writer import Attention, Writer
from phaze.ir import GraphBuilder

__all__ = ["t5"]


def t5(fields: Fields, builder: GraphBuilder) -> str:
    """T5: encoder and decoder, relative position biases made in the first block of each and shared by the others."""
    hidden = fields.size("d_model")
    writer = start(fields, builder, i=hidden, f=fields.size("d_ff"))
    layers = fields.count("num_layers", "num_hidden_layers")
    encoded = _t5_stack(fields, writer, "encoder", layers)
    x = _t5_stack(fields, writer, "decoder", fields.count("num_decoder_layers", default=layers), encoded)
    tied = tied_table(fields, "shared.weight", True)
    if tied:
        x = writer.scale("lm_head", x, hidden**-0.5)
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied)


def _t5_stack(fields: Fields, writer: Writer, root: str, layers: int, encoded: str | None = None) -> str:
    """The encoder, or with its result the decoder."""
    drop = fields.number("dropout_rate", 0.1)
    norm = partial(writer.norm, function="rms_norm", epsilon=fields.number("layer_norm_epsilon", 1e-6))
    across = Attention(
        heads=fields.size("num_heads"), head_size=fields.size("d_kv"), is_causal=False, scale=1.0, dropout=drop
    )
    own = replace(across, is_causal=encoded is not None)
    attend = partial(attend_separately, writer, names=("q", "k", "v"), out="o")
    ids = writer.batch("input_ids" if encoded is None else "decoder_input_ids")
    x = writer.embedding(f"{root}.embed_tokens", ids, writer.sizes["v"], table="shared.weight")
    x = writer.dropout(root, x, drop)
    bias = None
    for index in range(layers):
        path = f"{root}.block.{index}.layer"
        y = norm(f"{path}.0.layer_norm", x)
        bias = bias or _position_bias(fields, writer, f"{path}.0.SelfAttention", root, own)
        y = attend(f"{path}.0.SelfAttention", y, y, own, position_bias=bias)
        x = writer.residual(f"{path}.0", x, writer.dropout(f"{path}.0", y, drop))
        if encoded is not None:
            y = attend(f"{path}.1.EncDecAttention", norm(f"{path}.1.layer_norm", x), encoded, across)
            x = writer.residual(f"{path}.1", x, writer.dropout(f"{path}.1", y, drop))
        last = f"{path}.{1 if encoded is None else 2}"
        y = _t5_feed_forward(fields, writer, f"{last}.DenseReluDense", norm(f"{last}.layer_norm", x), drop)
        x = writer.residual(last, x, writer.dropout(last, y, drop))
    x = norm(f"{root}.final_layer_norm", x)
    return writer.dropout(f"{root}.final_layer_norm", x, drop)


def _position_bias(fields: Fields, writer: Writer, path: str, root: str, attention: Attention) -> str:
    """What is added to the scores of every pair of positions, by head and distance."""
    distances = writer.constant(f"{root}_distances", writer.sizes["s"], writer.sizes["t"])
    buckets = fields.size("relative_attention_num_buckets", default=32)
    table = f"{path}.relative_attention_bias"
    return writer.embedding(table, distances, buckets, "v h, s t -> h s t", sizes=attention.sizes)


def _t5_feed_forward(fields: Fields, writer: Writer, path: str, x: str, drop: float) -> str:
    kind = fields.text("feed_forward_proj", "relu")
    name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    activation = activation_function(replace(fields, values={"feed_forward_proj": name}), "feed_forward_proj", "relu")
    first = "wi_0" if kind.startswith("gated-") else "wi"
    y = writer.linear(f"{path}.{first}", x, "b s i, f i -> b s f")
    y = writer.elementwise(path, activation, "b s f -> b s f", y)
    if kind.startswith("gated-"):
        up = writer.linear(f"{path}.wi_1", x, "b s i, f i -> b s f")
        y = writer.elementwise(path, "multiply", "b s f, b s f -> b s f", y, up)
    y = writer.dropout(path, y, drop, "b s f")
    return writer.linear(f"{path}.wo", y, "b s f, i f -> b s i")
