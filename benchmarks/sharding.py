"""How long it takes to shard a model, and what its best layouts cost.

    python benchmarks/sharding.py [--model gpt3-175b] [--cluster a100-80gb:8] [--widths 2,4,8]

A row per tp and per choice of sequence parallelism: microseconds of work and of collectives of one block, seconds
for the whole model, the collectives of the block's slice. The last lines add up the seconds of all rows, and give those
of one block at all widths.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import phaze
from phaze.hardware import parse_cluster
from phaze.ir import OpKind
from phaze.shard import Axis, SequenceParallel, ShardingProblem, ShardOptions, shard_layer, shard_model, slice_layer


def main() -> None:
    """Shard one model at several widths and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt3-175b")
    parser.add_argument("--cluster", default="a100-80gb:8")
    parser.add_argument("--widths", default="2,4,8")
    arguments = parser.parse_args()
    graph, cluster = phaze.import_graph(arguments.model), parse_cluster(arguments.cluster)
    block = max(graph.layers, key=lambda layer: sum(other.key == layer.key for other in graph.layers)).index
    shard_model(phaze.import_graph("gpt2"), Axis(cluster, 2))
    total = 0.0
    name = graph.layers[block].name
    print(f"{'tp':>5} {'sequence':<9}{'work us':>10}{'moves us':>10}{'model s':>9}  collectives of {name}")
    for tp in (int(word) for word in arguments.widths.split(",")):
        for mode in SequenceParallel:
            start = time.perf_counter()
            model = shard_model(graph, Axis(cluster, tp), ShardOptions(sequence_parallel=mode))
            seconds = time.perf_counter() - start
            total += seconds
            layer = model.layers[block]
            names = Counter(op.function for op in slice_layer(layer).ops if op.kind is OpKind.COLLECTIVE)
            told = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
            print(f"{tp:>5} {mode:<9}{layer.compute_s * 1e6:>10.1f}{layer.move_s * 1e6:>10.1f}{seconds:>9.2f}  {told}")
    print(f"all rows {total:.2f} s, {len(graph.distinct_layers)} distinct layers each")
    widths = [int(word) for word in arguments.widths.split(",")]
    start = time.perf_counter()
    for tp in widths:
        shard_layer(ShardingProblem(graph=graph, layer=graph.layers[block], axis=Axis(cluster, tp)))
    print(f"{name} at widths {arguments.widths}: {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
