"""The GPT-2 family written out: a pre-norm decoder with learned positions and a fused query-key-value weight."""

from __future__ import annotations

from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.transformer_writer import Attention, TransformerWriter
from phaze.ir import GraphBuilder

__all__ = ["write_gpt2"]


def write_gpt2(fields: ConfigFields, builder: GraphBuilder) -> str:
    """GPT-2: learned positions, pre-norm, fused query-key-value columns (3 h d), tied logits."""
    hidden, heads = fields.size("n_embd", "hidden_size"), fields.size("n_head", "num_attention_heads")
    positions = fields.size("n_positions", "max_position_embeddings")
    writer = TransformerWriter.for_config(
        fields, builder, i=hidden, f=fields.size("n_inner", default=4 * hidden), max_length=positions
    )
    attention = Attention(
        heads=heads, head_size=fields.head_size(hidden, heads), dropout=fields.number("attn_pdrop", 0.1)
    )
    drop, activation = fields.number("resid_pdrop", 0.1), fields.activation("activation_function", "gelu_new")
    x = writer.embedding("transformer.wte", writer.batch("input_ids"), writer.sizes["v"])
    x = writer.positions("transformer.wpe", x, positions, writer.constant("positions", writer.sizes["s"]))
    x = writer.dropout("transformer.drop", x, fields.number("embd_pdrop", 0.1))
    for index in range(fields.count("n_layer", "num_hidden_layers")):
        path = f"transformer.h.{index}"
        y = writer.norm(f"{path}.ln_1", x, "layer_norm")
        y = writer.linear(
            f"{path}.attn.c_attn", y, "b s i, i (c h d) -> b s c h d", bias=True, sizes={"c": 3, **attention.sizes}
        )
        query, key, value = writer.split_query_key_value(f"{path}.attn", y, "b s c h d", attention)
        y = writer.attend(f"{path}.attn", query, key, value, attention)
        y = writer.linear(f"{path}.attn.c_proj", y, "b s h d, (h d) i -> b s i", bias=True, sizes=attention.sizes)
        x = writer.residual(path, x, writer.dropout(f"{path}.attn", y, drop))
        y = writer.norm(f"{path}.ln_2", x, "layer_norm")
        y = writer.linear(f"{path}.mlp.c_fc", y, "b s i, i f -> b s f", bias=True)
        y = writer.elementwise(f"{path}.mlp", activation, "b s f -> b s f", y)
        y = writer.linear(f"{path}.mlp.c_proj", y, "b s f, f i -> b s i", bias=True)
        x = writer.residual(path, x, writer.dropout(f"{path}.mlp", y, drop))
    x = writer.norm("transformer.ln_f", x, "layer_norm")
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=fields.tied_table("transformer.wte.weight", True))
