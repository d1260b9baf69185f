"""Reads placement problems in the JSON form of the published instances, which is the input of the paper's own program.

An instance has `nodes` and `edges` for every tensor-parallel width, `maxDevices`, `maxMemoryPerDevice`, `bandwidth`,
`mbsInBatch` (microbatches of one batch), `activationRecomputation` and `optimizerAlgorithm` (SGD or Adam).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phaze.errors import FormatError, GraphError, PlacementError
from phaze.place.paper.paper_problem import PaperInstance

__all__ = ["read_placement_instance"]

_NODE_FIELDS = ("optimalLatencyFw", "optimalLatencyBw", "parameterSize", "activationSize", "isTensorParallelized")


def read_placement_instance(document: Mapping[str, Any]) -> PaperInstance:
    """The instance in the input format of the paper's program (one accelerator).

    Raises:
        FormatError: a field is missing or of another form.
        PlacementError: a value makes no sense.
        GraphError: the layers are no chain.
    """
    try:
        return _read(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"not an instance of the paper's placement program: {error!r}.") from error


def _read(document: Mapping[str, Any]) -> PaperInstance:
    nodes = {int(width): {node["id"]: node for node in rows} for width, rows in document["nodes"].items()}
    edges = {
        int(width): {(edge["sourceId"], edge["destId"]): float(edge["communicationCost"]) for edge in rows}
        for width, rows in document["edges"].items()
    }
    widths = tuple(sorted(nodes))
    if not widths:
        raise PlacementError("the instance has no tensor widths; expected at least one.")
    first = widths[0]
    if set(edges) != set(widths) or any(
        set(nodes[width]) != set(nodes[first]) or set(edges[width]) != set(edges[first]) for width in widths
    ):
        raise GraphError("layers or edges differ between tensor widths; expected the same graph for every width.")
    if any(len(rows) != len(nodes[int(width)]) for width, rows in document["nodes"].items()):
        raise GraphError("two layers share an id; expected distinct ids.")
    order = _topological_order(list(nodes[first]), list(edges[first]))
    position = {layer: index for index, layer in enumerate(order)}
    pairs = tuple(edges[first])
    forward, backward, parameters, activations, flags = (
        np.array([[nodes[width][layer][field] for layer in order] for width in widths]) for field in _NODE_FIELDS
    )
    if document["optimizerAlgorithm"] not in ("SGD", "Adam"):
        raise PlacementError(f"optimizerAlgorithm is {document['optimizerAlgorithm']!r}; expected SGD or Adam.")
    if 1 in widths and flags[widths.index(1)].any():
        raise PlacementError("a layer is tensor-parallel at width 1; expected slices only at larger widths.")
    return PaperInstance(
        layer_ids=tuple(order),
        tp_degrees=widths,
        forward_s=forward[:, None, :].astype(float),
        backward_s=backward[:, None, :].astype(float),
        parameter_bytes=parameters.astype(float),
        activation_bytes=activations.astype(float),
        is_tensor_parallel=flags.astype(bool),
        edges=tuple((position[source], position[target]) for source, target in pairs),
        edge_bytes=np.array([[edges[width][pair] for pair in pairs] for width in widths], dtype=float),
        memory_bytes=np.array([document["maxMemoryPerDevice"]], dtype=float),
        bandwidth_bytes_per_s=float(document["bandwidth"]),
        device_count=int(document["maxDevices"]),
        micro_batches=int(document["mbsInBatch"]),
        recompute=(bool(document["activationRecomputation"]),),
        uses_adam=document["optimizerAlgorithm"] == "Adam",
    )


def _topological_order(layers: Sequence[Any], edges: Sequence[tuple[Any, Any]]) -> list[Any]:
    waiting = dict.fromkeys(layers, 0)
    for source, target in edges:
        if source not in waiting or target not in waiting:
            raise GraphError(f"edge {source!r} -> {target!r} names a layer that does not exist.")
        waiting[target] += 1
    ready = [layer for layer in layers if not waiting[layer]]
    order = []
    while ready:
        layer = ready.pop()
        order.append(layer)
        for source, target in edges:
            if source == layer:
                waiting[target] -= 1
                if not waiting[target]:
                    ready.append(target)
    if len(order) < len(layers):
        raise GraphError("the layer graph has a cycle; expected edges that point forward only.")
    return order
