"""What backward keeps, chosen as a compiler that fuses would: cheap vector work is done again instead of kept.

JAX's backward reads whatever its forward happened to compute. An elementwise op of the forward can as well be done
again inside the backward op that reads it, if what it reads is kept. For each layer the least bytes to keep are a
minimum cut between what is no elementwise work (products, reductions, other layers' results) and what backward's
elementwise ops read; what other backward ops read (products) is kept in any case. Ops between the cut and their readers
are repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import networkx as nx

from phaze.ir import Graph, Op, OpKind, Phase, Tensor

__all__ = ["keep_least"]


def keep_least(graph: Graph) -> Graph:
    """The graph whose backward reads the least that it can; ops that are done again are backward ops."""
    work = _Keeping(graph)
    for layer in graph.layers:
        work.choose(layer.forward, layer.backward)
    return work.result()


class _Keeping:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.replaced: dict[str, dict[str, str]] = {}
        self.added: dict[str, list[Op]] = {}
        self.tensors: dict[str, Tensor] = {}

    def choose(self, forward: Iterable[Op], backward: Iterable[Op]) -> None:
        """Cut the elementwise part of a layer, and repeat what lies behind the cut."""
        cheap = {tensor_id: op for op in forward if _is_cheap(op) for tensor_id in op.outputs}
        readers: dict[str, list[Op]] = {}
        for op in backward:
            if op.phase is Phase.BACKWARD:
                for tensor_id in dict.fromkeys(op.inputs):
                    readers.setdefault(tensor_id, []).append(op)
        kept = {t for t, ops in readers.items() if any(op.kind is not OpKind.ELEMENTWISE for op in ops)}
        wanted = [t for t in readers if t in cheap and t not in kept]
        if not wanted:
            return
        cut = self._cut(cheap, wanted, kept)
        for tensor_id in wanted:
            if tensor_id not in cut:
                for op in readers[tensor_id]:
                    self._repeat(op, tensor_id, cheap, cut | kept)

    def _cut(self, cheap: dict[str, Op], wanted: list[str], kept: set[str]) -> set[str]:
        """The tensors to keep; a tensor costs its bytes, one that is kept anyway or always there costs nothing."""
        network: nx.DiGraph[object] = nx.DiGraph()
        waiting, seen = list(wanted), set(wanted)
        for tensor_id in wanted:
            network.add_edge((tensor_id, "out"), "end")
        while waiting:
            tensor_id = waiting.pop()
            network.add_edge((tensor_id, "in"), (tensor_id, "out"), capacity=self._bytes(tensor_id, kept))
            if tensor_id not in cheap:
                network.add_edge("start", (tensor_id, "in"))
                continue
            for source in cheap[tensor_id].inputs:
                network.add_edge((source, "out"), (tensor_id, "in"))
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
        _, (near, _) = nx.minimum_cut(network, "start", "end")
        return {t for t in seen if (t, "in") in near and (t, "out") not in near}

    def _bytes(self, tensor_id: str, kept: set[str]) -> int:
        storage = self.graph.storage(tensor_id)
        is_there = tensor_id in kept or storage in kept or self.graph.tensors[storage].role is not None
        return 0 if is_there else self.graph.tensors[tensor_id].size_bytes

    def _repeat(self, reader: Op, tensor_id: str, cheap: dict[str, Op], kept: set[str]) -> None:
        """Give a backward op its own copy of what it reads; copies are shared by all readers."""
        own = self._copy(reader, tensor_id, cheap, kept)
        self.replaced.setdefault(reader.id, {})[tensor_id] = own

    def _copy(self, reader: Op, tensor_id: str, cheap: dict[str, Op], kept: set[str]) -> str:
        if tensor_id in kept or tensor_id not in cheap:
            return tensor_id
        again = f"{tensor_id}.again"
        if again not in self.tensors:
            op = cheap[tensor_id]
            inputs = tuple(self._copy(reader, source, cheap, kept) for source in op.inputs)
            self.tensors[again] = replace(self.graph.tensors[tensor_id], id=again)
            copied = replace(op, id=again, inputs=inputs, outputs=(again,), phase=Phase.BACKWARD)
            self.added.setdefault(reader.id, []).append(copied)
        return again

    def result(self) -> Graph:
        """The graph with the repeated ops before their first readers."""
        if not self.tensors:
            return self.graph
        ops: list[Op] = []
        for op in self.graph.ops:
            ops += self.added.get(op.id, ())
            names = self.replaced.get(op.id)
            if names is not None:
                op = replace(op, inputs=tuple(names.get(tensor_id, tensor_id) for tensor_id in op.inputs))
            ops.append(op)
        return replace(self.graph, ops=tuple(ops), tensors={**self.graph.tensors, **self.tensors})


def _is_cheap(op: Op) -> bool:
    """One result, made element by element of operands that are not looked up; reshapes are free."""
    return len(op.outputs) == 1 and (op.kind is OpKind.ELEMENTWISE or (op.kind is OpKind.VIEW and len(op.inputs) == 1))
