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


def counted_flops(model: torch.nn.Module, inputs: object) -> int:
    """Forward matmul flops by torch's own counter, with attention as plain matrix products."""
    fake = fake_model(model)
    examples = fake.tensors(read_examples(model, inputs, {}))
    with fake.mode, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        fake.module(*examples.args, **examples.kwargs)
    return int(counter.get_total_flops())


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
