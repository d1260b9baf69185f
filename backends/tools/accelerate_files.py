"""Target 'accelerate': a plan as a config of Accelerate 1.15, with FSDP2 and ParallelismConfig; such configs read.

FSDP2 shards over dp_shard x cp, with dp_replicate copies. `accelerate launch` takes tensor and context parallelism only
together with FSDP2, so that ZeRO-0 is plain DDP. A config says nothing about batches: microbatch and accumulation are
the training script's, and the README says them. `phaze.backends.accelerate` hands the same to a running script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import YAML, ConfigText, Settings
from phaze.backends.tools.tool_target import (
    ToolTarget,
    micro_batches,
    nodes,
    shard_groups,
    shard_of,
    strongest_recompute,
    unread_keys,
    whole,
)
from phaze.errors import PlanError
from phaze.hooks import hookimpl
from phaze.interfaces import Target
from phaze.strategy_files import StrategyFile
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["AccelerateTarget", "phaze_targets"]

_FILE = "accelerate.yaml"
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
_FSDP_ZERO = {"FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0, "HYBRID_SHARD": 3, "4": 3}
"""What sharding strategies of FSDP 1, by name or number, are as ZeRO stages; hybrid ones shard inside of a node."""
_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


class AccelerateTarget(ToolTarget):
    """Writes a config for `accelerate launch`."""

    name = "accelerate"
    tool = "Accelerate 1.15.0"
    checked = (
        "parsed by accelerate 1.15.0's launch code; the mesh of its ParallelismConfig on 4 processes of gloo is the "
        "plan's; a step of its own FSDP2 on CPUs, by the two lines, has one process's gradients and the plan's shards; "
        "not run: its context parallelism, which is a ring of CUDA's attention kernels, and tp"
    )

    @property
    def capabilities(self) -> Capabilities:
        """One stage; whole blocks are recomputed or nothing is."""
        return Capabilities(
            zero_stages=frozenset({0, 2, 3}),
            tensor_parallel_zero_stages=frozenset({2, 3}),
            context_parallel_zero_stages=frozenset({2, 3}),
            # ParallelismConfig refuses groups of a single copy beside cp, which hybrid groups with cp may be.
            excluded_axes=frozenset({("cp", "shard")}),
            compute_dtypes=frozenset(_PRECISIONS),
            recompute_modes=frozenset({"none", "full"}),
            allows_strided_parameters=True,
            allows_sequence_parallel=False,
            allows_context_parallel=True,
            allows_shard_groups=True,
        )

    def text_of(self, name: str, part: str | None, text: str) -> ConfigText | None:
        """YAML with the key that every config of Accelerate has."""
        return YAML if name.endswith((".yaml", ".yml")) and "distributed_type" in text else None

    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """Processes, precision, sections `fsdp_config` and `parallelism_config`."""
        strategy, recipe = plan.strategy, plan.question.precision
        if strategy.tp * strategy.cp > 1 and strategy.zero == 0:
            raise PlanError(
                "accelerate launch has tp and cp with FSDP2 only; plan with strategy zero=2 or zero=3, dp > 1."
            )
        if strategy.tp > 1 and strategy.sequence_parallel:
            raise PlanError(
                "Accelerate's tensor parallelism is that of transformers' plans, which split no sequence between "
                "layers; plan with strategy sequence_parallel=False."
            )
        count, _ = nodes(plan)
        settings: dict[str, object] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP" if strategy.zero else "MULTI_GPU",
            "num_machines": count,
            "num_processes": plan.cluster.device_count,
            "mixed_precision": _PRECISIONS.get(recipe.compute_dtype, "bf16"),
        }
        if strategy.zero == 0:
            return settings
        groups, shards = shard_groups(strategy, "Accelerate")
        sizes = {"dp_replicate": groups, "dp_shard": shards, "tp": strategy.tp, "cp": strategy.cp}
        fsdp = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": strategy.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": strongest_recompute(plan) == "full",
        }
        settings |= {f"fsdp_config.{name}": value for name, value in fsdp.items()}
        return settings | {f"parallelism_config.parallelism_config_{name}_size": size for name, size in sizes.items()}

    def files(self, plan: Plan) -> dict[str, str]:
        """One config."""
        return {_FILE: YAML.render(self.head(plan), self.settings(plan, YAML))}

    def launch(self, plan: Plan) -> str:
        """Accelerate's own launcher."""
        return f"accelerate launch --config_file {_FILE} your_script.py"

    def left_out(self, plan: Plan) -> list[str]:
        """Batches, and recompute under DDP."""
        strategy = plan.strategy
        sentences = [
            f"Your script's loader gives {strategy.micro_batch_size} sequences to each process (HF Trainer: "
            f"per_device_train_batch_size={strategy.micro_batch_size}), and it accumulates "
            f"gradient_accumulation_steps={micro_batches(plan)}.",
        ]
        if strategy.zero == 0 and strongest_recompute(plan) == "full":
            sentences.append("Recompute is your model's under DDP: call gradient_checkpointing_enable().")
        if strategy.tp > 1:
            sentences.append("The model must have a tp_plan, as those of transformers do.")
        return [*sentences, *super().left_out(plan)]

    def owned(self, settings: Settings) -> set[str]:
        """The two sections, and DeepSpeed's."""
        return {
            key
            for key in settings
            if key.startswith(("parallelism_config.", "deepspeed_config."))
            or key in _FSDP_KEYS
            or key == "deepspeed_config"
        }

    def strategy_of(self, settings: Settings, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy of a config; processes are those of the file, else the devices."""
        count = whole(settings.get("num_processes")) or devices
        copies, shards, tp, cp, sequence = (_size(settings, name) for name in _SIZES)
        deepspeed = {
            key.partition(".")[2]: value for key, value in settings.items() if key.startswith("deepspeed_config.")
        }
        zero, is_full = _fsdp(settings)
        if deepspeed:
            zero, copies, shards = whole(deepspeed.get("zero_stage", 2)) or 0, 1, 1
        if copies * shards == 1:  # without a parallelism config all processes are one group
            groups = (
                nodes_of(settings)
                if str(settings.get("fsdp_config.fsdp_sharding_strategy")).startswith("HYBRID")
                else 1
            )
            copies, shards = groups, max(1, count // (groups * tp * cp * sequence))
        cp, dp = cp * sequence, copies * shards
        zero = zero if dp * cp > 1 else 0
        strategy = {
            "dp": dp,
            "shard": shard_of(copies, shards, cp) if zero else None,
            "zero": zero,
            "cp": cp,
            "ep": 1,
            "tp": tp,
            "sequence_parallel": False if tp > 1 else None,
            "pp": 1,
            "micro_batch_size": whole(deepspeed.get("train_micro_batch_size_per_gpu")),
            "recompute": "full" if is_full else "none",
        }
        return StrategyFile(
            tool=self.name,
            strategy={key: value for key, value in strategy.items() if value is not None},
            precision={"fp16": "fp16", "fp8": "fp8"}.get(str(settings.get("mixed_precision"))),
            **unread_keys(
                settings, {*_KNOWN, *(f"deepspeed_config.{key}" for key in deepspeed)}, _OTHERS, is_whole=True
            ),
            notes=_notes(settings, deepspeed),
        )


_FSDP_KEYS = {
    f"fsdp_config.fsdp_{name}"
    for name in (
        "version",
        "reshard_after_forward",
        "activation_checkpointing",
        "sharding_strategy",
        "auto_wrap_policy",
    )
}
_KNOWN = {
    *("compute_environment", "distributed_type", "num_machines", "num_processes", "mixed_precision"),
    *_FSDP_KEYS,
    *(f"parallelism_config.parallelism_config_{name}_size" for name in _SIZES),
}


_OTHERS = (
    *("use_cpu", "debug", "machine_rank", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("same_network", "main_training_function", "enable_cpu_affinity", "fp8_config*", "megatron_lm_config.*"),
    *("mpirun_config*", "downcast_bf16", "tpu_*", "command_file", "commands", "dynamo_config*", "num_cpu_threads*"),
    *(f"fsdp_config.fsdp_{name}" for name in ("backward_prefetch*", "cpu_ram_efficient_loading", "forward_prefetch")),
    *(
        f"fsdp_config.fsdp_{name}"
        for name in ("min_num_params", "offload_params", "state_dict_type", "use_orig_params")
    ),
    *(f"fsdp_config.fsdp_{name}" for name in ("sync_module_states", "transformer_layer_cls_to_wrap")),
    *(f"parallelism_config.parallelism_config_{name}" for name in ("cp_backend", "cp_comm_strategy", "sp_*")),
)
"""What else a config of Accelerate 1.15 or of its versions since 0.20 has."""


def _size(settings: Settings, name: str) -> int:
    return whole(settings.get(f"parallelism_config.parallelism_config_{name}_size", 1)) or 1


def nodes_of(settings: Settings) -> int:
    """The number of machines of a config."""
    return whole(settings.get("num_machines", 1)) or 1


def _fsdp(settings: Settings) -> tuple[int, bool]:
    """The ZeRO stage of FSDP, and whether blocks are recomputed."""
    if str(settings.get("distributed_type")) != "FSDP":
        return 0, False
    is_full = str(settings.get("fsdp_config.fsdp_activation_checkpointing")).lower() == "true"
    gathers = settings.get("fsdp_config.fsdp_reshard_after_forward")
    if gathers is None or str(gathers).upper() in _FSDP_ZERO:
        strategy = gathers or settings.get("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD")
        return _FSDP_ZERO.get(str(strategy).upper(), 3), is_full
    return (3 if str(gathers).lower() == "true" else 2), is_full


def _notes(settings: Settings, deepspeed: Settings) -> tuple[str, ...]:
    notes = []
    if "train_micro_batch_size_per_gpu" not in deepspeed:
        notes.append("a config of Accelerate names no batch: the microbatch is left to the search")
    if str(settings.get("fsdp_config.fsdp_offload_params")).lower() == "true":
        notes.append("fsdp_offload_params is not priced: states are counted on the devices")
    for key in ("offload_optimizer_device", "offload_param_device"):
        if str(deepspeed.get(key, "none")) != "none":
            notes.append(f"deepspeed_config.{key} is not priced: states are counted on the devices")
    if "deepspeed_config_file" in deepspeed:
        notes.append(f"the strategy stands in {deepspeed['deepspeed_config_file']}: read that file instead")
    return tuple(notes)


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """The config for Accelerate."""
    return (AccelerateTarget(),)
