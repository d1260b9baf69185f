"""Every family of configs against transformers' own classes: parameters to the unit, matmul flops, layers.

Each row is a config made by a config class of transformers: a built-in model cut to a few layers at its real widths, or
a small variant of a family. It is imported twice, from the config and from the torch module that transformers builds of
it on the meta device. Of built-in models the parameters of all layers are counted by both, too. Run with

    python benchmarks/families.py [--only TEXT] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

import phaze
from phaze.frontends.families.parameter_count import count_parameters
from phaze.frontends.named_models import NAMED_CONFIGS

LENGTH = 480
"""Positions of a row: a multiple of experts / experts per token for all families, so that loads are even."""

LENGTHS = {"mamba": 32, "mamba2": 512, "whisper": 64}
"""Other lengths: Mamba is captured position by position, Mamba-2 works in chunks of 256."""

LAYERS = {"deepseek_v3": 5, "gemma3_text": 7, "llama4_text": 4}
"""Layers of a cut model, enough for each kind that it has; 3 in all other families."""

LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")

TOLERANCE = 0.005
"""How far matmul flops may differ: a causal convolution is padded on both sides in torch."""

HEADS = {
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "whisper": "WhisperForConditionalGeneration",
}
"""Classes of the models that are no causal language models."""

IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0}
_SMALL = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 80}
_SHARED = {**_SMALL, "num_key_value_heads": 2, "vocab_size": 101}
_FALCON = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": 101}

VARIANTS: Mapping[str, Mapping[str, object]] = {
    "llama with biases": {**_SHARED, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral with a window": {**_SHARED, "model_type": "mistral", "sliding_window": 64},
    "gemma2 with windows": {**_SHARED, "model_type": "gemma2", "head_dim": 16, "sliding_window": 64},
    "gemma3 with windows": {**_SHARED, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 64},
    "qwen2 with late windows": {
        **_SHARED,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
    },
    "qwen2_moe with dense layers": {
        **_SHARED,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
    "qwen3 with biases": {**_SHARED, "model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "granite": {**_SHARED, "model_type": "granite", "residual_multiplier": 0.5, "embedding_multiplier": 12.0},
    "stablelm": {**_SHARED, "model_type": "stablelm", "use_qkv_bias": True},
    "nemotron with biases": {**_SHARED, "model_type": "nemotron", "attention_bias": True, "mlp_bias": True},
    "gpt_neox one after the other": {
        **_SMALL,
        "model_type": "gpt_neox",
        "vocab_size": 101,
        "use_parallel_residual": False,
    },
    "phi with shared keys": {**_SHARED, "model_type": "phi"},
    "falcon with slopes": {
        **_FALCON,
        "model_type": "falcon",
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
    },
    "falcon with one norm": {
        **_FALCON,
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
    },
    "mamba2 with groups": {
        "model_type": "mamba2",
        "num_hidden_layers": 3,
        "hidden_size": 48,
        "vocab_size": 101,
        "state_size": 8,
        "num_heads": 12,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
}
"""Small configs of what no built-in model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What both ways of importing one config say."""

    name: str
    family: str
    has_equal_parameters: bool
    parameters: int
    flops_ratio: float
    backward_flops_ratio: float
    layers: int
    torch_layers: int
    seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether the row shows what it should."""
        ratios = (self.flops_ratio, self.backward_flops_ratio)
        is_near = all(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
        return self.has_equal_parameters and is_near and self.layers == self.torch_layers


def main() -> int:
    """Print a row for each config and how many agree; fails where one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name has this text in it")
    parser.add_argument("--json", metavar="FILE", help="write the rows to a file")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = []
    for name, config, whole in _configs():
        if arguments.only not in name:
            continue
        row = _compare(name, config, whole)
        rows.append(row)
        print(
            f"{'ok' if row.is_equal else 'DIFFERS':8}{name:30}{row.family:13}{row.parameters:>16,} parameters  "
            f"flops x{row.flops_ratio:.4f} x{row.backward_flops_ratio:.4f}  "
            f"{row.layers:3} layers  {row.seconds:5.1f} s",
            flush=True,
        )
    equal = sum(row.is_equal for row in rows)
    print(f"{equal} of {len(rows)} configs agree in parameters (to the unit), matmul flops (0.5 %) and layers")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    return 0 if equal == len(rows) else 1


def _configs() -> Iterator[tuple[str, Mapping[str, object], Mapping[str, object] | None]]:
    """Names, the configs to import, and the built-in configs that they were cut from."""
    for name, config in NAMED_CONFIGS.items():
        kind = str(config["model_type"])
        if kind.startswith("megatron") or "with_multi_token_heads" in config:
            continue  # transformers has no class for these
        depth = LAYERS.get(kind, 3)
        cut = {key: min(value, depth) if key in LAYER_FIELDS else value for key, value in config.items()}  # type: ignore[type-var]
        if kind == "llama4_text":
            # transformers runs all experts on all tokens: only where all are chosen is the work the same.
            cut["num_experts_per_tok"] = cut["num_local_experts"]
        yield name, cut, config
    for name, config in VARIANTS.items():
        yield name, config, None


def _compare(name: str, config: Mapping[str, object], whole: Mapping[str, object] | None) -> Row:
    start = time.process_time()
    kind = str(config["model_type"])
    reference, module = _build(config)
    length = LENGTHS.get(kind, LENGTH)
    sizes = {} if kind == "vit" else {"sequence_length": length}
    written = phaze.import_graph(reference, micro_batch_size=2, **sizes)
    captured = phaze.import_graph(module, _inputs(reference, kind, length))
    expected = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    is_equal = {tensor.id: tensor.shape for tensor in written.parameters} == expected
    parameters = written.parameter_count
    if whole is not None:
        parameters = count_parameters({**whole, "architectures": reference.architectures}).total
        is_equal = is_equal and parameters == sum(parameter.numel() for parameter in _build(whole)[1].parameters())
    return Row(
        name=name,
        family=kind,
        has_equal_parameters=is_equal,
        parameters=parameters,
        flops_ratio=written.matmul_flops("forward") / captured.matmul_flops("forward"),
        backward_flops_ratio=written.matmul_flops("backward") / captured.matmul_flops("backward"),
        layers=len(written.layers),
        torch_layers=len(captured.layers),
        seconds=time.process_time() - start,
    )


def _build(config: Mapping[str, object]) -> tuple[Any, torch.nn.Module]:
    """The config object of transformers and its model, without memory for weights."""
    kind = str(config["model_type"])
    fields = {key: value for key, value in config.items() if key not in ("model_type", "seq_length")}
    if kind in HEADS:
        fields["architectures"] = [HEADS[kind]]
    reference = transformers.AutoConfig.for_model(kind, **{**IDS, **fields})
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind in HEADS:
            module = getattr(transformers, HEADS[kind])(reference)
        else:
            module = transformers.AutoModelForCausalLM.from_config(reference)
    return reference, module.to(torch.bfloat16)


def _inputs(reference: Any, kind: str, length: int) -> dict[str, torch.Tensor]:
    ids = torch.empty(2, length, dtype=torch.int64, device="meta")
    if kind == "vit":
        size = reference.image_size
        pixels = torch.empty(2, 3, size, size, dtype=torch.bfloat16, device="meta")
        return {"pixel_values": pixels, "labels": torch.empty(2, dtype=torch.int64, device="meta")}
    if kind == "whisper":
        frames = (2, reference.num_mel_bins, 2 * reference.max_source_positions)
        return {"input_features": torch.empty(frames, dtype=torch.bfloat16, device="meta"), "labels": ids}
    return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    raise SystemExit(main())
