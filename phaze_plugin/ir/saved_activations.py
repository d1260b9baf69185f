"""A derived backward reads what the software of a captured model keeps, where the capture says so.

JAX's derivative of a function keeps what its rule says: that of `gelu` six tensors, where backward by rule reads one. A
scan over layers stacks exactly these, and no compiler drops any. `Graph.saved` lists them. Behind backward by rule

1. each saved tensor that backward does not read yet is read by the vector op of backward that is nearest to it: the
   gradient of the op that made it, of one beside it, or of one further off (`_Readers.nearest`);
2. vector ops of backward no longer read what is not saved of the same modules, where they can do without (`_reading`).

Products read what they need in any case, and what the captured forward no longer makes (scores of an attention that
runs as one kernel) is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phaze.errors import GraphError
from phaze.ir.graph import Graph
from phaze.ir.graph_checks import check_rule
from phaze.ir.op import Op, OpKind, Phase
from phaze.ir.rule import Dim, Dims, Rule
from phaze.ir.tensor import Role

__all__ = ["with_saved_activations"]

MOST_STEPS = 6
"""How many forward ops away from a saved tensor its reader in backward may be: the parts of one function and of a norm
are nearer, and what lies behind a product belongs to another function."""


def with_saved_activations(graph: Graph) -> Graph:
    """The graph whose backward reads what its software saves; itself where nothing is known of that."""
    saved = {graph.storage(name): None for name in graph.saved if graph.producer(name) is not None}
    if not saved:
        return graph
    modules = {producer.module for name in saved if (producer := graph.producer(name)) is not None}
    read = {graph.storage(name) for op in graph.ops_of(Phase.BACKWARD) for name in op.inputs}
    readers = _Readers(graph)
    added: dict[str, list[str]] = {}
    for name in saved:
        if name not in read and (reader := readers.nearest(name)) is not None:
            added.setdefault(reader.id, []).append(name)

    def is_dropped(name: str) -> bool:
        producer = graph.producer(graph.storage(name))
        is_inside = producer is not None and producer.phase is Phase.FORWARD and producer.module in modules
        return is_inside and graph.storage(name) not in saved

    ops = [
        _reading(graph, op, added.get(op.id, ()), {name for name in op.inputs if is_dropped(name)})
        if op.phase is Phase.BACKWARD and op.kind is OpKind.ELEMENTWISE
        else op
        for op in graph.ops
    ]
    return replace(graph, ops=tuple(ops))


class _Readers:
    """The vector ops of backward, by the forward op whose gradient they make."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.by_forward: dict[str, list[Op]] = {}
        for op in graph.ops_of(Phase.BACKWARD):
            if op.kind is OpKind.ELEMENTWISE and op.gradient_of:
                self.by_forward.setdefault(op.gradient_of, []).append(op)
        self.forward_readers: dict[str, list[Op]] = {}
        for op in graph.ops_of(Phase.FORWARD):
            for name in dict.fromkeys(op.inputs):
                self.forward_readers.setdefault(name, []).append(op)

    def nearest(self, name: str) -> Op | None:
        """The first vector op of backward, by distance in the forward, that has a place for a tensor."""
        producer = self.graph.producer(name)
        ring, seen = [] if producer is None else [producer], set[str]()
        for _ in range(MOST_STEPS):
            for op in ring:
                for reader in self.by_forward.get(op.id, ()):
                    if _dims_in(reader, self.graph.tensors[name].shape) is not None:
                        return reader
            seen |= {op.id for op in ring}
            around = {op.id: op for inner in ring for op in self._neighbours(inner) if op.module == inner.module}
            ring = [op for op_id, op in around.items() if op_id not in seen]
        return None

    def _neighbours(self, op: Op) -> Iterator[Op]:
        """The ops beside a forward op: those that make what it reads, read the same, and read what it makes."""
        for name in op.inputs:
            producer = self.graph.producer(name)
            if producer is not None and producer.kind is not OpKind.CONTRACTION:
                yield producer
            if self.graph.tensors[name].role is not Role.PARAMETER:
                yield from self.forward_readers.get(name, ())
        for name in op.outputs:
            yield from self.forward_readers.get(name, ())


def _dims_in(op: Op, shape: Sequence[int]) -> Dims | None:
    """The dimensions of a tensor of this shape in the largest tensor of an op; those of size 1 are nobody's."""
    for dims in sorted(op.rule.tensors(), key=len, reverse=True):
        chosen: list[Dim] = []
        position = 0
        for size in shape:
            if size == 1:
                chosen.append(Dim(()))
                continue
            while position < len(dims) and op.rule.shape((dims[position],)) != (size,):
                position += 1
            if position == len(dims):
                break
            chosen.append(dims[position])
            position += 1
        else:
            return tuple(chosen)
    return None


def _reading(graph: Graph, op: Op, added: Sequence[str], dropped: set[str]) -> Op:
    """A vector op of backward that also reads some tensors, and others no more where it can do without."""
    if not added and not dropped:
        return op
    reads = list(zip(op.inputs, op.rule.operands, strict=True))
    for name in added:
        dims = _dims_in(op, graph.tensors[name].shape)
        assert dims is not None, "a reader is chosen among ops that have a place for the tensor"
        reads.append((name, dims))
    for kept in ([read for read in reads if read[0] not in dropped], reads):
        changed = _with_reads(op, kept)
        if changed is not None:
            return changed
    return op


def _with_reads(op: Op, reads: Sequence[tuple[str, Dims]]) -> Op | None:
    """The op with these operands; None where its rule does not hold with them."""
    operands = tuple(dims for _, dims in reads)
    names = {name for dims in (*operands, *op.rule.results) for dim in dims for name in dim.factors}
    factors = tuple(factor for factor in op.rule.factors if factor.name in names)
    function = op.function if len(reads) == len(op.inputs) else "fused_backward"
    try:
        changed = replace(
            op,
            function=function,
            rule=Rule(operands, op.rule.results, factors),
            inputs=tuple(name for name, _ in reads),
        )
        check_rule(changed)
    except (GraphError, ValueError):
        return None
    return changed if reads else None
