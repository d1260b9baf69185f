"""Target 'deepspeed': a plan as a config (JSON) of DeepSpeed 0.19, and such configs read.

ZeRO shards over all of dp x sp; groups of it (MiCS) were removed in 0.19, and hpZ divides a second copy of the
parameters only, so that hybrid sharding is refused. Sequences are split by Ulysses (`sequence_parallel_size`), layers
by AutoTP, which goes with ZeRO up to stage 2. A pipeline runs 1F1B over equal stages, with ZeRO-1 at most and no tp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import JSON, ConfigText, Settings
from phaze.backends.tools.tool_target import (
    ToolTarget,
    command_line,
    micro_batches,
    nodes,
    strongest_recompute,
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
    from phaze.plan.plan import Plan

__all__ = ["DeepSpeedTarget", "phaze_targets"]

_FILE = "ds_config.json"
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": None}
_MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
"""What a config that says how a batch is divided has at least one of."""
_PIPELINE = PipelineSchedule.ONE_F_ONE_B


class DeepSpeedTarget(ToolTarget):
    """Writes a config for `deepspeed.initialize`."""

    name = "deepspeed"
    tool = "DeepSpeed 0.19.8"
    checked = (
        "parsed by deepspeed 0.19.8's DeepSpeedConfig, which settles the plan's batch, ZeRO stage and degrees; a step "
        "of its engine with ZeRO 1, 2 and 3 on CPU processes is one process's, with the plan's shards; losses of its "
        "AutoTP on 4 CPU processes, with the plan's groups and shards, are one process's; its DistributedAttention on "
        "the plan's groups of 2 CPU processes is whole attention; a batch of its PipelineEngine on 4 CPU processes, "
        "over the plan's stages, is one process's"
    )

    @property
    def capabilities(self) -> Capabilities:
        """Blocks are recomputed whole or not at all, by the model's own calls."""
        return Capabilities(
            schedules=frozenset({_PIPELINE}),
            zero_stages=frozenset({0, 1, 2, 3}),
            excluded_pairs=frozenset({(_PIPELINE, 2), (_PIPELINE, 3)}),
            tensor_parallel_zero_stages=frozenset({0, 1, 2}),
            excluded_axes=frozenset({("tp", "pp"), ("cp", "tp"), ("cp", "pp")}),
            compute_dtypes=frozenset(_PRECISIONS),
            recompute_modes=frozenset({"none", "full"}),
            allows_strided_parameters=True,
            allows_sequence_parallel=False,
            allows_context_parallel=True,
            can_cut_stages=True,
        )

    def text_of(self, name: str, part: str | None, text: str) -> ConfigText | None:
        """JSON with one of its keys."""
        return JSON if name.endswith(".json") and any(f'"{mark}"' in text for mark in _MARKS) else None

    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """Batch, precision, ZeRO stage and degrees."""
        strategy, recipe = plan.strategy, plan.question.precision
        if recipe.compute_dtype not in _PRECISIONS:
            raise PlanError(f"DeepSpeed trains in bf16, fp16 or fp32; the plan's precision is {recipe.name}.")
        if strategy.cp > 1 and strategy.pp * strategy.tp > 1:
            raise PlanError("DeepSpeed combines Ulysses (cp) with neither AutoTP nor pipelines; plan with cp=1.")
        if strategy.tp > 1 and strategy.sequence_parallel:
            raise PlanError("DeepSpeed's AutoTP splits no sequence; plan with strategy sequence_parallel=False.")
        # Its check of a batch takes the devices of AutoTP for copies: with tp the batch is left to what it is made of.
        batch = {} if strategy.tp > 1 else {"train_batch_size": plan.question.global_batch_size}
        settings: dict[str, object] = {
            **batch,
            "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
            "gradient_accumulation_steps": micro_batches(plan),
            "zero_optimization.stage": strategy.zero,
        }
        flag = _PRECISIONS[recipe.compute_dtype]
        settings |= {f"{flag}.enabled": True} if flag else {}
        settings |= {"tensor_parallel.autotp_size": strategy.tp} if strategy.tp > 1 else {}
        # Its Ulysses is switched on by both sizes together.
        ulysses = {"sequence_parallel_size": strategy.cp, "data_parallel_size": strategy.dp}
        settings |= ulysses if strategy.cp > 1 else {}
        if strategy.pp > 1:
            settings["pipeline.stages"] = strategy.pp
        is_full = strongest_recompute(plan) == "full"
        if strategy.pp > 1:
            settings["pipeline.activation_checkpoint_interval"] = 1 if is_full else 0
        elif is_full:
            settings["activation_checkpointing.partition_activations"] = False
        return settings

    def files(self, plan: Plan) -> dict[str, str]:
        """One config."""
        return {_FILE: JSON.render((), self.settings(plan, JSON))}

    def launch(self, plan: Plan) -> str:
        """DeepSpeed's launcher."""
        count, each = nodes(plan)
        where = f"--num_nodes {count} --num_gpus {each} --hostfile hostfile" if count > 1 else f"--num_gpus {each}"
        return command_line(f"deepspeed {where}", f"your_script.py --deepspeed --deepspeed_config {_FILE}")

    def left_out(self, plan: Plan) -> list[str]:
        """What the model's code must do."""
        sentences = []
        if strongest_recompute(plan) == "full" and plan.strategy.pp == 1:
            sentences.append(
                "Recompute is your model's: call gradient_checkpointing_enable() or deepspeed.checkpointing."
            )
        if plan.strategy.pp > 1:
            sentences.append(
                f"A pipeline needs your model as a PipelineModule(num_stages={plan.strategy.pp}, "
                'partition_method="type:Block"), Block being the class of your blocks: stages have equally many.'
            )
        return [*sentences, *super().left_out(plan)]

    def owned(self, settings: Settings) -> set[str]:
        """Degrees and recompute."""
        return {key for key in settings if key.startswith(("tensor_parallel.autotp", "pipeline.")) or key in _OWNED}

    def strategy_of(self, settings: Settings, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy of a config. "auto", which the caller fills in, is left to the batch and the search."""
        tp = whole(settings.get("tensor_parallel.autotp_size")) or 1
        pp = whole(settings.get("pipeline.stages")) or 1
        cp = whole(settings.get("sequence_parallel_size")) or 1
        dp = max(1, devices // (tp * pp * cp))
        batch, micro, steps = (
            whole(settings.get(key))
            for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
        if tp > 1 and micro and steps:  # DeepSpeed counts the devices of AutoTP as copies; samples are those of dp
            batch = None
        batch = batch or (dp * micro * steps if micro and steps else global_batch_size)
        if micro is None and batch and steps and batch % (dp * steps) == 0:
            micro = batch // (dp * steps)
        is_full = any(key.startswith("activation_checkpointing") for key in settings)
        is_full |= (whole(settings.get("pipeline.activation_checkpoint_interval")) or 0) > 0
        zero = (whole(settings.get("zero_optimization.stage", 0)) or 0) if dp * cp > 1 else 0
        strategy = {
            "dp": dp,
            "shard": _groups(settings, dp * cp) if zero else None,
            "zero": zero,
            "cp": cp,
            "ep": 1,
            "tp": tp,
            "sequence_parallel": False if tp > 1 else None,
            "micro_batch_size": micro,
            "pp": pp,
            "schedule": _PIPELINE if pp > 1 else None,
            "recompute": "full" if is_full else "none",
        }
        is_half = str(settings.get("fp16.enabled")).lower() == "true"
        return StrategyFile(
            tool=self.name,
            strategy={key: value for key, value in strategy.items() if value is not None},
            global_batch_size=batch,
            precision="fp16" if is_half else None,
            **unread_keys(settings, _KNOWN, _OTHERS, is_whole=True),
            notes=_notes(settings, is_full),
        )


_OWNED = {
    *("train_batch_size", "sequence_parallel_size", "data_parallel_size"),
    *("activation_checkpointing.partition_activations", "zero_optimization.mics_shard_size"),
}
_KNOWN = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization.stage"),
    *("zero_optimization.mics_shard_size", "zero_optimization.zero_hpz_partition_size", "tensor_parallel.autotp_size"),
    *(
        "pipeline.stages",
        "pipeline.partition",
        "pipeline.activation_checkpoint_interval",
        "bf16.enabled",
        "fp16.enabled",
    ),
    *_OWNED,
}


_OTHERS = (
    *("optimizer.*", "scheduler.*", "bf16.*", "fp16.*", "amp.*", "tensor_parallel.*", "torch_*"),
    *("activation_checkpointing.*", "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "prescale_*"),
    *("gradient_*", "sparse_*", "zero_allow_*", "zero_force_*", "communication_data_type", "seq_parallel_comm*"),
    *("fp32_allreduce", "disable_allgather", "flops_profiler.*", "monitor*", "tensorboard.*", "wandb.*", "comet.*"),
    *(
        "csv_monitor.*",
        "comms_logger.*",
        "aio.*",
        "autotuning.*",
        "elasticity.*",
        "data_efficiency.*",
        "hybrid_engine.*",
    ),
    *("curriculum_learning.*", "progressive_layer_drop.*", "compression_training.*", "checkpoint.*", "data_types.*"),
    *("dataloader_drop_last", "dump_state", "memory_breakdown", "quantize_training.*", "eigenvalue.*", "nebula.*"),
    *("use_data_before_expert_parallelism", "compile.*", "pipeline.*", "checkpoint_parallel_write_pipeline"),
    *(f"zero_optimization.{name}" for name in ("allgather_*", "overlap_comm", "reduce_*", "contiguous_gradients")),
    *(f"zero_optimization.{name}" for name in ("offload_*", "cpu_offload*", "sub_group_size", "stage3_*", "leaf_*")),
    *(f"zero_optimization.{name}" for name in ("round_robin_gradients", "ignore_unused_parameters", "load_from_*")),
    *(f"zero_optimization.{name}" for name in ("elastic_checkpoint", "gather_16bit_weights_on_model_save", "mics_h*")),
    *(f"zero_optimization.{name}" for name in ("zero_quantized_*", "*_threshold", "memory_efficient_linear", "use_*")),
    *(f"zero_optimization.{name}" for name in ("log_trace_*", "pipeline_loading_checkpoint", "override_*", "enable_*")),
)
"""What else a config of DeepSpeed has, from 0.3 to 0.19."""


def _groups(settings: Settings, devices: int) -> int | str:
    """The devices that share one set of states; older versions have MiCS."""
    group = whole(settings.get("zero_optimization.mics_shard_size")) or -1
    return group if 0 < group < devices else "all"


def _notes(settings: Settings, is_full: bool) -> tuple[str, ...]:
    notes = []
    for section in ("offload_optimizer", "offload_param"):
        device = settings.get(f"zero_optimization.{section}.device", "none")
        if str(device) != "none":
            notes.append(f"zero_optimization.{section} ({device}) is not priced: states are counted on the devices")
    if (whole(settings.get("zero_optimization.zero_hpz_partition_size")) or 1) > 1:
        notes.append("zero_hpz_partition_size is not priced: parameters are gathered over all devices")
    if not is_full:
        notes.append(
            "activation_checkpointing is absent: priced without recompute; add recompute=full if the model has it"
        )
    return tuple(notes)


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """The config for DeepSpeed."""
    return (DeepSpeedTarget(),)
