"""Plans of small random questions against trying every strategy of every axis, under every objective and at gap 0."""

import math
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from graphs import TINY_CONFIGS
from planning_brute_force import SlicingTimes, least_value, try_everything

from phaze.cost import IDEAL
from phaze.errors import PlanError
from phaze.frontends.transformer_config import graph_from_config
from phaze.hardware import Cluster, HostLink, InterconnectLevel, find_accelerator
from phaze.installed import installed_plugins
from phaze.ir import Graph, RecomputeMode
from phaze.objective import ObjectiveKind
from phaze.parallelism import PIPELINE_SCHEDULES, Offload
from phaze.plan.plan import Plan
from phaze.planner.planning import plan_for
from phaze.planner.progress import Watch
from phaze.question import Question, ask
from phaze.verify.bound_checks import derive_bound

LENGTH = 8
plugins = cache(installed_plugins)


def drawn_model(chance: Random, blocks: int) -> Graph:
    """A tiny transformer of some blocks with grouped keys, two of three families with experts."""
    family = chance.choice(["llama", "mixtral", "gpt_oss"])
    config = {**TINY_CONFIGS[family], "num_hidden_layers": blocks}
    return graph_from_config(config, name=family, sequence_length=LENGTH)


def drawn_cluster(chance: Random, graph: Graph, most_devices: int) -> Cluster:
    """Pairs of devices with hosts, whose links and memories are ample or hardly enough."""
    memory = (18 * graph.parameter_count + 2**14) * chance.choice([100.0, 10.0, 1.0, 0.5])
    chip = replace(find_accelerator("a100-80gb"), name="ideal", hbm_bytes=int(memory))
    bandwidth = chance.choice([1e6, 1e8, 1e10])
    levels = (
        InterconnectLevel(2, 4 * bandwidth, 1e-6),
        InterconnectLevel(8, bandwidth, chance.choice([1e-6, 1e-4])),
    )
    host = HostLink(chance.choice([1e6, 1e9]), chance.choice([2**10, 2**30]))
    return Cluster(chip, chance.choice(range(2, most_devices + 1)), levels, host=host)


def drawn_objective(chance: Random) -> dict[str, Any]:
    """Throughput in half of the questions; else money, joules or devices, some of these for steps that may not last."""
    kind = chance.choice(["throughput", "throughput", "throughput", "cost", "energy", "devices"])
    if kind == "cost":
        return {"objective": kind, "price": 1.0}
    has_limit = kind == "devices" and chance.random() < 0.5
    return {"objective": kind, **({"step_time": chance.choice([1e-4, 1e-3])} if has_limit else {})}


def drawn_question(seed: int, *, most_blocks: int, most_devices: int) -> Question:
    """A question whose offers are drawn on every axis: several degrees, or a single one that is not 1."""
    chance = Random(f"all axes/{seed}")
    graph = drawn_model(chance, chance.randint(1, most_blocks))
    has_experts = graph.name != "llama"
    degrees = [(1,), (1, 2), (2,), *([(1, 4)] if most_devices > 8 else [])]
    tp, cp, ep = (chance.choice(degrees) for _ in range(3))
    options: dict[str, Any] = {
        "cluster": drawn_cluster(chance, graph, most_devices),
        "global_batch_size": chance.choice([2, 4, 6, 8]),
        "micro_batch_size": chance.choice([(1,), (1, 2), (2,)]),
        "tp": tp,
        "cp": cp,
        "ep": ep if has_experts else (1,),
        "calibration": IDEAL,
        "target": None,
        "gap": 0.0,
        **drawn_objective(chance),
    }
    question = ask(graph, None, options, plugins())
    further = chance.choice([(), (RecomputeMode.FULL,), (RecomputeMode.SELECTIVE,)])
    choices = replace(
        question.choices,
        schedule=tuple(chance.sample(PIPELINE_SCHEDULES, 2)),
        recompute=(RecomputeMode.NONE, *further),
        offload=chance.choice([(Offload.NONE,), tuple(chance.sample(list(Offload), 2))]),
        expert_tp=chance.choice([None, 1, 2]) if has_experts and tp == (2,) else None,
        sequence_parallel=chance.choice([None, True, False, "mixed"]) if tp == (2,) else None,
    )
    return replace(question, choices=choices, offered=choices)


def assert_equals_trying_everything(question: Question) -> None:
    tried = try_everything(question)
    least = least_value(question, tried)
    try:
        plan = plan_for(question, Watch())
    except PlanError:  # nothing is sliced so, there are too few devices, or no step is short enough
        assert least == math.inf
        return
    assert plan.is_feasible == (least < math.inf)
    if not plan.is_feasible:
        return
    reached, bound = valued(question, plan)
    assert bound == pytest.approx(least, rel=1e-6)
    if question.objective.kind is ObjectiveKind.ENERGY:  # of which only the least is counted, not what cores are chosen
        assert least * (1 - 1e-9) <= reached <= least * 1.01
    else:
        assert reached == pytest.approx(least, rel=1e-9)
        assert plan.gap < 1e-6
    if question.objective.kind is ObjectiveKind.THROUGHPUT:
        assert_verified(question, plan, tried)


def valued(question: Question, plan: Plan) -> tuple[float, float]:
    """What a plan reaches and what is proven, in seconds, device-seconds, joules of a step, or devices."""
    tokens = question.global_batch_size * LENGTH
    scale = {ObjectiveKind.COST: 3600 * tokens / 1e6, ObjectiveKind.ENERGY: tokens}.get(question.objective.kind, 1)
    return plan.value.reached * scale, plan.value.bound * scale


def assert_verified(question: Question, plan: Plan, tried: list[SlicingTimes]) -> None:
    """The plain bound is shown where it holds and refuted above, and the plan is among what was tried, at its time."""
    assert derive_bound(question, plan.step_time_s * (1 - 1e-6), Watch()).faster is None
    assert derive_bound(question, plan.step_time_s * 1.01, Watch()).faster is not None
    chosen = replace(plan.strategy, micro_batch_size=1, recompute=(), expert_tp=None, sequence_parallel=False)
    times_s = [
        slicing.times_s.get(replace(chosen, shard=shard), math.inf)
        for slicing in tried
        for shard in {chosen.shard, "all" if chosen.shard_groups == 1 else chosen.shard}
        if slicing.slices.micro_batch_size == plan.strategy.micro_batch_size
    ]
    assert min(times_s) == pytest.approx(plan.step_time_s, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_plan_of_all_axes_is_the_best_of_trying_everything(seed: int) -> None:
    assert_equals_trying_everything(drawn_question(seed, most_blocks=1, most_devices=8))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_200_plans_of_all_axes_on_up_to_six_layers_and_sixteen_devices_are_the_best_of_trying_everything(
    first: int,
) -> None:
    for seed in range(first, first + 20):
        assert_equals_trying_everything(drawn_question(seed, most_blocks=4, most_devices=16))
