"""Layers: the units that placement moves, and the graph of what flows between them.

Ops are grouped by module path: the children of a repeated container (`h.0`, `h.1`, ...) are a layer each. What stands
outside of every container forms a layer per connected piece (the embedding; final norm, logits and loss), except that
a piece without parameters (a mask, a position table) joins the first layer that reads it. Where paths say nothing, or
would make layers that wait for each other, the forward chain is cut at its narrow waists (`waists.py`).
A backward op belongs to the layer of the forward op that it is the gradient of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from phaze.ir.graph import Graph, Role
from phaze.ir.op import Op, Phase
from phaze.ir.repeats import canonical_key
from phaze.ir.waists import cut_at_waists

__all__ = ["Boundary", "Layer", "LayerGraph", "split_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Ops that placement keeps together. `key` is equal for layers with equal ops, shapes and wiring.

    `inputs` are the forward tensors that come from other layers, `outputs` those that other layers or the graph's
    outputs need.
    """

    index: int
    name: str
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    key: str


@dataclass(frozen=True, slots=True)
class Boundary:
    """A forward tensor that leaves its layer, and the layers that read it."""

    tensor: str
    producer: int
    consumers: tuple[int, ...]

    @property
    def is_relayed(self) -> bool:
        """Whether a layer further on than the next one needs it: it travels through every stage on the way."""
        return self.consumers[-1] > self.producer + 1


@dataclass(frozen=True)
class LayerGraph:
    """Layers in topological order and the tensors between them."""

    layers: tuple[Layer, ...]
    boundaries: tuple[Boundary, ...]
    layer_of: Mapping[str, int]

    @cached_property
    def distinct(self) -> tuple[Layer, ...]:
        """The first layer of each kind."""
        return tuple({layer.key: layer for layer in reversed(self.layers)}[key] for key in self._keys)

    @property
    def _keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer.key for layer in self.layers))

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """Which layer feeds which."""
        return frozenset(
            (boundary.producer, consumer) for boundary in self.boundaries for consumer in boundary.consumers
        )

    @property
    def is_chain(self) -> bool:
        """Whether every layer reads only from the one before it."""
        return all(consumer == producer + 1 for producer, consumer in self.edges)

    @cached_property
    def tied_parameters(self) -> dict[str, tuple[int, ...]]:
        """Parameters that more than one layer uses, with those layers."""
        users: dict[str, list[int]] = {}
        for layer in self.layers:
            for parameter in layer.parameters:
                users.setdefault(parameter, []).append(layer.index)
        return {parameter: tuple(indices) for parameter, indices in users.items() if len(indices) > 1}


def split_layers(graph: Graph) -> LayerGraph:
    """Group the ops of a graph into layers."""
    forward = graph.ops_of(Phase.FORWARD)
    groups = _group_by_module(graph, forward)
    if groups is None or not _is_acyclic(graph, forward, groups):
        groups = cut_at_waists(graph, forward)
    order = {group: index for index, group in enumerate(dict.fromkeys(_in_topological_order(graph, forward, groups)))}
    layer_of = {op.id: order[groups[op.id]] for op in forward}
    for op in graph.ops:
        if op.phase in (Phase.BACKWARD, Phase.RECOMPUTE):
            layer_of[op.id] = _backward_layer(graph, op, layer_of)
    return _assemble(graph, layer_of, list(order))


def _group_by_module(graph: Graph, forward: Iterable[Op]) -> dict[str, str] | None:
    """Name the group of each forward op by its module path; None where no container repeats."""
    children: dict[str, set[str]] = {}
    for path in {op.module for op in forward}:
        for prefix, child in _numbered(path):
            children.setdefault(prefix, set()).add(child)
    groups: dict[str, str] = {}
    for op in forward:
        block = next((f"{p}.{c}".lstrip(".") for p, c in _numbered(op.module) if len(children[p]) > 1), None)
        if block is not None:
            groups[op.id] = block
    if not groups:
        return None
    return groups | _group_leftovers(graph, [op for op in forward if op.id not in groups], groups)


def _numbered(path: str) -> list[tuple[str, str]]:
    """Every (container, number) on a module path, outermost first."""
    words = path.split(".")
    return [(".".join(words[:index]), word) for index, word in enumerate(words) if word.isdigit()]


def _group_leftovers(graph: Graph, leftovers: list[Op], blocks: Mapping[str, str]) -> dict[str, str]:
    """Pieces of connected leftover ops that wait for the same blocks; pieces without parameters join a reader."""
    levels = _levels(graph, blocks)
    pieces = nx.utils.UnionFind(op.id for op in leftovers)
    ids = {op.id for op in leftovers}
    for op in leftovers:
        for tensor_id in op.inputs:
            producer = graph.producer(tensor_id)
            if producer is not None and producer.id in ids and levels[producer.id] == levels[op.id]:
                pieces.union(producer.id, op.id)
    members: dict[str, list[Op]] = {}
    for op in leftovers:
        members.setdefault(pieces[op.id], []).append(op)
    groups: dict[str, str] = {}
    for ops in members.values():
        groups |= {op.id: _piece_name(ops) for op in ops}
    for ops in reversed(list(members.values())):
        if not _has_parameters(graph, ops):
            reader = _reader(graph, ops, {**blocks, **groups})
            groups |= {op.id: reader for op in ops}
    return groups


def _levels(graph: Graph, blocks: Mapping[str, str]) -> dict[str, int]:
    """For each forward op, the number of the last block (by appearance) that it waits for or is in."""
    number: dict[str, int] = {}
    levels: dict[str, int] = {}
    for op in graph.ops_of(Phase.FORWARD):
        producers = (graph.producer(tensor_id) for tensor_id in op.inputs)
        waits = max((levels[producer.id] for producer in producers if producer is not None), default=0)
        block = blocks.get(op.id)
        levels[op.id] = waits if block is None else max(waits, number.setdefault(block, len(number) + 1))
    return levels | _levels_of_readers(graph, blocks, levels)


def _levels_of_readers(graph: Graph, blocks: Mapping[str, str], levels: Mapping[str, int]) -> dict[str, int]:
    """What waits for nothing but parameters (a transposed weight) is made where it is read, if that is in one piece."""
    forward = graph.ops_of(Phase.FORWARD)
    readers: dict[str, list[str]] = {}
    from_data: set[str] = set()
    for op in forward:
        if any(graph.tensors[t].role is Role.BATCH or t in from_data for t in op.inputs):
            from_data.update(op.outputs)
        for tensor_id in op.inputs:
            readers.setdefault(tensor_id, []).append(op.id)
    found: dict[str, int] = {}
    for op in reversed(forward):
        using = [reader for tensor_id in op.outputs for reader in readers.get(tensor_id, ())]
        if op.id in blocks or from_data.intersection(op.outputs) or not using or blocks.keys() & set(using):
            continue
        found[op.id] = min(found.get(reader, levels[reader]) for reader in using)
    return found


def _piece_name(ops: list[Op]) -> str:
    modules = list(dict.fromkeys(op.module or op.id for op in ops))
    return modules[0] if len(modules) == 1 else f"{modules[0]} .. {modules[-1]}"


def _has_parameters(graph: Graph, ops: Iterable[Op]) -> bool:
    return any(graph.tensors[tensor_id].role is Role.PARAMETER for op in ops for tensor_id in op.inputs)


def _reader(graph: Graph, ops: list[Op], groups: Mapping[str, str]) -> str:
    """The group of the first op that reads from a piece, or of the last that it reads from where nobody does."""
    own = {op.id for op in ops}
    made = {tensor_id for op in ops for tensor_id in op.outputs}
    for op in graph.ops_of(Phase.FORWARD):
        if op.id not in own and made.intersection(op.inputs):
            return groups[op.id]
    producers = [graph.producer(tensor_id) for op in ops for tensor_id in op.inputs]
    before = [groups[producer.id] for producer in producers if producer is not None and producer.id not in own]
    return before[-1] if before else groups[ops[0].id]


def _feeds(graph: Graph, forward: Iterable[Op], groups: Mapping[str, str]) -> nx.DiGraph[str]:
    digraph: nx.DiGraph[str] = nx.DiGraph()
    for op in forward:
        digraph.add_node(groups[op.id])
        for tensor_id in op.inputs:
            producer = graph.producer(tensor_id)
            if producer is not None and groups[producer.id] != groups[op.id]:
                digraph.add_edge(groups[producer.id], groups[op.id])
    return digraph


def _is_acyclic(graph: Graph, forward: Iterable[Op], groups: Mapping[str, str]) -> bool:
    return bool(nx.is_directed_acyclic_graph(_feeds(graph, forward, groups)))


def _in_topological_order(graph: Graph, forward: tuple[Op, ...], groups: Mapping[str, str]) -> list[str]:
    first = {group: index for index, group in reversed(list(enumerate(groups[op.id] for op in forward)))}
    return list(nx.lexicographical_topological_sort(_feeds(graph, forward, groups), key=first.__getitem__))


def _backward_layer(graph: Graph, op: Op, layer_of: Mapping[str, int]) -> int:
    if op.gradient_of in layer_of:
        return layer_of[op.gradient_of]
    producers = (graph.producer(tensor_id) for tensor_id in op.inputs)
    known = [layer_of[producer.id] for producer in producers if producer is not None and producer.id in layer_of]
    return min(known, default=0)


def _assemble(graph: Graph, layer_of: Mapping[str, int], names: list[str]) -> LayerGraph:
    members: list[list[Op]] = [[] for _ in names]
    for op in graph.ops:
        if op.id in layer_of:
            members[layer_of[op.id]].append(op)
    boundaries = _boundaries(graph, layer_of)
    entering: list[list[str]] = [[] for _ in names]
    leaving: list[list[str]] = [[] for _ in names]
    for boundary in boundaries:
        leaving[boundary.producer].append(boundary.tensor)
        for consumer in boundary.consumers:
            entering[consumer].append(boundary.tensor)
    for tensor_id in graph.outputs:
        producer = graph.producer(tensor_id)
        if producer is not None and producer.id in layer_of and tensor_id not in leaving[layer_of[producer.id]]:
            leaving[layer_of[producer.id]].append(tensor_id)
    texts: dict[int, str] = {}
    layers = tuple(
        _make_layer(graph, index, name, ops, tuple(entering[index]), tuple(leaving[index]), texts)
        for index, (name, ops) in enumerate(zip(names, members, strict=True))
    )
    return LayerGraph(layers, boundaries, layer_of)


def _make_layer(
    graph: Graph,
    index: int,
    name: str,
    ops: list[Op],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    texts: dict[int, str],
) -> Layer:
    used = dict.fromkeys(tensor_id for op in ops for tensor_id in op.inputs)
    return Layer(
        index=index,
        name=name,
        forward=tuple(op for op in ops if op.phase is Phase.FORWARD),
        backward=tuple(op for op in ops if op.phase is not Phase.FORWARD),
        parameters=tuple(t for t in used if graph.tensors[t].role is Role.PARAMETER),
        inputs=inputs,
        outputs=outputs,
        key=canonical_key(graph, ops, outputs, texts),
    )


def _boundaries(graph: Graph, layer_of: Mapping[str, int]) -> tuple[Boundary, ...]:
    consumers: dict[str, set[int]] = {}
    for op in graph.ops_of(Phase.FORWARD):
        for tensor_id in op.inputs:
            producer = graph.producer(tensor_id)
            if producer is not None and layer_of[producer.id] != layer_of[op.id]:
                consumers.setdefault(tensor_id, set()).add(layer_of[op.id])
    found = []
    for tensor_id, indices in consumers.items():
        producer = graph.producer(tensor_id)
        assert producer is not None
        found.append(Boundary(tensor_id, layer_of[producer.id], tuple(sorted(indices))))
    return tuple(found)
