"""The built-in models (`gpt2-xl`, `llama3-70b`, ...): the config that each name stands for."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NAMED_CONFIGS"]


def _megatron(kind: str, layers: int, hidden: int, heads: int, length: int, vocabulary: int) -> dict[str, object]:
    return {
        "model_type": kind,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": length,
        "max_position_embeddings": length,
        "vocab_size": vocabulary,
    }


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, object]:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads}
    return {"model_type": "gpt2", **sizes, "n_positions": 1024, "vocab_size": 50257}


def _llama(layers: int, hidden: int, intermediate: int, heads: int, **others: object) -> dict[str, object]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    return {"model_type": "llama", **sizes, "num_attention_heads": heads, "rms_norm_eps": 1e-5, **others}


def _opt(layers: int, hidden: int, heads: int, **others: object) -> dict[str, object]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_dim": 4 * hidden}
    return {"model_type": "opt", **sizes, "max_position_embeddings": 2048, "vocab_size": 50272, **others}


def _llama3(layers: int, hidden: int, intermediate: int, heads: int, **others: object) -> dict[str, object]:
    return _llama(
        layers, hidden, intermediate, heads, num_key_value_heads=8, vocab_size=128256, seq_length=8192, **others
    )


def _qwen2(layers: int, hidden: int, intermediate: int, heads: int, groups: int, **others: object) -> dict[str, object]:
    sizes = _llama(layers, hidden, intermediate, heads, num_key_value_heads=groups, seq_length=4096, **others)
    return {**sizes, "model_type": "qwen2", "rms_norm_eps": 1e-6}


NAMED_CONFIGS: Mapping[str, Mapping[str, object]] = {
    "bert-large": {
        "model_type": "bert",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 512,
        "vocab_size": 30522,
    },
    "gpt2-xl": _gpt2(48, 1600, 25),
    "opt-350m": _opt(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "llama2-7b": _llama(32, 4096, 11008, 32, vocab_size=32000, max_position_embeddings=4096),
    "megatron-bert": _megatron("megatron-bert", 24, 1024, 16, 512, 30592),
    "megatron-gpt2-xl": _megatron("megatron-gpt", 40, 1536, 16, 1024, 50304),
    "megatron-gpt2-54": _megatron("megatron-gpt", 54, 1920, 20, 1024, 50304),
    "megatron-gpt2-72": _megatron("megatron-gpt", 72, 3072, 24, 1024, 50304),
    "gpt3-175b": _megatron("megatron-gpt", 96, 12288, 96, 2048, 51200),
    "gpt2": _gpt2(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "llama3-8b": _llama(32, 4096, 14336, 32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192),
    "llama3-70b": _llama(80, 8192, 28672, 64, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192),
    "llama3.1-8b": _llama3(32, 4096, 14336, 32),
    "llama3.1-70b": _llama3(80, 8192, 28672, 64),
    "llama3.1-405b": _llama3(126, 16384, 53248, 128),
    "llama3.2-1b": _llama3(16, 2048, 8192, 32, tie_word_embeddings=True),
    "llama3.2-3b": _llama3(28, 3072, 8192, 24, tie_word_embeddings=True),
    "llama3.3-70b": _llama3(80, 8192, 28672, 64),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, vocab_size=151936, tie_word_embeddings=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, vocab_size=151936, tie_word_embeddings=True),
    "qwen2.5-3b": _qwen2(36, 2048, 11008, 16, 2, vocab_size=151936, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, vocab_size=152064),
    "qwen2.5-14b": _qwen2(48, 5120, 13824, 40, 8, vocab_size=152064),
    "qwen2.5-32b": _qwen2(64, 5120, 27648, 40, 8, vocab_size=152064),
    "qwen2.5-72b": _qwen2(80, 8192, 29568, 64, 8, vocab_size=152064),
    "mistral-7b": {
        **_llama(32, 4096, 14336, 32, num_key_value_heads=8, vocab_size=32000, seq_length=8192, sliding_window=4096),
        "model_type": "mistral",
    },
    "mixtral-8x22b": {
        **_llama(56, 6144, 16384, 48, num_key_value_heads=8, vocab_size=32000, seq_length=4096),
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mixtral-8x7b": {
        **_llama(32, 4096, 14336, 32, num_key_value_heads=8, vocab_size=32000),
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    },
    "t5-large": {
        "model_type": "t5",
        "num_layers": 24,
        "d_model": 1024,
        "d_kv": 64,
        "d_ff": 4096,
        "num_heads": 16,
        "vocab_size": 32128,
        "n_positions": 512,
    },
}
