"""GPT-2."""

from __future__ import annotations

from phaze.frontends.families.common import activation_function, head_size, split_fused, start, tied_table
from phaze.frontends.families.fields import Fields
from phaze.frontends.families.writer import Attention
from phaze.ir import GraphBuilder

__all__ = ["gpt2"]


def gpt2(fields: Fields, builder: GraphBuilder) -> str:
    """GPT-2: learned positions, pre-norm, fused query-key-value columns (3 h d), tied logits."""
    hidden, heads = fields.size("n_embd", "hidden_size"), fields.size("n_head", "num_attention_heads")
    positions = fields.size("n_positions", "max_position_embeddings")
    writer = start(fields, builder, i=hidden, f=fields.size("n_inner", default=4 * hidden), max_length=positions)
    attention = Attention(
        heads=heads, head_size=head_size(fields, hidden, heads), dropout=fields.number("attn_pdrop", 0.1)
    )
    resid, activation = (
        fields.number("resid_pdrop", 0.1),
        activation_function(fields, "activation_function", "gelu_new"),
    )
    x = writer.embedding("transformer.wte", writer.batch("input_ids"), writer.sizes["v"])
    x = writer.positions("transformer.wpe", x, positions, writer.constant("positions", writer.sizes["s"]))
    x = writer.dropout("transformer.drop", x, fields.number("embd_pdrop", 0.1))
    for index in range(fields.count("n_layer", "num_hidden_layers")):
        path = f"transformer.h.{index}"
        y = writer.norm(f"{path}.ln_1", x, "layer_norm")
        y = writer.linear(
            f"{path}.attn.c_attn", y, "b s i, i (c h d) -> b s c h d", bias=True, sizes={"c": 3, **attention.sizes}
        )
        query, key, value = split_fused(writer, f"{path}.attn", y, "b s c h d", attention)
        y = writer.attend(f"{path}.attn", query, key, value, attention)
        y = writer.linear(f"{path}.attn.c_proj", y, "b s h d, (h d) i -> b s i", bias=True, sizes=attention.sizes)
        x = writer.residual(path, x, writer.dropout(f"{path}.attn", y, resid))
        y = writer.norm(f"{path}.ln_2", x, "layer_norm")
        y = writer.linear(f"{path}.mlp.c_fc", y, "b s i, i f -> b s f", bias=True)
        y = writer.elementwise(f"{path}.mlp", activation, "b s f -> b s f", y)
        y = writer.linear(f"{path}.mlp.c_proj", y, "b s f, f i -> b s i", bias=True)
        x = writer.residual(path, x, writer.dropout(f"{path}.mlp", y, resid))
    x = writer.norm("transformer.ln_f", x, "layer_norm")
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied_table(fields, "transformer.wte.weight", True))
