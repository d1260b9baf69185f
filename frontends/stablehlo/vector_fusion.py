"""Fuse vector ops as a compiler for JAX fuses them, so that a chain of small ops reads and writes memory once.

Clusters of ops grow along what feeds what, inside one layer and one phase, over one space of factors:

 1. an elementwise op joins the cluster that makes one of its operands, if its result covers the same space (`_fits`);
 2. a reduction whose result comes back to the space that it reduced (a mean, the sum of a softmax) starts a cluster, in
    which the reduced factors are normalized; what is computed from its result, small or of the whole space, joins
    (`_comes_back`, `_fits`);
 3. a cluster that only one other cluster reads joins that one (`join_only_readers`);
 4. nothing joins where a way from the cluster to the op leads through another cluster (`_reaches`): a cluster becomes
    one op.

A cluster that only adds is a sum, whose gradient reads nothing of it (`_function_of`). What a cluster computes besides
its memory traffic is kept in the attribute `operations`: lane operations per element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import networkx as nx

from phaze.cost.operator_work import vector_operations
from phaze.errors import GraphError
from phaze.frontends.stablehlo.batch_and_expert_dims import rule_by_appearance
from phaze.ir import Dim, Dims, Factor, FactorKind, Graph, Op, OpKind, Phase, Rule
from phaze.ir.graph_checks import check_rule
from phaze.ir.op import PASSES_GRADIENT

__all__ = ["fuse_vector_ops"]

MOST_STEPS = 40
"""How many tensors the result of a reduction is followed through to see whether it comes back.

The few steps of a softmax or a norm are far fewer. A higher limit would only cost time on results that never do.
"""

MOST_ORIGIN_CHARACTERS = 80
"""Where the origin of a fused op, the list of its functions, is cut: it is read by people."""


def fuse_vector_ops(graph: Graph) -> Graph:
    """The graph with each cluster of vector ops as one op.

    Ways are followed inside of layers first, which is quick. Where one leaves its layer and comes back (statistics of a
    batch that a step carries on), that gives clusters that wait for each other; then all ways are followed.
    """
    try:
        return _fused_graph(graph, leaves_layers=False)
    except nx.NetworkXUnfeasible:
        return _fused_graph(graph, leaves_layers=True)


def _fused_graph(graph: Graph, *, leaves_layers: bool) -> Graph:
    fusion = _Fusion(graph, leaves_layers=leaves_layers)
    for op in graph.ops:
        fusion.add(op)
    fusion.join_only_readers()
    return fusion.fused_graph()


@dataclass(slots=True)
class _Cluster:
    """Ops over one space of factors, which have names of the cluster's own.

    `dims` has the dimensions of every tensor that the ops touch, `space` the dimensions of the largest of them, and
    `reduced` the factors that some op reduces.
    """

    ops: list[Op] = field(default_factory=list)
    dims: dict[str, Dims] = field(default_factory=dict)
    factors: dict[str, Factor] = field(default_factory=dict)
    space: Dims = ()
    reduced: set[str] = field(default_factory=set)

    @property
    def is_normalizing(self) -> bool:
        """Whether some op reduces a factor, which the cluster so normalizes."""
        return bool(self.reduced)

    def size(self, dims: Dims) -> int:
        return math.prod(self.factors[name].size for dim in dims for name in dim.factors)

    def copy(self) -> _Cluster:
        return _Cluster(list(self.ops), dict(self.dims), dict(self.factors), self.space, set(self.reduced))

    def add(self, op: Op) -> bool:
        """Take an op in. False, and nothing changed, where its factors do not fit. Factors of size 1 are left out."""
        tensor_dims = [_without_units(op.rule, dims) for dims in op.rule.tensors()]
        widest = tensor_dims[0] if op.kind is OpKind.REDUCTION else tensor_dims[-1]
        names = self._names(op, tensor_dims, widest)
        if names is None:
            return False
        for op_name, name in names.items():
            if name not in self.factors:
                self.factors[name] = replace(op.rule.factor(op_name), name=name)

        def renamed(dims: Dims) -> Dims:
            return tuple(Dim(tuple(names[name] for name in dim.factors)) for dim in dims)

        for tensor_id, dims in zip((*op.inputs, *op.outputs), tensor_dims, strict=True):
            self.dims.setdefault(tensor_id, renamed(dims))
        if not self.ops or self.size(renamed(widest)) > self.size(self.space):
            self.space = renamed(widest)
        if op.kind is OpKind.REDUCTION:
            kept = {op_name for dim in tensor_dims[-1] for op_name in dim.factors}
            self.reduced |= {name for op_name, name in names.items() if op_name not in kept}
        self.ops.append(op)
        return True

    def _names(self, op: Op, tensor_dims: list[Dims], widest: Dims) -> dict[str, str] | None:
        """The cluster's name for each factor of an op, found through shared tensors, then by place in the space.

        None where the op shares no tensor with the cluster, or where a factor would have two names.
        """
        names: dict[str, str] = {}
        touched = zip((*op.inputs, *op.outputs), tensor_dims, strict=True)
        shared = [(dims, self.dims[tensor_id]) for tensor_id, dims in touched if tensor_id in self.dims]
        if self.ops and not shared:
            return None
        if self.ops and _sizes(op.rule.size, widest) == _sizes(self._size, self.space):
            shared.append((widest, self.space))
        for op_dims, cluster_dims in shared:
            if _sizes(op.rule.size, op_dims) != _sizes(self._size, cluster_dims):
                return None
            for op_dim, cluster_dim in zip(op_dims, cluster_dims, strict=True):
                for op_name, name in zip(op_dim.factors, cluster_dim.factors, strict=True):
                    if names.setdefault(op_name, name) != name:
                        return None
        for op_name in dict.fromkeys(name for dims in tensor_dims for dim in dims for name in dim.factors):
            if op_name not in names:
                if self.ops and not self.is_normalizing:
                    return None
                names[op_name] = f"f{len({*self.factors, *names.values()})}"
        return names if len(set(names.values())) == len(names) else None

    def _size(self, name: str) -> int:
        return self.factors[name].size


def _without_units(rule: Rule, dims: Dims) -> Dims:
    """Dimensions without factors of size 1."""
    return tuple(Dim(tuple(name for name in dim.factors if rule.size(name) > 1)) for dim in dims)


def _sizes(size: Callable[[str], int], dims: Dims) -> list[list[int]]:
    return [[size(name) for name in dim.factors] for dim in dims]


class _Fusion:
    """Clusters as they grow. A cluster that has joined another leaves None in its place."""

    def __init__(self, graph: Graph, *, leaves_layers: bool) -> None:
        self.graph = graph
        self.leaves_layers = leaves_layers
        self.layer_of = graph.layer_graph.layer_of
        self.clusters: list[_Cluster | None] = []
        self.cluster_of: dict[str, int] = {}
        self.feeds: dict[int, set[int]] = {}
        self.readers: dict[str, list[Op]] = {}
        for op in graph.ops:
            for tensor_id in dict.fromkeys(op.inputs):
                self.readers.setdefault(tensor_id, []).append(op)
        self.outputs = {*graph.outputs, *(gradient for _, gradient in graph.gradients)}
        self.fusible: dict[str, bool] = {}

    def add(self, op: Op) -> None:
        """Join an op to the latest cluster that feeds it and that it fits, or start a cluster with it."""
        is_fusible = self._is_fusible(op)
        feeding = self._feeding(op)
        for number in sorted(feeding, reverse=True) if is_fusible else ():
            cluster = self.clusters[number]
            if cluster is None or not self._is_near(cluster.ops[0], op) or not self._fits(cluster, op):
                continue
            if not self._reaches(number, feeding - {number}) and cluster.add(op):
                self._enter(op, number)
                return
        cluster = _Cluster()
        if is_fusible:
            cluster.add(op)
        else:
            cluster.ops.append(op)
        self.clusters.append(cluster)
        self._enter(op, len(self.clusters) - 1)

    def _is_fusible(self, op: Op) -> bool:
        """Whether an op is vector work that may be part of a cluster; each op is looked at once."""
        if op.id not in self.fusible:
            self.fusible[op.id] = self._is_vector_work(op)
        return self.fusible[op.id]

    def _is_vector_work(self, op: Op) -> bool:
        if op.phase is Phase.UPDATE or any(dim.size is not None for dims in op.rule.tensors() for dim in dims):
            return False
        if op.kind is OpKind.VIEW:
            return op.function == "reshape" and _is_unit_view(op.rule)
        if len(op.outputs) != 1:
            return False
        if op.kind is OpKind.ELEMENTWISE:
            return op.function != "cumulative_add"  # every element waits for those before it
        return op.kind is OpKind.REDUCTION and self._comes_back(op)

    def _fits(self, cluster: _Cluster, op: Op) -> bool:
        """Rules 1 and 2. What makes the operand of a reduction is left to rule 3."""
        if not self._is_fusible(cluster.ops[0]):
            return False
        if op.kind is OpKind.REDUCTION:
            return cluster.is_normalizing
        size = math.prod(op.rule.shape(op.rule.results[0]))
        if cluster.is_normalizing:
            return size <= cluster.size(cluster.space)
        return op.kind is OpKind.ELEMENTWISE and size == cluster.size(cluster.space)

    def _is_near(self, first: Op, op: Op) -> bool:
        """Whether two ops are of one phase and one layer."""
        return first.phase is op.phase and self.layer_of.get(first.id) == self.layer_of.get(op.id)

    def _comes_back(self, op: Op) -> bool:
        """Whether the result of a reduction is spread again over what was reduced."""
        whole = math.prod(op.rule.shape(op.rule.operands[0]))
        small = math.prod(op.rule.shape(op.rule.results[0]))
        waiting, seen = list(op.outputs), set(op.outputs)
        for _ in range(MOST_STEPS):
            if not waiting or small == whole:
                return False
            for reader in self.readers.get(waiting.pop(0), ()):
                if not self._is_near(op, reader) or reader.kind not in (OpKind.ELEMENTWISE, OpKind.VIEW):
                    continue
                size = math.prod(reader.rule.shape(reader.rule.results[0]))
                if reader.kind is OpKind.ELEMENTWISE and size == whole:
                    return True
                if size == small and reader.outputs[0] not in seen:
                    seen.add(reader.outputs[0])
                    waiting.append(reader.outputs[0])
        return False

    def _feeding(self, op: Op) -> set[int]:
        """The clusters that make the operands of an op."""
        producers = (self.graph.producer(tensor_id) for tensor_id in op.inputs)
        return {self.cluster_of[producer.id] for producer in producers if producer is not None}

    def _enter(self, op: Op, number: int) -> None:
        """Remember which cluster an op is in, and what feeds it."""
        for feeding in self._feeding(op) - {number}:
            self.feeds.setdefault(feeding, set()).add(number)
        self.cluster_of[op.id] = number

    def _reaches(self, start: int, targets: Iterable[int]) -> bool:
        """Whether a way leads from a cluster to one of the targets."""
        wanted, waiting, seen = set(targets), [start], {start}
        layer = self._layer(start)
        while waiting and wanted:
            for fed in self.feeds.get(waiting.pop(), ()):
                if fed in wanted:
                    return True
                if fed not in seen and (self.leaves_layers or self._layer(fed) == layer):
                    seen.add(fed)
                    waiting.append(fed)
        return False

    def _layer(self, number: int) -> tuple[int | None, bool]:
        """The layer of a cluster, and whether it is forward."""
        cluster = self.clusters[number]
        if cluster is None:
            return None, False
        return self.layer_of.get(cluster.ops[0].id), cluster.ops[0].phase is Phase.FORWARD

    def join_only_readers(self) -> None:
        """Rule 3, from the last cluster to the first."""
        for number in range(len(self.clusters) - 1, -1, -1):
            cluster = self.clusters[number]
            if cluster is None or not self._is_fusible(cluster.ops[0]):
                continue
            results = [tensor_id for op in cluster.ops for tensor_id in op.outputs]
            readers = (reader for tensor_id in results for reader in self.readers.get(tensor_id, ()))
            reading = {self.cluster_of[reader.id] for reader in readers} - {number}
            if len(reading) == 1 and not self.outputs.intersection(results):
                self._join(number, next(iter(reading)))

    def _join(self, number: int, reading_number: int) -> None:
        """Join a cluster to the one that reads it, if both are over one space or the reader normalizes a larger one."""
        cluster, reading = self.clusters[number], self.clusters[reading_number]
        assert cluster is not None
        if reading is None or not self._is_fusible(reading.ops[0]):
            return
        if not self._is_near(cluster.ops[0], reading.ops[0]):
            return
        size, reading_size = cluster.size(cluster.space), reading.size(reading.space)
        if size > reading_size or (size != reading_size and not reading.is_normalizing):
            return
        joined = reading.copy()
        if not all(joined.add(op) for op in reversed(cluster.ops)):
            return
        for op in cluster.ops:
            self.cluster_of[op.id] = reading_number
        self.clusters[reading_number], self.clusters[number] = joined, None
        for fed in self.feeds.values():
            if number in fed:
                fed.discard(number)
                fed.add(reading_number)
        self.feeds.pop(number, None)

    def fused_graph(self) -> Graph:
        """The graph with one op for every cluster that a rule can describe."""
        position = {op.id: index for index, op in enumerate(self.graph.ops)}
        ops: list[Op] = []
        hidden: set[str] = set()
        for cluster in self.clusters:
            if cluster is None:
                continue
            members = sorted(cluster.ops, key=lambda op: position[op.id])
            fused = self._fused(cluster, members) if len(members) > 1 else None
            if fused is None:
                ops += members
                continue
            hidden.update(t for op in members for t in op.outputs if t not in fused.outputs)
            position[fused.id] = position[members[-1].id]
            ops.append(fused)
        tensors = {name: tensor for name, tensor in self.graph.tensors.items() if name not in hidden}
        return replace(self.graph, ops=tuple(_sorted(ops, position)), tensors=tensors)

    def _fused(self, cluster: _Cluster, members: list[Op]) -> Op | None:
        """The one op of a cluster; None where no rule fits, or where all that it does is view."""
        outputs = self._outputs_of(members)
        if not outputs or all(op.kind is OpKind.VIEW for op in members):
            return None
        results = {tensor_id for op in members for tensor_id in op.outputs}
        inputs = list(dict.fromkeys(t for op in members for t in op.inputs if t not in results))
        try:
            rule = _rule(cluster, inputs, outputs)
        except GraphError:  # more factors than a rule has: a norm over the gradients of many parameters
            return None
        work = sum(vector_operations(op) for op in members if op.kind is not OpKind.VIEW)
        per_element = max(1, round(work / max(1, rule.work)))
        functions = [op.function for op in members]
        last = members[-1]
        op = Op(
            id=outputs[0],
            kind=_kind_of(cluster, functions),
            function=_function_of(members, outputs),
            rule=rule,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            module=last.module,
            phase=last.phase,
            origin="+".join(dict.fromkeys(functions))[:MOST_ORIGIN_CHARACTERS],
            attributes=(("operations", per_element),),
        )
        try:
            check_rule(op)
        except GraphError:
            return None
        return op

    def _outputs_of(self, members: list[Op]) -> list[str]:
        """The tensors of a cluster that are read outside of it, or are outputs of the graph."""
        inside = {op.id for op in members}
        return [
            tensor_id
            for op in members
            for tensor_id in op.outputs
            if tensor_id in self.outputs or any(reader.id not in inside for reader in self.readers.get(tensor_id, ()))
        ]


def _function_of(members: list[Op], outputs: list[str]) -> str:
    only_adds = all(op.function in PASSES_GRADIENT or op.kind is OpKind.VIEW for op in members)
    return "fused_sum" if only_adds and len(outputs) == 1 else "fused"


def _kind_of(cluster: _Cluster, functions: list[str]) -> OpKind:
    if not cluster.is_normalizing:
        return OpKind.ELEMENTWISE
    return OpKind.SOFTMAX if "exp" in functions else OpKind.NORM


def _rule(cluster: _Cluster, inputs: list[str], outputs: list[str]) -> Rule:
    """The rule of a cluster: its factors, of which the reduced ones are normalized."""
    factors = {
        name: replace(factor, kind=FactorKind.NORMALIZED if name in cluster.reduced else factor.kind)
        for name, factor in cluster.factors.items()
    }
    operands, results = (tuple(cluster.dims[tensor_id] for tensor_id in side) for side in (inputs, outputs))
    return rule_by_appearance(operands, results, factors)


def _is_unit_view(rule: Rule) -> bool:
    """Whether a reshape only adds or drops dimensions of size 1."""
    both = (_without_units(rule, dims) for dims in (rule.operands[0], rule.results[0]))
    before, after = ([dim.factors for dim in dims if dim.factors] for dims in both)
    return before == after


def _sorted(ops: list[Op], position: Mapping[str, int]) -> list[Op]:
    """The ops in a topological order, forward first, that keeps to the given positions."""
    producers = {tensor_id: op.id for op in ops for tensor_id in op.outputs}
    by_id = {op.id: op for op in ops}
    digraph: nx.DiGraph[str] = nx.DiGraph()
    digraph.add_nodes_from(by_id)
    digraph.add_edges_from((producers[t], op.id) for op in ops for t in op.inputs if t in producers)
    order = nx.lexicographical_topological_sort(
        digraph, key=lambda op_id: (by_id[op_id].phase is not Phase.FORWARD, position[op_id])
    )
    return [by_id[op_id] for op_id in order]
