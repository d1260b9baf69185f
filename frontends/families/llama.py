"""The Llama family written out, with Mistral, Qwen2, Gemma and Mixtral: rotary positions, gated MLPs or experts."""

from __future__ import annotations

import math
from functools import partial

from phaze.errors import ImportModelError
from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.transformer_writer import Attention, TransformerWriter
from phaze.ir import DType, GraphBuilder, OpKind

__all__ = ["write_llama"]


def write_llama(fields: ConfigFields, builder: GraphBuilder) -> str:
    """Llama and its relatives (Mistral, Qwen2, Gemma, Mixtral): rotary positions, shared keys, gated MLP or experts."""
    kind = fields.text("model_type", "llama")
    hidden = fields.size("hidden_size")
    attention = _read_attention(fields, hidden, kind)
    writer = TransformerWriter.for_config(fields, builder, i=hidden, f=fields.size("intermediate_size"))
    window = fields.size("sliding_window", default=writer.sizes["s"])
    if window < writer.sizes["s"] and fields.flag("use_sliding_window", True):
        builder.notes.append(f"sliding_window={window} is not modelled: attention to all positions is counted")
    norm = partial(
        writer.norm, function="rms_norm", epsilon=fields.number("rms_norm_eps", 1e-6), offset=int(kind == "gemma")
    )
    angles = (writer.sizes["s"], attention.head_size)
    attend = partial(
        writer.project_and_attend,
        attention=attention,
        out="o_proj",
        bias=fields.flag("attention_bias", kind == "qwen2"),
        out_bias=fields.flag("attention_bias", False),
        rotary_tables=(
            writer.constant("rotary_cosine", *angles, dtype=builder.dtype),
            writer.constant("rotary_sine", *angles, dtype=builder.dtype),
        ),
    )
    write_mlp = _write_experts if kind == "mixtral" else _write_gated_mlp
    x = writer.embedding("model.embed_tokens", writer.batch("input_ids"), writer.sizes["v"])
    if kind == "gemma":
        x = writer.scale("model.embed_tokens", x, math.sqrt(hidden))
    for index in range(fields.count("num_hidden_layers")):
        path = f"model.layers.{index}"
        y = norm(f"{path}.input_layernorm", x)
        x = writer.residual(path, x, attend(f"{path}.self_attn", y, y))
        y = write_mlp(fields, writer, f"{path}.mlp", norm(f"{path}.post_attention_layernorm", x))
        x = writer.residual(f"{path}.mlp", x, y)
    x = norm("model.norm", x)
    tied = fields.tied_table("model.embed_tokens.weight", kind == "gemma")
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied)


def _read_attention(fields: ConfigFields, hidden: int, kind: str) -> Attention:
    heads = fields.size("num_attention_heads")
    key_value_heads = fields.size("num_key_value_heads", default=8 if kind in ("mistral", "mixtral") else heads)
    size = fields.head_size(hidden, heads)
    if heads % key_value_heads:
        raise ImportModelError(
            f"{heads} attention heads cannot share {key_value_heads} key/value heads: not a multiple."
        )
    if size % 2:
        raise ImportModelError(
            f"{fields.where}: rotary positions rotate pairs, so heads of size {size} are not possible."
        )
    dropout = fields.number("attention_dropout", 0)
    return Attention(heads=heads, key_value_heads=key_value_heads, head_size=size, dropout=dropout)


def _write_gated_mlp(fields: ConfigFields, writer: TransformerWriter, path: str, x: str) -> str:
    default = "gelu_pytorch_tanh" if fields.text("model_type", "") == "gemma" else "silu"
    bias, activation = fields.flag("mlp_bias", False), fields.activation("hidden_act", default)
    gate = writer.linear(f"{path}.gate_proj", x, "b s i, f i -> b s f", bias=bias)
    up = writer.linear(f"{path}.up_proj", x, "b s i, f i -> b s f", bias=bias)
    gate = writer.elementwise(path, activation, "b s f -> b s f", gate)
    y = writer.elementwise(path, "multiply", "b s f, b s f -> b s f", gate, up)
    return writer.linear(f"{path}.down_proj", y, "b s f, i f -> b s i", bias=bias)


def _write_experts(fields: ConfigFields, writer: TransformerWriter, path: str, x: str) -> str:
    """Experts with balanced load: each takes ceil(tokens x experts per token / experts) tokens of every sequence."""
    experts, chosen = fields.size("num_local_experts"), fields.size("num_experts_per_tok")
    if chosen > experts:
        raise ImportModelError(f"{fields.where}: num_experts_per_tok is {chosen}, but there are {experts} experts.")
    rows = -(-writer.sizes["s"] * chosen // experts)
    sizes = {"e": experts, "k": chosen, "c": rows, "u": 2}
    activation = fields.activation("hidden_act", "silu")
    weights, ids = _route(writer, f"{path}.gate", x, sizes)
    text, experts_path = "b s i, b s k -> e b c i", f"{path}.experts"
    (y,) = writer.op(experts_path, "dispatch", OpKind.LOOKUP, "dispatch", text, x, ids, sizes=sizes, lookup="s k")
    y = _expert_matmul(writer, experts_path, "gate_up_proj", y, "e b c i, e (u f) i -> e b c u f", sizes)
    gate, up = writer.split(experts_path, y, "e b c u f -> e b c f, e b c f", ("gate", "up"), "u", sizes=sizes)
    gate = writer.elementwise(experts_path, activation, "e b c f -> e b c f", gate, sizes=sizes)
    y = writer.elementwise(experts_path, "multiply", "e b c f, e b c f -> e b c f", gate, up, sizes=sizes)
    y = _expert_matmul(writer, experts_path, "down_proj", y, "e b c f, e i f -> e b c i", sizes)
    text = "e b c i, b s k, b s k -> b s i"
    return writer.op(
        experts_path, "combine", OpKind.LOOKUP, "combine", text, y, weights, ids, sizes=sizes, lookup="e c"
    )[0]


def _expert_matmul(writer: TransformerWriter, path: str, name: str, x: str, text: str, sizes: dict[str, int]) -> str:
    rule = writer.builder.rule(text, {**writer.sizes, **sizes})
    weight = writer.builder.parameter(f"{path}.{name}", *rule.shape(rule.operands[1]))
    return writer.builder.add(f"{path}.{name}.matmul", OpKind.CONTRACTION, "einsum", rule, (x, weight), module=path)[0]


def _route(writer: TransformerWriter, path: str, x: str, sizes: dict[str, int]) -> tuple[str, str]:
    """Scores of the chosen experts, summing to 1, and which they are."""
    logits = writer.linear(path, x, "b s i, e i -> b s e", sizes=sizes)
    (scores,) = writer.op(
        path, "softmax", OpKind.SOFTMAX, "softmax", "b s e -> b s e", logits, sizes=sizes, normalized="e"
    )
    weights, ids = writer.op(
        path,
        "top_k",
        OpKind.SORT,
        "top_k",
        "b s e -> b s k, b s k",
        scores,
        sizes=sizes,
        dtypes=(writer.builder.dtype, DType.INT64),
        results=("ids",),
        whole="e k",
    )
    (total,) = writer.op(path, "total", OpKind.REDUCTION, "sum", "b s k -> b s", weights, sizes=sizes)
    return writer.elementwise(path, "divide", "b s k, b s -> b s k", weights, total, sizes=sizes), ids
