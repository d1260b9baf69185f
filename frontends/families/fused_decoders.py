"""Decoders whose attention and MLP may run side by side: GPT-NeoX, GPT-J, Phi, Falcon, Bloom.

Most of them have one weight for query, key and value. Phi and GPT-J have one norm for both branches.
"""

from __future__ import annotations

from functools import partial

from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.transformer_writer import Attention, TransformerWriter
from phaze.ir import GraphBuilder, OpKind

__all__ = ["write_bloom", "write_falcon", "write_gpt_neox", "write_gptj", "write_phi"]


def write_gpt_neox(fields: ConfigFields, builder: GraphBuilder) -> str:
    """GPT-NeoX: rows (h 3 d) of the fused weight, heads rotated in part."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    size = fields.size("intermediate_size", default=4 * hidden)
    writer = TransformerWriter.for_config(fields, builder, i=hidden, f=size)
    attention = _attention(fields, hidden, heads)
    norm = _layer_norm(fields, writer, "layer_norm_eps")
    drop, bias = fields.number("hidden_dropout", 0), fields.flag("attention_bias", True)
    activation, tables = fields.activation("hidden_act", "gelu"), writer.rotary_tables(attention.head_size)
    is_parallel = fields.flag("use_parallel_residual", True)
    x = writer.embedding("gpt_neox.embed_in", writer.batch("input_ids"), writer.sizes["v"])
    x = writer.dropout("gpt_neox.emb_dropout", x, drop)
    for index in range(fields.count("num_hidden_layers")):
        path = f"gpt_neox.layers.{index}"
        y = norm(f"{path}.input_layernorm", x)
        query, key, value = _interleaved(writer, f"{path}.attention", y, attention, bias)
        query = writer.rotary(f"{path}.attention.query", query, "h", tables, attention)
        key = writer.rotary(f"{path}.attention.key", key, "h", tables, attention)
        y = writer.attend(f"{path}.attention", query, key, value, attention)
        y = writer.attention_result(f"{path}.attention.dense", y, attention, bias)
        y = writer.dropout(f"{path}.attention", y, drop)
        after = writer.residual(path, x, y)
        z = norm(f"{path}.post_attention_layernorm", x if is_parallel else after)
        z = writer.mlp(f"{path}.mlp", z, ("dense_h_to_4h", "dense_4h_to_h"), activation, bias=True)
        x = writer.residual(f"{path}.mlp", after, writer.dropout(f"{path}.mlp", z, drop))
    x = norm("gpt_neox.final_layer_norm", x)
    tied = fields.tied_table("gpt_neox.embed_in.weight", False)
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied)


def write_phi(fields: ConfigFields, builder: GraphBuilder) -> str:
    """Phi 1, 1.5 and 2: one norm for both branches, biases everywhere."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    writer = TransformerWriter.for_config(fields, builder, i=hidden, f=fields.size("intermediate_size"))
    attention = _attention(fields, hidden, heads, fields.key_value_heads(heads, heads))
    norm = _layer_norm(fields, writer, "layer_norm_eps")
    drop, activation = fields.number("resid_pdrop", 0), fields.activation("hidden_act", "gelu_new")
    tables = writer.rotary_tables(attention.head_size)

    def rotate(path: str, x: str, dims: str) -> str:
        return writer.rotary(path, x, dims, tables, attention)

    x = writer.embedding("model.embed_tokens", writer.batch("input_ids"), writer.sizes["v"])
    x = writer.dropout("model.embed_dropout", x, fields.number("embd_pdrop", 0))
    for index in range(fields.count("num_hidden_layers")):
        path = f"model.layers.{index}"
        y = norm(f"{path}.input_layernorm", x)
        z = writer.mlp(f"{path}.mlp", y, ("fc1", "fc2"), activation, bias=True)
        y = writer.project_and_attend(f"{path}.self_attn", y, y, attention, out="dense", bias=True, prepare=rotate)
        x = writer.residual(path, x, writer.dropout(f"{path}.self_attn", y, drop))
        x = writer.residual(f"{path}.mlp", x, writer.dropout(f"{path}.mlp", z, drop))
    x = norm("model.final_layernorm", x)
    tied = fields.tied_table("model.embed_tokens.weight", False)
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied, bias=True)


def write_gptj(fields: ConfigFields, builder: GraphBuilder) -> str:
    """GPT-J: one norm for both branches, no biases in attention."""
    hidden, heads = fields.size("n_embd", "hidden_size"), fields.size("n_head", "num_attention_heads")
    size = fields.size("n_inner", default=4 * hidden)
    writer = TransformerWriter.for_config(fields, builder, i=hidden, f=size)
    attention = Attention(
        heads=heads, head_size=fields.head_size(hidden, heads), dropout=fields.number("attn_pdrop", 0)
    )
    norm = _layer_norm(fields, writer, "layer_norm_epsilon")
    drop, activation = fields.number("resid_pdrop", 0), fields.activation("activation_function", "gelu_new")
    tables = writer.rotary_tables(attention.head_size)

    def rotate(path: str, x: str, dims: str) -> str:
        return writer.rotary(path, x, dims, tables, attention)

    x = writer.embedding("transformer.wte", writer.batch("input_ids"), writer.sizes["v"])
    x = writer.dropout("transformer.drop", x, fields.number("embd_pdrop", 0))
    for index in range(fields.count("n_layer", "num_hidden_layers")):
        path = f"transformer.h.{index}"
        y = norm(f"{path}.ln_1", x)
        z = writer.mlp(f"{path}.mlp", y, ("fc_in", "fc_out"), activation, bias=True)
        y = writer.project_and_attend(f"{path}.attn", y, y, attention, out="out_proj", prepare=rotate)
        x = writer.residual(path, x, writer.dropout(f"{path}.attn", y, drop))
        x = writer.residual(f"{path}.mlp", x, writer.dropout(f"{path}.mlp", z, drop))
    x = norm("transformer.ln_f", x)
    tied = fields.tied_table("transformer.wte.weight", False)
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied, bias=True)


def write_bloom(fields: ConfigFields, builder: GraphBuilder) -> str:
    """Bloom: rows (h 3 d) of the fused weight, scores biased by distance, a norm behind the embedding."""
    hidden, heads = fields.size("hidden_size", "n_embed"), fields.size("n_head", "num_attention_heads")
    writer = TransformerWriter.for_config(fields, builder, i=hidden, f=4 * hidden)
    attention = _attention(fields, hidden, heads)
    norm = _layer_norm(fields, writer, "layer_norm_epsilon")
    drop = fields.number("hidden_dropout", 0)
    slopes = _slopes(writer, heads)
    x = writer.embedding("transformer.word_embeddings", writer.batch("input_ids"), writer.sizes["v"])
    x = norm("transformer.word_embeddings_layernorm", x)
    for index in range(fields.count("n_layer", "num_hidden_layers")):
        path = f"transformer.h.{index}"
        y = norm(f"{path}.input_layernorm", x)
        query, key, value = _interleaved(writer, f"{path}.self_attention", y, attention, True)
        root = f"{path}.self_attention"
        y = writer.attend(root, query, key, value, attention, bias=slopes, bias_dims="h t")
        y = writer.attention_result(f"{root}.dense", y, attention, bias=True)
        x = writer.residual(path, x, writer.dropout(root, y, drop))
        y = norm(f"{path}.post_attention_layernorm", x)
        y = writer.mlp(f"{path}.mlp", y, ("dense_h_to_4h", "dense_4h_to_h"), "gelu_tanh", bias=True)
        x = writer.residual(f"{path}.mlp", x, writer.dropout(f"{path}.mlp", y, drop))
    x = norm("transformer.ln_f", x)
    tied = fields.tied_table("transformer.word_embeddings.weight", True)
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied)


def write_falcon(fields: ConfigFields, builder: GraphBuilder) -> str:
    """Falcon: keys shared by all heads (7B) or by groups (40B, 180B), or one for each head with biased scores (RW)."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads", "n_head")
    is_new = fields.flag("new_decoder_architecture", False)
    size = fields.size("ffn_hidden_size", default=4 * hidden)
    writer = TransformerWriter.for_config(fields, builder, i=hidden, f=size)
    attention = _attention(fields, hidden, heads, _falcon_groups(fields, heads, is_new))
    norm = _layer_norm(fields, writer, "layer_norm_epsilon")
    is_biased = fields.flag("alibi", False)
    positions = (_slopes(writer, heads),) if is_biased else writer.rotary_tables(attention.head_size)
    bias, drop = fields.flag("bias", False), fields.number("hidden_dropout", 0)
    is_parallel = is_new or fields.flag("parallel_attn", True)
    activation = fields.activation("activation", "gelu")
    has_two_norms = is_new and fields.size("num_ln_in_parallel_attn", default=2) == 2
    x = writer.embedding("transformer.word_embeddings", writer.batch("input_ids"), writer.sizes["v"])
    for index in range(fields.count("num_hidden_layers", "n_layer")):
        path = f"transformer.h.{index}"
        y = norm(f"{path}.{'ln_attn' if has_two_norms else 'input_layernorm'}", x)
        z = norm(f"{path}.ln_mlp", x) if has_two_norms else y
        root = f"{path}.self_attention"
        y = _falcon_attention(writer, root, y, attention, positions, bias)
        y = writer.dropout(root, y, drop)
        x = writer.residual(path, x, y)
        z = z if is_parallel else norm(f"{path}.post_attention_layernorm", x)
        z = writer.mlp(f"{path}.mlp", z, ("dense_h_to_4h", "dense_4h_to_h"), activation, bias=bias)
        x = writer.residual(f"{path}.mlp", x, writer.dropout(f"{path}.mlp", z, drop))
    x = norm("transformer.ln_f", x)
    tied = fields.tied_table("transformer.word_embeddings.weight", True)
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied)


def _falcon_groups(fields: ConfigFields, heads: int, is_new: bool) -> int | None:
    if is_new:
        return fields.key_value_heads(heads, heads, "num_kv_heads")
    return 1 if fields.flag("multi_query", True) else None


def _falcon_attention(
    writer: TransformerWriter,
    path: str,
    x: str,
    attention: Attention,
    positions: tuple[str, ...],
    bias: bool,
) -> str:
    """`positions` are two tables of rotations, or one of what distance adds to scores."""
    sizes, query_dims, g = attention.sizes, attention.query_dims, attention.key_dims
    groups, shared = sizes["g"], sizes["r"]
    if groups == attention.heads:
        query, key, value = _interleaved(writer, path, x, attention, bias)
    else:
        # Rows of the weight are (group, its query heads and its key and value, d).
        rows = shared + 2
        text = "b s i, (g x d) i -> b s g x d"
        y = writer.linear(f"{path}.query_key_value", x, text, bias=bias, sizes={**sizes, "x": rows})
        query = writer.slice(path, y, f"b s g r@{rows} d -> b s g r d", 0, sizes)
        key, value = (
            writer.op(
                path,
                name,
                OpKind.VIEW,
                "select",
                "b s g x d -> b s g d",
                y,
                sizes={**sizes, "x": rows},
                attributes={"index": shared + offset},
                whole="x",
            )[0]
            for offset, name in enumerate(("key", "value"))
        )
    slopes = None
    if len(positions) == 2:
        query = writer.rotary(f"{path}.query", query, query_dims, (positions[0], positions[1]), attention)
        key = writer.rotary(f"{path}.key", key, g, (positions[0], positions[1]), attention)
    else:
        slopes = positions[0]
    y = writer.attend(path, query, key, value, attention, bias=slopes, bias_dims=f"({attention.query_dims}) t")
    return writer.attention_result(f"{path}.dense", y, attention, bias)


def _attention(fields: ConfigFields, hidden: int, heads: int, groups: int | None = None) -> Attention:
    size, dropout = fields.head_size(hidden, heads), fields.number("attention_dropout", 0)
    return Attention(heads=heads, key_value_heads=groups, head_size=size, dropout=dropout)


def _layer_norm(fields: ConfigFields, writer: TransformerWriter, epsilon: str) -> partial[str]:
    return partial(writer.norm, function="layer_norm", epsilon=fields.number(epsilon, 1e-5))


def _interleaved(writer: TransformerWriter, path: str, x: str, attention: Attention, bias: bool) -> tuple[str, ...]:
    """Query, key and value out of one weight with rows (h 3 d)."""
    sizes = {"c": 3, **attention.sizes}
    y = writer.linear(f"{path}.query_key_value", x, "b s i, (h c d) i -> b s h c d", bias=bias, sizes=sizes)
    return writer.split_query_key_value(path, y, "b s h c d", attention)


def _slopes(writer: TransformerWriter, heads: int) -> str:
    """What distance adds to the scores of each head: a constant."""
    return writer.constant("distance_slopes", heads, writer.sizes["t"], dtype=writer.builder.dtype)
