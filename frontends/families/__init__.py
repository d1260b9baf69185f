"""Families of transformers, each written out as its reference implementation computes it.

Parameter names and shapes are those of Hugging Face's implementation of the family (Megatron-LM's for the Megatron
ones), so that a plan made from a config fits the real model.
"""

from collections.abc import Callable

from phaze.frontends.families.bert import bert
from phaze.frontends.families.fields import Fields
from phaze.frontends.families.gpt2 import gpt2
from phaze.frontends.families.llama import llama
from phaze.frontends.families.megatron import megatron_bert, megatron_gpt
from phaze.frontends.families.opt import opt
from phaze.frontends.families.t5 import t5
from phaze.ir import GraphBuilder

__all__ = ["FAMILIES", "Fields"]

FAMILIES: dict[str, Callable[[Fields, GraphBuilder], str]] = {
    "bert": bert,
    "gemma": llama,
    "gpt2": gpt2,
    "llama": llama,
    "megatron-bert": megatron_bert,
    "megatron-gpt": megatron_gpt,
    "mistral": llama,
    "mixtral": llama,
    "opt": opt,
    "qwen2": llama,
    "t5": t5,
}
