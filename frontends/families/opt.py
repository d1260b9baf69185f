"""The OPT family written out: a decoder with biases, ReLU and learned positions."""

from __future__ import annotations

from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.transformer_writer import Attention, TransformerWriter
from phaze.ir import GraphBuilder

__all__ = ["write_opt"]


def write_opt(fields: ConfigFields, builder: GraphBuilder) -> str:
    """OPT: biases everywhere, ReLU, tied logits; the 350m model embeds narrower and norms after the residual."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    embedded = fields.size("word_embed_proj_dim", default=hidden)
    is_pre_norm = fields.flag("do_layer_norm_before", True)
    positions = fields.size("max_position_embeddings")
    writer = TransformerWriter.for_config(
        fields, builder, i=hidden, f=fields.size("ffn_dim"), w=embedded, max_length=positions
    )
    attention = Attention(
        heads=heads, head_size=fields.head_size(hidden, heads), dropout=fields.number("attention_dropout", 0)
    )
    drop, bias = fields.number("dropout", 0.1), fields.flag("enable_bias", True)
    activation, root = fields.activation("activation_function", "relu"), "model.decoder"
    x = writer.embedding(f"{root}.embed_tokens", writer.batch("input_ids"), writer.sizes["v"], "v w, b s -> b s w")
    if embedded != hidden:
        x = writer.linear(f"{root}.project_in", x, "b s w, i w -> b s i")
    ids = writer.constant("positions", writer.sizes["s"])
    # The reference keeps two rows in front of the first position, for padding.
    x = writer.positions(f"{root}.embed_positions", x, positions + 2, ids)
    for index in range(fields.count("num_hidden_layers")):
        path = f"{root}.layers.{index}"
        y = writer.norm(f"{path}.self_attn_layer_norm", x, "layer_norm") if is_pre_norm else x
        y = writer.project_and_attend(f"{path}.self_attn", y, y, attention, out="out_proj", bias=bias)
        x = writer.residual(path, x, writer.dropout(f"{path}.self_attn", y, drop))
        x = x if is_pre_norm else writer.norm(f"{path}.self_attn_layer_norm", x, "layer_norm")
        y = writer.norm(f"{path}.final_layer_norm", x, "layer_norm") if is_pre_norm else x
        y = writer.linear(f"{path}.fc1", y, "b s i, f i -> b s f", bias=bias)
        y = writer.elementwise(path, activation, "b s f -> b s f", y)
        y = writer.linear(f"{path}.fc2", y, "b s f, i f -> b s i", bias=bias)
        x = writer.residual(path, x, writer.dropout(path, y, drop))
        x = x if is_pre_norm else writer.norm(f"{path}.final_layer_norm", x, "layer_norm")
    if is_pre_norm and not fields.flag("_remove_final_layer_norm", False):
        x = writer.norm(f"{root}.final_layer_norm", x, "layer_norm")
    if embedded != hidden:
        x = writer.linear(f"{root}.project_out", x, "b s i, w i -> b s w")
    tied = fields.tied_table(f"{root}.embed_tokens.weight", True)
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied, dims="w" if embedded != hidden else "i")
