"""What tests of sharding share."""

from phaze.hardware import parse_cluster
from phaze.ir import Graph
from phaze.ir.layers import single_layer
from phaze.shard import Axis, LayerTask

A100S = parse_cluster("a100-80gb:8")


def whole_task(graph: Graph, width: int, **options: object) -> LayerTask:
    """The task to shard all of a graph at once on A100s."""
    return LayerTask(graph=graph, layer=single_layer(graph), axis=Axis(A100S, width), **options)  # type: ignore[arg-type]
