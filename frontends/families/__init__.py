"""The transformer families that a config may name, and the function that writes each as its reference computes it.

Parameter names and shapes are those of Hugging Face's implementation of the family (Megatron-LM's for the Megatron
ones), so that a plan made from a config fits the real model. A field that a config lacks has the value that the
reference implementation gives it. In every family x is the residual stream, and y a branch
that is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phaze.errors import ImportModelError, UnknownNameError
from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.deepseek import write_deepseek
from phaze.frontends.families.encoders import write_bert, write_t5, write_vit, write_whisper
from phaze.frontends.families.gpt import (
    write_bloom,
    write_falcon,
    write_gpt2,
    write_gpt_neox,
    write_gptj,
    write_megatron_bert,
    write_megatron_gpt,
    write_opt,
    write_phi,
)
from phaze.frontends.families.llama import RELATIVES, write_llama
from phaze.frontends.families.mamba import write_mamba, write_mamba2
from phaze.ir import GraphBuilder

__all__ = ["FAMILIES", "ConfigFields", "fields_of", "write_model"]

FAMILIES: dict[str, Callable[[ConfigFields, GraphBuilder], str]] = {
    "bert": write_bert,
    "bloom": write_bloom,
    "deepseek_v2": write_deepseek,
    "deepseek_v3": write_deepseek,
    "falcon": write_falcon,
    "gpt2": write_gpt2,
    "gpt_neox": write_gpt_neox,
    "gptj": write_gptj,
    "mamba": write_mamba,
    "mamba2": write_mamba2,
    "megatron-bert": write_megatron_bert,
    "megatron-gpt": write_megatron_gpt,
    "opt": write_opt,
    "phi": write_phi,
    "t5": write_t5,
    "vit": write_vit,
    "whisper": write_whisper,
    **dict.fromkeys(RELATIVES, write_llama),
}
"""By `model_type`: each function adds a model's ops to a builder, and returns the id of the loss."""

REFERENCE_DEFAULTS: dict[str, dict[str, object]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
    },
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size_mlp": 16384},
    "qwen3": {"head_dim": 128},
}
"""What transformers gives fields that published configs of a family leave out."""


def fields_of(config: Mapping[str, object], sequence_length: int | None = None) -> ConfigFields:
    """The fields of a config, with the family's own values for those that it lacks.

    A config of a model that also sees or hears, with that of its language model inside (`text_config`), stands for the
    language model. Raises ImportModelError for a config without a family, UnknownNameError for an unknown one.
    """
    kind, inner = config.get("model_type"), config.get("text_config")
    if not isinstance(kind, str):
        raise ImportModelError(f"the config has no model_type; expected one of {', '.join(sorted(FAMILIES))}.")
    if kind not in FAMILIES and isinstance(inner, Mapping) and inner.get("model_type") in FAMILIES:
        return fields_of(inner, sequence_length)
    if kind not in FAMILIES:
        advice = "A model of another family can be imported as a torch module: phaze.import_graph(module, inputs)."
        raise UnknownNameError("model_type", kind, FAMILIES, advice)
    return ConfigFields({**REFERENCE_DEFAULTS.get(kind, {}), **config}, f"the {kind} config", sequence_length)


def write_model(fields: ConfigFields, builder: GraphBuilder) -> str:
    """Add the ops of a config's model to a builder; returns the id of the loss."""
    return FAMILIES[fields.text("model_type", "")](fields, builder)
