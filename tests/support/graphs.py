"""Graphs for tests: tiny configs of every family, random graphs, values for arguments."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from phaze.frontends.transformer_config import graph_from_config
from phaze.ir import DType, Graph, GraphBuilder, Layer, OpKind, RecomputeMode, Role, Rule, kept_tensors

_SMALL = {"num_hidden_layers": 2, "hidden_size": 12, "num_attention_heads": 3, "vocab_size": 11}
_LLAMA = {**_SMALL, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 20}
_OPT = {**_SMALL, "model_type": "opt", "ffn_dim": 20, "max_position_embeddings": 8}
_BERT = {**_SMALL, "model_type": "bert", "intermediate_size": 20, "max_position_embeddings": 8}
_T5 = {"model_type": "t5", "num_layers": 2, "d_model": 12, "d_kv": 5, "num_heads": 3, "d_ff": 20, "vocab_size": 11}
_MEGATRON = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 3, "seq_length": 8, "vocab_size": 11}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    **_SMALL,
    "intermediate_size": 20,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
    "first_k_dense_replace": 1,
}
_PLAIN = {**_SMALL, "intermediate_size": 20}

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "deepseek_v3": {**_LATENT, "model_type": "deepseek_v3", "n_group": 2, "topk_group": 1},
    "bert with its language head": {**_BERT, "architectures": ["BertForMaskedLM"]},
    "gemma": {**_LLAMA, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 6},
    "gemma2": {**_LLAMA, "model_type": "gemma2", "head_dim": 6, "sliding_window": 3},
    "gpt_oss": {**_LLAMA, **_EXPERTS, "model_type": "gpt_oss", "sliding_window": 3},
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 8, "vocab_size": 11},
    "llama": {**_LLAMA, "model_type": "llama"},
    "mamba2": {
        **_SMALL,
        "model_type": "mamba2",
        "state_size": 4,
        "num_heads": 6,
        "head_dim": 4,
        "n_groups": 3,
        "chunk_size": 4,
    },
    "megatron-bert": {**_MEGATRON, "model_type": "megatron-bert"},
    "megatron-gpt": {**_MEGATRON, "model_type": "megatron-gpt"},
    "mistral": {**_LLAMA, "model_type": "mistral"},
    "mixtral": {**_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": _OPT,
    "opt narrow and post-norm": {**_OPT, "word_embed_proj_dim": 6, "do_layer_norm_before": False},
    "qwen2": {**_LLAMA, "model_type": "qwen2"},
    "t5": _T5,
    "t5 gated and untied": {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
"""Families that have all the parts between them: what must hold of every graph is tested on these."""

MORE_TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": {"model_type": "bloom", "n_layer": 2, "hidden_size": 12, "n_head": 3, "vocab_size": 11},
    "deepseek_v2": {**_LATENT, "model_type": "deepseek_v2", "q_lora_rank": None},
    "falcon": {**_SMALL, "model_type": "falcon"},
    "falcon with groups": {
        **_SMALL,
        "model_type": "falcon",
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "num_key_value_heads": 2,
        "new_decoder_architecture": True,
    },
    "gemma3_text": {**_LLAMA, "model_type": "gemma3_text", "sliding_window": 3, "sliding_window_pattern": 2},
    "gpt_neox": {**_PLAIN, "model_type": "gpt_neox"},
    "gptj": {"model_type": "gptj", "n_layer": 2, "n_embd": 12, "n_head": 3, "vocab_size": 11},
    "granite": {**_LLAMA, "model_type": "granite", "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "llama4_text": {
        **_LLAMA,
        **_EXPERTS,
        "model_type": "llama4_text",
        "intermediate_size_mlp": 10,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 4,
    },
    "mamba": {**_SMALL, "model_type": "mamba", "state_size": 4},
    "nemotron": {**_LLAMA, "model_type": "nemotron"},
    "olmo2": {**_LLAMA, "model_type": "olmo2"},
    "phi": {**_PLAIN, "model_type": "phi"},
    "internlm2": {**_LLAMA, "model_type": "internlm2"},
    "phi3": {**_LLAMA, "model_type": "phi3"},
    "qwen2_moe": {
        **_LLAMA,
        **_EXPERTS,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 6,
        "mlp_only_layers": [0],
    },
    "qwen3": {**_LLAMA, "model_type": "qwen3"},
    "qwen3_moe": {**_LLAMA, **_EXPERTS, "model_type": "qwen3_moe", "moe_intermediate_size": 10},
    "stablelm": {**_LLAMA, "model_type": "stablelm"},
    "starcoder2": {**_LLAMA, "model_type": "starcoder2"},
    "vit": {**_PLAIN, "model_type": "vit", "image_size": 6, "patch_size": 2, "num_labels": 3},
    "whisper": {
        **{f"{side}_{field}": 2 for side in ("encoder", "decoder") for field in ("layers", "ffn_dim")},
        **{f"{side}_attention_heads": 3 for side in ("encoder", "decoder")},
        "model_type": "whisper",
        "d_model": 12,
        "num_mel_bins": 4,
        "max_source_positions": 10,
        "max_target_positions": 8,
        "vocab_size": 11,
    },
}
"""The other families, which put the same parts together in other ways."""


def tiny_graph(name: str, micro_batch_size: int = 2) -> Graph:
    """A family at toy size: sequences of 8, or of the patches of an image."""
    length = None if name == "vit" else 8
    config = TINY_CONFIGS.get(name) or MORE_TINY_CONFIGS[name]
    return graph_from_config(config, name=name, sequence_length=length, micro_batch_size=micro_batch_size)


def argument_values(graph: Graph, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Random values for a graph's arguments; integers stay below every table's size, gradients of losses are 1."""
    generator = np.random.default_rng(seed)
    values: dict[str, NDArray[Any]] = {}
    for tensor in graph.tensors.values():
        if tensor.role is None:
            continue
        if tensor.id.endswith(".gradient"):
            values[tensor.id] = np.ones(tensor.shape)
        elif tensor.dtype.is_float:
            values[tensor.id] = generator.normal(size=tensor.shape) * 0.5
        else:
            values[tensor.id] = generator.integers(0, 2, tensor.shape)
    return values


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """A random rule: any factors with any marks, dimensions of 0 to 3 factors, some covered in part."""
    from phaze.ir import Dim, Factor, FactorKind

    names = [f"f{index}" for index in range(draw(st.integers(1, 6)))]
    factors = tuple(
        Factor(name, draw(st.integers(1, 9)), draw(st.sampled_from(FactorKind)), draw(st.booleans())) for name in names
    )

    def dims() -> tuple[Dim, ...]:
        left = list(draw(st.permutations(names)))
        found = []
        for _ in range(draw(st.integers(0, 3))):
            count = draw(st.integers(0, min(3, len(left))))
            size = draw(st.none() | st.integers(1, 50))
            found.append(Dim(tuple(left.pop() for _ in range(count)), size))
        return tuple(found)

    operands = tuple(dims() for _ in range(draw(st.integers(0, 3))))
    return Rule(operands, tuple(dims() for _ in range(draw(st.integers(1, 3)))), factors)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A random training graph: linear maps, functions, norms, dropout, masks, residuals; a mean as loss."""
    batch, length, width = (draw(st.integers(1, 4)) for _ in range(3))
    sizes = {"b": batch, "s": length, "i": width, "o": width}
    builder = GraphBuilder(
        "random", micro_batch_size=batch, dtype=draw(st.sampled_from([DType.FLOAT32, DType.BFLOAT16]))
    )
    first = builder.argument("x", (batch, length, width), Role.BATCH)
    weight = builder.parameter("first.weight", width)
    scaled = builder.rule("b s i, i -> b s i", sizes)
    made = [*builder.add("first", OpKind.ELEMENTWISE, "multiply", scaled, (first, weight))]
    for index in range(draw(st.integers(1, 8))):
        module = f"layers.{index}" if draw(st.booleans()) else ""
        x = draw(st.sampled_from(made))
        made.append(_random_op(draw, builder, f"op{index}", module, x, draw(st.sampled_from(made)), sizes))
    mean = builder.rule("b s i -> .", sizes)
    (loss,) = builder.add("loss", OpKind.REDUCTION, "mean", mean, (made[-1],))
    graph = builder.build((loss,), draw(st.lists(st.text(max_size=5), max_size=2)))
    return graph.with_backward()


def _random_op(
    draw: st.DrawFn, builder: GraphBuilder, name: str, module: str, x: str, other: str, sizes: dict[str, int]
) -> str:
    choice = draw(st.integers(0, 9))
    same = builder.rule("b s i -> b s i", sizes)
    if choice == 0:
        weight = builder.parameter(f"{name}.weight", sizes["o"], sizes["i"])
        rule = builder.rule("b s i, o i -> b s o", sizes)
        return builder.add(name, OpKind.CONTRACTION, "einsum", rule, (x, weight), module=module)[0]
    if choice == 1:
        function = draw(st.sampled_from(["gelu", "tanh", "silu", "sigmoid", "sin", "square"]))
        return builder.add(name, OpKind.ELEMENTWISE, function, same, (x,), module=module)[0]
    if choice == 2:
        rule = builder.rule("b s i, b s i -> b s i", sizes)
        function = draw(st.sampled_from(["add", "multiply", "subtract"]))
        return builder.add(name, OpKind.ELEMENTWISE, function, rule, (x, other), module=module)[0]
    if choice == 3:
        weight = builder.parameter(f"{name}.weight", sizes["i"])
        rule = builder.rule("b s i, i -> b s i", sizes, normalized="i")
        attributes = {"epsilon": 0.1}
        return builder.add(name, OpKind.NORM, "rms_norm", rule, (x, weight), module=module, attributes=attributes)[0]
    if choice == 4:
        rule = builder.rule("b s i -> b s i, b s i", sizes)
        attributes, dtypes = {"probability": 0.25}, (builder.dtype, DType.BOOL)
        return builder.add(
            name,
            OpKind.DROPOUT,
            "dropout",
            rule,
            (x,),
            module=module,
            attributes=attributes,
            dtypes=dtypes,
            results=("mask",),
        )[0]
    if choice == 5:
        rule = builder.rule("b s i -> b (s i)", sizes)
        (flat,) = builder.add(name, OpKind.VIEW, "reshape", rule, (x,), module=module)
        back = builder.rule("b (s i) -> b s i", sizes)
        return builder.add(f"{name}.back", OpKind.VIEW, "reshape", back, (flat,), module=module)[0]
    if choice == 6:
        rule = builder.rule("b s i, b s i -> b s u i", {**sizes, "u": 2}, whole="u")
        (pair,) = builder.add(name, OpKind.COPY, "stack", rule, (x, other), module=module)
        total = builder.rule("b s u i -> b s i", {**sizes, "u": 2})
        return builder.add(f"{name}.sum", OpKind.REDUCTION, "sum", total, (pair,), module=module)[0]
    if choice == 7:
        cut = Rule.of(f"b s@{sizes['s']} i -> b s i", {**sizes, "s": (sizes["s"] + 1) // 2}, whole="s")
        (part,) = builder.add(name, OpKind.VIEW, "slice", cut, (x,), module=module, attributes={"start": 0})
        pad = Rule((cut.results[0],), (cut.operands[0],), cut.factors)
        return builder.add(f"{name}.pad", OpKind.COPY, "pad", pad, (part,), module=module, attributes={"start": 0})[0]
    if choice == 8:
        mask = builder.argument(f"{name}.mask", (sizes["s"], 1), Role.OTHER, DType.BOOL)
        weight = builder.parameter(f"{name}.weight", sizes["i"])
        rule = builder.rule("s 1, b s i, i -> b s i", sizes)
        return builder.add(name, OpKind.ELEMENTWISE, "where", rule, (mask, x, weight), module=module)[0]
    rule = builder.rule("b s i -> b s i", sizes, normalized="i")
    return builder.add(name, OpKind.SOFTMAX, "softmax", rule, (x,), module=module)[0]


def kept_bytes(graph: Graph, layer: Layer, mode: RecomputeMode) -> int:
    """Bytes of what a layer keeps between forward and backward."""
    return sum(graph.tensors[tensor_id].size_bytes for tensor_id in kept_tensors(graph, layer, mode))
