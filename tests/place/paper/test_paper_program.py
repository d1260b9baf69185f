"""The paper's program, against the original's answers and against a brute force that follows its rules word by word."""

import copy
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.placement_instances import read_placement_instance
from property_examples import examples
from repository import ROOT

from phaze.errors import FormatError, GraphError, PlacementError
from phaze.place.paper.paper_problem import PaperInstance
from phaze.place.paper.paper_program import PaperPlacement, place_paper, reconstruct

ORACLES = json.loads((ROOT / "tests" / "data" / "placement.json").read_text())


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(end - start for start, end in itertools.pairwise((0, *cuts, total)))


def stage_load(instance: PaperInstance, tp: int, accelerator: int, layers: range, recompute: bool) -> float:
    """Seconds of one stage: walk forward, walk backward, as the paper's program does."""
    forward, backward = instance.forward_s[tp, accelerator], instance.backward_s[tp, accelerator]
    transfer = dict(zip(instance.edges, instance.edge_bytes[tp] / instance.bandwidth_bytes_per_s, strict=True))
    done, clock = {}, 0.0
    for layer in layers:
        waits = [done.get(u, transfer[u, v]) for u, v in instance.edges if v == layer]
        done[layer] = clock = max([0.0, *waits]) + forward[layer]
    spent = clock
    again = float(sum(forward[layer] for layer in layers)) if recompute else 0.0
    done = {}
    for layer in reversed(layers):
        waits = [done.get(v, transfer[u, v]) for u, v in instance.edges if u == layer]
        done[layer] = clock = max([again, *waits]) + backward[layer]
    return spent + clock


def stage_fits(instance: PaperInstance, tp: int, accelerator: int, layers: range, position: int, stash: bool) -> bool:
    parameters = sum(instance.parameter_bytes[tp, layer] for layer in layers)
    activations = sum(instance.activation_bytes[tp, layer] for layer in layers)
    entering = sum(
        size
        for (u, v), size in zip(instance.edges, instance.edge_bytes[tp], strict=True)
        if v in layers and u not in layers
    )
    stashed = activations if stash else entering
    held = (3 if instance.uses_adam else 2) * parameters + activations
    return bool(held + (position - 1) * stashed <= instance.memory_bytes[accelerator])


def brute_force(instance: PaperInstance, accelerator: int = 0) -> float:
    best = math.inf
    layers = len(instance.layer_ids)
    for tp, recompute, stages in itertools.product(
        range(len(instance.tp_degrees)), instance.recompute, range(1, layers + 1)
    ):
        for lengths in compositions(layers, stages):
            starts = np.cumsum((0, *lengths)).tolist()
            runs = [range(start, end) for start, end in itertools.pairwise(starts)]
            positions = range(stages, 0, -1)
            if not all(
                stage_fits(instance, tp, accelerator, run, position, not recompute)
                for run, position in zip(runs, positions, strict=True)
            ):
                continue
            slowest = max(
                stage_load(instance, tp, accelerator, run, recompute and position > 1)
                for run, position in zip(runs, positions, strict=True)
            )
            devices = sum(instance.tp_degrees[tp] if any(instance.is_tensor_parallel[tp, run]) else 1 for run in runs)
            first = sum(instance.parameter_bytes[tp, layer] for layer in runs[0])
            for dp in range(1, min(instance.micro_batches, instance.device_count // devices) + 1):
                rounds = -(-instance.micro_batches // dp)
                resync = 4 * (dp - 1) / dp * first / instance.bandwidth_bytes_per_s
                best = min(best, slowest * (rounds + stages - 1) + resync)
    return best


def check(instance: PaperInstance, plan: PaperPlacement, accelerator: int) -> None:
    """A plan's own stages fit and take the time that it states."""
    tp = instance.tp_degrees.index(plan.tp)
    assert list(itertools.chain(*plan.stages)) == list(instance.layer_ids)
    starts = np.cumsum([0, *map(len, plan.stages)]).tolist()
    runs = [range(start, end) for start, end in itertools.pairwise(starts)]
    slowest = 0.0
    for run, position in zip(runs, range(len(runs), 0, -1), strict=True):
        assert stage_fits(instance, tp, accelerator, run, position, not plan.recompute)
        slowest = max(slowest, stage_load(instance, tp, accelerator, run, plan.recompute and position > 1))
    assert plan.dp * sum(plan.stage_devices) <= instance.device_count
    assert plan.stage_devices == tuple(plan.tp if any(instance.is_tensor_parallel[tp, run]) else 1 for run in runs)
    first = sum(instance.parameter_bytes[tp, layer] for layer in runs[0])
    resync = 4 * (plan.dp - 1) / plan.dp * first / instance.bandwidth_bytes_per_s
    rounds = -(-instance.micro_batches // plan.dp)
    assert slowest * (rounds + len(runs) - 1) + resync == pytest.approx(plan.time_s, rel=1e-9)


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle["name"])
def test_the_original_programs_optimum_is_reproduced(oracle: dict[str, Any]) -> None:
    instance = read_placement_instance(oracle["instance"])
    result, expected = place_paper(instance), oracle["expected"]
    assert bool(result.is_feasible[0]) == expected["feasible"]
    if expected["feasible"]:
        assert result.time_s[0] == pytest.approx(expected["timePerBatch"], rel=1e-9)
        plan = reconstruct(instance, result)
        assert plan is not None
        check(instance, plan, 0)
    else:
        assert reconstruct(instance, result) is None


def plain_program(instance: PaperInstance, accelerator: int = 0) -> float:
    """The dynamic program as the paper writes it: over layers, devices and stages, nothing skipped."""
    best, layers, devices = math.inf, len(instance.layer_ids), instance.device_count
    for tp, recompute in itertools.product(range(len(instance.tp_degrees)), instance.recompute):
        table = np.full((layers + 1, devices + 1, layers + 1), math.inf)
        table[layers, :, 0] = 0
        for start, end in itertools.product(range(layers - 1, -1, -1), range(layers, 0, -1)):
            run = range(start, end)
            if not run:
                continue
            takes = instance.tp_degrees[tp] if any(instance.is_tensor_parallel[tp, run]) else 1
            first = sum(instance.parameter_bytes[tp, layer] for layer in run)
            loads = [stage_load(instance, tp, accelerator, run, again) for again in (False, recompute)]
            for stages in range(1, layers + 1):
                if not stage_fits(instance, tp, accelerator, run, stages, not recompute):
                    break
                slowest = np.full(devices + 1, math.inf)
                slowest[takes:] = np.maximum(table[end, : max(devices + 1 - takes, 0), stages - 1], loads[stages > 1])
                table[start, :, stages] = np.minimum(table[start, :, stages], slowest)
                if start == 0:
                    for dp in range(1, min(instance.micro_batches, devices) + 1):
                        rounds = -(-instance.micro_batches // dp)
                        resync = 4 * (dp - 1) / dp * first / instance.bandwidth_bytes_per_s
                        best = min(best, slowest[devices // dp] * (rounds + stages - 1) + resync)
    return best


@st.composite
def instances(draw: st.DrawFn, largest: int = 6) -> PaperInstance:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, accelerators = draw(st.integers(1, largest)), draw(st.integers(1, 3))
    tp_degrees = tuple(sorted(draw(st.sets(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))))
    skips = draw(st.sets(st.tuples(st.integers(0, 5), st.integers(2, 5)), max_size=3))
    edges = [(layer, layer + 1) for layer in range(layers - 1)]
    edges += [(source, source + length) for source, length in sorted(skips) if source + length < layers]
    share = draw(st.sampled_from([0.0, 0.5, 1.0]))
    sliced = generator.random((len(tp_degrees), layers)) < share
    sliced[[index for index, tp in enumerate(tp_degrees) if tp == 1]] = False
    forward, backward = generator.uniform(0.1, 1, (2, len(tp_degrees), accelerators, layers))
    transfer = draw(st.sampled_from([0.0, 0.1, 2.0]))
    return PaperInstance(
        layer_ids=tuple(f"layer{index}" for index in range(layers)),
        tp_degrees=tp_degrees,
        forward_s=forward,
        backward_s=backward,
        parameter_bytes=generator.uniform(0.1, 1, (len(tp_degrees), layers)),
        activation_bytes=generator.uniform(0.1, 1, (len(tp_degrees), layers)),
        is_tensor_parallel=sliced,
        edges=tuple(edges),
        edge_bytes=generator.uniform(0, 1, (len(tp_degrees), len(edges))) * transfer,
        memory_bytes=generator.uniform(2, draw(st.sampled_from([4.0, 12.0, 40.0])), accelerators) * (largest / 6),
        bandwidth_bytes_per_s=draw(st.sampled_from([0.3, 1.0, 100.0])),
        device_count=draw(st.integers(1, 2 * largest)),
        micro_batches=draw(st.integers(1, 2 * largest)),
        recompute=draw(st.sampled_from([(False,), (True,), (False, True)])),
        uses_adam=draw(st.booleans()),
    )


@examples(300)
@given(instances())
def test_every_accelerator_of_a_batch_gets_what_a_brute_force_finds(instance: PaperInstance) -> None:
    result = place_paper(instance)
    for accelerator, time_s in enumerate(result.time_s):
        assert time_s == pytest.approx(brute_force(instance, accelerator), rel=1e-9)
        plan = reconstruct(instance, result, accelerator)
        assert (plan is None) == math.isinf(time_s)
        if plan is not None:
            check(instance, plan, accelerator)


@examples(25)
@given(instances(largest=20))
def test_nothing_that_is_skipped_changes_the_optimum(instance: PaperInstance) -> None:
    times = place_paper(instance).time_s
    for accelerator, time_s in enumerate(times):
        assert time_s == pytest.approx(plain_program(instance, accelerator), rel=1e-9)


def test_a_large_batch_equals_one_accelerator_at_a_time() -> None:
    generator = np.random.default_rng(0)
    layers, count = 30, 300
    speed = generator.uniform(0.5, 2, (3, count, 1))
    instance = PaperInstance(
        layer_ids=tuple(range(layers)),
        tp_degrees=(1, 2, 4),
        forward_s=generator.uniform(0.5, 1.5, (3, count, layers)) * speed,
        backward_s=generator.uniform(0.5, 1.5, (3, count, layers)) * speed,
        parameter_bytes=generator.uniform(0.5, 1.5, (3, layers)),
        activation_bytes=generator.uniform(0.5, 1.5, (3, layers)),
        is_tensor_parallel=np.array([[False] * layers, [True] * layers, [True, False] * (layers // 2)]),
        edges=tuple((layer, layer + 1) for layer in range(layers - 1)),
        edge_bytes=generator.uniform(0.1, 0.3, (3, layers - 1)),
        memory_bytes=generator.choice([20.0, 40.0, 90.0], count),
        bandwidth_bytes_per_s=2.0,
        device_count=64,
        micro_batches=48,
        recompute=(False, True),
    )
    together = place_paper(instance).time_s
    for index in range(0, count, 29):
        alone = PaperInstance(
            **{
                name: getattr(instance, name)
                for name in PaperInstance.__slots__
                if name not in ("forward_s", "backward_s", "memory_bytes")
            },
            forward_s=instance.forward_s[:, index : index + 1],
            backward_s=instance.backward_s[:, index : index + 1],
            memory_bytes=instance.memory_bytes[index : index + 1],
        )
        assert place_paper(alone).time_s[0] == pytest.approx(together[index], rel=1e-12)


def changed(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy(ORACLES[1]["instance"]) | fields


@pytest.mark.parametrize(
    ("document", "error", "message"),
    [
        (changed(nodes={"1": []}, edges={"1": []}), GraphError, "layer graph is empty"),
        (changed(nodes={}, edges={}), PlacementError, "no tensor widths"),
        (changed(maxDevices=0), PlacementError, "device_count is 0; expected at least 1"),
        (changed(mbsInBatch=0), PlacementError, "micro_batches is 0; expected at least 1"),
        (changed(bandwidth=0.0), PlacementError, "bandwidth_bytes_per_s is 0.0; expected a number above 0"),
        (changed(maxMemoryPerDevice=math.nan), PlacementError, "memory_bytes is .nan.; expected numbers above 0"),
        (changed(optimizerAlgorithm="Lion"), PlacementError, "optimizerAlgorithm is 'Lion'; expected SGD or Adam"),
        (changed(edges={"1": []}), GraphError, "branches: .* use the default mode"),
        (changed(edges={}), GraphError, "differ between tensor widths"),
        (changed(nodes=[1, 2]), FormatError, "not an instance"),
        ({}, FormatError, "not an instance"),
    ],
)
def test_a_malformed_instance_is_refused_with_a_reason(
    document: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_placement_instance(document)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("field", ["optimalLatencyFw", "optimalLatencyBw", "parameterSize", "activationSize"])
def test_a_time_or_size_that_cannot_be_is_refused(field: str, value: float) -> None:
    document = changed()
    document["nodes"]["1"][2][field] = value
    with pytest.raises(PlacementError, match=r"expected finite numbers of at least 0"):
        read_placement_instance(document)


def test_a_cycle_and_an_edge_to_nowhere_are_refused() -> None:
    document = changed()
    document["edges"]["1"].append({"sourceId": 4, "destId": 0, "communicationCost": 1.0})
    with pytest.raises(GraphError, match="cycle"):
        read_placement_instance(document)
    document["edges"]["1"][-1] = {"sourceId": 4, "destId": 9, "communicationCost": 1.0}
    with pytest.raises(GraphError, match="does not exist"):
        read_placement_instance(document)


def test_memory_smaller_than_one_layer_is_infeasible() -> None:
    result = place_paper(read_placement_instance(changed(maxMemoryPerDevice=1.0)))
    assert not result.is_feasible.any()
