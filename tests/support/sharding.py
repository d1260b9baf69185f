"""What tests of sharding share."""

from phaze.hardware import parse_cluster
from phaze.ir import Graph
from phaze.ir.layers import single_layer
from phaze.shard import Axis, ShardingProblem

A100S = parse_cluster("a100-80gb:8")


def whole_problem(graph: Graph, tp: int, **options: object) -> ShardingProblem:
    """The problem of sharding all of a graph at once on A100s."""
    return ShardingProblem(graph=graph, layer=single_layer(graph), axis=Axis(A100S, tp), **options)  # type: ignore[arg-type]
