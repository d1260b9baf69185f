"""What a layer keeps between forward and backward, and which ops it computes again, for each recompute mode.

A layer that computes nothing again keeps its stash: the forward tensors that its backward ops read.

none       the whole stash
selective  the stash, less what lies inside attention: results of products of two activations, and of the
           softmax and dropout between them, that nothing else needs (Korthikanti et al., arXiv:2205.05198, section 5)
products   what enters the layer, and the results of attention, of reduce-scatters and of every other product with a
           parameter, the first one included, as far as backward or what runs again reads them (torchtitan's selective
           checkpointing by op, torchtitan/distributed/activation_checkpoint.py)
full       only what enters the layer; the whole forward runs again, or (trimmed) what leads to a tensor that backward
           reads: compilers drop the rest, such as a layer's last product and the sum of its parts
"""

from __future__ import annotations

from enum import StrEnum

from phaze.ir.graph import Graph
from phaze.ir.layers import Layer
from phaze.ir.op import Op, OpKind, Phase
from phaze.ir.tensor import Role

__all__ = [
    "SEARCHED_MODES",
    "RecomputeMode",
    "kept_tensors",
    "recomputed_ops",
    "stashed_bytes",
    "stashed_tensors",
]


class RecomputeMode(StrEnum):
    """How much of a layer's forward is computed again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    PRODUCTS = "products"
    FULL = "full"


SEARCHED_MODES = (RecomputeMode.NONE, RecomputeMode.SELECTIVE, RecomputeMode.FULL)
"""What is searched unless a strategy says otherwise; few targets run the others."""


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


def kept_tensors(graph: Graph, layer: Layer, mode: RecomputeMode) -> tuple[str, ...]:
    """Ids of the tensors that a layer keeps between forward and backward."""
    stash = stashed_tensors(graph, layer)
    if mode is RecomputeMode.NONE:
        return stash
    if mode is RecomputeMode.FULL:
        return tuple(_entering(graph, layer)) if stash else ()
    return _kept_and_rerun(graph, layer, mode)[0]


def recomputed_ops(graph: Graph, layer: Layer, mode: RecomputeMode, *, is_trimmed: bool = False) -> tuple[Op, ...]:
    """The forward ops that run again in backward, in order."""
    if mode is RecomputeMode.NONE:
        return ()
    if mode is RecomputeMode.FULL and not is_trimmed:
        return layer.forward
    return _kept_and_rerun(graph, layer, mode)[1]


def _entering(graph: Graph, layer: Layer) -> dict[str, None]:
    """Activations and batch tensors that a layer reads and does not make."""
    made = {tensor_id for op in layer.forward for tensor_id in op.outputs}
    return dict.fromkeys(
        graph.storage(tensor_id)
        for op in layer.forward
        for tensor_id in op.inputs
        if tensor_id not in made and graph.tensors[graph.storage(tensor_id)].role in (None, Role.BATCH)
    )


def _kept_and_rerun(graph: Graph, layer: Layer, mode: RecomputeMode) -> tuple[tuple[str, ...], tuple[Op, ...]]:
    """What a layer keeps of what its mode may keep, and the ops that make the rest of what backward asks for again."""
    may_keep = {*_entering(graph, layer)}
    if mode is RecomputeMode.PRODUCTS:
        may_keep |= _saved_results(graph, layer)
    elif mode is RecomputeMode.SELECTIVE:
        may_keep |= {graph.storage(tensor_id) for op in layer.forward for tensor_id in op.outputs}
        may_keep -= _inside_attention(graph, layer)
    stash = stashed_tensors(graph, layer)
    kept = dict.fromkeys(tensor_id for tensor_id in stash if tensor_id in may_keep)
    wanted = set(stash) - may_keep
    rerun: list[Op] = []
    for op in reversed(layer.forward):
        if wanted.isdisjoint(op.outputs):
            continue
        rerun.append(op)
        for tensor_id in op.inputs:
            if (storage := graph.storage(tensor_id)) in may_keep:
                kept[storage] = None
            else:
                wanted.add(tensor_id)
    return tuple(kept), tuple(reversed(rerun))


def _saved_results(graph: Graph, layer: Layer) -> set[str]:
    """Results of attention, of reduce-scatters and of every other product with a parameter."""
    inside = _inside_attention(graph, layer)
    products = [op for op in layer.forward if op.kind is OpKind.CONTRACTION]
    saved = [op for op in products if not _is_activation_product(graph, op)][::2]
    saved += [op for op in products if _is_activation_product(graph, op) and inside.isdisjoint(op.outputs)]
    saved += [op for op in layer.forward if op.kind is OpKind.ATTENTION]
    saved += [op for op in layer.forward if op.kind is OpKind.COLLECTIVE and op.function == "reduce_scatter"]
    return {graph.storage(tensor_id) for op in saved for tensor_id in op.outputs}


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
        if op.id not in products and op.kind in _BETWEEN_PRODUCTS and before & (products | after):
            after.add(op.id)
    ahead: set[str] = set()
    for op in reversed(layer.forward):
        if op.id in products or op.id in ahead:
            ahead |= {producer[tensor_id] for tensor_id in op.inputs if tensor_id in producer} & after
    return after & ahead


_BETWEEN_PRODUCTS = (OpKind.SOFTMAX, OpKind.DROPOUT, OpKind.ELEMENTWISE, OpKind.VIEW)
"""Kinds of ops that may stand between the two products of an attention: masks, scaling, softmax and dropout."""
