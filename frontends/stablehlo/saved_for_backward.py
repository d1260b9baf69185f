"""Choose which forward tensors backward keeps: the fewest bytes, with cheap vector work computed again instead of kept.

JAX's backward reads whatever its forward happened to compute. A compiler that fuses does better: an elementwise op of
the forward can as well be done again inside the backward op that reads it, if its own operands are kept. For each layer
the least bytes to keep are a minimum cut (`_Choice.minimum_cut`) between what is no elementwise work (products,
reductions, other layers' results) and what backward's elementwise ops read. What other backward ops read (products) is
kept in any case. Ops between the cut and their readers are repeated (`_Choice.repeat`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import networkx as nx

from phaze.ir import Graph, Op, OpKind, Phase, Tensor

__all__ = ["minimize_saved_bytes"]


def minimize_saved_bytes(graph: Graph) -> Graph:
    """The graph whose backward reads the fewest bytes of the forward; ops that are done again are backward ops."""
    choice = _Choice(graph)
    for layer in graph.layers:
        choice.add_layer(layer.forward, layer.backward)
    return choice.graph_with_repeats()


class _Choice:
    """What was chosen so far: the repeated ops by their first reader, and what readers read instead."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
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
        kept = {t for t, ops in readers.items() if any(op.kind is not OpKind.ELEMENTWISE for op in ops)}
        wanted = [tensor_id for tensor_id in readers if tensor_id in cheap and tensor_id not in kept]
        if not wanted:
            return
        cut = self.minimum_cut(cheap, wanted, kept)
        for tensor_id in wanted:
            if tensor_id not in cut:
                for op in readers[tensor_id]:
                    again = self.repeat(op, tensor_id, cheap, cut | kept)
                    self.read_instead.setdefault(op.id, {})[tensor_id] = again

    def minimum_cut(self, cheap: dict[str, Op], wanted: list[str], kept: set[str]) -> set[str]:
        """The tensors to keep so that all wanted ones can be computed from them.

        Each tensor is an edge from its "in" to its "out", which costs its bytes. Edges between tensors are without a
        capacity, which networkx takes for infinite.
        """
        network: nx.DiGraph[object] = nx.DiGraph()
        waiting, seen = list(wanted), set(wanted)
        for tensor_id in wanted:
            network.add_edge((tensor_id, "out"), "end")
        while waiting:
            tensor_id = waiting.pop()
            network.add_edge((tensor_id, "in"), (tensor_id, "out"), capacity=self._bytes_to_keep(tensor_id, kept))
            if tensor_id not in cheap:
                network.add_edge("start", (tensor_id, "in"))
                continue
            for source in cheap[tensor_id].inputs:
                network.add_edge((source, "out"), (tensor_id, "in"))
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
        _, (start_side, _) = nx.minimum_cut(network, "start", "end")
        return {t for t in seen if (t, "in") in start_side and (t, "out") not in start_side}

    def _bytes_to_keep(self, tensor_id: str, kept: set[str]) -> int:
        """What keeping a tensor costs: nothing if it is kept in any case or is an argument, which is always there."""
        storage = self.graph.storage(tensor_id)
        is_there = tensor_id in kept or storage in kept or self.graph.tensors[storage].role is not None
        return 0 if is_there else self.graph.tensors[tensor_id].size_bytes

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
