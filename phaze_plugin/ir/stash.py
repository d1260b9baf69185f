"""What a layer keeps between forward and backward: the forward tensors that its backward ops read."""

from __future__ import annotations

from phaze.ir.graph import Graph, Role
from phaze.ir.layers import Layer
from phaze.ir.op import Phase

__all__ = ["stashed_bytes", "stashed_tensors"]


def stashed_tensors(graph: Graph, layer: Layer) -> tuple[str, ...]:
    """Ids of the tensors to keep, views counted as the tensor whose memory they are.

    Parameters and constants are not among them: they are there anyway.
    """
    kept: dict[str, None] = {}
    for op in layer.backward:
        for tensor_id in op.inputs:
            storage = graph.storage(tensor_id)
            producer = graph.producer(storage)
            is_forward = producer is not None and producer.phase is Phase.FORWARD
            if is_forward or graph.tensors[storage].role is Role.BATCH:
                kept[storage] = None
    return tuple(kept)


def stashed_bytes(graph: Graph, layer: Layer) -> int:
    """Bytes of what a layer keeps."""
    return sum(graph.tensors[tensor_id].size_bytes for tensor_id in stashed_tensors(graph, layer))
