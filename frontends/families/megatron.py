"""The Megatron families written out: GPT and BERT as Megatron-LM builds them, with its names of parameters."""

from __future__ import annotations

from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.transformer_writer import Attention, TransformerWriter
from phaze.ir import GraphBuilder

__all__ = ["write_megatron_bert", "write_megatron_gpt"]


def write_megatron_gpt(fields: ConfigFields, builder: GraphBuilder) -> str:
    """GPT as Megatron-LM builds it: rows of the fused query-key-value weight are (h 3 d)."""
    writer, attention, positions = _sizes_and_attention(fields, builder, is_causal=True)
    x = _write_embedding(writer, positions, fields.number("hidden_dropout", 0.1))
    for index in range(fields.count("num_layers", "num_hidden_layers")):
        x = _write_layer(fields, writer, f"language_model.encoder.layers.{index}", x, attention)
    x = writer.norm("language_model.encoder.final_layernorm", x, "layer_norm")
    tied = fields.tied_table("language_model.embedding.word_embeddings.weight", True)
    return writer.head("language_model.output_layer", x, writer.batch("labels"), tied_to=tied)


def write_megatron_bert(fields: ConfigFields, builder: GraphBuilder) -> str:
    """BERT as Megatron-LM builds it: pre-norm layers, masked-language-model head."""
    writer, attention, positions = _sizes_and_attention(fields, builder, is_causal=False)
    x = _write_embedding(writer, positions, fields.number("hidden_dropout", 0.1), has_types=True)
    for index in range(fields.count("num_layers", "num_hidden_layers")):
        x = _write_layer(fields, writer, f"language_model.encoder.layers.{index}", x, attention)
    x = writer.norm("language_model.encoder.final_layernorm", x, "layer_norm")
    return writer.masked_language_head("lm_head", x, "language_model.embedding.word_embeddings.weight", "gelu")


def _sizes_and_attention(
    fields: ConfigFields, builder: GraphBuilder, *, is_causal: bool
) -> tuple[TransformerWriter, Attention, int]:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    positions = fields.size("max_position_embeddings", "seq_length")
    size = fields.head_size(hidden, heads, "kv_channels")
    intermediate = fields.size("ffn_hidden_size", "intermediate_size", default=4 * hidden)
    writer = TransformerWriter.for_config(fields, builder, i=hidden, f=intermediate, max_length=positions)
    attention = Attention(
        heads=heads, head_size=size, is_causal=is_causal, dropout=fields.number("attention_dropout", 0.1)
    )
    return writer, attention, positions


def _write_embedding(writer: TransformerWriter, positions: int, drop: float, *, has_types: bool = False) -> str:
    root = "language_model.embedding"
    x = writer.embedding(f"{root}.word_embeddings", writer.batch("input_ids"), writer.sizes["v"])
    ids = writer.constant("positions", writer.sizes["s"])
    x = writer.positions(f"{root}.position_embeddings", x, positions, ids)
    if has_types:
        y = writer.embedding(f"{root}.tokentype_embeddings", writer.batch("token_type_ids"), 2)
        x = writer.elementwise(root, "add", "b s i, b s i -> b s i", x, y)
    return writer.dropout(root, x, drop)


def _write_layer(fields: ConfigFields, writer: TransformerWriter, path: str, x: str, attention: Attention) -> str:
    drop, sizes = fields.number("hidden_dropout", 0.1), attention.sizes
    y = writer.norm(f"{path}.input_layernorm", x, "layer_norm")
    root = f"{path}.self_attention"
    text = "b s i, (h c d) i -> b s h c d"
    y = writer.linear(f"{root}.query_key_value", y, text, bias=True, sizes={"c": 3, **sizes})
    query, key, value = writer.split_query_key_value(root, y, "b s h c d", attention)
    y = writer.attend(root, query, key, value, attention)
    y = writer.linear(f"{root}.dense", y, "b s h d, i (h d) -> b s i", bias=True, sizes=sizes)
    x = writer.residual(path, x, writer.dropout(root, y, drop))
    y = writer.norm(f"{path}.post_attention_layernorm", x, "layer_norm")
    y = writer.linear(f"{path}.mlp.dense_h_to_4h", y, "b s i, f i -> b s f", bias=True)
    y = writer.elementwise(f"{path}.mlp", "gelu", "b s f -> b s f", y)
    y = writer.linear(f"{path}.mlp.dense_4h_to_h", y, "b s f, i f -> b s i", bias=True)
    return writer.residual(path, x, writer.dropout(f"{path}.mlp", y, drop))
