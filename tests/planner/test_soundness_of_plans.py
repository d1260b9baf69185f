"""Random small questions: no strategy of a grid beats the plan by more than its gap, and none beats its bound.

Every strategy of the grid is priced by `phaze.evaluate`, as a user would who does not believe the plan.
"""

import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from designs import tiny_model
from graphs import TINY_CONFIGS
from plans import small_cluster, small_graph

import phaze
from phaze.errors import PhazeError
from phaze.frontends.transformer_config import graph_from_config
from phaze.hardware import Cluster
from phaze.installed import installed_plugins
from phaze.ir import Graph
from phaze.plan.plan import Plan

ROUNDING = 1e-9
plugins = cache(installed_plugins)


def drawn_model(chance: random.Random) -> Graph:
    """A tiny model of some family: blocks of products, transformers, experts, state spaces."""
    family = chance.choice(["tiny", "gpt", "llama", "mixtral", "mamba2", "t5"])
    if family == "tiny":
        return tiny_model(chance.randint(1, 5), chance.choice([64, 512]))
    if family == "gpt":
        return small_graph(num_layers=chance.randint(1, 3), hidden_size=64, num_attention_heads=4)
    return graph_from_config(TINY_CONFIGS[family], name=family, sequence_length=8)


def drawn_question(seed: int) -> tuple[Graph, dict[str, Any]]:
    """A model and what is asked of it; memories from ample to hardly enough."""
    chance = random.Random(f"soundness/{seed}")
    graph = drawn_model(chance)
    needed = 18 * graph.parameter_count + 2**20
    cluster = small_cluster(int(needed * chance.choice([100.0, 1.0, 0.3])), chance.choice([2, 4, 6, 8]))
    if chance.random() < 0.5:
        cluster = _slow_network(cluster)
    return graph, {
        "cluster": cluster,
        "global_batch_size": chance.choice([4, 8, 12]),
        "micro_batch_size": chance.choice([(1,), (1, 2), (2, 4)]),
        "tp": chance.choice([(1,), (1, 2)]),
        "gap": chance.choice([0.0, 0.01, 0.05]),
        "plugins": plugins(),
    }


def _slow_network(cluster: Cluster) -> Cluster:
    levels = tuple(replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / 50) for level in cluster.levels)
    return replace(cluster, levels=levels)


def grid(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination of degrees on a few devices, with schedules, ZeRO stages and recompute modes."""
    devices = question["cluster"].device_count
    strategies = []
    for dp, tp, pp in product((1, 2, 3, 4, 6, 8), question["tp"], (1, 2, 3, 4)):
        if dp * tp * pp > devices:
            continue
        schedules = ["none"] if pp == 1 else ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"]
        for schedule, zero, recompute, size in product(
            schedules, range(4) if dp > 1 else (0,), ("none", "selective", "full"), question["micro_batch_size"]
        ):
            degrees = {"dp": dp, "tp": tp, "pp": pp, "schedule": schedule}
            strategies.append({**degrees, "zero": zero, "recompute": recompute, "micro_batch_size": size})
    return strategies


def contradictions(seed: int, most: int) -> list[tuple[Any, ...]]:
    """Strategies of a question's grid that beat the plan by more than its gap, or its bound."""
    graph, question = drawn_question(seed)
    try:
        plan = phaze.optimize(graph, **question)
    except PhazeError:  # a model that cannot be sliced or fed so
        return []
    chance, wrong = random.Random(seed), []
    strategies = grid(question)
    for strategy in chance.sample(strategies, min(most, len(strategies))):
        try:
            priced = phaze.evaluate(graph, strategy=strategy, compares=False, **question).plan
        except PhazeError:
            continue
        if priced.is_feasible and (not plan.is_feasible or is_faster(priced, plan)):
            wrong.append((seed, strategy, priced.step_time_s, plan.step_time_s, plan.bound_s, plan.status))
    return wrong


def is_faster(priced: Plan, plan: Plan) -> bool:
    """Whether a priced strategy refutes the plan's bound, or the gap that the plan claims."""
    least_s = min(plan.bound_s, plan.step_time_s * (1 - plan.gap))
    return priced.step_time_s < least_s * (1 - ROUNDING)


@pytest.mark.parametrize("seed", range(2))
def test_no_strategy_of_a_grid_refutes_a_plan(seed: int) -> None:
    assert contradictions(seed, 5) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(20))
def test_no_strategy_of_500_grids_refutes_a_plan(part: int) -> None:
    assert [wrong for seed in range(25 * part, 25 * part + 25) for wrong in contradictions(100 + seed, 10)] == []


PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
import json
from plans import QUESTION, small_cluster, small_graph
import phaze
plan = json.loads(phaze.optimize(small_graph(), cluster=small_cluster(), **QUESTION).to_json())
sys.stdout.write(plan["digest"])
"""


@pytest.mark.parametrize("seeds", [("1", "2"), pytest.param(tuple("345678"), marks=pytest.mark.exhaustive)])
def test_plans_are_equal_whatever_seeds_hashes_have_and_however_many_threads_run(seeds: tuple[str, ...]) -> None:
    support = Path(__file__).parents[1]
    digests = set()
    for seed in seeds:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed, "OPENBLAS_NUM_THREADS": seed}
        program = [sys.executable, "-c", PROGRAM, str(support / "support"), str(support)]
        digests.add(subprocess.run(program, capture_output=True, text=True, env=environment, check=True).stdout)
    assert len(digests) == 1
    assert all(len(digest) == 64 for digest in digests)
