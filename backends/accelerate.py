"""A plan in a script that uses Accelerate or the HF Trainer, in two lines.

    from phaze.backends.accelerate import accelerator_arguments
    accelerator = Accelerator(**accelerator_arguments(phaze.load_plan("plan.json")))

For the Trainer it is `TrainingArguments(output_dir, **training_arguments(plan))`. Both say what target 'accelerate'
writes into its config, batches included; `checked` of that target says how this was tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phaze.backends.tools.accelerate_files import AccelerateTarget
from phaze.backends.tools.config_texts import YAML
from phaze.backends.tools.tool_target import micro_batches
from phaze.errors import PlanError
from phaze.plan.handover import obstacles

if TYPE_CHECKING:
    from accelerate import ParallelismConfig

    from phaze.plan.plan import Plan

__all__ = ["accelerator_arguments", "training_arguments"]


def accelerator_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of `accelerate.Accelerator`: precision, accumulation, and with ZeRO the mesh and the FSDP plugin.

    Raises PlanError for a plan that Accelerate cannot run.
    """
    settings = _settings(plan)
    arguments: dict[str, Any] = {
        "mixed_precision": settings["mixed_precision"],
        "gradient_accumulation_steps": micro_batches(plan),
    }
    if plan.strategy.zero:
        # Imported here: this module loads where accelerate is not installed.
        from accelerate.utils import FullyShardedDataParallelPlugin

        arguments["parallelism_config"] = _mesh(settings)
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=settings["fsdp_config.fsdp_reshard_after_forward"],
            auto_wrap_policy="transformer_based_wrap",
            activation_checkpointing=settings["fsdp_config.fsdp_activation_checkpointing"],
        )
    return arguments


def training_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of `transformers.TrainingArguments`: batches, precision, and with ZeRO the mesh and FSDP."""
    settings, strategy = _settings(plan), plan.strategy
    is_full = "full" in strategy.recompute
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": strategy.micro_batch_size,
        "gradient_accumulation_steps": micro_batches(plan),
        "bf16": settings["mixed_precision"] == "bf16",
        "fp16": settings["mixed_precision"] == "fp16",
    }
    if strategy.zero == 0:
        return {**arguments, "gradient_checkpointing": is_full}
    fsdp = {
        "version": 2,
        "reshard_after_forward": settings["fsdp_config.fsdp_reshard_after_forward"],
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": is_full,
    }
    return {**arguments, "parallelism_config": _mesh(settings), "fsdp": "full_shard auto_wrap", "fsdp_config": fsdp}


def _settings(plan: Plan) -> dict[str, Any]:
    target = AccelerateTarget()
    reasons = obstacles(plan, target.capabilities)
    if reasons:
        raise PlanError(f"Accelerate cannot run this plan: it has {', '.join(reasons)}. Plan with target='accelerate'.")
    return target.settings(plan, YAML)


def _mesh(settings: dict[str, Any]) -> ParallelismConfig:
    from accelerate import ParallelismConfig

    prefix = "parallelism_config.parallelism_config_"
    return ParallelismConfig(
        **{key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    )
