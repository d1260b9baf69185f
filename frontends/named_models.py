"""The built-in models (`gpt2-xl`, `llama3.1-405b`, ...): the config that each name stands for.

Dimensions are those of the `config.json` that a model's makers published on Hugging Face, or of their report where
there is none (GPT-3: arXiv:2005.14165, Nemotron-4: arXiv:2402.16819 and 2406.11704, Megatron: arXiv:1909.08053). Of
models that also see, only the language model is meant. `seq_length` is the length of the main phase of pre-training
where a report says it; elsewhere (Llama 4, gpt-oss, Mixtral, Mistral Nemo, Small and Large) a usual length is taken.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NAMED_CONFIGS", "OTHER_NAMES"]

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


def _smollm2(layers: int, hidden: int, intermediate: int, heads: int, groups: int) -> Config:
    sizes = {"num_key_value_heads": groups, "vocab_size": 49152, "seq_length": 2048, "tie_word_embeddings": True}
    return _llama(layers, hidden, intermediate, heads, **sizes)


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


def _qwen3_moe(
    layers: int, hidden: int, intermediate: int, expert: int, heads: int, groups: int = 4, experts: int = 128
) -> Config:
    sizes = {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return {**_qwen3(layers, hidden, intermediate, heads, groups, **sizes), "model_type": "qwen3_moe"}


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


def _starcoder2(layers: int, hidden: int, heads: int, groups: int) -> Config:
    sizes = {"num_key_value_heads": groups, "vocab_size": 49152, "seq_length": 4096, "sliding_window": 4096}
    return _decoder("starcoder2", layers, hidden, 4 * hidden, heads, **sizes)


def _mamba(layers: int, hidden: int) -> Config:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "state_size": 16, "time_step_rank": hidden // 16}
    return {"model_type": "mamba", **sizes, "vocab_size": 50280, "seq_length": 2048}


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


_LLAMA_1: Config = {"vocab_size": 32000, "max_position_embeddings": 2048}

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
    "whisper-tiny": _whisper(4, 384, 6, 80, 51865),
    "whisper-base": _whisper(6, 512, 8, 80, 51865),
    "whisper-small": _whisper(12, 768, 12, 80, 51865),
    "whisper-medium": _whisper(24, 1024, 16, 80, 51865),
    "whisper-large-v2": _whisper(32, 1280, 20, 80, 51865),
    "whisper-large-v3": _whisper(32, 1280, 20, 128, 51866),
    "t5-small": _t5(6, 512, 2048, 8, 64),
    "t5-base": _t5(12, 768, 3072, 12, 64),
    "t5-large": _t5(24, 1024, 4096, 16, 64),
    "t5-3b": _t5(24, 1024, 16384, 32, 128),
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
    "gpt3-6.7b": _megatron("megatron-gpt", 32, 4096, 32, 2048, 51200),
    "gpt3-13b": _megatron("megatron-gpt", 40, 5120, 40, 2048, 51200),
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
    "pythia-160m": _neox(12, 768, 12, 50304),
    "pythia-410m": _neox(24, 1024, 16, 50304),
    "pythia-1b": _neox(16, 2048, 8, 50304),
    "pythia-1.4b": _neox(24, 2048, 16, 50304),
    "pythia-2.8b": _neox(32, 2560, 32, 50304),
    "pythia-6.9b": _neox(32, 4096, 32, 50432),
    "pythia-12b": _neox(36, 5120, 40, 50688),
    "opt-125m": _opt(12, 768, 12),
    "opt-350m": _opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-2.7b": _opt(32, 2560, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-1b7": _bloom(24, 2048, 16),
    "bloom-3b": _bloom(30, 2560, 32),
    "bloom-7b1": _bloom(30, 4096, 32),
    "bloom-176b": _bloom(70, 14336, 112),
    "falcon-7b": _falcon(32, 4544, 71),
    "falcon-40b": _falcon(60, 8192, 128, num_kv_heads=8, new_decoder_architecture=True),
    "falcon-180b": _falcon(80, 14848, 232, num_kv_heads=8, new_decoder_architecture=True, tie_word_embeddings=False),
    "llama-7b": _llama(32, 4096, 11008, 32, **_LLAMA_1),
    "llama-13b": _llama(40, 5120, 13824, 40, **_LLAMA_1),
    "llama-30b": _llama(60, 6656, 17920, 52, **_LLAMA_1),
    "llama-65b": _llama(80, 8192, 22016, 64, **_LLAMA_1),
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
    "codellama-34b": _llama2(48, 8192, 22016, 64, num_key_value_heads=8),
    "tinyllama-1.1b": _llama(22, 2048, 5632, 32, num_key_value_heads=4, **_LLAMA_1),
    "smollm2-135m": _smollm2(30, 576, 1536, 9, 3),
    "smollm2-360m": _smollm2(32, 960, 2560, 15, 5),
    "smollm2-1.7b": _smollm2(24, 2048, 8192, 32, 32),
    "yi-6b": _llama(32, 4096, 11008, 32, num_key_value_heads=4, vocab_size=64000, seq_length=4096),
    "yi-34b": _llama(60, 7168, 20480, 56, num_key_value_heads=8, vocab_size=64000, seq_length=4096),
    "deepseek-llm-7b": _llama(30, 4096, 11008, 32, vocab_size=102400, seq_length=4096),
    "deepseek-llm-67b": _llama(95, 8192, 22016, 64, num_key_value_heads=8, vocab_size=102400, seq_length=4096),
    "mistral-7b": _mistral(32, 4096, 14336, 32, vocab_size=32000, seq_length=8192, sliding_window=4096),
    "mistral-7b-v0.3": _mistral(32, 4096, 14336, 32, vocab_size=32768, seq_length=8192),
    "mistral-nemo-12b": _mistral(40, 5120, 14336, 32, head_dim=128, vocab_size=131072, seq_length=8192),
    "codestral-22b": _mistral(56, 6144, 16384, 48, vocab_size=32768, seq_length=8192),
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
    "gemma3-270m": _gemma3(18, 640, 2048, 4, 1, sliding_window=512, vocab_size=262144),
    "gemma3-1b": _gemma3(26, 1152, 6912, 4, 1, sliding_window=512, vocab_size=262144),
    "gemma3-4b": _gemma3(34, 2560, 10240, 8, 4),
    "gemma3-12b": _gemma3(48, 3840, 15360, 16, 8),
    "gemma3-27b": _gemma3(62, 5376, 21504, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    "phi-2": _decoder("phi", 32, 2560, 10240, 32, vocab_size=51200, seq_length=2048),
    "phi-3-mini": _decoder("phi3", 32, 3072, 8192, 32, vocab_size=32064, seq_length=4096, sliding_window=2047),
    "phi-3-medium": _decoder("phi3", 40, 5120, 17920, 40, num_key_value_heads=10, vocab_size=32064, seq_length=4096),
    "phi-3.5-mini": _decoder("phi3", 32, 3072, 8192, 32, vocab_size=32064, seq_length=4096),
    "phi-4-mini": _decoder(
        "phi3",
        32,
        3072,
        8192,
        24,
        num_key_value_heads=8,
        partial_rotary_factor=0.75,
        vocab_size=200064,
        seq_length=4096,
        tie_word_embeddings=True,
    ),
    "phi-4": _decoder("phi3", 40, 5120, 17920, 40, num_key_value_heads=10, vocab_size=100352, seq_length=4096),
    "olmo2-7b": _olmo2(32, 4096, 11008, 32, 32),
    "olmo2-13b": _olmo2(40, 5120, 13824, 40, 40),
    "olmo2-32b": _olmo2(64, 5120, 27648, 40, 8),
    "starcoder2-3b": _starcoder2(30, 3072, 24, 2),
    "starcoder2-7b": _starcoder2(32, 4608, 36, 4),
    "starcoder2-15b": {**_starcoder2(40, 6144, 48, 4), "tie_word_embeddings": False},
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
    "qwen3-coder-480b-a35b": _qwen3_moe(62, 6144, 8192, 2560, 96, 8, 160),
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
    "kimi-k2": {
        **_DEEPSEEK_V3,
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "mamba-130m": _mamba(24, 768),
    "mamba-370m": _mamba(48, 1024),
    "mamba-1.4b": _mamba(48, 2048),
    "mamba-2.8b": _mamba(64, 2560),
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

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "bert-base": ("bert-base-uncased",),
    "bert-large": ("bert-large-uncased",),
    "bloom-176b": ("bloom",),
    "deepseek-v3": ("deepseek-r1", "deepseek-r1-0528", "deepseek-v3-0324", "deepseek-v3.1"),
    "gpt3-175b": ("gpt-3",),
    "llama3.1-405b": ("llama3-405b",),
    "llama4-maverick": ("llama-4-maverick-17b-128e",),
    "llama4-scout": ("llama-4-scout-17b-16e",),
    "mistral-large-123b": ("mistral-large",),
    "mistral-nemo-12b": ("mistral-nemo",),
    "mistral-small-24b": ("mistral-small", "mistral-small-3", "mistral-small-3.1-24b"),
    "phi-3-medium": ("phi-3-medium-4k",),
    "phi-3-mini": ("phi-3-mini-4k",),
    "qwen2.5-1.5b": ("qwen2-1.5b",),
    "qwen2.5-7b": ("qwen2-7b", "qwen2.5-coder-7b"),
    "qwen2.5-14b": ("qwen2.5-coder-14b",),
    "qwen2.5-32b": ("qwen2.5-coder-32b", "qwq-32b"),
    "qwen2.5-72b": ("qwen2-72b",),
    "qwen3-30b-a3b": ("qwen3-coder-30b-a3b",),
    "vit-base": ("vit-base-patch16-224",),
    "vit-huge": ("vit-huge-patch14-224",),
    "vit-large": ("vit-large-patch16-224",),
}
"""Further names that people have for a model, or for one of the same shapes, by the name that it has here."""
