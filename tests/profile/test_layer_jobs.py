"""Layers of real models become scheduling problems."""

from __future__ import annotations

import numpy as np
import pytest

import phaze
from phaze.cost import Collective, price_collective
from phaze.errors import ScheduleError
from phaze.hardware import AcceleratorArray, parse_cluster, preset
from phaze.ir import Graph, Op, OpKind
from phaze.profile.layer_jobs import price_pass
from phaze.schedule import Compatibility, Resource, schedule_layer
from phaze.shard import Axis, ShardingProblem, shard_layer, slice_layer

CHIPS = AcceleratorArray.of([preset("tpuv4-paper").accelerator, preset("a100-80gb").accelerator])


@pytest.fixture(scope="module")
def gpt2() -> Graph:
    return phaze.import_graph("gpt2")


def test_forward_and_backward_of_a_block_are_scheduled_within_the_gap(gpt2: Graph) -> None:
    block = gpt2.layers[1]
    for ops in (block.forward, block.backward):
        priced = price_pass(gpt2, ops, CHIPS, prices={})
        bounds = priced.lower_bounds()
        for chip in range(len(CHIPS)):
            answer = schedule_layer(priced.problem(chip))
            assert answer.gap <= 0.01 + 1e-9
            assert bounds[chip] <= answer.time_s * (1 + 1e-9)
            assert answer.time_s <= priced.spread_s[chip][np.isfinite(priced.spread_s[chip])].sum() * (1 + 1e-9)


def test_no_layer_beats_bytes_over_bandwidth(gpt2: Graph) -> None:
    for layer in gpt2.distinct_layers:
        priced = price_pass(gpt2, layer.forward, CHIPS, prices={})
        for chip in range(len(CHIPS)):
            problem = priced.problem(chip)
            assert schedule_layer(problem).time_s >= problem.memory_s > 0.0


def test_views_hold_nothing_and_fused_ops_hold_both(gpt2: Graph) -> None:
    block = gpt2.layers[1]
    single = price_pass(gpt2, block.forward, CHIPS, prices={})
    views = {op.id for op in block.forward if op.kind is OpKind.VIEW}
    assert views
    assert {
        name for name, resource in zip(single.names, single.resources, strict=True) if resource is Resource.NONE
    } == views
    fused = price_pass(gpt2, block.forward, CHIPS, is_fused=True, prices={})
    assert Resource.BOTH in fused.resources
    assert len(fused.names) < len(single.names)
    assert Resource.BOTH not in single.resources


def test_collectives_of_a_sliced_layer_are_links(gpt2: Graph) -> None:
    cluster = parse_cluster("a100-80gb:8")
    axis = Axis(cluster, 4)
    local = slice_layer(shard_layer(ShardingProblem(graph=gpt2, layer=gpt2.layers[1], axis=axis)))
    forward = [op for op in local.ops if op.phase == "forward"]
    chip = cluster.accelerator
    with pytest.raises(ScheduleError, match=r"is a collective \(reduce_scatter\) and nobody says how long it takes"):
        price_pass(local, forward, chip, prices={})

    def seconds(op: object) -> float:
        return float(price_collective("all_reduce", 1e6, cluster, 4).seconds)

    priced = price_pass(local, forward, chip, link_s=seconds, prices={})
    assert Resource.LINK in priced.resources
    kept = schedule_layer(priced.problem(0), gap=0.0)
    paper = price_pass(local, forward, chip, link_s=seconds, prices={}, compatibility=Compatibility.PAPER)
    assert Resource.LINK not in paper.problem(0).resources
    assert kept.gap <= 1e-9


@pytest.mark.parametrize("chip", ["a100-80gb:8", "tpuv4:8"])
def test_sliced_backward_overlaps_its_collectives_and_is_proven(gpt2: Graph, chip: str) -> None:
    axis = Axis(parse_cluster(chip), 4)
    local = slice_layer(shard_layer(ShardingProblem(graph=gpt2, layer=gpt2.layers[1], axis=axis)))
    backward = [op for op in local.ops if op.phase == "backward"]

    def seconds(op: Op) -> float:
        return axis.seconds(Collective(op.function), op.collective_bytes)

    problem = price_pass(local, backward, axis.cluster.accelerator, link_s=seconds, prices={}).problem()
    answer = schedule_layer(problem)
    assert answer.gap <= 0.01 + 1e-9
    assert answer.makespan_s < sum(job.shortest_s for job in problem.jobs)
    other = schedule_layer(problem, method="cp-sat", gap=0.0, work=0.5)
    assert other.bound_s <= answer.makespan_s * (1 + 1e-6)
    assert answer.bound_s <= other.makespan_s * (1 + 1e-6)
