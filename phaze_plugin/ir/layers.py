"""Layers: the units that placement moves, what flows between them, and which of them are equal.

Forward ops are grouped by module path, or cut where a single tensor passes (`layer_grouping.py`). A backward op belongs
to the layer of the forward op that it is the gradient of. Two layers are equal where `canonical_key` is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx

from phaze.ir.graph import Graph, Role
from phaze.ir.layer_grouping import PIECE, cut_at_waists, group_by_module, rule_text
from phaze.ir.op import Op, Phase

__all__ = ["Boundary", "Layer", "LayerGraph", "canonical_key", "rescaled_layers", "single_layer", "split_layers"]


_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)
"""The phases of ops that belong to a layer and are not forward."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Layer:
    """Ops that placement keeps together. `key` is equal for layers with equal ops, shapes, wiring and ties.

    `inputs` are the forward tensors that come from other layers, `outputs` those that other layers or the graph's
    outputs need. `gradients_out` are the tensors made backward that ops outside of the layer read, in the order of
    their first read. `forward_key` is equal for layers with an equal forward, in graphs of which parts are frozen:
    there the first layer that is trained gives no gradient of its input and has a backward of its own.
    """

    index: int
    name: str
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients_out: tuple[str, ...]
    key: str
    forward_key: str = ""

    @property
    def kind(self) -> str:
        """What layers share that repeat, whatever of them is frozen."""
        return self.forward_key or self.key

    def __repr__(self) -> str:
        return f"<Layer {self.index} {self.name}: {len(self.forward)} + {len(self.backward)} ops>"


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


def single_layer(graph: Graph) -> Layer:
    """All of a graph as one layer."""
    backward = tuple(op for op in graph.ops if op.phase in _BACKWARD)
    made_backward = {name for op in backward for name in op.outputs}
    outside = (op for op in graph.ops if op.phase is not Phase.FORWARD and op.phase not in _BACKWARD)
    return Layer(
        index=0,
        name=graph.name,
        forward=graph.ops_of(Phase.FORWARD),
        backward=backward,
        parameters=tuple(tensor.id for tensor in graph.parameters),
        inputs=(),
        outputs=graph.outputs,
        gradients_out=tuple(dict.fromkeys(name for op in outside for name in op.inputs if name in made_backward)),
        key="",
    )


def split_layers(graph: Graph) -> LayerGraph:
    """Group the ops of a graph into layers."""
    forward = graph.ops_of(Phase.FORWARD)
    groups = group_by_module(graph, forward)
    if groups is None or not _is_acyclic(graph, forward, groups):
        groups = cut_at_waists(graph, forward)
    order = {group: index for index, group in enumerate(dict.fromkeys(_in_topological_order(graph, forward, groups)))}
    layer_of = {op.id: order[groups[op.id]] for op in forward}
    _add_backward_layers(graph, layer_of)
    return _assemble(graph, layer_of, [group.partition(PIECE)[0] for group in order])


def rescaled_layers(known: LayerGraph, graph: Graph) -> LayerGraph:
    """The layers of a graph that differs in its microbatch size only from the one whose layers are known."""
    members: list[list[Op]] = [[] for _ in known.layers]
    for op in graph.ops:
        if op.id in known.layer_of:
            members[known.layer_of[op.id]].append(op)
    keys: dict[str, str] = {}
    layers, rule_texts = list[Layer](), dict[int, str]()
    for layer, ops in zip(known.layers, members, strict=True):
        if layer.key not in keys:  # what is equal at one size is equal at every size
            keys[layer.key] = canonical_key(graph, ops, layer.outputs, rule_texts)
        forward = tuple(op for op in ops if op.phase is Phase.FORWARD)
        backward = tuple(op for op in ops if op.phase is not Phase.FORWARD)
        layers.append(replace(layer, forward=forward, backward=backward, key=keys[layer.key]))
    return _telling_ties_apart(LayerGraph(tuple(layers), known.boundaries, known.layer_of))


def _feeds(graph: Graph, forward: Iterable[Op], groups: Mapping[str, str]) -> nx.DiGraph[str]:
    """Which group reads from which."""
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
    """Groups in an order in which none waits for a later one, by first appearance where that leaves a choice."""
    first = {group: index for index, group in reversed(list(enumerate(groups[op.id] for op in forward)))}
    return list(nx.lexicographical_topological_sort(_feeds(graph, forward, groups), key=first.__getitem__))


def _add_backward_layers(graph: Graph, layer_of: dict[str, int]) -> None:
    """Add the layer of every backward op: its forward op's, its module's, or that of what it reads."""
    by_module = {op.module: layer_of[op.id] for op in graph.ops if op.id in layer_of and op.module}
    users: dict[str, set[int]] = {}
    for op in graph.ops_of(Phase.FORWARD):
        for tensor_id in op.inputs:
            users.setdefault(tensor_id, set()).add(layer_of[op.id])
    trained = {gradient: parameter for parameter, gradient in graph.gradients}
    for op in graph.ops:
        if op.phase in _BACKWARD:
            made = (users.get(trained[name], set()) for name in op.outputs if name in trained)
            only_users = [layers for layers in made if len(layers) == 1]
            layer_of[op.id] = _backward_layer(graph, op, layer_of, by_module, users, only_users)


def _backward_layer(
    graph: Graph,
    op: Op,
    layer_of: dict[str, int],
    by_module: Mapping[str, int],
    users: Mapping[str, set[int]],
    only_users: list[set[int]],
) -> int:
    """The layer of one backward op; `only_users` are those of the parameters whose gradients it makes.

    In this order: that of the forward op that it is the gradient of, of its module, the only user of a parameter whose
    gradient it makes or that it reads, the last layer whose forward it reads, and else the first whose backward it
    reads.
    """
    if op.gradient_of in layer_of:
        return layer_of[op.gradient_of]
    if op.module in by_module:
        return by_module[op.module]
    users_of_untied = only_users + [
        users[name]
        for name in op.inputs
        if graph.tensors[name].role is Role.PARAMETER and len(users.get(name, ())) == 1
    ]
    if users_of_untied:
        return min(users_of_untied[0])
    producers = [producer for name in op.inputs if (producer := graph.producer(name)) is not None]
    forward = [layer_of[producer.id] for producer in producers if producer.phase is Phase.FORWARD]
    later = [
        layer_of[producer.id]
        for producer in producers
        if producer.phase is not Phase.FORWARD and producer.id in layer_of
    ]
    return max(forward, default=min(later, default=0))


def _assemble(graph: Graph, layer_of: Mapping[str, int], names: list[str]) -> LayerGraph:
    """The layers with what enters and leaves each of them."""
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
    rule_texts: dict[int, str] = {}
    gradients = _gradients_read_elsewhere(graph, layer_of, len(names))
    layers = tuple(
        _make_layer(
            graph, index, name, ops, _Ends(tuple(entering[index]), tuple(leaving[index]), gradients[index]), rule_texts
        )
        for index, (name, ops) in enumerate(zip(names, members, strict=True))
    )
    return _telling_ties_apart(LayerGraph(layers, boundaries, layer_of))


def _telling_ties_apart(graph: LayerGraph) -> LayerGraph:
    """The same with other keys for layers that are equal but share other parameters with layers outside of them.

    A penalty on weights reads the parameters of all layers, so that each of them shares its own with the last.
    """
    tied = graph.tied_parameters
    shared = [tuple(sorted(name for name in layer.parameters if name in tied)) for layer in graph.layers]
    kinds: dict[str, set[tuple[str, ...]]] = {}
    for layer, names in zip(graph.layers, shared, strict=True):
        kinds.setdefault(layer.key, set()).add(names)
    layers = tuple(
        replace(layer, key=hashlib.sha256("\n".join((layer.key, *names)).encode()).hexdigest())
        if len(kinds[layer.key]) > 1
        else layer
        for layer, names in zip(graph.layers, shared, strict=True)
    )
    return replace(graph, layers=layers)


def _gradients_read_elsewhere(graph: Graph, layer_of: Mapping[str, int], count: int) -> list[tuple[str, ...]]:
    """For each layer the tensors that it makes backward and that ops outside of it read, by first read."""
    read: list[dict[str, None]] = [{} for _ in range(count)]
    for op in graph.ops:
        for tensor_id in op.inputs:
            producer = graph.producer(tensor_id)
            if producer is None or producer.phase is Phase.FORWARD or producer.id not in layer_of:
                continue
            if layer_of.get(op.id) != layer_of[producer.id]:
                read[layer_of[producer.id]][tensor_id] = None
    return [tuple(names) for names in read]


@dataclass(frozen=True, slots=True)
class _Ends:
    """What enters and leaves a layer, named as in `Layer`."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients_out: tuple[str, ...]


def _make_layer(graph: Graph, index: int, name: str, ops: list[Op], ends: _Ends, rule_texts: dict[int, str]) -> Layer:
    used = dict.fromkeys(tensor_id for op in ops for tensor_id in op.inputs)
    forward = tuple(op for op in ops if op.phase is Phase.FORWARD)
    return Layer(
        index=index,
        name=name,
        forward=forward,
        backward=tuple(op for op in ops if op.phase is not Phase.FORWARD),
        parameters=tuple(name for name in used if graph.tensors[name].role is Role.PARAMETER),
        inputs=ends.inputs,
        outputs=ends.outputs,
        gradients_out=ends.gradients_out,
        key=canonical_key(graph, ops, ends.outputs, rule_texts),
        forward_key=canonical_key(graph, forward, ends.outputs, rule_texts, tells_frozen=False)
        if graph.frozen_parameter_count
        else "",
    )


def _boundaries(graph: Graph, layer_of: Mapping[str, int]) -> tuple[Boundary, ...]:
    """The forward tensors that are read by another layer than makes them."""
    consumers: dict[str, set[int]] = {}
    for op in graph.ops_of(Phase.FORWARD):
        for tensor_id in op.inputs:
            producer = graph.producer(tensor_id)
            if producer is not None and layer_of[producer.id] != layer_of[op.id]:
                consumers.setdefault(tensor_id, set()).add(layer_of[op.id])
    boundaries = []
    for tensor_id, indices in consumers.items():
        producer = graph.producer(tensor_id)
        assert producer is not None
        boundaries.append(Boundary(tensor_id, layer_of[producer.id], tuple(sorted(indices))))
    return tuple(boundaries)


def canonical_key(
    graph: Graph, ops: Sequence[Op], outputs: Iterable[str], rule_texts: dict[int, str], *, tells_frozen: bool = True
) -> str:
    """Hash a layer's ops with tensors numbered by first appearance; `rule_texts` keeps the text of rules seen before.

    Tensors from outside enter by role, shape and type; those that leave are marked, since they must be kept.
    """
    numbers: dict[str, int] = {}
    made = {tensor_id for op in ops for tensor_id in op.outputs}
    lines = []
    for op in ops:
        rule = rule_text(op.rule, rule_texts)
        inputs = [_number(graph, tensor_id, numbers, made, tells_frozen) for tensor_id in op.inputs]
        results = [_number(graph, tensor_id, numbers, made, tells_frozen) for tensor_id in op.outputs]
        moved = f" {op.collective_bytes}" if op.collective_bytes else ""
        lines.append(f"{op.phase} {op.kind} {op.function} {op.attributes}{moved} {rule} {inputs} {results}")
    lines.append(f"out {sorted(numbers[tensor_id] for tensor_id in outputs if tensor_id in numbers)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _number(graph: Graph, tensor_id: str, numbers: dict[str, int], made: set[str], tells_frozen: bool) -> str:
    if tensor_id in numbers:
        return str(numbers[tensor_id])
    numbers[tensor_id] = len(numbers)
    tensor = graph.tensors[tensor_id]
    frozen = "frozen " if tensor.is_frozen and tells_frozen else ""
    origin = "" if tensor_id in made else f" {frozen}{tensor.role or 'boundary'} {tensor.shape}"
    return f"{numbers[tensor_id]}{origin} {tensor.dtype}"
