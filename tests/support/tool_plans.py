"""Plans with any strategy, for tests of the files that tools read: one plan is made, its strategy replaced."""

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hypothesis import strategies as st
from plans import small_cluster, small_graph

import phaze
from phaze.backends.tools.tool_target import ToolTarget
from phaze.hardware import Cluster, InterconnectLevel, recipe_of
from phaze.hardware.hardware_files import cluster_to_json
from phaze.installed import installed_plugins
from phaze.interfaces import FileTarget
from phaze.ir import RecomputeMode
from phaze.parallelism import PIPELINE_SCHEDULES, Parallelism, PipelineSchedule
from phaze.plan.plan import Plan, StageLayer

TOOLS: dict[str, ToolTarget] = {
    offer.name: offer.value
    for offer in installed_plugins().targets()
    if isinstance(offer.value, FileTarget) and isinstance(offer.value, ToolTarget)
}
FIXED = {"schedule": "none", "chunks": 1, "recompute": "none", "pp": 1, "tp": 1, "dp": 8, "zero": 0}


@cache
def base_plan() -> Plan:
    """A plan of the small GPT on eight devices."""
    question: dict[str, Any] = {"global_batch_size": 32, "tp": (1,), "target": None, "compares": False}
    strategy = {**FIXED, "micro_batch_size": 2}
    return phaze.evaluate(small_graph(), cluster=small_cluster(), strategy=strategy, **question).plan


def plan_of(
    strategy: Parallelism,
    *,
    stages: tuple[int, ...] = (6,),
    micro_batches: int = 2,
    name: str = "small-gpt",
    precision: str = "bf16",
    slices: int = 1,
) -> Plan:
    """A plan with this strategy and so many layers in each stage; its times are those of another plan."""
    base = base_plan()
    devices = strategy.dp * strategy.cp * strategy.tp * strategy.pp
    levels = (InterconnectLevel(max(1, devices // slices), 250e9, 3e-6), InterconnectLevel(slices, 25e9, 5e-6))
    cluster = Cluster(base.cluster.accelerator, devices, levels)
    each = devices // strategy.pp
    layers = iter(range(sum(stages)))
    made = tuple(
        replace(
            base.stages[0],
            layers=tuple(StageLayer(next(layers), "", 0) for _ in range(count)),
            place=index % strategy.pp,
            chunk=index // strategy.pp,
            tp=strategy.tp,
            devices=tuple(range(index % strategy.pp * each, (index % strategy.pp + 1) * each)),
            recompute=strategy.recompute[index],
        )
        for index, count in enumerate(stages)
    )
    batch = strategy.dp * strategy.micro_batch_size * micro_batches
    question = replace(base.question, global_batch_size=batch, precision=recipe_of(precision, "adamw"))
    return replace(
        base,
        model=replace(base.model, name=name),
        strategy=strategy,
        stages=made,
        question=question,
        hardware=cluster_document(cluster),
    )


def cluster_document(cluster: Cluster) -> dict[str, object]:
    """A cluster as a plan that was loaded has it."""
    document: dict[str, object] = json.loads(json.dumps(cluster_to_json(cluster)))
    return document


@dataclass(frozen=True)
class Case:
    """A strategy, the layers of its stages, and the microbatches of each pipeline."""

    strategy: Parallelism
    stages: tuple[int, ...]
    micro_batches: int

    def plan(self) -> Plan:
        return plan_of(self.strategy, stages=self.stages, micro_batches=self.micro_batches)


@st.composite
def cases_for(draw: st.DrawFn, tool: ToolTarget) -> Case:
    """Strategies within what a tool runs, with one recompute mode in all stages."""
    runs = tool.capabilities
    degrees = st.sampled_from([1, 2, 3, 4, 8])
    cp = draw(st.sampled_from([1, 1, 2, 4])) if runs.allows_context_parallel else 1
    dp, tp, pp = draw(degrees), draw(degrees), draw(degrees)
    experts = draw(st.sampled_from([1, 1, 2, 4])) if runs.allows_expert_parallel else 1
    if runs.excluded_together(tp=tp, ep=experts):
        tp = 1
    if runs.excluded_together(cp=cp, ep=experts):
        experts = 1
    if runs.excluded_together(cp=cp, tp=tp):
        tp = 1
    needs_split = runs.experts_need_split_sequences and experts > 1
    runs = runs.at_degrees(tp=tp, cp=cp, ep=experts)
    dp = dp * experts
    if 0 not in runs.zero_stages:
        dp = max(2, dp)
    pp = pp if runs.schedules else 1
    schedule = draw(st.sampled_from(sorted(runs.schedules))) if pp > 1 else PipelineSchedule.NONE
    chunks = draw(st.sampled_from(schedule.chunk_counts((2, 3))))
    zeros = [zero for zero in sorted(runs.zero_stages) if pp == 1 or runs.supports(schedule, zero)]
    zero = draw(st.sampled_from(zeros)) if dp * cp > 1 else 0
    parts = [part for part in range(2, dp + 1) if dp % part == 0]
    parts = [part for part in parts if zero and runs.runs_groups(part * cp, zero=zero, cp=cp, ep=experts)]
    shards = draw(st.sampled_from(parts)) if parts and draw(st.booleans()) else dp
    counts = [draw(st.integers(1, 4)) if runs.allows_uneven_stages else 2 for _ in range(pp * chunks)]
    counts[0] += 1
    counts[-1] += 1
    mode = draw(st.sampled_from(sorted(runs.recompute_modes)))
    strategy = Parallelism(
        dp=dp,
        shard="all" if shards == dp else shards * cp,
        zero=zero,
        cp=cp,
        ep=experts,
        tp=tp,
        expert_tp=draw(st.sampled_from([tp] if runs.cuts_experts else [1, tp])) if tp > 1 < experts else None,
        sequence_parallel=tp > 1 and runs.allows_sequence_parallel and (needs_split or draw(st.booleans())),
        pp=pp,
        schedule=schedule,
        chunks=chunks,
        micro_batch_size=draw(st.sampled_from([1, 2, 3])),
        recompute=(RecomputeMode(mode),) * (pp * chunks),
    )
    return Case(strategy, tuple(counts), draw(st.integers(1, 3)) * pp * chunks)


@st.composite
def any_cases(draw: st.DrawFn) -> Case:
    """Strategies of all kinds, whatever a tool runs of them."""
    degrees = st.sampled_from([1, 1, 2, 4])
    dp, cp, tp, pp = (draw(degrees) for _ in range(4))
    zero = draw(st.integers(0, 3)) if dp * cp > 1 else 0
    sizes = [size for size in (2, 4, 8, 16) if dp * cp % size == 0]
    ep = draw(st.sampled_from([1, *sizes]))
    groups = [size for size in sizes if size < dp * cp and (size % ep == 0 or ep % size == 0)]
    shard = draw(st.sampled_from(["all", *groups])) if zero else "all"
    schedule = draw(st.sampled_from(PIPELINE_SCHEDULES)) if pp > 1 else PipelineSchedule.NONE
    chunks = 2 if schedule.has_chunks else 1
    counts = [draw(st.integers(1, 2)) for _ in range(pp * chunks)]
    counts[0] += 1
    counts[-1] += 1
    strategy = Parallelism(
        dp=dp,
        shard=shard,
        zero=zero,
        cp=cp,
        ep=ep,
        tp=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        pp=pp,
        schedule=schedule,
        chunks=chunks,
        micro_batch_size=draw(st.sampled_from([1, 2])),
        recompute=(draw(st.sampled_from(list(RecomputeMode))),) * (pp * chunks),
    )
    return Case(strategy, tuple(counts), draw(st.integers(1, 2)) * pp * chunks)


def parallelism_of(strategy: Any, stages: int) -> Parallelism:
    """The value that the keys of a strategy make."""
    keys = {key: value for key, value in strategy.items() if key != "stages"}
    mode = keys.get("recompute", "none")
    keys["recompute"] = tuple(mode) if isinstance(mode, list | tuple) else (mode,) * stages
    return Parallelism(**keys)
