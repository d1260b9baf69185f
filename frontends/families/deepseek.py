"""The DeepSeek families (V2, V3) written out: latent attention, and experts behind the first dense layers.

Queries, and keys with values, come out of narrow latents; a part of each key is rotated and shared by all heads. The
multi-token head of V3 is not part of the reference implementation: it is written where the config has
`with_multi_token_heads`, as many modules as `num_nextn_predict_layers` says (arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from phaze.frontends.families.config_fields import ConfigFields, layers_with_experts
from phaze.frontends.families.experts import Experts, read_experts, write_experts
from phaze.frontends.families.transformer_writer import Attention, TransformerWriter
from phaze.ir import GraphBuilder, OpKind

__all__ = ["write_deepseek"]

Norm = Callable[..., str]


def write_deepseek(fields: ConfigFields, builder: GraphBuilder) -> str:
    """DeepSeek-V2 and V3."""
    kind, hidden = fields.text("model_type", "deepseek_v3"), fields.size("hidden_size")
    attention, sizes = _read_attention(fields)
    writer = TransformerWriter.for_config(fields, builder, i=hidden, f=fields.size("intermediate_size"), **sizes)
    layers = fields.count("num_hidden_layers")
    with_experts, experts = layers_with_experts(fields, kind, layers), _read_experts(fields, kind)
    norm = partial(writer.norm, function="rms_norm", epsilon=fields.number("rms_norm_eps", 1e-6))
    tables = (writer.rotary_tables(attention.head_size), writer.rotary_tables(sizes["p"], "shared_rotary"))
    write_block = partial(_write_block, fields, writer, norm, attention, tables)
    x = writer.embedding("model.embed_tokens", writer.batch("input_ids"), writer.sizes["v"])
    for index in range(layers):
        x = write_block(f"model.layers.{index}", x, experts if with_experts[index] else None)
    tied = fields.tied_table("model.embed_tokens.weight", False)
    head = partial(writer.head, tied_to=tied or builder.parameter("lm_head.weight", writer.sizes["v"], hidden))
    loss = head("lm_head", norm("model.norm", x), writer.batch("labels"))
    if fields.flag("with_multi_token_heads", False):
        for index in range(fields.count("num_nextn_predict_layers", default=1)):
            path = f"model.layers.{layers + index}"
            x = _join_next_token(writer, norm, path, x, index)
            x = write_block(path, x, experts)
            next_loss = head(
                f"{path}.shared_head", norm(f"{path}.shared_head.norm", x), writer.batch(f"labels_{index + 2}")
            )
            loss = writer.elementwise("loss", "add", ". , . -> .", loss, next_loss)
    return loss


def _join_next_token(writer: TransformerWriter, norm: Norm, path: str, x: str, index: int) -> str:
    """What a multi-token module starts from: the stream so far beside the embedding of the next token."""
    ids, table = writer.batch(f"input_ids_{index + 2}"), "model.embed_tokens.weight"
    token = writer.embedding(f"{path}.embed_tokens", ids, writer.sizes["v"], table=table)
    token, x = norm(f"{path}.enorm", token), norm(f"{path}.hnorm", x)
    sizes = {"o": 2}
    (both,) = writer.op(path, "joined", OpKind.COPY, "stack", "b s i, b s i -> b s o i", token, x, sizes=sizes)
    return writer.linear(f"{path}.eh_proj", both, "b s o i, j (o i) -> b s j", sizes={"j": writer.sizes["i"], **sizes})


def _write_block(
    fields: ConfigFields,
    writer: TransformerWriter,
    norm: Norm,
    attention: Attention,
    tables: tuple[tuple[str, str], tuple[str, str]],
    path: str,
    x: str,
    experts: Experts | None,
) -> str:
    y = norm(f"{path}.input_layernorm", x)
    x = writer.residual(path, x, _latent_attention(fields, writer, norm, attention, tables, f"{path}.self_attn", y))
    y = norm(f"{path}.post_attention_layernorm", x)
    if experts is None:
        y = writer.gated_mlp(f"{path}.mlp", y, fields.activation("hidden_act", "silu"))
    else:
        y = write_experts(writer, f"{path}.mlp", y, experts)
    return writer.residual(f"{path}.mlp", x, y)


def _read_attention(fields: ConfigFields) -> tuple[Attention, dict[str, int]]:
    """Attention and the sizes of its parts.

    n is the part of a key's head that is not rotated, p the rotated one, y the latent of queries, l that of keys.
    """
    plain, rotated = fields.size("qk_nope_head_dim", default=128), fields.size("qk_rope_head_dim", default=64)
    attention = Attention(
        heads=fields.size("num_attention_heads"),
        head_size=plain + rotated,
        value_size=fields.size("v_head_dim", default=128),
        dropout=fields.number("attention_dropout", 0),
    )
    sizes = {"n": plain, "p": rotated, "l": fields.size("kv_lora_rank", default=512)}
    # A config without the field has the reference's latent; null stands for queries without one.
    if fields.values.get("q_lora_rank", 1536) is not None:
        sizes["y"] = fields.size("q_lora_rank", default=1536)
    return attention, sizes


def _latent_attention(
    fields: ConfigFields,
    writer: TransformerWriter,
    norm: Norm,
    attention: Attention,
    tables: tuple[tuple[str, str], tuple[str, str]],
    path: str,
    x: str,
) -> str:
    """Queries and keys come out of narrow latents."""
    bias, sizes = fields.flag("attention_bias", False), attention.sizes
    if "y" in writer.sizes:
        y = writer.linear(f"{path}.q_a_proj", x, "b s i, y i -> b s y", bias=bias)
        y = norm(f"{path}.q_a_layernorm", y, dims="b s y", over="y")
        query = writer.linear(f"{path}.q_b_proj", y, "b s y, (h d) y -> b s h d", sizes=sizes)
    else:
        query = writer.linear(f"{path}.q_proj", x, "b s i, (h d) i -> b s h d", sizes=sizes)
    query = writer.rotary(f"{path}.query", query, "h", tables[0], attention)
    key, value = _keys_and_values(writer, norm, attention, tables[1], path, x, bias)
    y = writer.attend(path, query, key, value, attention)
    return writer.attention_result(f"{path}.o_proj", y, attention, bias)


def _keys_and_values(
    writer: TransformerWriter,
    norm: Norm,
    attention: Attention,
    tables: tuple[str, str],
    path: str,
    x: str,
    bias: bool,
) -> tuple[str, str]:
    """Keys of an own part for each head and a rotated part for all of them; values."""
    sizes, plain = attention.sizes, writer.sizes["n"]
    latent, rotated = writer.sizes["l"], writer.sizes["p"]
    both = {"q": latent + rotated}
    y = writer.linear(f"{path}.kv_a_proj_with_mqa", x, "b s i, q i -> b s q", bias=bias, sizes=both)
    shared = writer.slice(path, y, f"b s p@{latent + rotated} -> b s p", latent)
    y = writer.slice(path, y, f"b s l@{latent + rotated} -> b s l", 0)
    text = "b s p, s p, s p -> b s p"
    (shared,) = writer.op(f"{path}.key", "rotary", OpKind.ELEMENTWISE, "rotary", text, shared, *tables, whole="p")
    (shared,) = writer.op(f"{path}.key", "shared", OpKind.VIEW, "expand", "b s p -> b s h p", shared, sizes=sizes)
    y = norm(f"{path}.kv_a_layernorm", y, dims="b s l", over="l")
    width = plain + sizes["z"]
    y = writer.linear(f"{path}.kv_b_proj", y, "b s l, (h w) l -> b s h w", sizes={**sizes, "w": width})
    own = writer.slice(f"{path}.key", y, f"b s h n@{width} -> b s h n", 0, sizes)
    value = writer.slice(f"{path}.value", y, f"b s h z@{width} -> b s h z", plain, sizes)
    text = f"b s h d@{plain}, b s h d@{rotated} -> b s h d"
    (key,) = writer.op(f"{path}.key", "whole", OpKind.COPY, "concatenate", text, own, shared, sizes=sizes, whole="d")
    return key, value


def _read_experts(fields: ConfigFields, kind: str) -> Experts:
    size = fields.size("moe_intermediate_size")
    return read_experts(
        fields,
        size=size,
        scores="sigmoid" if kind == "deepseek_v3" else "softmax",
        shared="shared_experts",
        shared_size=size * fields.size("n_shared_experts", default=1),
    )
