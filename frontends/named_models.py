"""The built-in models (`gpt2-xl`, `llama3.1-405b`, ...): the config that each name stands for.

Dimensions are those of the `config.json` that a model's makers published on Hugging Face, or of their report where
there is none (GPT-3: arXiv:2005.14165, Nemotron-4: arXiv:2402.16819 and 2406.11704, Megatron: arXiv:1909.08053). Of
models that also see, only the language model is meant. `seq_length` is the length of the main phase of pre-training
where a report says it; elsewhere (Llama 4, gpt-oss, Mixtral, Mistral Nemo, Small and Large) a usual length is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NAMED_CONFIGS"]

Config = dict[str, object]


def _megatron(kind: str, layers: int, hidden: int, heads: int, length: int, vocabulary: int) -> Config:
    return {
        "model_type": kind,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": length,
        "max_position_embeddings": length,
        "vocab_size": vocabulary,
    }


def _gpt2(layers: int, hidden: int, heads: int) -> Config:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads}
    return {"model_type": "gpt2", **sizes, "n_positions": 1024, "vocab_size": 50257}


def _decoder(kind: str, layers: int, hidden: int, intermediate: int, heads: int, **others: object) -> Config:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    return {"model_type": kind, **sizes, "num_attention_heads": heads, **others}


def _bert(layers: int, hidden: int, heads: int) -> Config:
    sizes = {"max_position_embeddings": 512, "vocab_size": 30522}
    return _decoder("bert", layers, hidden, 4 * hidden, heads, **sizes)


def _llama(layers: int, hidden: int, intermediate: int, heads: int, **others: object) -> Config:
    return _decoder("llama", layers, hidden, intermediate, heads, rms_norm_eps=1e-5, **others)


def _llama2(layers: int, hidden: int, intermediate: int, heads: int, **others: object) -> Config:
    return _llama(layers, hidden, intermediate, heads, vocab_size=32000, max_position_embeddings=4096, **others)


def _llama3(layers: int, hidden: int, intermediate: int, heads: int, **others: object) -> Config:
    sizes = {"num_key_value_heads": 8, "vocab_size": 128256, "seq_length": 8192}
    return _llama(layers, hidden, intermediate, heads, **sizes, **others)


def _llama4(experts: int, *, step: int, has_head_norm: bool) -> Config:
    return _decoder(
        "llama4_text",
        48,
        5120,
        8192,
        40,
        intermediate_size_mlp=16384,
        num_key_value_heads=8,
        head_dim=128,
        num_local_experts=experts,
        num_experts_per_tok=1,
        interleave_moe_layer_step=step,
        use_qk_norm=has_head_norm,
        vocab_size=202048,
        seq_length=8192,
    )


def _mistral(layers: int, hidden: int, intermediate: int, heads: int, **others: object) -> Config:
    sizes = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, **others}
    return _decoder("mistral", layers, hidden, intermediate, heads, **sizes)


def _mixtral(layers: int, hidden: int, intermediate: int, heads: int, length: int) -> Config:
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "seq_length": length}
    return {**_mistral(layers, hidden, intermediate, heads, **sizes), "model_type": "mixtral"}


def _qwen2(layers: int, hidden: int, intermediate: int, heads: int, groups: int, **others: object) -> Config:
    sizes = {"num_key_value_heads": groups, "seq_length": 4096, "vocab_size": 152064, **others}
    return _decoder("qwen2", layers, hidden, intermediate, heads, **sizes)


def _small_qwen2(layers: int, hidden: int, intermediate: int, heads: int) -> Config:
    return _qwen2(layers, hidden, intermediate, heads, 2, vocab_size=151936, tie_word_embeddings=True)


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, groups: int = 8, **others: object) -> Config:
    sizes = {"num_key_value_heads": groups, "head_dim": 128, "seq_length": 4096, "vocab_size": 151936, **others}
    return _decoder("qwen3", layers, hidden, intermediate, heads, **sizes)


def _qwen3_moe(layers: int, hidden: int, intermediate: int, expert: int, heads: int) -> Config:
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return {**_qwen3(layers, hidden, intermediate, heads, 4, **sizes), "model_type": "qwen3_moe"}


def _qwen2_moe(layers: int, hidden: int, expert: int, shared: int, heads: int, groups: int, **others: object) -> Config:
    sizes = {"moe_intermediate_size": expert, "shared_expert_intermediate_size": shared, "vocab_size": 151936, **others}
    return {**_qwen2(layers, hidden, shared, heads, groups, **sizes), "model_type": "qwen2_moe"}


def _gemma(kind: str, layers: int, hidden: int, intermediate: int, heads: int, groups: int, **others: object) -> Config:
    sizes = {"num_key_value_heads": groups, "head_dim": 256, "seq_length": 8192, "vocab_size": 256000, **others}
    return _decoder(kind, layers, hidden, intermediate, heads, **sizes)


def _gemma3(layers: int, hidden: int, intermediate: int, heads: int, groups: int, **others: object) -> Config:
    sizes = {"sliding_window": 1024, "seq_length": 32768, "vocab_size": 262208, **others}
    return _gemma("gemma3_text", layers, hidden, intermediate, heads, groups, **sizes)


def _deepseek(kind: str, layers: int, hidden: int, intermediate: int, heads: int, **others: object) -> Config:
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return _decoder(kind, layers, hidden, intermediate, heads, **latent, seq_length=4096, **others)


def _gpt_oss(layers: int, experts: int) -> Config:
    sizes = {"num_local_experts": experts, "num_experts_per_tok": 4, "num_key_value_heads": 8, "head_dim": 64}
    window = {"sliding_window": 128, "vocab_size": 201088, "seq_length": 4096}
    return _decoder("gpt_oss", layers, 2880, 2880, 64, **sizes, **window)


def _opt(layers: int, hidden: int, heads: int, **others: object) -> Config:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_dim": 4 * hidden}
    return {"model_type": "opt", **sizes, "max_position_embeddings": 2048, "vocab_size": 50272, **others}


def _falcon(layers: int, hidden: int, heads: int, **others: object) -> Config:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 65024}
    return {"model_type": "falcon", **sizes, "seq_length": 2048, **others}


def _bloom(layers: int, hidden: int, heads: int) -> Config:
    sizes = {"n_layer": layers, "hidden_size": hidden, "n_head": heads, "vocab_size": 250880}
    return {"model_type": "bloom", **sizes, "seq_length": 2048}


def _nemotron4(layers: int, hidden: int, heads: int) -> Config:
    sizes = {"num_key_value_heads": 8, "vocab_size": 256000, "seq_length": 4096}
    return _decoder("nemotron", layers, hidden, 4 * hidden, heads, **sizes)


def _neox(layers: int, hidden: int, heads: int, vocabulary: int) -> Config:
    return _decoder("gpt_neox", layers, hidden, 4 * hidden, heads, vocab_size=vocabulary, seq_length=2048)


def _olmo2(layers: int, hidden: int, intermediate: int, heads: int, groups: int) -> Config:
    sizes = {"num_key_value_heads": groups, "vocab_size": 100352, "seq_length": 4096}
    return _decoder("olmo2", layers, hidden, intermediate, heads, **sizes)


def _vit(layers: int, hidden: int, heads: int, patch: int) -> Config:
    return _decoder("vit", layers, hidden, 4 * hidden, heads, image_size=224, patch_size=patch, num_labels=1000)


def _whisper(layers: int, hidden: int, heads: int, bands: int, vocabulary: int) -> Config:
    sides = {f"{side}_layers": layers for side in ("encoder", "decoder")}
    sides |= {f"{side}_attention_heads": heads for side in ("encoder", "decoder")}
    sides |= {f"{side}_ffn_dim": 4 * hidden for side in ("encoder", "decoder")}
    sizes = {"d_model": hidden, "num_mel_bins": bands, "vocab_size": vocabulary}
    return {"model_type": "whisper", **sides, **sizes, "max_source_positions": 1500, "max_target_positions": 448}


def _t5(layers: int, hidden: int, intermediate: int, heads: int, head_size: int, **others: object) -> Config:
    sizes = {"num_layers": layers, "d_model": hidden, "d_ff": intermediate, "num_heads": heads, "d_kv": head_size}
    return {"model_type": "t5", **sizes, "vocab_size": 32128, "n_positions": 512, **others}


_DEEPSEEK_V3 = _deepseek(
    "deepseek_v3",
    61,
    7168,
    18432,
    128,
    q_lora_rank=1536,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=3,
    vocab_size=129280,
)

_ENCODERS: Mapping[str, Config] = {
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "megatron-bert": _megatron("megatron-bert", 24, 1024, 16, 512, 30592),
    "vit-base": _vit(12, 768, 12, 16),
    "vit-large": _vit(24, 1024, 16, 16),
    "vit-huge": _vit(32, 1280, 16, 14),
    "whisper-small": _whisper(12, 768, 12, 80, 51865),
    "whisper-large-v3": _whisper(32, 1280, 20, 128, 51866),
    "t5-large": _t5(24, 1024, 4096, 16, 64),
    "t5-11b": _t5(24, 1024, 65536, 128, 128),
    "ul2": _t5(32, 4096, 16384, 16, 256, feed_forward_proj="gated-silu"),
}

_DENSE_DECODERS: Mapping[str, Config] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "megatron-gpt2-xl": _megatron("megatron-gpt", 40, 1536, 16, 1024, 50304),
    "megatron-gpt2-54": _megatron("megatron-gpt", 54, 1920, 20, 1024, 50304),
    "megatron-gpt2-72": _megatron("megatron-gpt", 72, 3072, 24, 1024, 50304),
    "gpt3-175b": _megatron("megatron-gpt", 96, 12288, 96, 2048, 51200),
    "gpt-j-6b": {
        "model_type": "gptj",
        "n_layer": 28,
        "n_embd": 4096,
        "n_head": 16,
        "n_positions": 2048,
        "vocab_size": 50400,
    },
    "gpt-neox-20b": _neox(44, 6144, 64, 50432),
    "pythia-12b": _neox(36, 5120, 40, 50688),
    "opt-350m": _opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "bloom-7b1": _bloom(30, 4096, 32),
    "bloom-176b": _bloom(70, 14336, 112),
    "falcon-7b": _falcon(32, 4544, 71),
    "falcon-40b": _falcon(60, 8192, 128, num_kv_heads=8, new_decoder_architecture=True),
    "falcon-180b": _falcon(80, 14848, 232, num_kv_heads=8, new_decoder_architecture=True, tie_word_embeddings=False),
    "llama2-7b": _llama2(32, 4096, 11008, 32),
    "llama2-13b": _llama2(40, 5120, 13824, 40),
    "llama2-70b": _llama2(80, 8192, 28672, 64, num_key_value_heads=8),
    "llama3-8b": _llama3(32, 4096, 14336, 32),
    "llama3-70b": _llama3(80, 8192, 28672, 64),
    "llama3.1-8b": _llama3(32, 4096, 14336, 32),
    "llama3.1-70b": _llama3(80, 8192, 28672, 64),
    "llama3.1-405b": _llama3(126, 16384, 53248, 128),
    "llama3.2-1b": _llama3(16, 2048, 8192, 32, tie_word_embeddings=True),
    "llama3.2-3b": _llama3(28, 3072, 8192, 24, tie_word_embeddings=True),
    "llama3.3-70b": _llama3(80, 8192, 28672, 64),
    "mistral-7b": _mistral(32, 4096, 14336, 32, vocab_size=32000, seq_length=8192, sliding_window=4096),
    "mistral-nemo-12b": _mistral(40, 5120, 14336, 32, head_dim=128, vocab_size=131072, seq_length=8192),
    "mistral-small-24b": _mistral(40, 5120, 32768, 32, head_dim=128, vocab_size=131072, seq_length=8192),
    "mistral-large-123b": _mistral(88, 12288, 28672, 96, vocab_size=32768, seq_length=8192),
    "nemotron4-15b": _nemotron4(32, 6144, 48),
    "nemotron4-340b": _nemotron4(96, 18432, 96),
    "qwen2.5-0.5b": _small_qwen2(24, 896, 4864, 14),
    "qwen2.5-1.5b": _small_qwen2(28, 1536, 8960, 12),
    "qwen2.5-3b": _small_qwen2(36, 2048, 11008, 16),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4),
    "qwen2.5-14b": _qwen2(48, 5120, 13824, 40, 8),
    "qwen2.5-32b": _qwen2(64, 5120, 27648, 40, 8),
    "qwen2.5-72b": _qwen2(80, 8192, 29568, 64, 8),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    "gemma-2b": _gemma("gemma", 18, 2048, 16384, 8, 1),
    "gemma-7b": _gemma("gemma", 28, 3072, 24576, 16, 16),
    "gemma2-2b": _gemma("gemma2", 26, 2304, 9216, 8, 4, sliding_window=4096),
    "gemma2-9b": _gemma("gemma2", 42, 3584, 14336, 16, 8, sliding_window=4096),
    "gemma2-27b": _gemma(
        "gemma2", 46, 4608, 36864, 32, 16, head_dim=128, query_pre_attn_scalar=144, sliding_window=4096
    ),
    "gemma3-1b": _gemma3(26, 1152, 6912, 4, 1, sliding_window=512, vocab_size=262144),
    "gemma3-4b": _gemma3(34, 2560, 10240, 8, 4),
    "gemma3-12b": _gemma3(48, 3840, 15360, 16, 8),
    "gemma3-27b": _gemma3(62, 5376, 21504, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    "phi-2": _decoder("phi", 32, 2560, 10240, 32, vocab_size=51200, seq_length=2048),
    "phi-3-mini": _decoder("phi3", 32, 3072, 8192, 32, vocab_size=32064, seq_length=4096, sliding_window=2047),
    "phi-4": _decoder("phi3", 40, 5120, 17920, 40, num_key_value_heads=10, vocab_size=100352, seq_length=4096),
    "olmo2-7b": _olmo2(32, 4096, 11008, 32, 32),
    "olmo2-13b": _olmo2(40, 5120, 13824, 40, 40),
    "olmo2-32b": _olmo2(64, 5120, 27648, 40, 8),
    "starcoder2-3b": _decoder(
        "starcoder2", 30, 3072, 12288, 24, num_key_value_heads=2, vocab_size=49152, seq_length=4096, sliding_window=4096
    ),
}

_MIXTURES_AND_STATE_SPACES: Mapping[str, Config] = {
    "mixtral-8x7b": _mixtral(32, 4096, 14336, 32, 4096),
    "mixtral-8x22b": _mixtral(56, 6144, 16384, 48, 4096),
    "llama4-scout": _llama4(16, step=1, has_head_norm=True),
    "llama4-maverick": _llama4(128, step=2, has_head_norm=False),
    "qwen1.5-moe-a2.7b": _qwen2_moe(24, 2048, 1408, 5632, 16, 16, num_experts=60, num_experts_per_tok=4),
    "qwen2-57b-a14b": _qwen2_moe(28, 3584, 2560, 20480, 28, 4, num_experts=64, num_experts_per_tok=8),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 6144, 768, 32),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 12288, 1536, 64),
    "deepseek-v2-lite": _deepseek(
        "deepseek_v2",
        27,
        2048,
        10944,
        16,
        q_lora_rank=None,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        vocab_size=102400,
    ),
    "deepseek-v2": _deepseek(
        "deepseek_v2",
        60,
        5120,
        12288,
        128,
        q_lora_rank=1536,
        n_routed_experts=160,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1536,
        n_group=8,
        topk_group=3,
        first_k_dense_replace=1,
        vocab_size=102400,
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3-mtp": {**_DEEPSEEK_V3, "with_multi_token_heads": True, "num_nextn_predict_layers": 1},
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "mamba-2.8b": {
        "model_type": "mamba",
        "num_hidden_layers": 64,
        "hidden_size": 2560,
        "state_size": 16,
        "time_step_rank": 160,
        "vocab_size": 50280,
        "seq_length": 2048,
    },
    "mamba2-2.7b": {
        "model_type": "mamba2",
        "num_hidden_layers": 64,
        "hidden_size": 2560,
        "state_size": 128,
        "num_heads": 80,
        "head_dim": 64,
        "n_groups": 1,
        "chunk_size": 256,
        "vocab_size": 50288,
        "tie_word_embeddings": True,
        "seq_length": 2048,
    },
}

NAMED_CONFIGS: Mapping[str, Mapping[str, object]] = {**_ENCODERS, **_DENSE_DECODERS, **_MIXTURES_AND_STATE_SPACES}
