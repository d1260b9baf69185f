"""The T5 family written out: encoder and decoder with relative position biases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.transformer_writer import Attention, TransformerWriter
from phaze.ir import GraphBuilder

__all__ = ["write_t5"]


def write_t5(fields: ConfigFields, builder: GraphBuilder) -> str:
    """T5: encoder and decoder, relative position biases made in the first block of each and shared by the others."""
    hidden = fields.size("d_model")
    writer = TransformerWriter.for_config(fields, builder, i=hidden, f=fields.size("d_ff"))
    layers = fields.count("num_layers", "num_hidden_layers")
    encoded = _write_stack(fields, writer, "encoder", layers)
    x = _write_stack(fields, writer, "decoder", fields.count("num_decoder_layers", default=layers), encoded)
    tied = fields.tied_table("shared.weight", True)
    # transformers 5 ties the logits always, and keeps in this field whether the config did.
    if tied and fields.flag("scale_decoder_outputs", True):
        x = writer.scale("lm_head", x, hidden**-0.5)
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied)


def _write_stack(
    fields: ConfigFields, writer: TransformerWriter, root: str, layers: int, encoded: str | None = None
) -> str:
    """The encoder, or the decoder where the result of the encoder is given."""
    drop = fields.number("dropout_rate", 0.1)
    norm = partial(writer.norm, function="rms_norm", epsilon=fields.number("layer_norm_epsilon", 1e-6))
    cross_attention = Attention(
        heads=fields.size("num_heads"), head_size=fields.size("d_kv"), is_causal=False, scale=1.0, dropout=drop
    )
    self_attention = replace(cross_attention, is_causal=encoded is not None)
    attend = partial(writer.project_and_attend, names=("q", "k", "v"), out="o")
    ids = writer.batch("input_ids" if encoded is None else "decoder_input_ids")
    x = writer.embedding(f"{root}.embed_tokens", ids, writer.sizes["v"], table="shared.weight")
    x = writer.dropout(root, x, drop)
    bias = None
    for index in range(layers):
        path = f"{root}.block.{index}.layer"
        y = norm(f"{path}.0.layer_norm", x)
        bias = bias or _position_bias(fields, writer, f"{path}.0.SelfAttention", root, self_attention)
        y = attend(f"{path}.0.SelfAttention", y, y, self_attention, position_bias=bias)
        x = writer.residual(f"{path}.0", x, writer.dropout(f"{path}.0", y, drop))
        if encoded is not None:
            y = attend(f"{path}.1.EncDecAttention", norm(f"{path}.1.layer_norm", x), encoded, cross_attention)
            x = writer.residual(f"{path}.1", x, writer.dropout(f"{path}.1", y, drop))
        last = f"{path}.{1 if encoded is None else 2}"
        y = _write_feed_forward(fields, writer, f"{last}.DenseReluDense", norm(f"{last}.layer_norm", x), drop)
        x = writer.residual(last, x, writer.dropout(last, y, drop))
    x = norm(f"{root}.final_layer_norm", x)
    return writer.dropout(f"{root}.final_layer_norm", x, drop)


def _position_bias(fields: ConfigFields, writer: TransformerWriter, path: str, root: str, attention: Attention) -> str:
    """What is added to the scores of every pair of positions, by head and distance."""
    distances = writer.constant(f"{root}_distances", writer.sizes["s"], writer.sizes["t"])
    buckets = fields.size("relative_attention_num_buckets", default=32)
    table = f"{path}.relative_attention_bias"
    return writer.embedding(table, distances, buckets, "v h, s t -> h s t", sizes=attention.sizes)


def _write_feed_forward(fields: ConfigFields, writer: TransformerWriter, path: str, x: str, drop: float) -> str:
    """The MLP of a block, gated where the config says so."""
    kind = fields.text("feed_forward_proj", "relu")
    # transformers takes the GELU of 'gated-gelu' for the approximate one.
    name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    activation = replace(fields, values={"feed_forward_proj": name}).activation("feed_forward_proj", "relu")
    first = "wi_0" if kind.startswith("gated-") else "wi"
    y = writer.linear(f"{path}.{first}", x, "b s i, f i -> b s f")
    y = writer.elementwise(path, activation, "b s f -> b s f", y)
    if kind.startswith("gated-"):
        up = writer.linear(f"{path}.wi_1", x, "b s i, f i -> b s f")
        y = writer.elementwise(path, "multiply", "b s f, b s f -> b s f", y, up)
    y = writer.dropout(path, y, drop, "b s f")
    return writer.linear(f"{path}.wo", y, "b s f, i f -> b s i")
