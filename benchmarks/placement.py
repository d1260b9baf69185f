"""Placement against its oracle and at scale.

    PYTHONPATH=tests python benchmarks/placement.py --instances FILE
    PYTHONPATH=tests python benchmarks/placement.py --scale
    PYTHONPATH=tests python benchmarks/placement.py --model NAME [--cluster TEXT] [--batch N]

--instances compares every instance of FILE (the format of tests/data/placement.json) with the original program's
optimum. --scale places 98 layers on 1,024 devices: paper mode for one accelerator and for 1,000 at once, and the
default mode. --model places a built-in model with scheduled profiles at every microbatch size, alone and below the best
time of the sizes before it. The readers of instances are those of the tests: hence PYTHONPATH.

The scale instance is random with a fixed seed: 98 unequal layers, tp 1, 2, 4 and 8 with falling efficiency,
Adam, both recompute choices, 512 microbatches; parameters that no device can hold alone. The default mode gets the same
layers with a third recompute mode (selective), all four schedules with 2 to 4 chunks, and ZeRO 0 to 3.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from oracles.placement_instances import read_placement_instance

import phaze
from phaze.hardware import Cluster, InterconnectLevel, parse_cluster, precision_recipe, preset
from phaze.place import (
    BoundaryTensor,
    Bounded,
    LayerProfile,
    PaperInstance,
    PlacementGraph,
    PlacementProblem,
    RecomputeMode,
    find_placement,
    place_paper,
    reconstruct,
)
from phaze.profile.layer_passes import ProfileOptions, placement_graph, profile_layer
from phaze.shard import Axis, ShardingProblem, shard_model, unsharded

RELATIVE = 1e-9
"""The largest relative difference from the original program's optimum: far above rounding, far below any real one."""

RUNS = 20
"""Runs of which the median is printed: enough that a busy moment of the machine does not decide."""

LAYERS, DEVICES, MICRO_BATCHES, TP_DEGREES = 98, 1024, 512, (1, 2, 4, 8)


def main() -> int:
    """Run what was asked for; 1 if an instance differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=Path, help="file of instances with the original program's optima")
    parser.add_argument("--scale", action="store_true", help="time the program at scale")
    parser.add_argument("--model", help="time the default mode on a built-in model")
    parser.add_argument("--cluster", default="a100-80gb:1024", help="the cluster of --model")
    parser.add_argument("--batch", type=int, default=1536, help="sequences in a batch of --model")
    arguments = parser.parse_args()
    if arguments.instances is None and not arguments.scale and arguments.model is None:
        parser.error("nothing to do: give --instances FILE, --scale or --model NAME")
    differing = compare_instances(arguments.instances) if arguments.instances else 0
    if arguments.scale:
        time_scale()
    if arguments.model:
        time_model(arguments.model, parse_cluster(arguments.cluster), arguments.batch)
    return 1 if differing else 0


def compare_instances(path: Path) -> int:
    """Print mismatches, seconds and `N/N equal`; the number of mismatches."""
    oracles = json.loads(path.read_text())
    equal, ours, original = 0, 0.0, 0.0
    for oracle in oracles:
        start = time.perf_counter()
        instance = read_placement_instance(oracle["instance"])
        result = place_paper(instance)
        reconstruct(instance, result)
        ours += time.perf_counter() - start
        original += oracle.get("reference_seconds", 0.0)
        time_s, expected = float(result.time_s[0]), oracle["expected"]
        is_equal = bool(result.is_feasible[0]) == expected["feasible"]
        if is_equal and expected["feasible"]:
            is_equal = abs(time_s - expected["timePerBatch"]) <= RELATIVE * expected["timePerBatch"]
        equal += is_equal
        if not is_equal:
            print(f"{oracle['name']}: found {time_s!r}, expected {expected.get('timePerBatch', 'infeasible')!r}")
    print(f"total {ours:.3f} s; the original program's own total in the file: {original:.3f} s")
    print(f"{equal}/{len(oracles)} equal")
    return len(oracles) - equal


def scale_instance(accelerators: int) -> PaperInstance:
    """The random instance of --scale, on one or many accelerators."""
    generator = np.random.default_rng(0)
    tp = np.array(TP_DEGREES)[:, None, None]
    speed = generator.uniform(0.5, 2, (1, accelerators, 1)) if accelerators > 1 else np.ones((1, 1, 1))
    forward = generator.uniform(5e-3, 15e-3, (1, accelerators, LAYERS)) / speed * (1 + 0.06 * (tp - 1)) / tp
    parameters, activations = generator.uniform(0.5e9, 1.5e9, (2, 1, LAYERS)) / tp[:, 0]
    edges = generator.uniform(20e6, 60e6, (1, LAYERS - 1))
    return PaperInstance(
        layer_ids=tuple(range(LAYERS)),
        tp_degrees=TP_DEGREES,
        forward_s=forward,
        backward_s=2 * forward * generator.uniform(0.9, 1.1, forward.shape),
        parameter_bytes=parameters,
        activation_bytes=activations,
        is_tensor_parallel=np.repeat(np.array(TP_DEGREES)[:, None] > 1, LAYERS, axis=1),
        edges=tuple((layer, layer + 1) for layer in range(LAYERS - 1)),
        edge_bytes=np.repeat(edges, len(TP_DEGREES), axis=0),
        memory_bytes=np.full(accelerators, 40e9),
        bandwidth_bytes_per_s=25e9,
        device_count=DEVICES,
        micro_batches=MICRO_BATCHES,
        recompute=(False, True),
    )


def default_problem(instance: PaperInstance) -> PlacementProblem:
    """The same layers for the default mode."""
    stash = {RecomputeMode.NONE: 1.0, RecomputeMode.SELECTIVE: 0.5, RecomputeMode.FULL: 0.05}
    again = {RecomputeMode.NONE: 0.0, RecomputeMode.SELECTIVE: 0.1, RecomputeMode.FULL: 1.0}
    profiles = {}
    for index, tp in enumerate(TP_DEGREES):
        for layer in range(LAYERS):
            forward, backward = instance.forward_s[index, 0, layer], instance.backward_s[index, 0, layer]
            activations = float(instance.activation_bytes[index, layer])
            size = float(instance.edge_bytes[index, min(layer, LAYERS - 2)])
            for mode in RecomputeMode:
                profiles[str(layer), tp, mode] = LayerProfile(
                    forward_s=Bounded.exact(forward),
                    backward_input_s=Bounded.exact(backward / 2),
                    backward_weight_s=Bounded.exact(backward / 2),
                    recompute_s=Bounded.exact(again[mode] * forward),
                    parameter_bytes={"bfloat16": float(instance.parameter_bytes[index, layer])},
                    stashed_bytes=stash[mode] * activations,
                    peak_working_bytes=activations,
                    outputs=(BoundaryTensor(size),),
                    is_tensor_parallel=tp > 1,
                )
    links = (InterconnectLevel(DEVICES, instance.bandwidth_bytes_per_s),)
    return PlacementProblem(
        graph=PlacementGraph.chain(tuple(str(layer) for layer in range(LAYERS))),
        profiles=profiles,
        cluster=Cluster(preset("a100-80gb").accelerator, DEVICES, links),
        micro_batches=MICRO_BATCHES,
        recipe=precision_recipe("bf16-adam"),
    )


def median_s(work: Callable[[], object], runs: int = RUNS) -> float:
    """Median seconds of some runs."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def time_scale() -> None:
    """Print what one placement and a batch of 1,000 cost."""
    alone, many = scale_instance(1), scale_instance(1000)
    plan = reconstruct(alone, place_paper(alone))
    assert plan is not None
    print(
        f"{LAYERS} layers, {DEVICES} devices, tp {TP_DEGREES}, Adam, recompute both: {len(plan.stages)} stages x "
        f"{plan.tp} tensor x {plan.dp} data, recompute {plan.recompute}, {plan.time_s:.4f} s per batch"
    )
    single = median_s(lambda: reconstruct(alone, place_paper(alone)))
    print(f"paper mode, one accelerator with its stages: {1e3 * single:.2f} ms (median of {RUNS})")
    feasible = int(place_paper(many).is_feasible.sum())
    batch = median_s(lambda: place_paper(many)) / 1000
    print(
        f"paper mode, 1,000 accelerators in one call ({feasible} feasible): {1e3 * batch:.3f} ms each (median of "
        f"{RUNS}), {single / batch:.1f} times faster than one by one"
    )
    problem = default_problem(alone)
    result = find_placement(problem, top=1)
    assert result.best is not None
    parallelism = result.best.parallelism
    print(
        f"default mode: {parallelism.pp} stages x {parallelism.tp} tensor x {parallelism.dp} data, "
        f"{parallelism.schedule}, {parallelism.chunks} chunk(s), ZeRO-{parallelism.zero}, {result.best.time_s:.4f} s "
        f"per batch; {result.status}, gap {result.gap:.1%}; {result.strategies} strategies looked at, "
        f"{result.simulated} pipelines simulated"
    )
    seconds = median_s(lambda: find_placement(problem, top=1))
    print(f"default mode: {seconds:.3f} s (median of {RUNS})")


def model_problem(name: str, cluster: Cluster, batch: int, size: int, options: ProfileOptions) -> PlacementProblem:
    """A built-in model at one microbatch size, sliced, scheduled and profiled."""
    graph = phaze.import_graph(name).with_micro_batch(size)
    profiles = {}
    for tp in TP_DEGREES:
        axis = Axis(cluster, tp)
        whole = [unsharded(ShardingProblem(graph=graph, layer=layer, axis=axis)) for layer in graph.layers]
        layers = shard_model(graph, axis).layers if tp > 1 else whole
        for layer in graph.distinct_layers:
            for mode in RecomputeMode:
                profiles[layer.key, tp, mode] = profile_layer(layers[layer.index], mode, options)
    return PlacementProblem(
        graph=placement_graph(graph),
        profiles=profiles,
        cluster=cluster,
        micro_batches=batch // size,
        recipe=precision_recipe("bf16-adam"),
    )


def time_model(name: str, cluster: Cluster, batch: int, gap: float = 0.01) -> None:
    """Print processor seconds of one call for each microbatch size, and below the best time so far."""
    options, best_s = ProfileOptions(), math.inf
    for size in (1, 2, 4, 8):
        problem = model_problem(name, cluster, batch, size, options)
        start = time.process_time()
        result = find_placement(problem, gap=gap)
        middle = time.process_time()
        find_placement(problem, gap=gap, cutoff_s=best_s)
        end = time.process_time()
        answer = "nothing" if result.best is None else f"{result.best.time_s:.4g} s per batch, gap {result.gap:.1%}"
        best_s = min(best_s, math.inf if result.best is None else result.best.time_s)
        print(
            f"microbatches of {size}: {answer}, {result.strategies} strategies, {middle - start:.2f} s; below "
            f"the best of smaller ones {end - middle:.2f} s"
        )


if __name__ == "__main__":
    sys.exit(main())
