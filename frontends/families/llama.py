"""The Llama family written out, and its many relatives: rotary positions, shared keys, gated MLPs or experts.

What tells the relatives apart stands in `RELATIVES`, by the `model_type` of configs; which layers have experts, and
which see a window only, is read from each config.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from phaze.errors import ImportModelError
from phaze.frontends.families.config_fields import ConfigFields, attention_spans, layers_with_experts, note_spans
from phaze.frontends.families.experts import Experts, read_experts, write_experts
from phaze.frontends.families.transformer_writer import Attention, PrepareHeads, TransformerWriter
from phaze.ir import GraphBuilder

__all__ = ["RELATIVES", "write_llama"]


class Norms(StrEnum):
    """Where a block has norms: before each branch, behind it, or both."""

    BEFORE = "before"
    BEHIND = "behind"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """What a family differs in from Llama.

    `plain_mlp` names the two linear maps of an MLP without a gate. `head_norm` is `head` where queries and keys are
    normed in each head, `all` where over all heads together, `unweighted` where in each head, without a weight and
    after the rotation. Families that fuse heads have one weight for query, key and value, those that fuse gates one for
    gate and up.
    """

    norm: str = "rms_norm"
    epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6)
    norm_offset: int = 0
    norms: Norms = Norms.BEFORE
    head_norm: str = ""
    key_value_heads: int | None = None
    bias: tuple[str, bool] = ("attention_bias", False)
    has_query_key_value_bias: bool = False
    plain_mlp: tuple[str, str] | None = None
    mlp: str = "mlp"
    activation: tuple[str, str] = ("hidden_act", "silu")
    scales_embedding: bool = False
    is_tied: bool = False
    fuses_heads: bool = False
    fuses_gates: bool = False
    has_sinks: bool = False


_GEMMA = Relative(
    norm_offset=1, activation=("hidden_activation", "gelu_pytorch_tanh"), scales_embedding=True, is_tied=True
)

RELATIVES: dict[str, Relative] = {
    "gemma": replace(_GEMMA, activation=("hidden_act", "gelu_pytorch_tanh")),
    "gemma2": replace(_GEMMA, norms=Norms.BOTH),
    "gemma3_text": replace(_GEMMA, norms=Norms.BOTH, head_norm="head"),
    "gpt_oss": Relative(bias=("attention_bias", True), epsilon=("rms_norm_eps", 1e-5), has_sinks=True),
    "granite": Relative(),
    "internlm2": Relative(bias=("bias", True), fuses_heads=True),
    "llama": Relative(),
    "llama4_text": Relative(epsilon=("rms_norm_eps", 1e-5), head_norm="unweighted", mlp="feed_forward"),
    "mistral": Relative(key_value_heads=8),
    "mixtral": Relative(key_value_heads=8),
    "nemotron": Relative(
        norm="layer_norm",
        epsilon=("norm_eps", 1e-5),
        norm_offset=1,
        plain_mlp=("up_proj", "down_proj"),
        activation=("hidden_act", "relu2"),
    ),
    "olmo2": Relative(norms=Norms.BEHIND, head_norm="all", epsilon=("rms_norm_eps", 1e-5)),
    "phi3": Relative(fuses_heads=True, fuses_gates=True, epsilon=("rms_norm_eps", 1e-5)),
    "qwen2": Relative(has_query_key_value_bias=True),
    "qwen2_moe": Relative(bias=("qkv_bias", True), has_query_key_value_bias=True),
    "qwen3": Relative(head_norm="head"),
    "qwen3_moe": Relative(head_norm="head"),
    "stablelm": Relative(norm="layer_norm", epsilon=("layer_norm_eps", 1e-5), bias=("use_qkv_bias", False)),
    "starcoder2": Relative(
        norm="layer_norm",
        epsilon=("norm_epsilon", 1e-5),
        bias=("use_bias", True),
        plain_mlp=("c_fc", "c_proj"),
        activation=("hidden_act", "gelu_pytorch_tanh"),
        is_tied=True,
    ),
}
"""By `model_type`."""

LlamaBranch = Callable[[str, str], str]
"""Writes a branch of a block, given its path and what comes in."""


def write_llama(fields: ConfigFields, builder: GraphBuilder) -> str:
    """Llama and its relatives."""
    kind = fields.text("model_type", "llama")
    relative, hidden = RELATIVES[kind], fields.size("hidden_size")
    attention = _read_attention(fields, hidden, relative)
    writer = TransformerWriter.for_config(fields, builder, i=hidden, f=_mlp_size(fields, kind))
    layers = fields.count("num_hidden_layers")
    spans = attention_spans(fields, kind, layers, writer.sizes["s"])
    note_spans(builder, spans)
    with_experts, experts = layers_with_experts(fields, kind, layers), _read_experts(fields, kind)
    norm, mlp = _norm_of(fields, writer, relative), _mlp_of(fields, writer, relative)
    tables = writer.rotary_tables(attention.head_size)
    x = writer.embedding("model.embed_tokens", writer.batch("input_ids"), writer.sizes["v"])
    multiplier = math.sqrt(hidden) if relative.scales_embedding else fields.positive("embedding_multiplier", 1.0)
    x = x if multiplier in (None, 1.0) else writer.scale("model.embed_tokens", x, multiplier)
    for index in range(layers):
        span = spans[index]
        seen = replace(attention, window=span.window, chunk=span.chunk)
        attend = _attention_of(fields, writer, relative, seen, tables if span.has_positions else None)
        feed = _experts_of(writer, experts) if experts is not None and with_experts[index] else mlp
        x = _write_block(fields, writer, relative, norm, f"model.layers.{index}", x, attend, feed)
    x = norm("model.norm", x)
    tied = fields.tied_table("model.embed_tokens.weight", relative.is_tied)
    cap = fields.positive("final_logit_softcapping", 30.0 if kind == "gemma2" else None)
    return writer.head("lm_head", x, writer.batch("labels"), tied_to=tied, softcap=cap)


def _write_block(
    fields: ConfigFields,
    writer: TransformerWriter,
    relative: Relative,
    norm: LlamaBranch,
    path: str,
    x: str,
    attend: LlamaBranch,
    feed: LlamaBranch,
) -> str:
    """Attention and MLP, each added to the residual stream, with norms where the family has them."""
    scale = fields.positive("residual_multiplier", 1.0)
    before = ("input_layernorm", "post_attention_layernorm")
    behind = ("", "")
    if relative.norms is Norms.BEHIND:
        before, behind = ("", ""), ("post_attention_layernorm", "post_feedforward_layernorm")
    elif relative.norms is Norms.BOTH:
        before = ("input_layernorm", "pre_feedforward_layernorm")
        behind = ("post_attention_layernorm", "post_feedforward_layernorm")
    branches = (("self_attn", attend), (relative.mlp, feed))
    for (name, branch), first, last in zip(branches, before, behind, strict=True):
        y = branch(f"{path}.{name}", norm(f"{path}.{first}", x) if first else x)
        y = norm(f"{path}.{last}", y) if last else y
        y = y if scale in (None, 1.0) else writer.scale(f"{path}.{name}", y, scale)
        x = writer.residual(path if name == "self_attn" else f"{path}.{name}", x, y)
    return x


def _norm_of(fields: ConfigFields, writer: TransformerWriter, relative: Relative) -> LlamaBranch:
    epsilon = fields.number(*relative.epsilon)
    return partial(writer.norm, function=relative.norm, epsilon=epsilon, offset=relative.norm_offset)


def _read_attention(fields: ConfigFields, hidden: int, relative: Relative) -> Attention:
    heads = fields.size("num_attention_heads")
    key_value_heads = fields.key_value_heads(heads, relative.key_value_heads or heads)
    size = fields.head_size(hidden, heads)
    if size % 2:
        raise ImportModelError(
            f"{fields.where}: rotary positions rotate pairs, so heads of size {size} are not possible."
        )
    kind = fields.text("model_type", "llama")
    pre_scale = fields.positive("query_pre_attn_scalar", 256.0 if kind in ("gemma2", "gemma3_text") else None)
    return Attention(
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=size,
        scale=fields.positive("attention_multiplier", None) if pre_scale is None else pre_scale**-0.5,
        dropout=fields.number("attention_dropout", 0),
        softcap=fields.positive("attn_logit_softcapping", 50.0 if kind == "gemma2" else None),
    )


def _prepare_heads(
    fields: ConfigFields,
    writer: TransformerWriter,
    relative: Relative,
    attention: Attention,
    tables: tuple[str, str] | None,
) -> PrepareHeads:
    """Norms of queries and keys, and their rotation."""
    epsilon = fields.number(*relative.epsilon)
    norm = partial(
        writer.norm, function="rms_norm", epsilon=epsilon, offset=relative.norm_offset, sizes=attention.sizes
    )

    def prepare(path: str, x: str, heads: str) -> str:
        norm_path = f"{path.removesuffix('_proj')}_norm"
        if relative.head_norm == "head":
            x = norm(norm_path, x, dims=f"b s {heads} d", over="d")
        elif relative.head_norm == "all":
            x = norm(norm_path, x, dims=f"b s {heads} d", over=f"({heads} d)")
        if tables is not None:
            x = writer.rotary(path, x, heads, tables, attention)
            if relative.head_norm == "unweighted" and fields.flag("use_qk_norm", True):
                x = norm(norm_path, x, dims=f"b s {heads} d", over="d", has_weight=False)
        return x

    return prepare


def _attention_of(
    fields: ConfigFields,
    writer: TransformerWriter,
    relative: Relative,
    attention: Attention,
    tables: tuple[str, str] | None,
) -> LlamaBranch:
    prepare = _prepare_heads(fields, writer, relative, attention, tables)
    bias = fields.flag(*relative.bias)

    def attend(path: str, x: str) -> str:
        if relative.fuses_heads:
            return _fused_attention(writer, path, x, attention, prepare, bias=bias)
        sinks = writer.builder.parameter(f"{path}.sinks", attention.heads) if relative.has_sinks else None
        only_inputs = relative.has_query_key_value_bias or relative.bias[0] == "use_qkv_bias"
        return writer.project_and_attend(
            path,
            x,
            x,
            attention,
            out="o_proj",
            bias=bias or (relative.has_query_key_value_bias and relative.bias[0] == "attention_bias"),
            out_bias=fields.flag("attention_bias", False) if only_inputs else bias,
            prepare=prepare,
            sinks=sinks,
        )

    return attend


def _fused_attention(
    writer: TransformerWriter, path: str, x: str, attention: Attention, prepare: PrepareHeads, *, bias: bool
) -> str:
    """Attention whose query, key and value come out of one weight, all query heads first."""
    sizes, heads, groups = attention.sizes, attention.heads, attention.sizes["g"]
    rows = heads + 2 * groups
    text = "b s i, (x d) i -> b s x d"
    y = writer.linear(f"{path}.qkv_proj", x, text, sizes={"x": rows, **sizes}, bias=bias)
    query_dims = "h" if attention.query_dims == "h" else "(g r)"
    g = attention.key_dims
    query = writer.slice(path, y, f"b s {query_dims}@{rows} d -> b s {query_dims} d", 0, sizes)
    key = writer.slice(path, y, f"b s {g}@{rows} d -> b s {g} d", heads, sizes)
    value = writer.slice(path, y, f"b s {g}@{rows} d -> b s {g} d", heads + groups, sizes)
    query, key = prepare(f"{path}.query", query, query_dims), prepare(f"{path}.key", key, g)
    y = writer.attend(path, query, key, value, attention, query_dims=query_dims)
    return writer.attention_result(f"{path}.o_proj", y, attention, bias=bias)


def _mlp_of(fields: ConfigFields, writer: TransformerWriter, relative: Relative) -> LlamaBranch:
    activation, kind = fields.activation(*relative.activation), fields.text("model_type", "llama")
    bias = fields.flag("use_bias", True) if kind == "starcoder2" else fields.flag("mlp_bias", False)

    def feed(path: str, x: str) -> str:
        if relative.plain_mlp is not None:
            return writer.mlp(path, x, relative.plain_mlp, activation, bias=bias)
        if relative.fuses_gates:
            return _fused_mlp(writer, path, x, activation)
        sizes = {"f": fields.size("intermediate_size_mlp")} if kind == "llama4_text" else None
        return writer.gated_mlp(path, x, activation, bias=bias, sizes=sizes)

    return feed


def _fused_mlp(writer: TransformerWriter, path: str, x: str, activation: str) -> str:
    """A gated MLP whose gate and up come out of one weight."""
    sizes = {"u": 2}
    y = writer.linear(f"{path}.gate_up_proj", x, "b s i, (u f) i -> b s u f", sizes=sizes)
    gate, up = writer.split(path, y, "b s u f -> b s f, b s f", ("gate", "up"), "u", sizes=sizes)
    gate = writer.activate(path, activation, gate)
    y = writer.elementwise(path, "multiply", "b s f, b s f -> b s f", gate, up)
    return writer.linear(f"{path}.down_proj", y, "b s f, i f -> b s i")


def _experts_of(writer: TransformerWriter, experts: Experts) -> LlamaBranch:
    return partial(write_experts, writer, experts=experts)


def _mlp_size(fields: ConfigFields, kind: str) -> int:
    if kind in ("qwen2_moe", "qwen3_moe"):
        return fields.size("intermediate_size", default=fields.size("moe_intermediate_size"))
    return fields.size("intermediate_size")


def _read_experts(fields: ConfigFields, kind: str) -> Experts | None:
    """The experts of the layers that have any."""
    if kind == "mixtral":
        return read_experts(fields, size=fields.size("intermediate_size"))
    if kind == "qwen3_moe":
        return read_experts(fields, size=fields.size("moe_intermediate_size"))
    if kind == "qwen2_moe":
        shared = fields.size("shared_expert_intermediate_size")
        size = fields.size("moe_intermediate_size")
        return read_experts(
            fields, size=size, shared="shared_expert", shared_size=shared, shared_gate="shared_expert_gate"
        )
    if kind == "gpt_oss":
        size = fields.size("intermediate_size")
        return read_experts(
            fields, size=size, router="router", scores="chosen_softmax", is_input_first=True, has_bias=True
        )
    if kind == "llama4_text":
        size = fields.size("intermediate_size")
        return read_experts(
            fields,
            size=size,
            router="router",
            scores="sigmoid",
            is_input_first=True,
            shared="shared_expert",
            shared_size=size,
        )
    return None
