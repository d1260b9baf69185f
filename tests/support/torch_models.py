"""Torch models for tests: tiny Hugging Face models on the meta device, and what torch itself counts of them."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from phaze.frontends.torch.clone import fake_model
from phaze.frontends.torch.examples import read_examples

transformers.logging.set_verbosity_error()

LENGTH = 16
_SMALL = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 80}
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_LLAMA = {**_SMALL, **_IDS, "num_key_value_heads": 2, "vocab_size": 101}


def ids(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.empty(batch, length, dtype=torch.int64, device="meta")


def on_meta(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """A module whose weights take no memory."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build()


def gpt2(**changes: Any) -> torch.nn.Module:
    config = {"n_layer": 3, "n_embd": 48, "n_head": 3, "n_positions": LENGTH, "vocab_size": 101, **_IDS, **changes}
    return on_meta(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**config)))


def counted_flops(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """Forward matmul flops by torch's own counter, with attention as plain matrix products."""
    fake = fake_model(model)
    examples = fake.tensors(read_examples(model, inputs, {}))
    with fake.mode, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        fake.module(*examples.args, **examples.kwargs)
    return int(counter.get_total_flops())
