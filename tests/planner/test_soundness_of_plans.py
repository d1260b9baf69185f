"""Random small questions: no strategy of a grid beats the plan by more than its gap, and none beats its bound.

Every strategy of the grid is priced by `phaze.evaluate`, as a user would who does not believe the plan.
"""

import random
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
from designs import tiny_model
from graphs import TINY_CONFIGS
from plans import small_cluster, small_graph

import phaze
from phaze.errors import PhazeError, PlanError
from phaze.frontends.transformer_config import graph_from_config
from phaze.hardware import Cluster
from phaze.installed import installed_plugins
from phaze.ir import Graph
from phaze.plan.plan import Plan

ROUNDING = 1e-9
plugins = cache(installed_plugins)


FAMILIES = ("tiny", "tiny", "gpt", "gpt", "llama", "llama", "mixtral", "mixtral", "gpt_oss", "t5")
"""What models are drawn from: blocks of products, transformers, experts, encoders with decoders."""

SLOW_FAMILY, SLOW_EVERY = "mamba2", 50
"""State spaces are scheduled for ten times as long as all others: one question in so many has one."""


def drawn_model(seed: int, chance: random.Random) -> Graph:
    """A tiny model of some family."""
    family = SLOW_FAMILY if seed % SLOW_EVERY == SLOW_EVERY - 1 else chance.choice(FAMILIES)
    if family == "tiny":
        return tiny_model(chance.randint(1, 5), chance.choice([64, 512]))
    if family == "gpt":
        return small_graph(num_layers=chance.randint(1, 3), hidden_size=64, num_attention_heads=4)
    return graph_from_config(TINY_CONFIGS[family], name=family, sequence_length=8)


def drawn_question(seed: int) -> tuple[Graph, dict[str, Any]]:
    """A model and what is asked of it: all axes in some questions, and memories from ample to hardly enough."""
    chance = random.Random(f"soundness/{seed}")
    graph = drawn_model(seed, chance)
    needed = 18 * graph.parameter_count + 2**20
    cluster = small_cluster(int(needed * chance.choice([100.0, 1.0, 0.3])), chance.choice([2, 4, 6, 8]))
    if chance.random() < 0.5:
        cluster = _slow_network(cluster)
    has_experts = graph.name in ("mixtral", "gpt_oss")
    return graph, {
        "cluster": cluster,
        "global_batch_size": chance.choice([4, 8, 12]),
        "micro_batch_size": chance.choice([(1,), (1, 2), (2, 4)]),
        "tp": chance.choice([(1,), (1, 2)]),
        "cp": chance.choice([(1,), (1, 2)]) if graph.name != "tiny" else (1,),
        "ep": chance.choice([(1,), (1, 2), (2,)]) if has_experts else (1,),
        "gap": chance.choice([0.0, 0.01, 0.05]),
        "plugins": plugins(),
    }


def _slow_network(cluster: Cluster) -> Cluster:
    levels = tuple(replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / 50) for level in cluster.levels)
    return replace(cluster, levels=levels)


def grid(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination of degrees on a few devices, with schedules, ZeRO stages and groups, and recompute modes."""
    devices, sizes = question["cluster"].device_count, question["micro_batch_size"]
    strategies = []
    for dp, cp, ep, tp, pp, size in product(
        (1, 2, 3, 4, 6, 8), question["cp"], question["ep"], question["tp"], (1, 2, 3, 4), sizes
    ):
        copies = dp * cp
        if copies * tp * pp > devices or copies % ep:
            continue
        degrees = {"dp": dp, "cp": cp, "ep": ep, "tp": tp, "pp": pp, "micro_batch_size": size}
        for schedule, zero, recompute in product(
            ["none"] if pp == 1 else ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"],
            range(4) if copies > 1 else (0,),
            ("none", "selective", "full"),
        ):
            chosen = {**degrees, "schedule": schedule, "zero": zero, "recompute": recompute}
            strategies += [{**chosen, "shard": shard} for shard in (_groups(copies, ep) if zero else ["all"])]
    return strategies


def _groups(copies: int, ep: int) -> list[int | str]:
    """Devices over which ZeRO may shard: all that hold the same layers, or a power of two of them."""
    powers = [size for size in (2, 4) if size < copies and copies % size == 0 and (size % ep == 0 or ep % size == 0)]
    return ["all", *powers]


class Tried(NamedTuple):
    """What came of a question's grid: how many strategies were priced, and which of them refute the plan."""

    priced: int
    wrong: list[tuple[Any, ...]]


def tried(seed: int, most: int) -> Tried:
    """Price some strategies of a question's grid, and find those that beat the plan by more than its gap, or its bound.

    Half of them are drawn from the whole grid and half from those without recompute, which are the fastest ones.
    """
    graph, question = drawn_question(seed)
    try:
        plan = phaze.optimize(graph, **question)
    except PlanError:  # degrees are drawn so large that some models cannot be sliced
        return Tried(0, [])
    priced = 0
    wrong = []
    for strategy in drawn_strategies(question, random.Random(seed), most):
        try:
            evaluated = phaze.evaluate(graph, strategy=strategy, compares=False, **question).plan
        except PhazeError:  # more stages than layers, or heads that do not divide: no plan can have it
            continue
        priced += 1
        if evaluated.is_feasible and (not plan.is_feasible or is_faster(evaluated, plan)):
            wrong.append((seed, strategy, evaluated.step_time_s, plan.step_time_s, plan.bound_s, plan.status))
    return Tried(priced, wrong)


def drawn_strategies(question: dict[str, Any], chance: random.Random, most: int) -> list[dict[str, Any]]:
    """Some strategies of a question's grid, half of them without recompute."""
    every = grid(question)
    quick = [strategy for strategy in every if strategy["recompute"] == "none"]
    drawn = chance.sample(quick, min(most // 2, len(quick)))
    rest = [strategy for strategy in every if strategy not in drawn]
    return drawn + chance.sample(rest, min(most - len(drawn), len(rest)))


def is_faster(priced: Plan, plan: Plan) -> bool:
    """Whether a priced strategy refutes the plan's bound, or the gap that the plan claims."""
    least_s = min(plan.bound_s, plan.step_time_s * (1 - plan.gap))
    return priced.step_time_s < least_s * (1 - ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_strategy_of_a_grid_refutes_a_plan(seed: int) -> None:
    assert tried(seed, 5).wrong == []


QUESTIONS, IN_A_PART = 500, 25


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, QUESTIONS, IN_A_PART))
def test_no_strategy_of_500_grids_refutes_a_plan(first: int) -> None:
    answers = [tried(100 + seed, 10) for seed in range(first, first + IN_A_PART)]
    assert [wrong for answer in answers for wrong in answer.wrong] == []
    assert sum(answer.priced for answer in answers) > 2 * IN_A_PART
