"""What every function means, in numpy: the reference that rules, backward and sharding are proven against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from oracles.numpy_reference import indexing, moving, normalizing, products
from oracles.numpy_reference.axes import Array
from oracles.numpy_reference.elementwise import ELEMENTWISE, dropout, dropout_backward, linear_scan_backward
from phaze.errors import GraphError
from phaze.ir.graph import Graph
from phaze.ir.op import Op

__all__ = ["evaluate_graph", "evaluate_op"]

_FUNCTIONS: dict[str, Callable[..., tuple[Array, ...]]] = {
    **ELEMENTWISE,
    "attention": products.attention,
    "attention_backward": products.attention_backward,
    "sink_attention": products.attention,
    "sink_attention_backward": products.attention_backward,
    "biased_softmax": normalizing.softmax,
    "combine": indexing.combine,
    "combine_rows_backward": indexing.combine_rows_backward,
    "combine_weights_backward": indexing.combine_weights_backward,
    "concatenate": moving.concatenate,
    "contiguous": moving.view,
    "convolution": products.convolution,
    "convolution_input": products.convolution_input,
    "convolution_weight": products.convolution_weight,
    "cross_entropy": normalizing.cross_entropy,
    "cross_entropy_backward": normalizing.cross_entropy_backward,
    "dispatch": indexing.dispatch,
    "dropout": dropout,
    "dropout_backward": dropout_backward,
    "einsum": products.contract,
    "embedding": indexing.embedding,
    "expand": moving.view,
    "layer_norm": normalizing.norm,
    "layer_norm_backward": normalizing.norm_backward,
    "linear_scan_backward": linear_scan_backward,
    "max": moving.reduce,
    "max_backward": moving.max_backward,
    "mean": moving.reduce,
    "pad": moving.pad,
    "reshape": moving.view,
    "rms_norm": normalizing.norm,
    "rms_norm_backward": normalizing.norm_backward,
    "scatter_add": indexing.scatter_add,
    "select": moving.select,
    "sink_softmax": normalizing.sink_softmax,
    "slice": moving.slice_part,
    "softmax": normalizing.softmax,
    "softmax_backward": normalizing.softmax_backward,
    "split": moving.split,
    "stack": moving.stack,
    "sum": moving.reduce,
    "top_k": indexing.top_k,
    "top_k_backward": indexing.top_k_backward,
    "transpose": moving.view,
    "undispatch": indexing.undispatch,
    "zeros": moving.zeros,
}


def evaluate_op(op: Op, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """The results of one op; raises GraphError where its function has no reference."""
    if op.function not in _FUNCTIONS:
        raise GraphError(f"op {op.id!r}: no reference says what {op.kind} {op.function!r} computes.")
    return _FUNCTIONS[op.function](op, *inputs)


def evaluate_graph(graph: Graph, arguments: Mapping[str, Array]) -> dict[str, Array]:
    """Every tensor of a graph, given its arguments."""
    values = dict(arguments)
    missing = [tensor.id for tensor in graph.tensors.values() if tensor.role is not None and tensor.id not in values]
    if missing:
        raise GraphError(f"no value for argument {missing[0]!r} of graph {graph.name!r}.")
    for op in graph.ops:
        results = evaluate_op(op, [values[tensor_id] for tensor_id in op.inputs])
        values.update(zip(op.outputs, results, strict=True))
    return values
