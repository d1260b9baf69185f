"""Plans of models of which parts are frozen: bytes by closed form, and never more memory or time than without."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from plans import checked, small_cluster, small_graph

import phaze
from phaze.ir import Graph, Role
from phaze.ir.backward import derive_backward, without_backward
from phaze.ir.low_rank_adapters import LowRankAdapters, add_adapters
from phaze.plan.plan import Plan

ASKED: dict[str, Any] = {"cluster": small_cluster(), "global_batch_size": 32, "target": None, "compares": False}
STRATEGIES: list[dict[str, Any]] = [
    {"dp": 8, "zero": 0, "micro_batch_size": 2},
    {"dp": 4, "pp": 2, "zero": 1, "micro_batch_size": 2, "recompute": "full"},
    {"dp": 2, "tp": 4, "zero": 2, "micro_batch_size": 4},
    {"dp": 8, "zero": 3, "micro_batch_size": 4, "recompute": "selective"},
]


def partly_frozen(graph: Graph, seed: int) -> Graph:
    """Some layers, or some parameters of all layers, stay trained; at least one does."""
    random, forward = Random(seed), without_backward(graph)
    names = [tensor.id for tensor in graph.parameters]
    trained = {random.choice(names)} | {name for name in names if random.random() < random.choice([0.0, 0.2, 0.8])}
    if seed % 2:
        kept = random.sample([layer.parameters for layer in graph.layers], 2)
        trained = {name for parameters in kept for name in parameters}
    tensors = {
        name: replace(tensor, is_frozen=tensor.role is Role.PARAMETER and name not in trained)
        for name, tensor in forward.tensors.items()
    }
    return derive_backward(replace(forward, tensors=tensors))


@pytest.mark.parametrize("strategy", STRATEGIES[2:], ids=str)
def test_freezing_all_but_a_part_never_raises_memory_or_time(strategy: dict[str, Any]) -> None:
    _never_more(strategy, range(2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_freezing_any_part_never_raises_memory_or_time(strategy: dict[str, Any]) -> None:
    _never_more(strategy, range(40))


def _never_more(strategy: dict[str, Any], seeds: range) -> None:
    whole = phaze.evaluate(small_graph(), strategy=strategy, **ASKED).plan
    for seed in seeds:
        plan = phaze.evaluate(partly_frozen(small_graph(), seed), strategy=strategy, **ASKED).plan
        assert plan.step_time_s < whole.step_time_s, seed
        assert _peak_bytes(plan) < _peak_bytes(whole), seed


def _peak_bytes(plan: Plan) -> float:
    """What the fullest device holds."""
    items = ("parameters", "gradients", "optimizer", "activations", "working", "buffers")
    return max(sum(stage.memory_bytes[item] for item in items) for stage in plan.stages)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_adapters_hold_gradients_and_states_of_their_own_parameters_alone(zero: int) -> None:
    graph = add_adapters(small_graph(), LowRankAdapters(16))
    strategy = {"dp": 8, "zero": zero, "micro_batch_size": 4}
    memory = phaze.evaluate(graph, strategy=strategy, **ASKED).plan.stages[0].memory_bytes
    # A GPT of four blocks of width h: projections of (h, 3h) and (h, h) in attention, and two of (h, 4h).
    width = 512
    adapters = 4 * 16 * ((width + 3 * width) + (width + width) + 2 * (width + 4 * width))
    assert graph.parameter_count - graph.frozen_parameter_count == adapters
    assert memory["parameters"] == pytest.approx(2 * graph.parameter_count / (8 if zero == 3 else 1))
    assert memory["gradients"] == pytest.approx(4 * adapters / (8 if zero >= 2 else 1))
    assert memory["optimizer"] == pytest.approx(12 * adapters / (8 if zero >= 1 else 1))


def test_a_plan_with_adapters_is_derived_again_by_plain_code() -> None:
    graph = add_adapters(small_graph(), LowRankAdapters(8))
    asked = {"global_batch_size": 32, "target": None, "micro_batch_size": 1, "tp": 1}
    little = small_cluster(hbm_bytes=120 * 2**20, devices=1)
    plan = checked(phaze.optimize(graph, cluster=little, **asked), graph)
    assert plan.is_feasible
    assert not phaze.optimize(small_graph(), cluster=little, **asked).is_feasible
    assert "LoRA of rank 8" in " ".join(plan.provenance.notes)
