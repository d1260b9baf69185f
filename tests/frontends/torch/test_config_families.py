"""Configs of further families against the modules that transformers makes of them; the whole table is a benchmark."""

from typing import Any

import pytest
import torch
import torch_models as models
import transformers

import phaze

LENGTH = 32
_SMALL = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": 101}
_SHARED = {**_SMALL, "num_key_value_heads": 2, "intermediate_size": 80}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "hidden_size": 48, "n_head": 6, "vocab_size": 101},
    "deepseek_v3": {**_SMALL, **_LATENT, "intermediate_size": 80},
    "falcon": {**_SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma2": {**_SHARED, "head_dim": 16, "sliding_window": 8},
    "gpt_oss": {**_SHARED, "head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba2": {**_SMALL, "state_size": 8, "num_heads": 12, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
    "nemotron": _SHARED,
    "phi3": _SHARED,
}


IN_FULL = ("falcon", "nemotron", "phi3")
"""Families whose blocks are put together of what the others have."""
PARAMETERS = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in IN_FULL)) for name in CONFIGS]


@pytest.mark.parametrize("family", PARAMETERS)
def test_a_config_has_the_parameters_products_and_layers_of_its_module(family: str) -> None:
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = transformers.AutoConfig.for_model(family, **ids, **CONFIGS[family])
    module = models.on_meta(lambda: transformers.AutoModelForCausalLM.from_config(config)).to(torch.bfloat16)
    tokens = models.ids(2, LENGTH)
    captured = phaze.import_graph(module, {"input_ids": tokens, "labels": tokens})
    written = phaze.import_graph(config, sequence_length=LENGTH, micro_batch_size=2)
    expected = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert {tensor.id: tensor.shape for tensor in written.parameters} == expected
    for phase in ("forward", "backward"):
        assert written.matmul_flops(phase) == pytest.approx(captured.matmul_flops(phase), rel=0.005)
    assert len(written.layers) == len(captured.layers)
