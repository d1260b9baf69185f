"""Torch models for tests: tiny Hugging Face models on the meta device, and what torch itself counts of them."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from phaze.frontends.torch.example_inputs import read_inputs
from phaze.frontends.torch.fake_model import make_fake_model
from phaze.ir import Graph, Phase

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


def _tokens(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(), "labels": ids(), **more}


def _images() -> dict[str, torch.Tensor]:
    labels = torch.empty(2, dtype=torch.int64, device="meta")
    return {"pixel_values": torch.empty(2, 3, 32, 32, device="meta"), "labels": labels}


def _sound() -> dict[str, torch.Tensor]:
    return {"input_features": torch.empty(2, 8, 2 * LENGTH, device="meta"), "labels": ids()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A Hugging Face architecture at toy size, its inputs, and the paths of its blocks."""

    model: str
    config: str
    fields: dict[str, Any]
    blocks: tuple[str, ...]
    inputs: Callable[[], dict[str, torch.Tensor]] = _tokens
    dtype: torch.dtype = torch.float32
    kinds: int = 1

    def build(self) -> torch.nn.Module:
        config = getattr(transformers, self.config)(**self.fields)
        return on_meta(lambda: getattr(transformers, self.model)(config)).to(self.dtype)


_T5 = {"num_layers": 3, "d_model": 48, "d_kv": 8, "num_heads": 6, "d_ff": 80, "vocab_size": 101, "pad_token_id": 0}
_OPT = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "ffn_dim": 80, "word_embed_proj_dim": 48}
_WHISPER = {
    **{f"{side}_{field}": 3 for side in ("encoder", "decoder") for field in ("layers", "attention_heads")},
    **{f"{side}_ffn_dim": 80 for side in ("encoder", "decoder")},
    "d_model": 48,
    "num_mel_bins": 8,
    "max_source_positions": LENGTH,
    "max_target_positions": LENGTH,
}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        model="GPT2LMHeadModel",
        config="GPT2Config",
        fields={"n_layer": 3, "n_embd": 48, "n_head": 3, "n_positions": LENGTH, "vocab_size": 101, **_IDS},
        blocks=("transformer.h",),
    ),
    "llama": Family(model="LlamaForCausalLM", config="LlamaConfig", fields=_LLAMA, blocks=("model.layers",)),
    "bert": Family(
        model="BertForMaskedLM",
        config="BertConfig",
        fields={**_SMALL, "vocab_size": 101, "max_position_embeddings": LENGTH, "architectures": ["BertForMaskedLM"]},
        blocks=("bert.encoder.layer",),
    ),
    "opt": Family(
        model="OPTForCausalLM",
        config="OPTConfig",
        fields={**_OPT, **_IDS, "vocab_size": 101, "max_position_embeddings": 2 * LENGTH},
        blocks=("model.decoder.layers",),
    ),
    "t5": Family(
        model="T5ForConditionalGeneration",
        config="T5Config",
        fields={**_T5, "decoder_start_token_id": 0},
        blocks=("encoder.block", "decoder.block"),
        kinds=6,
    ),
    "mixtral": Family(
        model="MixtralForCausalLM",
        config="MixtralConfig",
        fields={**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        blocks=("model.layers",),
        dtype=torch.bfloat16,
    ),
    "qwen2_moe": Family(
        model="Qwen2MoeForCausalLM",
        config="Qwen2MoeConfig",
        fields={
            **_LLAMA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        blocks=("model.layers",),
        dtype=torch.bfloat16,
    ),
    "vit": Family(
        model="ViTForImageClassification",
        config="ViTConfig",
        fields={**_SMALL, "image_size": 32, "patch_size": 8, "num_labels": 10},
        blocks=("vit.layers",),
        inputs=_images,
    ),
    "whisper": Family(
        model="WhisperForConditionalGeneration",
        config="WhisperConfig",
        fields={**_WHISPER, **_IDS, "vocab_size": 101, "decoder_start_token_id": 0},
        blocks=("model.encoder.layers", "model.decoder.layers"),
        inputs=_sound,
        kinds=3,
    ),
}


def gpt2(**changes: Any) -> torch.nn.Module:
    return replace(FAMILIES["gpt2"], fields={**FAMILIES["gpt2"].fields, **changes}).build()


def counted_flops(model: torch.nn.Module, inputs: object) -> int:
    """Forward matmul flops by torch's own counter, with attention as plain matrix products.

    The counter does not know `_grouped_mm`, in which experts run: `grouped_flops` counts those.
    """
    fake = make_fake_model(model)
    examples = fake.fake_inputs(read_inputs(model, inputs, {}))
    with fake.mode, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        fake.module(*examples.args, **examples.kwargs)
    return int(counter.get_total_flops())


def grouped_flops(graph: Graph) -> int:
    """Flops of the forward ops that came from `_grouped_mm`."""
    return sum(op.matmul_flops for op in graph.ops_of(Phase.FORWARD) if op.origin == "aten._grouped_mm")


class Bottleneck(torch.nn.Module):
    """A block of ResNet-50 (He et al., arXiv:1512.03385, figure 5), stride in the 3 x 3 convolution."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        conv, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d
        self.conv1, self.bn1 = conv(channels, width, 1, bias=False), norm(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride, 1, bias=False), norm(width)
        self.conv3, self.bn3 = conv(width, 4 * width, 1, bias=False), norm(4 * width)
        self.relu = torch.nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != 4 * width:
            self.downsample = torch.nn.Sequential(conv(channels, 4 * width, 1, stride, bias=False), norm(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(torch.nn.Module):
    """ResNet-50 with depths (3, 4, 6, 3)."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1, self.bn1 = torch.nn.Conv2d(3, width, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(width)
        self.relu, self.maxpool = torch.nn.ReLU(inplace=True), torch.nn.MaxPool2d(3, 2, 1)
        channels = width
        for index, depth in enumerate(depths):
            inner = width * 2**index
            blocks = []
            for position in range(depth):
                blocks.append(Bottleneck(channels, inner, 2 if position == 0 and index > 0 else 1))
                channels = 4 * inner
            setattr(self, f"layer{index + 1}", torch.nn.Sequential(*blocks))
        self.stages = len(depths)
        self.avgpool, self.fc = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for index in range(self.stages):
            x = getattr(self, f"layer{index + 1}")(x)
        return self.fc(self.avgpool(x).flatten(1))


class Block(torch.nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Tower(torch.nn.Module):
    """A linear map, blocks in a list, a linear map, and a scalar."""

    def __init__(self, depth: int = 3, run: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(depth))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.run is None else self.run(block, x)
        return self.last(x).square().mean()
