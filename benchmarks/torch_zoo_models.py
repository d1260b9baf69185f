"""Small models of many kinds for `torch_zoo.py`: Hugging Face's by config, and some as people write them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
import transformers

import phaze

__all__ = ["MODELS", "ZooModel"]

transformers.logging.set_verbosity_error()

LENGTH = 16
WORDS = 96


def token_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    """Ids and labels of sequences."""
    words = torch.randint(3, WORDS, (2, size, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": words[0], "labels": words[1]}


def image_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    """Images and their kinds."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(size, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (size,), generator=generator)}


def sound_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    """Spectrograms and the words in them."""
    features = torch.randn(size, 8, 2 * LENGTH, generator=torch.Generator().manual_seed(seed))
    return {"input_features": features, "labels": token_batch(size, seed)["labels"]}


def captioned_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    """Images and sequences in which some ids, at other places in each, stand for parts of them."""
    batch = token_batch(size, seed)
    for index, row in enumerate(batch["input_ids"]):
        row[1 + index % 3 : 5 + index % 3] = IMAGE_WORD
    return {**batch, "pixel_values": torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(seed))}


IMAGE_WORD = 1


def returned_loss(output: Any) -> torch.Tensor:
    """The loss that a model returns: itself, under its name, or last in a tuple."""
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else getattr(output, "loss", output[-1])
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A model that is always built with the same weights, and its batches."""

    make: Callable[[], torch.nn.Module]
    make_batch: Callable[[int, int], dict[str, torch.Tensor]] = token_batch
    loss: Callable[[Any], torch.Tensor] = returned_loss
    returns_loss: bool = True
    has_batch_norms: bool = False
    is_mixture: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)

    def build(self) -> torch.nn.Module:
        """The model, in training mode; nothing in it is random after this."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make().train()

    def batch(self, size: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """A global batch, as keyword arguments."""
        return {self.renamed.get(name, name): value for name, value in self.make_batch(size, seed + 1).items()}

    def described(self) -> Any:
        """The graph that the model's config describes, in which experts are known."""
        config = getattr(self.build(), "config", None)
        if config is None:
            raise phaze.PhazeError("the model has no config, from which experts would be known.")
        return phaze.import_graph(config.to_dict(), sequence_length=LENGTH)


_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
_CAUSAL = {**_SMALL, **_IDS, "num_key_value_heads": 2, "vocab_size": WORDS}
_NO_DROPS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MASKED = {**_SMALL, **_NO_DROPS, "vocab_size": WORDS, "max_position_embeddings": 2 * LENGTH}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def hugging_face(model: str, config: str, fields: Mapping[str, Any], **more: Any) -> ZooModel:
    """A model of transformers by the names of its classes and the fields of its config."""

    def make() -> torch.nn.Module:
        module: torch.nn.Module = getattr(transformers, model)(getattr(transformers, config)(**fields))
        return module

    return ZooModel(make=make, **more)


def causal(family: str, *, is_mixture: bool = False, **fields: Any) -> ZooModel:
    """A causal language model whose classes are named after its family."""
    return hugging_face(f"{family}ForCausalLM", f"{family}Config", {**_CAUSAL, **fields}, is_mixture=is_mixture)


class Block(torch.nn.Module):
    """A block of a language model as people write it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a perceptron, each beside its input."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class NanoGpt(torch.nn.Module):
    """A language model in the way of nanoGPT: logits and loss in a tuple, a tied head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(WORDS, width), torch.nn.Embedding(LENGTH, width)
        self.h = torch.nn.ModuleList(Block(width, 4) for _ in range(2))
        self.ln_f, self.lm_head = torch.nn.LayerNorm(width), torch.nn.Linear(width, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and loss."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


class TorchEncoder(torch.nn.Module):
    """torch.nn's own encoder."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of each word."""
        logits = self.head(self.encoder(self.words(input_ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LowRank(torch.nn.Module):
    """A frozen linear map with a trained one of low rank beside it (LoRA, arXiv:2106.09685)."""

    def __init__(self, frozen: torch.nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = torch.nn.Linear(frozen.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both maps, added."""
        result: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return result


def low_rank_llama() -> torch.nn.Module:
    """A Llama of which only maps of low rank beside its projections are trained."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_CAUSAL))
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))
    return model


class UNet(torch.nn.Module):
    """Convolutions down and up again, with skips between equal sizes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = torch.nn.Conv2d(3, width, 3, padding=1)
        self.down = torch.nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = torch.nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = torch.nn.Conv2d(2 * width, width, 3, padding=1)
        self.norm, self.leave = torch.nn.GroupNorm(2, width), torch.nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The squared error of the image that it gives back, scaled by its kind."""
        early = F.silu(self.norm(self.enter(pixel_values)))
        inner = F.silu(self.middle(F.silu(self.down(early))))
        late = self.up(F.interpolate(inner, scale_factor=2.0, mode="nearest"))
        error = self.leave(torch.cat((early, late), 1)) - pixel_values
        return (error.square().mean((1, 2, 3)) * (1 + labels)).mean()


def small_llava() -> torch.nn.Module:
    """A language model that reads parts of images between words."""
    vision = transformers.CLIPVisionConfig(**_SMALL, image_size=16, patch_size=8, projection_dim=32)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**_CAUSAL),
        image_token_index=IMAGE_WORD,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


def small_gemma3() -> torch.nn.Module:
    """A Gemma 3 with its tower for images, which words of an image attend to both ways."""
    vision = {**_SMALL, "image_size": 16, "patch_size": 8}
    text = {**_CAUSAL, "head_dim": 8, "sliding_window": 8}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=IMAGE_WORD
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def typed_captioned_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    """The same, with the kind of each id."""
    batch = captioned_batch(size, seed)
    return {**batch, "token_type_ids": (batch["input_ids"] == IMAGE_WORD).long()}


def small_internvl() -> torch.nn.Module:
    """A Qwen2 that reads images between words."""
    vision = {**_SMALL, "image_size": [16, 16], "patch_size": [8, 8]}
    text = {"model_type": "qwen2", **_CAUSAL}
    config = transformers.InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE_WORD, downsample_ratio=1.0
    )
    return transformers.InternVLForConditionalGeneration(config)


_ENDS = {"decoder_start_token_id": 0, "pad_token_id": 2}
_T5 = {"num_layers": 1, "num_decoder_layers": 1, "d_model": 32, "d_ff": 64, "num_heads": 4, "d_kv": 8}
_SIDES = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": WORDS, "n_positions": LENGTH, **_IDS}
_GPT2_DROPS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 10}

MODELS: dict[str, ZooModel] = {
    "llama": causal("Llama"),
    "gpt2": hugging_face("GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_GPT2_DROPS}),
    "qwen3": causal("Qwen3", head_dim=8),
    "mistral": causal("Mistral", sliding_window=8),
    "gemma3": hugging_face("Gemma3ForCausalLM", "Gemma3TextConfig", {**_CAUSAL, "head_dim": 8, "sliding_window": 8}),
    "phi3": causal("Phi3", **{**_IDS, "resid_pdrop": 0.0}),
    "gpt-neox": causal("GPTNeoX"),
    "opt": causal("OPT", ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=32, dropout=0.0, layerdrop=0.0),
    "olmo2": causal("Olmo2"),
    "falcon": causal("Falcon", new_decoder_architecture=True, num_kv_heads=2, alibi=False, bias=False),
    "mamba": hugging_face(
        "MambaForCausalLM",
        "MambaConfig",
        {"num_hidden_layers": 2, "hidden_size": 32, "state_size": 4, "vocab_size": WORDS, **_IDS},
    ),
    "mixtral": causal("Mixtral", is_mixture=True, num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": causal("Qwen2Moe", is_mixture=True, **_EXPERTS, shared_expert_intermediate_size=48),
    "qwen3-moe": causal("Qwen3Moe", is_mixture=True, **_EXPERTS, head_dim=8),
    "deepseek-v3": causal("DeepseekV3", is_mixture=True, **_DEEPSEEK),
    "gpt-oss": causal(
        "GptOss", is_mixture=True, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8
    ),
    "bert": hugging_face("BertForMaskedLM", "BertConfig", _MASKED),
    "roberta": hugging_face("RobertaForMaskedLM", "RobertaConfig", {**_MASKED, "pad_token_id": 2}),
    "distilbert": hugging_face(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "n_layers": 2,
            "dim": 32,
            "hidden_dim": 64,
            "n_heads": 4,
            "vocab_size": WORDS,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "max_position_embeddings": LENGTH,
        },
    ),
    "t5": hugging_face(
        "T5ForConditionalGeneration", "T5Config", {**_T5, **_ENDS, "vocab_size": WORDS, "dropout_rate": 0.0}
    ),
    "bart": hugging_face(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **_SIDES,
            **_ENDS,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "d_model": 32,
            "vocab_size": WORDS,
            "dropout": 0.0,
            "max_position_embeddings": 32,
        },
    ),
    "whisper": hugging_face(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_SIDES,
            **_IDS,
            "decoder_start_token_id": 0,
            "d_model": 32,
            "num_mel_bins": 8,
            "vocab_size": WORDS,
            "max_source_positions": LENGTH,
            "max_target_positions": LENGTH,
            "dropout": 0.0,
        },
        make_batch=sound_batch,
    ),
    "vit": hugging_face(
        "ViTForImageClassification",
        "ViTConfig",
        {**_SMALL, **_NO_DROPS, "image_size": 32, "patch_size": 8, "num_labels": 10},
        make_batch=image_batch,
    ),
    "convnext": hugging_face(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "num_labels": 10},
        make_batch=image_batch,
    ),
    "resnet": hugging_face(
        "ResNetForImageClassification", "ResNetConfig", _RESNET, make_batch=image_batch, has_batch_norms=True
    ),
    "llava": ZooModel(make=small_llava, make_batch=captioned_batch),
    "gemma3-images": ZooModel(make=small_gemma3, make_batch=typed_captioned_batch),
    "internvl": ZooModel(make=small_internvl, make_batch=captioned_batch),
    "nanogpt": ZooModel(make=NanoGpt, renamed={"input_ids": "idx", "labels": "targets"}),
    "torch-encoder": ZooModel(make=TorchEncoder),
    "unet": ZooModel(make=UNet, make_batch=image_batch),
    "llama-lora": ZooModel(make=low_rank_llama),
}
