"""Verification lists, for every tool, exactly the strategies that the tool's Capabilities allow."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from placement_problems import random_problem
from tool_plans import TOOLS, plan_of

from phaze.backends.tools.tool_target import ToolTarget
from phaze.hardware import Cluster, InterconnectLevel, precision_recipe
from phaze.ir import RecomputeMode
from phaze.parallelism import PIPELINE_SCHEDULES, ZERO_STAGES, Choices, Parallelism, PipelineSchedule
from phaze.place import PlacementProblem
from phaze.plan.handover import obstacles
from phaze.verify.plain_pipeline import plain_strategies

DEVICES, MICRO_BATCHES = 8, 8
DEGREES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
"""tp, cp and ep, alone and in pairs."""


@cache
def base_problem(tp: int) -> PlacementProblem:
    """A problem of four layers, all of one tp, on two nodes of four devices."""
    problems = (random_problem(seed) for seed in range(200))
    problem = next(one for one in problems if one.tp_degrees == (tp,) and len(one.graph.layers) == 4)
    nodes = (InterconnectLevel(4, 1e7, 1e-4), InterconnectLevel(2, 1e6, 1e-3))
    return replace(
        problem,
        cluster=Cluster(problem.cluster.accelerator, DEVICES, nodes),
        micro_batches=MICRO_BATCHES,
        recipe=precision_recipe("bf16-adam"),
        choices=Choices(chunks=(2,), recompute=problem.choices.recompute),
    )


def problem_of(tool: ToolTarget, tp: int, cp: int, ep: int) -> PlacementProblem:
    """The problem as a question for a tool makes it at these degrees."""
    problem = base_problem(tp)
    runs = tool.capabilities.with_master(problem.recipe.master_bytes).at_degrees(tp=tp, cp=cp, ep=ep)
    return replace(problem, capabilities=runs, cp=cp, ep=ep)


def every_strategy(problem: PlacementProblem, tp: int) -> Iterator[Parallelism]:
    """Strategies of all kinds on all devices, whatever a tool runs of them."""
    schedules = [(PipelineSchedule.NONE, 1)]
    schedules += [(kind, chunks) for kind in PIPELINE_SCHEDULES for chunks in kind.chunk_counts(problem.choices.chunks)]
    copies = [dp for dp in (1, 2, 4, 8) if MICRO_BATCHES % dp == 0 and dp * problem.cp % problem.ep == 0]
    for dp, (schedule, chunks) in itertools.product(copies, schedules):
        replicas = dp * problem.cp
        pp, rest = divmod(DEVICES, replicas * tp)
        is_piped = schedule is not PipelineSchedule.NONE
        if rest or pp * chunks > len(problem.graph.layers) or is_piped != (pp > 1):
            continue
        if schedule is PipelineSchedule.INTERLEAVED and MICRO_BATCHES // dp % pp:  # it takes them in rounds of pp
            continue
        if schedule is PipelineSchedule.DUAL_PIPE_V and MICRO_BATCHES // dp < 2 * pp:
            continue
        for zero in ZERO_STAGES if replicas > 1 else (0,):
            sizes = [
                size for size in (2, 4, 8) if size < replicas and (size % problem.ep == 0 or problem.ep % size == 0)
            ]
            for shard in ["all", *sizes] if zero else ["all"]:
                yield Parallelism(
                    dp=dp,
                    cp=problem.cp,
                    ep=problem.ep,
                    tp=tp,
                    pp=pp,
                    zero=zero,
                    shard=shard,
                    schedule=schedule,
                    chunks=chunks,
                )


def is_allowed(tool: ToolTarget, strategy: Parallelism) -> bool:
    """Whether a plan with this strategy, and else with what the tool runs, has nothing that the tool does not."""
    runs = tool.capabilities
    counts = [1] * (strategy.pp * strategy.chunks)
    counts[0] += 1
    counts[-1] += 1
    plan = plan_of(
        replace(
            strategy,
            sequence_parallel=strategy.tp > 1 and runs.experts_need_split_sequences,
            recompute=(RecomputeMode(min(runs.recompute_modes)),) * len(counts),
        ),
        stages=tuple(counts),
        micro_batches=MICRO_BATCHES // strategy.dp,
    )
    return not obstacles(plan, runs)


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_the_strategies_that_verification_lists_are_those_that_capabilities_allow(name: str) -> None:
    tool, listed_in_all = TOOLS[name], 0
    for tp, cp, ep in DEGREES:
        runs = tool.capabilities
        if (cp > 1 and not runs.allows_context_parallel) or (ep > 1 and not runs.allows_expert_parallel):
            continue
        if runs.excluded_together(tp=tp, cp=cp, ep=ep):
            continue
        problem = problem_of(tool, tp, cp, ep)
        listed = {
            strategy
            for strategy in plain_strategies(problem)
            if strategy.dp * cp * tp * strategy.pp == DEVICES and strategy.dp in (1, 2, 4, 8)
        }
        allowed = {strategy for strategy in every_strategy(problem, tp) if is_allowed(tool, strategy)}
        assert listed == allowed, (tp, cp, ep)
        listed_in_all += len(listed)
    assert listed_in_all > 0
