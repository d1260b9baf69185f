"""The transformer families that a config may name, and the function that writes each as its reference computes it.

Parameter names and shapes are those of Hugging Face's implementation of the family (Megatron-LM's for the Megatron
ones), so that a plan made from a config fits the real model. A field that a config lacks has the value that the
reference implementation gives it. In every family x is the residual stream, and y a branch
that is added to it.
"""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.families.bert import write_bert
from phaze.frontends.families.config_fields import ConfigFields
from phaze.frontends.families.gpt2 import write_gpt2
from phaze.frontends.families.llama import write_llama
from phaze.frontends.families.megatron import write_megatron_bert, write_megatron_gpt
from phaze.frontends.families.opt import write_opt
from phaze.frontends.families.t5 import write_t5
from phaze.ir import GraphBuilder

__all__ = ["FAMILIES", "ConfigFields"]

FAMILIES: dict[str, Callable[[ConfigFields, GraphBuilder], str]] = {
    "bert": write_bert,
    "gemma": write_llama,
    "gpt2": write_gpt2,
    "llama": write_llama,
    "megatron-bert": write_megatron_bert,
    "megatron-gpt": write_megatron_gpt,
    "mistral": write_llama,
    "mixtral": write_llama,
    "opt": write_opt,
    "qwen2": write_llama,
    "t5": write_t5,
}
"""By `model_type`: each function adds a model's ops to a builder, and returns the id of the loss."""
