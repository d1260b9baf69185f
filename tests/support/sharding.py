"""What tests of sharding share."""

from phaze.hardware import parse_cluster
from phaze.ir import Graph, Layer, Phase
from phaze.shard import Axis, LayerTask

A100S = parse_cluster("a100-80gb:8")


def whole_layer(graph: Graph) -> Layer:
    """All of a graph as one layer."""
    return Layer(
        index=0,
        name=graph.name,
        forward=graph.ops_of(Phase.FORWARD),
        backward=graph.ops_of(Phase.BACKWARD),
        parameters=tuple(tensor.id for tensor in graph.parameters),
        inputs=(),
        outputs=graph.outputs,
        key="",
    )


def whole_task(graph: Graph, width: int, **options: object) -> LayerTask:
    """The task to shard all of a graph at once on A100s."""
    return LayerTask(graph=graph, layer=whole_layer(graph), axis=Axis(A100S, width), **options)  # type: ignore[arg-type]
