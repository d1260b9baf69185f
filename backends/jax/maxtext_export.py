"""Flags for MaxText (github.com/AI-Hypercomputer/maxtext, configs/base.yml); option names checked, not run here.

Copies of ZeRO-3 are its fsdp axis, others its data axis; per-device batches count what one device trains on between two
accumulations of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaze.backends.launcher_exports import block_counts, head_lines, micro_batches, strongest_recompute
from phaze.capabilities import Capabilities, PipelineSchedule

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["MaxTextTarget"]

_POLICIES = {"none": "minimal", "selective": "minimal", "full": "full"}
SOURCE = "MaxText's configs/base.yml"


@dataclass(frozen=True, slots=True)
class MaxTextTarget:
    """Writes a plan's degrees as overrides of MaxText's configuration; the model itself is chosen there."""

    name: str = "maxtext"
    libraries: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        """GPipe over equal stages; layouts are MaxText's own, so that strided parameters are no obstacle."""
        return Capabilities(
            schedules=frozenset({PipelineSchedule.GPIPE}),
            zero_stages=frozenset({0, 1, 3}),
            allows_strided_parameters=True,
            can_cut_stages=True,
        )

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """One file: a key and a value in each line."""
        lines = head_lines(plan, "MaxText", SOURCE)
        lines.append("# remat_policy is the nearest to the plan's recompute mode.")
        lines += [f"{key}: {value}" for key, value in _flags(plan).items()]
        return {"maxtext.yml": "\n".join(lines) + "\n"}


def _flags(plan: Plan) -> dict[str, object]:
    chosen = plan.strategy
    batches = micro_batches(plan)
    is_pipeline = chosen.pp > 1
    accumulated = 1 if is_pipeline else batches
    samples = plan.question.global_batch_size / accumulated / (chosen.dp * chosen.tp * chosen.pp)
    tensor = "ici_tensor_sequence_parallelism" if chosen.sequence_parallel else "ici_tensor_parallelism"
    flags: dict[str, object] = {
        "ici_data_parallelism": 1 if chosen.zero == 3 else chosen.dp,
        "ici_fsdp_parallelism": chosen.dp if chosen.zero == 3 else 1,
        tensor: chosen.tp,
        "ici_pipeline_parallelism": chosen.pp,
        "shard_optimizer_over_data": chosen.zero == 1,
        "per_device_batch_size": f"{samples:g}",
        "gradient_accumulation_steps": accumulated,
        "remat_policy": _POLICIES[strongest_recompute(plan)],
    }
    if is_pipeline:
        flags["num_pipeline_microbatches"] = batches
        flags["num_layers_per_pipeline_stage"] = max(block_counts(plan, "MaxText"))
    return flags
