"""Target 'megatron-lm': a plan written as command-line arguments of Megatron-LM (github.com/NVIDIA/Megatron-LM).

ZeRO 1 is its distributed optimizer; ZeRO 2 and 3 are its own FSDP. It runs 1F1B, and interleaved 1F1B where a device
has several stages; a layout names the blocks of each stage. Option names were checked against `SOURCE`; nothing of it
was run by us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaze.backends.launcher_exports import block_counts, head_lines, strongest_recompute
from phaze.capabilities import Capabilities
from phaze.errors import PlanError
from phaze.hooks import hookimpl
from phaze.interfaces import Target
from phaze.parallelism import PipelineSchedule

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["MegatronTarget", "phaze_targets"]

SOURCE = "megatron/training/arguments.py at commit 000c4ac"
"""Where the option names were read."""

_SCHEDULES = frozenset({PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED})
_PRECISIONS = {"bfloat16": ("--bf16",), "float16": ("--fp16",), "float32": ()}
_FSDP = {2: "optim_grads", 3: "optim_grads_params"}
_RECOMPUTE: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("--recompute-granularity selective", "--recompute-modules core_attn"),
    "full": ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"),
}


@dataclass(frozen=True, slots=True)
class MegatronTarget:
    """Writes the arguments that a plan decides, one in each line."""

    name: str = "megatron-lm"
    libraries: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        """Stages of any number of blocks; its FSDP not together with pipelines, which nobody has tried here."""
        return Capabilities(
            schedules=_SCHEDULES,
            zero_stages=frozenset({0, 1, 2, 3}),
            excluded_pairs=frozenset((schedule, zero) for schedule in _SCHEDULES for zero in (2, 3)),
            allows_uneven_stages=True,
            allows_strided_parameters=True,
            can_cut_stages=True,
        )

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """One file, which a shell sources: an array of arguments."""
        lines = head_lines(plan, "Megatron-LM", SOURCE)
        lines.append(
            '# Use: source megatron_lm.sh; torchrun ... pretrain_gpt.py "${PLANNED[@]}" and the model\'s arguments.'
        )
        written = "\n".join([*lines, "PLANNED=(", *(f"  {argument}" for argument in _arguments(plan)), ")"])
        return {"megatron_lm.sh": f"{written}\n"}


def _arguments(plan: Plan) -> list[str]:
    """Everything that the plan decides; raises PlanError for a precision that Megatron-LM does not train in."""
    strategy, recipe = plan.strategy, plan.question.precision
    if recipe.compute_dtype not in _PRECISIONS:
        raise PlanError(f"Megatron-LM trains in bf16, fp16 or fp32; the plan's precision is {recipe.name}.")
    arguments = [
        f"--tensor-model-parallel-size {strategy.tp}",
        f"--pipeline-model-parallel-size {strategy.pp}",
        f"--micro-batch-size {strategy.micro_batch_size}",
        f"--global-batch-size {plan.question.global_batch_size}",
        f"--seq-length {plan.model.tokens_per_sample}",
        *_PRECISIONS[recipe.compute_dtype],
    ]
    if strategy.sequence_parallel and strategy.tp > 1:
        arguments.append("--sequence-parallel")
    arguments += _sharding(strategy.zero)
    if strategy.pp > 1:
        arguments.append(f"--pipeline-model-parallel-layout '{_layout(plan)}'")
    return [*arguments, *_RECOMPUTE[strongest_recompute(plan)]]


def _sharding(zero: int) -> list[str]:
    """The arguments for a ZeRO stage."""
    if zero == 0:
        return []
    if zero == 1:
        return ["--use-distributed-optimizer"]
    return [
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        f"--data-parallel-sharding-strategy {_FSDP[zero]}",
        "--no-gradient-accumulation-fusion",
        "--ckpt-format fsdp_dtensor",
    ]


def _layout(plan: Plan) -> str:
    """The stages from first to last: E is the embedding, t a block, L the head with its loss.

    Where devices have several stages, stages go round the devices.
    """
    parts = ["" if count == 0 else "t" if count == 1 else f"t*{count}" for count in block_counts(plan, "Megatron-LM")]
    parts[0] = f"E{parts[0]}"
    parts[-1] = f"{parts[-1]}L"
    return "|".join(parts)


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """The arguments for Megatron-LM."""
    return (MegatronTarget(),)
