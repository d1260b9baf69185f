"""The same graph at another microbatch size: every shape follows from the rules, nothing is captured again."""

from __future__ import annotations

from dataclasses import replace

from phaze.errors import GraphError
from phaze.ir.graph import Graph
from phaze.ir.op import Op

__all__ = ["rescale"]


def rescale(graph: Graph, size: int) -> Graph:
    """Scale every batch factor to a microbatch of `size`; raises GraphError where the graph has none."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise GraphError(f"a microbatch of {size!r} is not possible; expected an integer of at least 1.")
    if size == graph.micro_batch_size:
        return graph
    rules = {id(op.rule): op.rule for op in graph.ops}
    if not any(factor.is_batch for rule in rules.values() for factor in rule.factors):
        raise GraphError(
            f"graph {graph.name!r} marks no batch factor: it is fixed to the microbatch it was captured with, "
            f"{graph.micro_batch_size}. Capture it again with inputs of batch {size}."
        )
    scaled = {key: rule.with_batch_scaled(graph.micro_batch_size, size) for key, rule in rules.items()}
    ops = tuple(replace(op, rule=scaled[id(op.rule)]) for op in graph.ops)
    tensors = {
        tensor_id: replace(graph.tensors[tensor_id], shape=shape) for tensor_id, shape in _shapes(graph, ops).items()
    }
    return replace(graph, tensors={**graph.tensors, **tensors}, ops=ops, micro_batch_size=size)


def _shapes(graph: Graph, ops: tuple[Op, ...]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that some rule describes: results first, then arguments by their readers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for op in ops:
        for tensor_id, dims in zip(op.outputs, op.rule.results, strict=True):
            shapes[tensor_id] = op.rule.shape(dims)
    for op in ops:
        for tensor_id, dims in zip(op.inputs, op.rule.operands, strict=True):
            shapes.setdefault(tensor_id, op.rule.shape(dims))
    return shapes
