"""The GPT family and its relatives written out: GPT-2, OPT, Megatron-LM's, GPT-NeoX, GPT-J, Phi, Falcon and Bloom.

Decoders with layer norms and MLPs without gates:

GPT-2                                    pre-norm, learned positions, one weight for query, key and value
OPT                                      learned positions, biases and ReLU
Megatron                                 GPT as Megatron-LM builds it, with its names of parameters; its BERT too, which
                                         is made of the same layers
GPT-NeoX, GPT-J, Phi, Falcon, Bloom      attention and MLP may run side by side; most have one weight for query, key and
                                         value; Phi and GPT-J have one norm for both branches
"""

from __future__ import annotations

from functools import partial

from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.transformer_writer import Attention, TransformerWriter
from phaze.ir import GraphBuilder, OpKind

__all__ = [
    "write_bloom",
    "write_falcon",
    "write_gpt2",
    "write_gpt_neox",
    "write_gptj",
    "write_megatron_bert",
    "write_megatron_gpt",
    "write_opt",
    "write_phi",
]


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
