"""Choose which forward tensors backward keeps, as XLA does, with cheap vector work computed again instead of kept.

JAX's backward reads whatever its forward happened to compute. A compiler that fuses does better: an elementwise op of
the forward can as well be done again inside the backward op that reads it. XLA's instruction fusion (`IsExpensive` and
what follows it in xla/service/instruction_fusion.cc) does so

1. unless it is expensive (`EXPENSIVE`): an exponential, a quotient, a root are kept;
2. unless it would read more full tensors than the one that it makes (`_Choice.find_roots`).

What other backward ops read (products) is kept in any case. The bytes that gradients hold which XLA compiled for a CPU
are those of this choice within a tenth (`benchmarks/memory_statistics.py`).

What a loop of the forward stacks for one of the backward is kept as it is: no compiler chooses anew between two loops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from phaze.ir import Graph, Op, OpKind, Phase, Tensor

__all__ = ["minimize_saved_bytes", "saved_activations"]


def minimize_saved_bytes(graph: Graph, stacked: Collection[str] = ()) -> Graph:
    """The graph whose backward reads the fewest bytes of the forward; ops that are done again are backward ops.

    Backward goes on reading the tensors that are stacked.
    """
    choice = _Choice(graph, frozenset(stacked))
    for layer in graph.layers:
        choice.add_layer(layer.forward, layer.backward)
    return choice.graph_with_repeats()


def saved_activations(graph: Graph) -> tuple[str, ...]:
    """What the backward of a graph reads of its forward, the layer of the loss left out: it has kernels of its own."""
    layers = [layer for layer in graph.layers if not graph.outputs or graph.outputs[0] not in layer.outputs]
    made = {tensor_id for layer in layers for op in layer.forward for tensor_id in op.outputs}
    read = dict.fromkeys(graph.storage(name) for op in graph.ops_of(Phase.BACKWARD) for name in op.inputs)
    return tuple(name for name in read if name in made)


EXPENSIVE = frozenset(
    {
        *("cbrt", "cos", "divide", "erf", "exp", "expm1", "log", "log1p", "power", "remainder", "rsqrt", "sigmoid"),
        *("sin", "sqrt", "tan", "tanh", "atan2", "silu", "gelu", "softplus"),
    }
)
"""Elementwise functions that XLA does not compute again for a second reader."""


class _Choice:
    """What was chosen so far: the repeated ops by their first reader, and what readers read instead."""

    def __init__(self, graph: Graph, stacked: frozenset[str]) -> None:
        self.graph = graph
        self.stacked = stacked
        self.read_instead: dict[str, dict[str, str]] = {}
        self.repeated_ops: dict[str, list[Op]] = {}
        self.repeated_tensors: dict[str, Tensor] = {}

    def add_layer(self, forward: Iterable[Op], backward: Iterable[Op]) -> None:
        """Cut the elementwise part of a layer, and repeat what lies behind the cut."""
        cheap = {tensor_id: op for op in forward if _is_cheap(op) for tensor_id in op.outputs}
        readers: dict[str, list[Op]] = {}
        for op in backward:
            if op.phase is Phase.BACKWARD:
                for tensor_id in dict.fromkeys(op.inputs):
                    readers.setdefault(tensor_id, []).append(op)
        kept = {
            t for t, ops in readers.items() if t in self.stacked or any(op.kind is not OpKind.ELEMENTWISE for op in ops)
        }
        wanted = [tensor_id for tensor_id in readers if tensor_id in cheap and tensor_id not in kept]
        if not wanted:
            return
        chosen = set(kept)
        roots: dict[str, frozenset[str]] = {}
        for tensor_id in wanted:
            self.find_roots(tensor_id, cheap, chosen, roots)
        for tensor_id in wanted:
            if tensor_id not in chosen:
                for op in readers[tensor_id]:
                    again = self.repeat(op, tensor_id, cheap, chosen)
                    self.read_instead.setdefault(op.id, {})[tensor_id] = again

    def find_roots(
        self, tensor_id: str, cheap: dict[str, Op], kept: set[str], roots: dict[str, frozenset[str]]
    ) -> frozenset[str]:
        """The tensors that this one is computed again from; itself where it is kept instead.

        Those on the way to it that are kept are added to `kept`; `roots` has what is known already.
        """
        if tensor_id in kept or tensor_id not in cheap:
            return frozenset((tensor_id,))
        if tensor_id not in roots:
            op, size = cheap[tensor_id], self.graph.tensors[tensor_id].elements
            found = frozenset().union(*(self.find_roots(source, cheap, kept, roots) for source in op.inputs))
            as_large = {root for root in found if self.graph.tensors[root].elements >= size}
            if op.function in EXPENSIVE or sum(map(self._costs_to_keep, as_large)) > 1:
                kept.add(tensor_id)
                return frozenset((tensor_id,))
            roots[tensor_id] = found
        return roots[tensor_id]

    def _costs_to_keep(self, tensor_id: str) -> bool:
        """Whether a tensor is no argument, which is always there."""
        return self.graph.tensors[self.graph.storage(tensor_id)].role is None

    def repeat(self, reader: Op, tensor_id: str, cheap: dict[str, Op], kept: set[str]) -> str:
        """The tensor that backward computes again from what is kept; it is made before its first reader, for all."""
        if tensor_id in kept or tensor_id not in cheap:
            return tensor_id
        again = f"{tensor_id}.again"
        if again not in self.repeated_tensors:
            op = cheap[tensor_id]
            inputs = tuple(self.repeat(reader, source, cheap, kept) for source in op.inputs)
            self.repeated_tensors[again] = replace(self.graph.tensors[tensor_id], id=again)
            repeated = replace(op, id=again, inputs=inputs, outputs=(again,), phase=Phase.BACKWARD)
            self.repeated_ops.setdefault(reader.id, []).append(repeated)
        return again

    def graph_with_repeats(self) -> Graph:
        """The graph with the repeated ops before their first readers."""
        if not self.repeated_tensors:
            return self.graph
        ops: list[Op] = []
        for op in self.graph.ops:
            ops += self.repeated_ops.get(op.id, ())
            instead = self.read_instead.get(op.id)
            if instead is not None:
                op = replace(op, inputs=tuple(instead.get(tensor_id, tensor_id) for tensor_id in op.inputs))
            ops.append(op)
        return replace(self.graph, ops=tuple(ops), tensors={**self.graph.tensors, **self.repeated_tensors})


def _is_cheap(op: Op) -> bool:
    """Whether an op has one result and makes it element by element; views cost nothing."""
    return len(op.outputs) == 1 and (op.kind is OpKind.ELEMENTWISE or (op.kind is OpKind.VIEW and len(op.inputs) == 1))
