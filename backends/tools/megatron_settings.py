"""What Megatron-LM and Megatron Bridge share: a plan in megatron-core 0.16's words, and the strategy of such words.

ZeRO 1 is the distributed optimizer, over all of dp x cp or over each of several equal parts of it (its instances);
ZeRO 2 and 3 are Megatron's own FSDP. It runs 1F1B, and interleaved 1F1B where a device has several stages; a layout
names the blocks of each stage: E is the embedding, t a block, L the head with its loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import Settings
from phaze.backends.tools.tool_target import block_counts, shard_groups, shard_of, strongest_recompute, whole
from phaze.capabilities import Capabilities
from phaze.errors import PlanError
from phaze.parallelism import PipelineSchedule

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = [
    "CAPABILITIES",
    "KEYS",
    "PASSED_OVER",
    "PRECISIONS",
    "layout_counts",
    "megatron_settings",
    "megatron_strategy",
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
    *("expert_tensor_parallel_size", "pipeline_dtype", "rampup_batch_size", "eval_*batch_size", "defer_embedding_*"),
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
        "expert_model_parallel_size": strategy.ep,
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
        "ep": ep,
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
