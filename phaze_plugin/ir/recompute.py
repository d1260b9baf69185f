"""What a layer keeps for backward when it computes parts of its forward again, and which ops it runs again.

none       everything that backward reads
selective  what backward reads, less what lies inside attention: results of products of two activations, and of the
           softmax and dropout between them, that nothing else needs (Korthikanti et al., arXiv:2205.05198, section 5)
full       only what enters the layer; the whole forward runs again
"""

from __future__ import annotations

from enum import StrEnum

from phaze.ir.graph import Graph, Role
from phaze.ir.layers import Layer
from phaze.ir.op import Op, OpKind
from phaze.ir.stash import stashed_tensors

__all__ = ["RecomputeMode", "kept_bytes", "kept_tensors", "recomputed_ops"]


class RecomputeMode(StrEnum):
    """How much of a layer's forward is computed again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


def kept_tensors(graph: Graph, layer: Layer, mode: RecomputeMode) -> tuple[str, ...]:
    """Ids of the tensors that a layer keeps between forward and backward."""
    kept = stashed_tensors(graph, layer)
    if mode is RecomputeMode.NONE:
        return kept
    if mode is RecomputeMode.SELECTIVE:
        dropped = _inside_attention(graph, layer)
        return tuple(tensor_id for tensor_id in kept if tensor_id not in dropped)
    made = {tensor_id for op in layer.forward for tensor_id in op.outputs}
    entering = dict.fromkeys(
        graph.storage(tensor_id)
        for op in layer.forward
        for tensor_id in op.inputs
        if tensor_id not in made and graph.tensors[graph.storage(tensor_id)].role in (None, Role.BATCH)
    )
    return tuple(entering) if kept else ()


def kept_bytes(graph: Graph, layer: Layer, mode: RecomputeMode) -> int:
    """Bytes of what a layer keeps between forward and backward."""
    return sum(graph.tensors[tensor_id].size_bytes for tensor_id in kept_tensors(graph, layer, mode))


def recomputed_ops(graph: Graph, layer: Layer, mode: RecomputeMode) -> tuple[Op, ...]:
    """The forward ops that run again in backward, in order."""
    if mode is RecomputeMode.NONE:
        return ()
    if mode is RecomputeMode.FULL:
        return layer.forward
    dropped = _inside_attention(graph, layer)
    return tuple(op for op in layer.forward if dropped.intersection(op.outputs))


def _inside_attention(graph: Graph, layer: Layer) -> frozenset[str]:
    """Tensors between products of two activations that no op outside of them reads."""
    inside = {op.id for op in layer.forward if _is_activation_product(graph, op)}
    inside |= _between(layer, inside)
    readers: dict[str, list[str]] = {}
    for op in layer.forward:
        for tensor_id in op.inputs:
            readers.setdefault(tensor_id, []).append(op.id)
    leaving = frozenset(layer.outputs)
    return frozenset(
        tensor_id
        for op in layer.forward
        if op.id in inside
        for tensor_id in op.outputs
        if tensor_id not in leaving and inside.issuperset(readers.get(tensor_id, ()))
    )


def _is_activation_product(graph: Graph, op: Op) -> bool:
    if op.kind is not OpKind.CONTRACTION:
        return False
    return all(graph.tensors[graph.storage(tensor_id)].role is not Role.PARAMETER for tensor_id in op.inputs)


def _between(layer: Layer, products: set[str]) -> set[str]:
    """Ops that depend on one product and that another depends on, without a product on the way."""
    producer = {tensor_id: op.id for op in layer.forward for tensor_id in op.outputs}
    after: set[str] = set()
    for op in layer.forward:
        before = {producer[tensor_id] for tensor_id in op.inputs if tensor_id in producer}
        if op.id not in products and op.kind in _SOFT and before & (products | after):
            after.add(op.id)
    ahead: set[str] = set()
    for op in reversed(layer.forward):
        if op.id in products or op.id in ahead:
            ahead |= {producer[tensor_id] for tensor_id in op.inputs if tensor_id in producer} & after
    return after & ahead


_SOFT = (OpKind.SOFTMAX, OpKind.DROPOUT, OpKind.ELEMENTWISE, OpKind.VIEW)
