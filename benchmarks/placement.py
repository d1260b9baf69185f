"""Placement against its oracle and at scale.

    PYTHONPATH=tests python benchmarks/placement.py --instances FILE
    PYTHONPATH=tests python benchmarks/placement.py --scale
    PYTHONPATH=tests python benchmarks/placement.py --growth
    PYTHONPATH=tests python benchmarks/placement.py --model NAME [--cluster TEXT] [--batch N]

--instances compares every instance of FILE (the format of tests/data/placement.json) with the original program's
optimum. --scale places 98 layers on 1,024 devices: paper mode for one accelerator and for 1,000 at once, and the
default mode. --growth places a chain of equal blocks between two ends on 64 to 131,072 devices, with 12 to 1,000 layers
and with tp up to 8, each in a process of its own, and prints processor seconds and peak memory. --model places a
built-in model with scheduled profiles at every microbatch size, alone and below the best time of the sizes before it.
The readers of instances are those of the tests: hence PYTHONPATH.

The scale instance is random with a fixed seed: 98 unequal layers, tp 1, 2, 4 and 8 with falling efficiency,
Adam, both recompute choices, 512 microbatches; parameters that no device can hold alone. The default mode gets the same
layers with a third recompute mode (selective), all four schedules with 2 to 4 chunks, and ZeRO 0 to 3.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from oracles.placement_instances import read_placement_instance

import phaze
from phaze.errors import ShardError
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

STASHED = {RecomputeMode.NONE: 1.0, RecomputeMode.SELECTIVE: 0.5, RecomputeMode.FULL: 0.05}
"""The part of a layer's activations that each recompute mode of --scale and --growth keeps."""

RECOMPUTED = {RecomputeMode.NONE: 0.0, RecomputeMode.SELECTIVE: 0.1, RecomputeMode.FULL: 1.0}
"""The part of a layer's forward that each of them runs again."""

LAYERS, DEVICES, MICRO_BATCHES, TP_DEGREES = 98, 1024, 512, (1, 2, 4, 8)


def main() -> int:
    """Run what was asked for; 1 if an instance differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=Path, help="file of instances with the original program's optima")
    parser.add_argument("--scale", action="store_true", help="time the program at scale")
    parser.add_argument("--growth", action="store_true", help="seconds and memory against devices, layers and tp")
    parser.add_argument("--model", help="time the default mode on a built-in model")
    parser.add_argument("--cluster", default="a100-80gb:1024", help="the cluster of --model")
    parser.add_argument("--batch", type=int, default=1536, help="sequences in a batch of --model")
    arguments = parser.parse_args()
    if arguments.instances is None and not (arguments.scale or arguments.growth) and arguments.model is None:
        parser.error("nothing to do: give --instances FILE, --scale, --growth or --model NAME")
    differing = compare_instances(arguments.instances) if arguments.instances else 0
    if arguments.scale:
        time_scale()
    if arguments.growth:
        time_growth()
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
    profiles = {}
    for index, tp in enumerate(TP_DEGREES):
        for layer in range(LAYERS):
            forward, backward = instance.forward_s[index, 0, layer], instance.backward_s[index, 0, layer]
            activations = float(instance.activation_bytes[index, layer])
            size = float(instance.edge_bytes[index, min(layer, LAYERS - 2)])
            for mode in STASHED:
                profiles[str(layer), tp, mode] = LayerProfile(
                    forward_s=Bounded.exact(forward),
                    backward_input_s=Bounded.exact(backward / 2),
                    backward_weight_s=Bounded.exact(backward / 2),
                    recompute_s=Bounded.exact(RECOMPUTED[mode] * forward),
                    parameter_bytes={"bfloat16": float(instance.parameter_bytes[index, layer])},
                    stashed_bytes=STASHED[mode] * activations,
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


def growth_problem(devices: int, layers: int, tp_degrees: tuple[int, ...]) -> PlacementProblem:
    """A chain of blocks of 0.9 billion parameters between an embedding and a head, on nodes of eight 80 GB devices."""
    seconds = {"embedding": 1e-4, "block": 2e-2, "head": 1e-2}
    profiles = {}
    for tp in tp_degrees:
        for key, forward_s in seconds.items():
            forward = forward_s * (1 + 0.06 * (tp - 1)) / tp
            for mode in STASHED:
                profiles[key, tp, mode] = LayerProfile(
                    forward_s=Bounded.exact(forward),
                    backward_input_s=Bounded.exact(forward),
                    backward_weight_s=Bounded.exact(forward),
                    recompute_s=Bounded.exact(RECOMPUTED[mode] * forward),
                    parameter_bytes={"bfloat16": 1.8e9 / tp},
                    stashed_bytes=STASHED[mode] * 1.2e9 / tp,
                    peak_working_bytes=0.6e9 / tp,
                    outputs=(BoundaryTensor(50e6),),
                    is_tensor_parallel=tp > 1,
                )
    links = (InterconnectLevel(8, 300e9), InterconnectLevel(-(-devices // 8), 25e9))
    return PlacementProblem(
        graph=PlacementGraph.chain(("embedding", *["block"] * (layers - 2), "head")),
        profiles=profiles,
        cluster=Cluster(preset("a100-80gb").accelerator, devices, links),
        micro_batches=2 * devices,
        recipe=precision_recipe("bf16-adam"),
    )


def growth_row(devices: int, layers: int, tp_degrees: tuple[int, ...]) -> str:
    """Place one problem to a gap of 1 %: processor seconds, peak memory and the answer in words."""
    problem = growth_problem(devices, layers, tp_degrees)
    start = time.process_time()
    result = find_placement(problem, top=1, gap=0.01)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answer = "nothing fits"
    if result.best is not None:
        plan = result.best.parallelism
        answer = f"dp {plan.dp} tp {plan.tp} pp {plan.pp} {plan.schedule}, ZeRO-{plan.zero}, gap {result.gap:.2%}"
    return f"{devices:>8,}{layers:>8,}  {tp_degrees!s:<14}{seconds:>8.2f} s{peak:>8.0f} MiB  {answer}"


def time_growth() -> None:
    """Print a row for each number of devices, of layers, and each largest tp."""
    rows = [(devices, 98, TP_DEGREES) for devices in (64, 256, 1024, 4096, 16_384, 65_536, 131_072)]
    rows += [(1024, layers, TP_DEGREES) for layers in (12, 26, 50, 200, 400, 1000)]
    rows += [(1024, 98, TP_DEGREES[:count]) for count in (1, 2, 3)]
    print(f"{'devices':>8}{'layers':>8}  {'tp':<14}{'seconds':>10}{'memory':>12}  plan")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for row in rows:
            print(pool.submit(growth_row, *row).result(), flush=True)


def model_problem(name: str, cluster: Cluster, batch: int, size: int, options: ProfileOptions) -> PlacementProblem:
    """A built-in model at one microbatch size, sliced, scheduled and profiled."""
    graph = phaze.import_graph(name).with_micro_batch(size)
    profiles = {}
    for tp in TP_DEGREES:
        axis = Axis(cluster, tp)
        whole = [unsharded(ShardingProblem(graph=graph, layer=layer, axis=axis)) for layer in graph.layers]
        try:
            layers = shard_model(graph, axis).layers if tp > 1 else whole
        except ShardError:  # tp does not divide its heads
            continue
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
