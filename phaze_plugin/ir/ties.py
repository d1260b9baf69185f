"""Gradients of tied parameters, one for each layer that uses them.

A framework sums all contributions to a parameter's gradient. Between layers that sum is a reduction across devices,
which placement prices; here it is taken apart into one gradient a layer, and sums inside a layer are kept.
"""

from __future__ import annotations

from phaze.ir.builder import GraphBuilder
from phaze.ir.graph import Graph
from phaze.ir.op import Op, OpKind, Phase
from phaze.ir.shape_rules import elementwise_rule

__all__ = ["split_tied_gradients"]


def split_tied_gradients(graph: Graph) -> Graph:
    """The graph with one gradient per layer for each parameter that several layers use; itself where none is tied."""
    tied = graph.layer_graph.tied_parameters
    if not any(parameter in tied for parameter, _ in graph.gradients):
        return graph
    builder = GraphBuilder.from_graph(graph)
    builder.gradients.clear()
    dropped: set[str] = set()
    for parameter, gradient in graph.gradients:
        leaves = _leaves(graph, gradient, dropped) if parameter in tied else [gradient]
        by_layer: dict[int, list[str]] = {}
        for leaf in leaves:
            by_layer.setdefault(_layer(graph, leaf), []).append(leaf)
        for layer in sorted(by_layer):
            builder.gradients.append((parameter, _sum(graph, builder, parameter, by_layer[layer])))
    builder.ops = [op for op in builder.ops if op.id not in dropped]
    for op_id in dropped:
        for tensor_id in graph.op(op_id).outputs:
            del builder.tensors[tensor_id]
    return builder.build(graph.outputs, graph.notes)


def _leaves(graph: Graph, gradient: str, dropped: set[str]) -> list[str]:
    """The terms of a sum that nothing else reads, in order; the sums themselves go to `dropped`."""
    op = graph.producer(gradient)
    if op is None or not _is_sum(op) or _is_read(graph, gradient):
        return [gradient]
    dropped.add(op.id)
    return [leaf for tensor_id in op.inputs for leaf in _leaves(graph, tensor_id, dropped)]


def _is_sum(op: Op) -> bool:
    return op.kind is OpKind.ELEMENTWISE and op.function == "add" and op.phase is Phase.BACKWARD and not op.gradient_of


def _is_read(graph: Graph, tensor_id: str) -> bool:
    return any(tensor_id in op.inputs and not (_is_sum(op) and len(op.inputs) == 2) for op in graph.ops)


def _layer(graph: Graph, tensor_id: str) -> int:
    op = graph.producer(tensor_id)
    return graph.layer_graph.layer_of[op.id] if op is not None else 0


def _sum(graph: Graph, builder: GraphBuilder, parameter: str, terms: list[str]) -> str:
    total = terms[0]
    for term in terms[1:]:
        shape = graph.tensors[term].shape
        op = graph.producer(term)
        (total,) = builder.add(
            f"{parameter}.gradient_sum",
            OpKind.ELEMENTWISE,
            "add",
            elementwise_rule(shape, shape, shape),
            (total, term),
            dtypes=(graph.tensors[term].dtype,),
            phase=Phase.BACKWARD,
            gradient_of=op.gradient_of if op is not None else "",
        )
    return total
