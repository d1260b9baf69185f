"""Target 'megatron-lm': a plan as arguments of Megatron-LM, and back; also the words that Megatron Bridge shares.

A plan in the words of megatron-core 0.16, and the strategy of such words, are the same for Megatron-LM and Megatron
Bridge (`megatron_settings`, `megatron_strategy`; `megatron_bridge_files.py` uses them too). ZeRO 1 is the distributed
optimizer, over all of dp x cp or over each of several equal parts of it (its instances); ZeRO 2 and 3 are Megatron's
own FSDP. It runs 1F1B, and interleaved 1F1B where a device has several stages; a layout names the blocks of each stage:
E is the embedding, t a block, L the head with its loss.

For Megatron-LM (github.com/NVIDIA/Megatron-LM) these words are options of `pretrain_gpt.py`, in a script of one's own
or in ours (`MegatronTarget`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import ConfigText, Settings
from phaze.backends.tools.script_texts import DASHED_OPTIONS
from phaze.backends.tools.tool_target import (
    ToolTarget,
    block_counts,
    command_line,
    shard_groups,
    shard_of,
    strongest_recompute,
    torchrun,
    unread_keys,
    whole,
)
from phaze.errors import PlanError
from phaze.hooks import hookimpl
from phaze.interfaces import Target
from phaze.parallelism import PipelineSchedule
from phaze.strategy_files import StrategyFile
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from phaze.parallelism import Parallelism
    from phaze.plan.plan import Plan
    from phaze.targets import Capabilities

__all__ = [
    "CAPABILITIES",
    "KEYS",
    "PASSED_OVER",
    "PRECISIONS",
    "MegatronTarget",
    "layout_counts",
    "megatron_settings",
    "megatron_strategy",
    "phaze_targets",
]

_SCHEDULES = frozenset({PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED})
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": None}
"""Megatron's flag for each compute type; fp32 has none."""
_SHARDING = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
_ZERO = {strategy: zero for zero, strategy in _SHARDING.items()}
_RECOMPUTE: Mapping[str, dict[str, object]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
CAPABILITIES = Capabilities(
    schedules=_SCHEDULES,
    zero_stages=frozenset({0, 1, 2, 3}),
    # Its FSDP together with pipelines is nothing that anybody has tried here.
    excluded_pairs=frozenset((schedule, zero) for schedule in _SCHEDULES for zero in (2, 3)),
    allows_uneven_stages=True,
    allows_strided_parameters=True,
    allows_context_parallel=True,
    allows_expert_parallel=True,
    allows_shard_groups=True,
    # Its FSDP makes no groups of experts where states are divided over a part of the devices.
    excluded_axes=frozenset({("ep", "shard")}),
    experts_need_split_sequences=True,
    compute_dtypes=frozenset(PRECISIONS),
    product_dtypes=frozenset({"fp8"}),
    can_cut_stages=True,
    fuses_gates=True,
)
"""Stages of any number of blocks."""
KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "use_torch_fsdp2",
    "data_parallel_sharding_strategy",
    "pipeline_model_parallel_layout",
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
    "checkpoint_activations",
    "activations_checkpoint_method",
    "bf16",
    "fp16",
    "fp8",
    "fp8_format",
    "num_layers",
)
"""Everything that is read, in megatron-core's spelling."""

PASSED_OVER = (
    *("distributed_backend", "DDP_impl", "overlap_*", "*_comm_overlap*", "decoder_*pipeline*", "*_pipeline_num_layers"),
    *("pipeline_dtype", "rampup_batch_size", "eval_*batch_size", "defer_embedding_*"),
    *("sharp_enabled_group", "use_tp_pp_dp_mapping", "distribute_saved_activations", "dist_ckpt*", "fsdp_*"),
    *("*_in_pipeline_split", "account_for_*", "cp_comm_type", "hierarchical_context_parallel_sizes", "num_gpus_*"),
)
"""Words that speak of how a batch is divided and are known, and that are not priced."""


def megatron_settings(plan: Plan) -> dict[str, object]:
    """Everything that the plan decides; raises PlanError for what Megatron has no word for."""
    strategy, recipe = plan.strategy, plan.question.precision
    if recipe.compute_dtype not in PRECISIONS:
        raise PlanError(f"Megatron trains in bf16, fp16 or fp32; the plan's precision is {recipe.name}.")
    settings: dict[str, object] = {
        "tensor_model_parallel_size": strategy.tp,
        "pipeline_model_parallel_size": strategy.pp,
        "context_parallel_size": strategy.cp,
        **_experts(strategy),
        "micro_batch_size": strategy.micro_batch_size,
        "global_batch_size": plan.question.global_batch_size,
        "seq_length": plan.model.tokens_per_sample,
    }
    flag = PRECISIONS[recipe.compute_dtype]
    settings |= {flag: True} if flag else {}
    settings |= {"fp8": "hybrid"} if recipe.quantizes_products else {}
    if strategy.sequence_parallel and strategy.tp > 1:
        settings["sequence_parallel"] = True
    settings |= _sharding(plan)
    if strategy.pp > 1:
        settings["pipeline_model_parallel_layout"] = _layout(plan)
    return {**settings, **_RECOMPUTE[strongest_recompute(plan)]}


def _experts(strategy: Parallelism) -> dict[str, object]:
    """The settings for experts: Megatron counts the tp devices where whole experts are divided over them, too."""
    if strategy.expert_tp is None:
        if strategy.tp > 1 and strategy.ep > 1:
            raise PlanError(
                "Megatron cuts the experts of all layers over its tensor-parallel devices, or of none; the plan's "
                f"differ. Plan with expert_tp 1 or {strategy.tp}."
            )
        return {"expert_model_parallel_size": strategy.ep}
    return {
        "expert_model_parallel_size": strategy.ep * strategy.tp // strategy.expert_tp,
        "expert_tensor_parallel_size": strategy.expert_tp,
    }


def _read_experts(settings: Settings, tp: int, ep: int) -> dict[str, object]:
    """How experts are divided, in Megatron's default cut as layers are; nothing where the tp devices hold copies."""
    if tp == 1:
        return {"ep": ep}
    expert_tp = whole(settings.get("expert_tensor_parallel_size", tp))
    if expert_tp == 1:
        return {"ep": ep // tp, "expert_tp": 1} if ep % tp == 0 else {}
    return {"ep": ep, "expert_tp": tp if ep > 1 and expert_tp == tp else None}


def _sharding(plan: Plan) -> dict[str, object]:
    """The settings for a ZeRO stage and its groups."""
    strategy = plan.strategy
    if strategy.zero == 0:
        return {}
    settings: dict[str, object] = {"use_distributed_optimizer": True}
    groups, _ = shard_groups(strategy, "Megatron")
    if groups > 1:
        settings["num_distributed_optimizer_instances"] = groups
    if strategy.zero > 1:
        settings |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": _SHARDING[strategy.zero]}
    return settings


def _layout(plan: Plan) -> str:
    """The stages from first to last; where devices have several stages, stages go round the devices."""
    parts = ["" if count == 0 else "t" if count == 1 else f"t*{count}" for count in block_counts(plan, "Megatron")]
    parts[0] = f"E{parts[0]}"
    parts[-1] = f"{parts[-1]}L"
    return "|".join(parts)


def layout_counts(layout: str) -> list[int] | None:
    """How many layers each stage of a layout has, embedding and head counted; None for one that is not understood."""
    text = re.sub(r"[\s,'\"]", "", layout)
    for _ in range(len(text)):  # groups are written out from the inside
        grown = re.sub(r"\(([^()]*)\)\*(\d{1,3})", lambda match: match[1] * int(match[2]), text, count=1)
        if grown == text or len(grown) > 10_000:
            break
        text = grown
    text = re.sub(r"([EtmL])\*(\d{1,4})", lambda match: match[1] * int(match[2]), text)
    if not re.fullmatch(r"[EtmL|]+", text):
        return None
    return [sum(char in "EtL" for char in stage) for stage in text.split("|")]


def megatron_strategy(settings: Settings, devices: int) -> dict[str, object]:
    """The strategy of settings in megatron-core's spelling, with its defaults."""
    tp, pp, cp, ep = (
        whole(settings.get(name, 1))
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        )
    )
    dp = max(1, devices // ((tp or 1) * (pp or 1) * (cp or 1)))
    zero = _zero_stage(settings) if dp * (cp or 1) > 1 else 0
    groups = whole(settings.get("num_distributed_optimizer_instances", 1)) or 1
    strategy = {
        "dp": dp,
        "shard": shard_of(groups, dp // groups, cp or 1) if zero else None,
        "zero": zero,
        "cp": cp,
        **(_read_experts(settings, tp, ep) if tp and ep else {"ep": ep}),
        "tp": tp,
        "sequence_parallel": _is_set(settings.get("sequence_parallel")) if tp != 1 else None,
        "micro_batch_size": whole(settings.get("micro_batch_size", 1)),
        "pp": pp,
        **(_pipeline(settings, pp) if pp is not None and pp > 1 else {}),
        "recompute": _recompute(settings),
    }
    return {key: value for key, value in strategy.items() if value is not None}


def _is_set(value: object) -> bool:
    return value is True or str(value).lower() == "true"


def _zero_stage(settings: Settings) -> int:
    if _is_set(settings.get("use_torch_fsdp2")):
        return 3
    if _is_set(settings.get("use_megatron_fsdp")) or _is_set(settings.get("use_custom_fsdp")):
        return _ZERO.get(str(settings.get("data_parallel_sharding_strategy")), 0)
    return 1 if _is_set(settings.get("use_distributed_optimizer")) else 0


def _pipeline(settings: Settings, pp: int) -> dict[str, object]:
    layout = settings.get("pipeline_model_parallel_layout")
    counts = layout_counts(layout) if isinstance(layout, str) else None
    if counts is not None and len(counts) % pp == 0:
        chunks: int | None = len(counts) // pp
    else:
        counts = None
        layers, each = (whole(settings.get(name)) for name in ("num_layers", "num_layers_per_virtual_pipeline_stage"))
        named = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
        chunks = next((count for name in named if (count := whole(settings.get(name)))), None)
        chunks = layers // pp // each if layers and each else chunks or 1
    schedule = PipelineSchedule.INTERLEAVED if chunks and chunks > 1 else PipelineSchedule.ONE_F_ONE_B
    return {"schedule": schedule, "chunks": chunks, "stages": counts}


def _recompute(settings: Settings) -> str:
    granularity = settings.get("recompute_granularity")
    if granularity in ("full", "selective"):
        return str(granularity)
    # Options of older versions: Megatron-LM before 2022 recomputed whole layers by these.
    if "activations_checkpoint_method" in settings or _is_set(settings.get("checkpoint_activations")):
        return "full"
    return "selective" if _is_set(settings.get("recompute_activations")) else "none"


_FILE = "megatron_lm.sh"
_DEFAULTS = {"num_layers", "hidden_size", "num_attention_heads", "vocab_size", "ffn_hidden_size", "padded_vocab_size"}
"""Sizes of the model, which the file may name."""
_VOCABULARY = 50257
"""The vocabulary of GPT-2's tokenizer, which Megatron-LM's GPT examples read."""
_PADDING = 128
"""Megatron-LM pads vocabularies to a multiple of this x tp."""


class MegatronTarget(ToolTarget):
    """Writes the arguments that a plan decides, one in each line."""

    name = "megatron-lm"
    tool = "Megatron-LM core_v0.16"
    checked = (
        "values accepted by megatron-core 0.16.1's TransformerConfig and DistributedDataParallelConfig; groups of its "
        "parallel_state on 8 processes of gloo are the plan's; loss and gradients of its GPTModel at tp 2 on CPUs are "
        "those at tp 1; losses and gradients of its pipeline schedules over the layout's stages on CPUs are one "
        "process's; loss and gradients of its mixture with experts over ep 2 on CPUs are those at ep 1; not run: its "
        "trainer, whose recompute asks for CUDA's generator, contexts, whose attention is Transformer Engine's, and "
        "its sharding of parameters; not parsed: option names, read in megatron/training/arguments.py, which the "
        "package does not have"
    )

    @property
    def capabilities(self) -> Capabilities:
        """Those of megatron-core."""
        return CAPABILITIES

    def text_of(self, name: str, part: str | None, text: str) -> ConfigText | None:
        """Any text with one of its options."""
        known = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size")
        return DASHED_OPTIONS if any(option in text for option in known) and not name.endswith(".py") else None

    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """Options without their dashes."""
        settings = megatron_settings(plan)
        if "fp8" in settings:
            settings["fp8_format"] = settings.pop("fp8")
        if "use_megatron_fsdp" in settings:  # what its arguments ask for beside it
            settings |= {"no_gradient_accumulation_fusion": True, "ckpt_format": "fsdp_dtensor"}
        return {name.replace("_", "-"): value for name, value in settings.items()}

    def files(self, plan: Plan) -> dict[str, str]:
        """One file, which a shell sources: an array of arguments."""
        return {_FILE: DASHED_OPTIONS.render(self.head(plan), self.settings(plan, DASHED_OPTIONS))}

    def launch(self, plan: Plan) -> str:
        """Megatron-LM's program for GPT; the model's own arguments come behind the plan's."""
        program = 'pretrain_gpt.py "${PLANNED[@]}" "${MODEL_AND_DATA[@]}"'
        return f"source {_FILE}\n{command_line(torchrun(plan), program)}"

    def owned(self, settings: Settings) -> set[str]:
        """The options that are read, but those of the model and the batch."""
        sizes = {"num-layers", "seq-length", "bf16", "fp16"}
        return {key for key in settings if key.replace("-", "_") in KEYS} - sizes

    def strategy_of(self, settings: Settings, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy of arguments, wherever they stand in a script."""
        options = {key.replace("-", "_"): value for key, value in settings.items()}
        named = {*KEYS, *_DEFAULTS, "ckpt_format", "no_gradient_accumulation_fusion"}
        read = {spelled for name in named for spelled in (name, name.replace("_", "-"))}
        others = [spelled for name in PASSED_OVER for spelled in (name, name.replace("_", "-"))]
        return StrategyFile(
            tool=self.name,
            strategy=megatron_strategy(options, devices),
            global_batch_size=whole(options.get("global_batch_size")),
            sequence_length=whole(options.get("seq_length")),
            precision="fp8" if "fp8_format" in options else "fp16" if "fp16" in options else None,
            config=_model(options),
            **unread_keys(settings, read, others, is_whole=False, prefix="--"),
            notes=unset_variables(settings, "--"),
        )


def unset_variables(settings: Settings, prefix: str = "") -> tuple[str, ...]:
    """What a file leaves to variables that it does not set."""
    read = {name.replace("_", "-") for name in KEYS} | set(KEYS)
    return tuple(
        f"{prefix}{key} is {value}, which this file does not set: it is left to the search"
        for key, value in settings.items()
        if key in read and isinstance(value, str) and value.startswith("$")
    )


def _model(options: Settings) -> dict[str, object] | None:
    """The GPT that arguments describe, as `phaze.import_graph` takes a config; None where a size is missing.

    Where no vocabulary is named it is GPT-2's, padded as Megatron-LM pads it.
    """
    layers, hidden, heads = (whole(options.get(name)) for name in ("num_layers", "hidden_size", "num_attention_heads"))
    if layers is None or hidden is None or heads is None or "swiglu" in options or "num_experts" in options:
        return None
    multiple = _PADDING * (whole(options.get("tensor_model_parallel_size")) or 1)
    vocabulary = whole(options.get("vocab_size")) or -(-_VOCABULARY // multiple) * multiple
    return {
        "model_type": "megatron-gpt",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": whole(options.get("seq_length")) or whole(options.get("max_position_embeddings")) or 1024,
        "vocab_size": vocabulary,
    }


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """The arguments for Megatron-LM."""
    return (MegatronTarget(),)
