"""GPT and BERT as Megatron-LM builds them, given by numbers."""

from __future__ import annotations

from phaze.frontends.families.common import head_size, masked_language_head, split_fused, start, tied_table
from phaze.frontends.families.fields import Fields
from phaze.frontends.families.writer import Attention, Writer
from phaze.ir import GraphBuilder

__all__ = ["megatron_bert", "megatron_gpt"]


def megatron_gpt(fields: Fields, builder: GraphBuilder) -> str:
    """GPT as Megatron-LM builds it: rows of the fused query-key-value weight are (h 3 d)."""
    writer, attention, positions = _megatron(fields, builder, is_causal=True)
    x = _megatron_embedding(writer, positions, fields.number("hidden_dropout", 0.1))
    for index in range(fields.count("num_layers", "num_hidden_layers")):
        x = _megatron_layer(fields, writer, f"language_model.encoder.layers.{index}", x, attention)
    x = writer.norm("language_model.encoder.final_layernorm", x, "layer_norm")
    tied = tied_table(fields, "language_model.embedding.word_embeddings.weight", True)
    return writer.head("language_model.output_layer", x, writer.batch("labels"), tied_to=tied)


def megatron_bert(fields: Fields, builder: GraphBuilder) -> str:
    """BERT as Megatron-LM builds it: pre-norm layers, masked-language-model head."""
    writer, attention, positions = _megatron(fields, builder, is_causal=False)
    x = _megatron_embedding(writer, positions, fields.number("hidden_dropout", 0.1), has_types=True)
    for index in range(fields.count("num_layers", "num_hidden_layers")):
        x = _megatron_layer(fields, writer, f"language_model.encoder.layers.{index}", x, attention)
    x = writer.norm("language_model.encoder.final_layernorm", x, "layer_norm")
    return masked_language_head(writer, "lm_head", x, "language_model.embedding.word_embeddings.weight", "gelu")


def _megatron(fields: Fields, builder: GraphBuilder, *, is_causal: bool) -> tuple[Writer, Attention, int]:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    positions = fields.size("max_position_embeddings", "seq_length")
    size = head_size(fields, hidden, heads, "kv_channels")
    intermediate = fields.size("ffn_hidden_size", "intermediate_size", default=4 * hidden)
    writer = start(fields, builder, i=hidden, f=intermediate, max_length=positions)
    attention = Attention(
        heads=heads, head_size=size, is_causal=is_causal, dropout=fields.number("attention_dropout", 0.1)
    )
    return writer, attention, positions


def _megatron_embedding(writer: Writer, positions: int, drop: float, *, has_types: bool = False) -> str:
    root = "language_model.embedding"
    x = writer.embedding(f"{root}.word_embeddings", writer.batch("input_ids"), writer.sizes["v"])
    ids = writer.constant("positions", writer.sizes["s"])
    x = writer.positions(f"{root}.position_embeddings", x, positions, ids)
    if has_types:
        y = writer.embedding(f"{root}.tokentype_embeddings", writer.batch("token_type_ids"), 2)
        x = writer.elementwise(root, "add", "b s i, b s i -> b s i", x, y)
    return writer.dropout(root, x, drop)


def _megatron_layer(fields: Fields, writer: Writer, path: str, x: str, attention: Attention) -> str:
    drop, sizes = fields.number("hidden_dropout", 0.1), attention.sizes
    y = writer.norm(f"{path}.input_layernorm", x, "layer_norm")
    root = f"{path}.self_attention"
    text = "b s i, (h c d) i -> b s h c d"
    y = writer.linear(f"{root}.query_key_value", y, text, bias=True, sizes={"c": 3, **sizes})
    query, key, value = split_fused(writer, root, y, "b s h c d", attention)
    y = writer.attend(root, query, key, value, attention)
    y = writer.linear(f"{root}.dense", y, "b s h d, i (h d) -> b s i", bias=True, sizes=sizes)
    x = writer.residual(path, x, writer.dropout(root, y, drop))
    y = writer.norm(f"{path}.post_attention_layernorm", x, "layer_norm")
    y = writer.linear(f"{path}.mlp.dense_h_to_4h", y, "b s i, f i -> b s f", bias=True)
    y = writer.elementwise(f"{path}.mlp", "gelu", "b s f -> b s f", y)
    y = writer.linear(f"{path}.mlp.dense_4h_to_h", y, "b s f, i f -> b s i", bias=True)
    return writer.residual(path, x, writer.dropout(f"{path}.mlp", y, drop))
