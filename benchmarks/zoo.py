"""How many architectures the torch frontend imports as they come: a row each, or the error.

    python benchmarks/zoo.py [--layers N] [NAME ...]
    python benchmarks/zoo.py --compare [--layers N] [NAME ...]

Models are built from configs on the meta device with N layers a stack (4) and otherwise their default sizes, and get no
inputs: the frontend finds them. A row: how torch captured it, seconds, ops, how much of the flops and bytes is
understood in percent, layers, distinct layers, whether parameters are equal to the model's to the unit, whether the
microbatch can be changed. The last line counts successes: parameters equal, at least 99 % of flops and 95 % of bytes
understood.

With `--compare` every model is imported twice, as usual and with each of its blocks captured by itself (`--layers 8` at
least, so that some can be copied). A row: processor seconds of both, whether the graphs are equal (ops, ids, order,
arguments, gradients, notes), layers, and why no blocks were copied where none were.
"""

from __future__ import annotations

import argparse
import importlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's users know
from torch import nn

import phaze
from phaze.frontends.torch import importing
from phaze.frontends.torch.block_copies import Irregular

LAYER_FIELDS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
LANGUAGE = {
    "albert": "AlbertForMaskedLM",
    "bart": "BartForConditionalGeneration",
    "bert": "BertForMaskedLM",
    "bloom": "BloomForCausalLM",
    "cohere": "CohereForCausalLM",
    "deberta_v2": "DebertaV2ForMaskedLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "distilbert": "DistilBertForMaskedLM",
    "electra": "ElectraForMaskedLM",
    "falcon": "FalconForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mamba": "MambaForCausalLM",
    "marian": "MarianMTModel",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mpt": "MptForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "pegasus": "PegasusForConditionalGeneration",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "roberta": "RobertaForMaskedLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "t5": "T5ForConditionalGeneration",
}
OTHERS = {
    "beit": "BeitForImageClassification",
    "convnext": "ConvNextForImageClassification",
    "deit": "DeiTForImageClassification",
    "hubert": "HubertForSequenceClassification",
    "regnet": "RegNetForImageClassification",
    "resnet": "ResNetForImageClassification",
    "swin": "SwinForImageClassification",
    "vit": "ViTForImageClassification",
    "wav2vec2": "Wav2Vec2ForSequenceClassification",
    "whisper": "WhisperForConditionalGeneration",
}
CHANGES: dict[str, dict[str, object]] = {
    "t5": {"decoder_start_token_id": 0},
    "hubert": {"apply_spec_augment": False},
    "wav2vec2": {"apply_spec_augment": False},
    "bart": {"decoder_start_token_id": 2},
    "marian": {"decoder_start_token_id": 0},
    "pegasus": {"decoder_start_token_id": 0},
}
"""Fields without which a default config cannot be trained, or trains by chance."""
DTYPES = dict.fromkeys(("mixtral", "qwen2_moe", "olmoe", "deepseek_v3"), torch.bfloat16)
"""Models whose experts run in one grouped product, captured in the element type that torch has kernels of it for."""

FLOPS_SHARE, BYTES_SHARE = 0.99, 0.95
"""How much of a model's flops and bytes must be understood, not opaque, for a success. Lower shares would count models
whose cost is partly guessed; more bytes than flops may be missing, because unknown operators mostly move data."""

REASON_LENGTH = 160
"""How many characters of the reason a row shows for which no blocks were copied: enough to see what it is about."""


class Vgg(nn.Module):
    """VGG-16 (Simonyan and Zisserman, arXiv:1409.1556)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
            layers += [nn.MaxPool2d(2)] if width == 0 else [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(True)]
            channels = width or channels
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(25088, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1)).square().mean()


class InvertedResidual(nn.Module):
    """A block of MobileNetV2 (Sandler et al., arXiv:1801.04381)."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        inner = 6 * channels
        self.is_residual = stride == 1 and channels == out
        self.conv = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(True),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(True),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.is_residual else self.conv(x)


class MobileNet(nn.Module):
    """MobileNetV2's body."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 2, 1)
        blocks, channels = [], 32
        for out, count, stride in ((16, 1, 1), (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2)):
            for index in range(count):
                blocks.append(InvertedResidual(channels, out, stride if index == 0 else 1))
                channels = out
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(self.stem(x)).mean((2, 3))).square().mean()


class UNet(nn.Module):
    """Convolutions down and up with connections across (Ronneberger et al., arXiv:1505.04597)."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        sizes = [width * 2**index for index in range(depth + 1)]
        self.down = nn.ModuleList(self._pair(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * s, s, 2, 2) for s in reversed(sizes[:-1]))
        self.join = nn.ModuleList(self._pair(2 * s, s) for s in reversed(sizes[:-1]))
        self.last = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _pair(channels: int, out: int) -> nn.Sequential:
        first, second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        return nn.Sequential(first, nn.GroupNorm(8, out), nn.SiLU(), second, nn.GroupNorm(8, out), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], dim=1))
        return F.interpolate(self.last(x), scale_factor=2, mode="bilinear").square().mean()


class MixerBlock(nn.Module):
    """A block of MLP-Mixer (Tolstikhin et al., arXiv:2105.01601)."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self, depth: int = 4, width: int = 512) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList(MixerBlock(196, width) for _ in range(depth))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1)).square().mean()


class Recurrent(nn.Module):
    """A language model on LSTMs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(10000, 256), nn.LSTM(256, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 10000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.lstm(self.embedding(ids))[0])
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


BY_HAND: dict[str, tuple[Callable[[], nn.Module], object]] = {
    "lstm (by hand)": (Recurrent, {"ids": (4, 16)}),
    "mixer (by hand)": (Mixer, (4, 3, 224, 224)),
    "mobilenet-v2 (by hand)": (MobileNet, (4, 3, 224, 224)),
    "transformer (torch.nn)": (lambda: nn.Transformer(batch_first=True), ((4, 32, 512), (4, 16, 512))),
    "unet (by hand)": (UNet, (4, 3, 64, 64)),
    "vgg-16 (by hand)": (Vgg, (4, 3, 224, 224)),
}


def build(name: str, layers: int) -> tuple[nn.Module, object, dict[str, Any]]:
    """A model, its inputs (None where the frontend is to find them) and options."""
    with torch.device("meta"):
        if name in BY_HAND:
            make, inputs = BY_HAND[name]
            return make(), inputs, {"loss_fn": torch.mean} if name.startswith("transformer") else {}
        import transformers

        package = importlib.import_module(f"transformers.models.{name}")
        model_class = getattr(package, (LANGUAGE | OTHERS)[name])
        config = model_class.config_class()
        for field in LAYER_FIELDS:
            if isinstance(getattr(config, field, None), int):
                setattr(config, field, layers)
        if isinstance(vars(config).get("layer_types"), list):
            config.layer_types = config.layer_types[:layers]
        for field, value in CHANGES.get(name, {}).items():
            setattr(config, field, value)
        transformers.logging.set_verbosity_error()
        model = model_class(config)
    return model.to(DTYPES.get(name, torch.float32)), None, {"sequence_length": 128} if name in LANGUAGE else {}


def print_row(name: str, layers: int) -> bool:
    """Import one model, print its row; whether it succeeded."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, inputs, options = build(name, layers)
            start = time.perf_counter()
            graph = phaze.import_graph(model, inputs, **options)
    except Exception as error:
        print(
            f"{name:<24}{'failed':<10}{time.perf_counter() - start:>6.1f}  {type(error).__name__}: {str(error)[:200]}"
        )
        return False
    seconds = time.perf_counter() - start
    coverage, distinct = graph.coverage(), len(graph.distinct_layers)
    is_equal = graph.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    method = graph.notes[0].rpartition(" ")[2]
    is_flexible = not any(note.startswith("fixed to") for note in graph.notes)
    print(
        f"{name:<24}{method:<10}{seconds:>6.1f}{len(graph.ops):>7}{100 * coverage.flops_share:>8.2f}"
        f"{100 * coverage.bytes_share:>8.2f}{len(graph.layers):>8}{distinct:>9}"
        f"{'  equal' if is_equal else '  UNEQUAL'}{'' if is_flexible else '  fixed batch'}"
        f"  {', '.join(entry.function for entry in coverage.unknown[:4])}"
    )
    return is_equal and coverage.flops_share >= FLOPS_SHARE and coverage.bytes_share >= BYTES_SHARE


def print_comparison(name: str, layers: int) -> bool:
    """Import one model with and without copied blocks, print its row; whether the graphs are equal."""
    reasons = ["captured at one batch size only"]
    capture_repeated = importing.capture_repeated

    def noting(*arguments: Any) -> Any:
        try:
            captured = capture_repeated(*arguments)
        except Irregular as reason:
            reasons.append(f"not copied: {str(reason)[:REASON_LENGTH]}")
            raise
        reasons.append("copied")
        return captured

    graphs, seconds = [], []
    importing.capture_repeated = noting
    try:
        for copies_blocks in (True, False):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model, inputs, options = build(name, layers)
                start = time.process_time()
                graphs.append(importing.import_module(model, inputs, options, copies_blocks=copies_blocks))
                seconds.append(time.process_time() - start)
            if copies_blocks:
                reason = reasons[-1]
    finally:
        importing.capture_repeated = capture_repeated
    copied, whole = graphs
    is_equal = copied == whole and list(copied.tensors) == list(whole.tensors)
    print(
        f"{name:<24}{seconds[0]:>8.1f}{seconds[1]:>8.1f}{len(whole.layers):>8}"
        f"{'  equal' if is_equal else '  UNEQUAL'}  {reason}",
        flush=True,
    )
    return is_equal


def main() -> None:
    """Print a row for every architecture, and the count of successes."""
    names = sorted([*LANGUAGE, *OTHERS, *BY_HAND])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=names, metavar="NAME", help="architectures (all)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="layers of each stack (4)")
    parser.add_argument("--compare", action="store_true", help="import with and without copied blocks")
    arguments = parser.parse_args()
    if arguments.compare:
        print(f"{'architecture':<24}{'copied s':>8}{'whole s':>8}{'layers':>8}")
        equal = [print_comparison(name, arguments.layers) for name in arguments.names]
        print(f"{sum(equal)} of {len(equal)} graphs equal")
        return
    print(
        f"{'architecture':<24}{'method':<10}{'s':>6}{'ops':>7}{'flops %':>8}{'bytes %':>8}{'layers':>8}{'distinct':>9}"
        "  parameters"
    )
    successes = [print_row(name, arguments.layers) for name in arguments.names]
    print(f"{sum(successes)} of {len(successes)} architectures imported")


if __name__ == "__main__":
    main()
