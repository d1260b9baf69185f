"""How long it takes to shard a model with and without a solver, and what its best layouts cost.

    python benchmarks/sharding.py [--model gpt3-175b] [--cluster a100-80gb:8] [--widths 2,4,8] [--micro-batch-size 1,2]

A row per tp and per choice of sequence parallelism: microseconds of work and of collectives of one block, processor
milliseconds for the whole model by elimination and by the integer program on HiGHS, their ratio, and the collectives of
the block's slice. Both must find the same optimum. The last lines add up all rows, and give the processor seconds of
sharding, pricing and scheduling all layers at all of the widths and microbatch sizes, with and without sequence
parallelism, as planning does it.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import replace

import phaze
from phaze.hardware import Cluster, parse_cluster
from phaze.ir import Graph, OpKind
from phaze.profile.layer_passes import ProfileOptions
from phaze.profile.model_profiles import profile_model
from phaze.shard import (
    Axis,
    SequenceParallel,
    ShardedModel,
    ShardingTables,
    ShardOptions,
    shard_model,
    shard_variants,
    slice_layer,
)
from phaze.solvers import AUTOMATIC_SOLVERS, SolverChain

HIGHS = SolverChain(AUTOMATIC_SOLVERS.solvers[:1])
"""A named solver: sharding then asks it instead of eliminating."""


def main() -> None:
    """Shard one model at several widths and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt3-175b")
    parser.add_argument("--cluster", default="a100-80gb:8")
    parser.add_argument("--widths", default="2,4,8")
    parser.add_argument("--micro-batch-size", default="1,2,4,8")
    arguments = parser.parse_args()
    graph, cluster = phaze.import_graph(arguments.model), parse_cluster(arguments.cluster)
    widths = [int(word) for word in arguments.widths.split(",")]
    block = max(graph.layers, key=lambda layer: sum(other.key == layer.key for other in graph.layers)).index
    for solver in (AUTOMATIC_SOLVERS, HIGHS):  # what is loaded on first use is not measured
        shard_model(phaze.import_graph("gpt2"), Axis(cluster, 2), ShardOptions(solver=solver))
    columns = f"{'tp':>4} {'sequence':<9}{'work us':>9}{'moves us':>10}{'ms':>7}{'program':>9}{'ratio':>7}"
    print(f"{columns}  collectives of a block")
    totals = [0.0, 0.0]
    for tp in widths:
        for mode in SequenceParallel:
            options = ShardOptions(sequence_parallel=mode)
            exact, exact_s = timed(graph, Axis(cluster, tp), options)
            program, program_s = timed(graph, Axis(cluster, tp), replace(options, solver=HIGHS))
            totals = [totals[0] + exact_s, totals[1] + program_s]
            assert abs(program.seconds - exact.seconds) <= 1e-4 * exact.seconds, "the program found another optimum"
            layer = exact.layers[block]
            names = Counter(op.function for op in slice_layer(layer).ops if op.kind is OpKind.COLLECTIVE)
            told = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
            print(
                f"{tp:>4} {mode:<9}{layer.compute_s * 1e6:>9.1f}{layer.move_s * 1e6:>10.1f}{exact_s * 1e3:>7.0f}"
                f"{program_s * 1e3:>9.0f}{program_s / exact_s:>7.1f}  {told}"
            )
    ratio = totals[1] / totals[0]
    print(f"all rows {totals[0]:.2f} s, by the integer program {totals[1]:.2f} s: {ratio:.1f} times as long")
    as_planned(graph, cluster, widths, [int(word) for word in arguments.micro_batch_size.split(",")])


def timed(graph: Graph, axis: Axis, options: ShardOptions) -> tuple[ShardedModel, float]:
    """The sharded model, and the processor seconds that it took."""
    start = time.process_time()
    return shard_model(graph, axis, options), time.process_time() - start


def as_planned(graph: Graph, cluster: Cluster, widths: list[int], sizes: list[int]) -> None:
    """Shard and profile all widths and microbatch sizes with what they share worked out once, and print the seconds."""
    tables, options, models = ShardingTables(), ProfileOptions(), list[ShardedModel]()
    start = time.process_time()
    for size in sizes:
        scaled = graph.with_micro_batch(size)
        for tp in widths:
            models += shard_variants(scaled, Axis(cluster, tp), tables=tables).values()
    middle = time.process_time()
    for model in models:
        profile_model(model, options)
    end = time.process_time()
    told = f"sharded in {middle - start:.2f} s, profiled in {end - middle:.2f} s"
    print(f"{len(models)} slicings at microbatches {sizes}: {told}")


if __name__ == "__main__":
    main()
