"""Target 'torchtitan': a plan written as sections of a job configuration of torchtitan (github.com/pytorch/torchtitan).

torchtitan shards by FSDP2: under ZeRO 3 it gathers parameters in both passes, and under ZeRO 2 it keeps them after the
forward. Copies without shards are DDP, which it combines with nothing else. Its tensor parallelism always splits the
sequence too. Option names were checked against `SOURCE`; nothing of it was run by us.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from phaze.backends.launcher_exports import block_counts, head_lines, micro_batches, strongest_recompute
from phaze.capabilities import Capabilities
from phaze.errors import PlanError
from phaze.hooks import hookimpl
from phaze.interfaces import Target
from phaze.parallelism import PipelineSchedule

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["TorchtitanTarget", "phaze_targets"]

SOURCE = "torchtitan/config/job_config.py at commit 6404b93"
"""Where the option names were read."""

_SCHEDULES = {
    PipelineSchedule.GPIPE: "GPipe",
    PipelineSchedule.ONE_F_ONE_B: "1F1B",
    PipelineSchedule.INTERLEAVED: "Interleaved1F1B",
}
_PRECISIONS = {"bfloat16": "bfloat16", "float32": "float32"}

Section: TypeAlias = dict[str, object]
"""One section of the TOML file: values by option."""


@dataclass(frozen=True, slots=True)
class TorchtitanTarget:
    """Writes the sections of a job's TOML that a plan decides."""

    name: str = "torchtitan"
    libraries: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        """Stages of any size by module names; no ZeRO-1; no zero-bubble schedule with one stage per device."""
        return Capabilities(
            schedules=frozenset(_SCHEDULES),
            zero_stages=frozenset({0, 2, 3}),
            recompute_modes=frozenset({"none", "products", "full"}),
            allows_uneven_stages=True,
            allows_strided_parameters=True,
            can_cut_stages=True,
        )

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """One file: sections of a job configuration."""
        strategy = plan.strategy
        if strategy.zero == 0 and strategy.dp > 1 and strategy.tp * strategy.pp > 1:
            raise PlanError(
                f"torchtitan combines DDP (ZeRO stage 0, dp={strategy.dp}) with no tensor or pipeline parallelism (tp="
                f"{strategy.tp}, pp={strategy.pp}); plan with strategy zero=2 or zero=3, which are FSDP2 there."
            )
        sections = {
            "training": _training(plan),
            "parallelism": _parallelism(plan),
            "activation_checkpoint": _recompute(plan),
        }
        lines = head_lines(plan, "torchtitan", SOURCE)
        if strategy.tp > 1 and not strategy.sequence_parallel:
            lines.append("# The plan splits no sequence between layers; torchtitan's tensor parallelism does.")
        for name, section in sections.items():
            lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
        return {"torchtitan.toml": "\n".join(lines) + "\n"}


def _training(plan: Plan) -> Section:
    """Batch and precision; torchtitan's local batch is what one step of a pipeline takes, else one microbatch."""
    recipe, strategy = plan.question.precision, plan.strategy
    if recipe.compute_dtype not in _PRECISIONS:
        raise PlanError(f"torchtitan trains in bfloat16 or float32; the plan's precision is {recipe.name}.")
    in_flight = micro_batches(plan) if strategy.pp > 1 else 1
    return {
        "seq_len": plan.model.tokens_per_sample,
        "local_batch_size": strategy.micro_batch_size * in_flight,
        "global_batch_size": plan.question.global_batch_size,
        "mixed_precision_param": _PRECISIONS[recipe.compute_dtype],
        "mixed_precision_reduce": "float32",
    }


def _parallelism(plan: Plan) -> Section:
    """Degrees, sharding and the pipeline."""
    strategy = plan.strategy
    section: Section = {
        "data_parallel_replicate_degree": 1 if strategy.zero else strategy.dp,
        "data_parallel_shard_degree": strategy.dp if strategy.zero else 1,
        "tensor_parallel_degree": strategy.tp,
        "pipeline_parallel_degree": strategy.pp,
    }
    if strategy.zero:
        section["fsdp_reshard_after_forward"] = "always" if strategy.zero == 3 else "never"
    if strategy.pp > 1:
        section["pipeline_parallel_schedule"] = _SCHEDULES[PipelineSchedule(strategy.schedule)]
        section["pipeline_parallel_microbatch_size"] = strategy.micro_batch_size
        section["module_fqns_per_model_part"] = _modules(plan)
    return section


def _modules(plan: Plan) -> list[list[str]]:
    """The modules of each stage, as torchtitan's decoders name them."""
    counts, first = block_counts(plan, "torchtitan"), 0
    parts: list[list[str]] = []
    for count in counts:
        parts.append([f"layers.{number}" for number in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _recompute(plan: Plan) -> Section:
    """torchtitan's selective mode by op is the plan's `products`."""
    mode = strongest_recompute(plan)
    if mode == "products":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": mode}


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """The texts for torchtitan."""
    return (TorchtitanTarget(),)
