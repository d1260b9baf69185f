"""The target maxtext: a plan as options of MaxText (github.com/AI-Hypercomputer/maxtext, configs/base.yml).

The names of options were checked against that file; MaxText is not run here. Data-parallel copies are its fsdp axis
with ZeRO-3, and otherwise its data axis. Its batch per device counts the samples that one device trains on between two
accumulations of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaze.backends.launcher_exports import block_counts, head_lines, micro_batches, strongest_recompute
from phaze.capabilities import Capabilities
from phaze.ir.recompute_policies import MAXTEXT_POLICIES
from phaze.parallelism import PipelineSchedule

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["MaxTextTarget"]

_REMAT_POLICIES = {mode: policy for policy, mode in MAXTEXT_POLICIES.items()}
_SOURCE = "MaxText's configs/base.yml"


@dataclass(frozen=True, slots=True)
class MaxTextTarget:
    """Writes a plan's parallelism as overrides of MaxText's configuration; the model itself is chosen there."""

    name: str = "maxtext"
    libraries: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        """What MaxText can run: GPipe over equal stages.

        It lays out parameters by its own rules, so that parameters that a plan splits inside a dimension are no
        obstacle.
        """
        return Capabilities(
            schedules=frozenset({PipelineSchedule.GPIPE}),
            zero_stages=frozenset({0, 1, 3}),
            recompute_modes=frozenset(_REMAT_POLICIES),
            allows_strided_parameters=True,
            can_cut_stages=True,
        )

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """The text of one file, which has an option in each line."""
        lines = head_lines(plan, "MaxText", _SOURCE)
        lines += [f"{option}: {value}" for option, value in _options(plan).items()]
        return {"maxtext.yml": "\n".join(lines) + "\n"}


def _options(plan: Plan) -> dict[str, object]:
    strategy = plan.strategy
    micro_batch_count = micro_batches(plan)
    is_pipeline = strategy.pp > 1
    # A pipeline of MaxText runs its microbatches in one step, and accumulates nothing.
    accumulated = 1 if is_pipeline else micro_batch_count
    samples_per_device = plan.question.global_batch_size / accumulated / (strategy.dp * strategy.tp * strategy.pp)
    tensor_axis = "ici_tensor_sequence_parallelism" if strategy.sequence_parallel else "ici_tensor_parallelism"
    options: dict[str, object] = {
        "ici_data_parallelism": 1 if strategy.zero == 3 else strategy.dp,
        "ici_fsdp_parallelism": strategy.dp if strategy.zero == 3 else 1,
        tensor_axis: strategy.tp,
        "ici_pipeline_parallelism": strategy.pp,
        "shard_optimizer_over_data": strategy.zero == 1,
        "per_device_batch_size": f"{samples_per_device:g}",
        "gradient_accumulation_steps": accumulated,
        "remat_policy": _REMAT_POLICIES[strongest_recompute(plan)],
    }
    if is_pipeline:
        options["num_pipeline_microbatches"] = micro_batch_count
        options["num_layers_per_pipeline_stage"] = max(block_counts(plan, "MaxText"))
    return options
