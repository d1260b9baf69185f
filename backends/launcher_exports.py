"""What the files written for Megatron-LM, torchtitan and MaxText have in common: first lines, counts, recompute mode.

Such launchers bring their own models, whose layers are an embedding, equal blocks and a head. A plan for one of them
has the same layers: one before the blocks and one behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaze.errors import PlanError
from phaze.ir import RecomputeMode

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["block_counts", "head_lines", "micro_batches", "strongest_recompute"]


def head_lines(plan: Plan, tool: str, source: str) -> list[str]:
    """What every file says first: which plan it is, for which version of the tool, and that it was not run by us."""
    return [
        f"# {plan.model.name} on {plan.cluster.device_count} x {plan.cluster.accelerator.name}, by Phaze.",
        f"# For {tool}; option names checked against {source}, not run by Phaze.",
        f"# {tool} lays out parameters by rules of its own, and brings its own model: choose it there.",
    ]


def micro_batches(plan: Plan) -> int:
    """The number of microbatches that each pipeline runs in a step."""
    return plan.question.global_batch_size // (plan.strategy.dp * plan.strategy.micro_batch_size)


def strongest_recompute(plan: Plan) -> RecomputeMode:
    """The recompute mode for tools that have one mode for all stages: the strongest that any stage needs to fit."""
    return max(plan.strategy.recompute, key=list(RecomputeMode).index)


def block_counts(plan: Plan, tool: str) -> list[int]:
    """How many blocks each stage (chunk of a device) has, in the order of the pipeline.

    Raises PlanError where the plan's layers cannot be an embedding, blocks and a head.
    """
    counts = [len(stage.layers) for stage in plan.stages]
    counts[0] -= 1
    counts[-1] -= 1
    if min(counts) < 0 or sum(counts) < 1:
        raise PlanError(
            f"{tool} cuts models of an embedding, equal blocks and a head; this plan's stages have "
            f"{', '.join(str(len(stage.layers)) for stage in plan.stages)} layers. Plan such a model."
        )
    return counts
