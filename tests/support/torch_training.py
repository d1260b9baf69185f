"""Small models for training in torch: real weights, equal in every process that builds them."""

import warnings
from functools import partial
from typing import Any

import torch
import transformers
from torch.utils.checkpoint import checkpoint

transformers.logging.set_verbosity_error()

LENGTH = 16
BATCH = 8
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


class HandWritten(torch.nn.Module):
    """A language model as people write it: fused projections, a list of blocks, its own loss."""

    class Block(torch.nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
            q, k, v = (one.view(batch, length, self.heads, -1).transpose(1, 2) for one in (q, k, v))
            found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 4, words: int = 96) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(words, width)
        self.places = torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.ModuleList(HandWritten.Block(width, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return word_loss(self.logits(tokens), targets)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


class Headless(HandWritten):
    """One that returns logits, so that a loss is to be given beside it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.logits(tokens)


def word_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Checkpointed(HandWritten):
    """One that computes its blocks again in backward by itself."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        result: torch.Tensor = self.head(self.norm(x))
        return result


class NanoGpt(HandWritten):
    """One in the way of nanoGPT: modules by name, a tied head, logits and loss in a tuple."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.transformer = torch.nn.ModuleDict({"wte": self.words, "wpe": self.places, "h": self.blocks})
        self.transformer["ln_f"] = self.norm
        del self.words, self.places, self.blocks, self.norm
        self.transformer["wte"].weight = self.head.weight

    def forward(  # type: ignore[override]
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1], device=idx.device))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.head(self.transformer["ln_f"](x))
        return logits, None if targets is None else word_loss(logits, targets)


class TorchEncoder(HandWritten):
    """One whose blocks are torch.nn's own."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        result: torch.Tensor = self.head(self.norm(self.encoder(x)))
        return result


class BatchNormed(HandWritten):
    """One with batch norms, which look at all samples at once."""

    class Mixed(torch.nn.Module):
        def __init__(self, momentum: float) -> None:
            super().__init__()
            self.mix, self.norm = torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32, momentum=momentum)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.norm(self.mix(x).transpose(1, 2)).transpose(1, 2))

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.blocks = torch.nn.ModuleList(BatchNormed.Mixed(momentum) for momentum in (0.1, 0.3))


class Spare(HandWritten):
    """One with parameters that nothing reads."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.spare = torch.nn.Linear(32, 32)


def second_of_output(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return output[1]


class Uncut(HandWritten):
    """The same without a list of blocks: nothing tells where to cut it into stages."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        del self.blocks
        self.early, self.late = HandWritten.Block(32, 4), HandWritten.Block(32, 4)

    @property
    def blocks(self) -> tuple[torch.nn.Module, ...]:  # type: ignore[override]
        return (self.early, self.late)


class Odd(HandWritten):
    """Few words, so that one of four devices holds none; parameters of blocks themselves; a head that is another's."""

    class Scaled(HandWritten.Block):
        def __init__(self) -> None:
            super().__init__(32, 4)
            self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.scale)

    def __init__(self) -> None:
        super().__init__(words=5)
        self.blocks = torch.nn.ModuleList(Odd.Scaled() for _ in range(2))
        del self.head

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.words.weight.T


def build_model(kind: str) -> torch.nn.Module:
    """A model by its kind, always with the same weights."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _BUILDERS[kind]()


def _gpt2(use_cache: bool = False) -> torch.nn.Module:
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=LENGTH, use_cache=use_cache, **drops, **_IDS
    )
    return transformers.GPT2LMHeadModel(config)


class Grouped(HandWritten):
    """One whose keys serve two heads each, and are repeated for them before attention."""

    class Block(HandWritten.Block):
        def __init__(self) -> None:
            super().__init__(32, 4)
            self.qkv = torch.nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            parts = self.qkv(self.norm1(x)).view(batch, length, 8, 8).transpose(1, 2).split([4, 2, 2], dim=1)
            query, key, value = parts[0], *(part.repeat_interleave(2, dim=1) for part in parts[1:])
            result = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(result.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.blocks = torch.nn.ModuleList(Grouped.Block() for _ in range(2))


def _llama(use_cache: bool = False, key_heads: int = 2) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        vocab_size=96,
        use_cache=use_cache,
        **_IDS,
    )
    return transformers.LlamaForCausalLM(config)


class LowRank(torch.nn.Module):
    """A frozen linear map with a trained one of low rank beside it (LoRA, arXiv:2106.09685)."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


def _lora() -> torch.nn.Module:
    """A frozen Llama with trained adapters of low rank in its last layer only."""
    model = _llama().requires_grad_(False)
    attention = model.model.layers[-1].self_attn
    attention.q_proj, attention.v_proj = LowRank(attention.q_proj), LowRank(attention.v_proj)
    return model


def _t5(layers: int = 2, use_cache: bool = False) -> torch.nn.Module:
    config = transformers.T5Config(
        num_layers=layers,
        num_decoder_layers=layers,
        d_model=32,
        d_ff=64,
        num_heads=4,
        d_kv=8,
        vocab_size=96,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=2,
        use_cache=use_cache,
    )
    return transformers.T5ForConditionalGeneration(config)


def _captioned() -> torch.nn.Module:
    """A language model that reads images between words, and whose embedding is called outside of it, and tied."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.InternVLConfig(
        vision_config={**sizes, "image_size": [16, 16], "patch_size": [8, 8]},
        text_config={"model_type": "qwen2", **sizes, **_IDS, "num_key_value_heads": 2, "vocab_size": 96},
        image_token_id=1,
        downsample_ratio=1.0,
    )
    return transformers.InternVLForConditionalGeneration(config)


def _bert() -> torch.nn.Module:
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=96, **drops
    )
    return transformers.BertForMaskedLM(config)


def _neox() -> torch.nn.Module:
    config = transformers.GPTNeoXConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=96, **_IDS
    )
    return transformers.GPTNeoXForCausalLM(config)


def _qwen3() -> torch.nn.Module:
    config = transformers.Qwen3Config(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=96,
        **_IDS,
    )
    return transformers.Qwen3ForCausalLM(config)


_SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    **_IDS,
}


def _gemma3() -> torch.nn.Module:
    config = transformers.Gemma3TextConfig(**_SMALL, head_dim=8, sliding_window=8)
    return transformers.Gemma3ForCausalLM(config)


def _mamba() -> torch.nn.Module:
    config = transformers.MambaConfig(
        num_hidden_layers=2, hidden_size=32, state_size=4, vocab_size=96, tie_word_embeddings=True, **_IDS
    )
    return transformers.MambaForCausalLM(config)


def _mixtral(adds_router_loss: bool = False) -> torch.nn.Module:
    layer = {**_SMALL, "num_hidden_layers": 1, "output_router_logits": adds_router_loss, "router_aux_loss_coef": 0.5}
    config = transformers.MixtralConfig(**layer, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def _qwen2_moe() -> torch.nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    layer = {**_SMALL, "num_hidden_layers": 1}
    config = transformers.Qwen2MoeConfig(**layer, **experts, shared_expert_intermediate_size=48)
    return transformers.Qwen2MoeForCausalLM(config)


def _deepseek_v3() -> torch.nn.Module:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16}
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
    config = transformers.DeepseekV3Config(**{**_SMALL, **experts, **groups, **ranks, **heads})
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt_oss() -> torch.nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**_SMALL, **experts, head_dim=8, sliding_window=8)
    return transformers.GptOssForCausalLM(config)


_BUILDERS = {
    "gpt2-cached": partial(_gpt2, use_cache=True),
    "llama-cached": partial(_llama, use_cache=True),
    "t5-cached": partial(_t5, layers=1, use_cache=True),
    "neox-cached": _neox,
    "qwen3-cached": _qwen3,
    "gemma3": _gemma3,
    "mamba": _mamba,
    "mixtral": _mixtral,
    "mixtral-balanced": partial(_mixtral, adds_router_loss=True),
    "qwen2-moe": _qwen2_moe,
    "deepseek-v3": _deepseek_v3,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "llama": _llama,
    "llama-config": _llama,
    "llama-mqa": partial(_llama, key_heads=1),
    "llama-mqa-config": partial(_llama, key_heads=1),
    "gpt2-config": _gpt2,
    "grouped": Grouped,
    "lora": _lora,
    "t5": _t5,
    "bert": _bert,
    "captioned": _captioned,
    "hand-written": HandWritten,
    "headless": partial(Headless, layers=2),
    "three-headed": partial(HandWritten, width=24, heads=3, layers=2),
    "encoder": TorchEncoder,
    "checkpointed": partial(Checkpointed, layers=2),
    "batch-normed": BatchNormed,
    "spare": Spare,
    "nanogpt": NanoGpt,
    "nanogpt-indexed": NanoGpt,
    "uncut": Uncut,
    "odd": Odd,
}


def batch_of(kind: str, seed: int = 1, size: int = BATCH) -> dict[str, torch.Tensor]:
    """A global batch of a model, as keyword arguments."""
    torch.manual_seed(seed)
    words = (0, 5) if kind == "odd" else (3, 96)
    tokens, labels = torch.randint(*words, (2, size, LENGTH))
    is_written = kind in (
        "hand-written",
        "three-headed",
        "grouped",
        "headless",
        "uncut",
        "odd",
        "encoder",
        "batch-normed",
        "spare",
        "checkpointed",
    )
    names = ("tokens", "targets") if is_written else ("input_ids", "labels")
    if kind.startswith("nanogpt"):
        names = ("idx", "targets")
    if kind == "captioned":
        tokens[:, 3:7] = 1
        return {"input_ids": tokens, "labels": labels, "pixel_values": torch.randn(size, 3, 16, 16)}
    return dict(zip(names, (tokens, labels), strict=True))


def given_loss(kind: str) -> dict[str, Any]:
    """The loss that is given beside a model, as `optimize` and `apply` take it."""
    losses = {"headless": word_loss, "nanogpt-indexed": second_of_output}
    return {"loss_fn": losses[kind]} if kind in losses else {}


def apply_options(kind: str) -> dict[str, Any]:
    """What `apply` is given beside the inputs."""
    return given_loss(kind) | ({"batch_norm": "synchronized"} if kind == "batch-normed" else {})


def inputs_of(kind: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What of a batch the model itself takes."""
    return {name: value for name, value in batch.items() if kind != "headless" or name != "targets"}


def loss_of(kind: str, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch in one process."""
    output = model(**inputs_of(kind, batch))
    if kind == "headless":
        return word_loss(output, batch["targets"])
    if isinstance(output, tuple):
        return second_of_output(output)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss
