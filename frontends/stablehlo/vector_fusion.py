"""Vector ops joined as a compiler for JAX joins them: a chain of small ops reads and writes memory once.

Clusters grow along what feeds what, inside one layer and one phase, over one space of factors:

 1. an elementwise op joins the cluster that makes one of its operands, if its result covers the same space;
 2. a reduction whose result comes back to the space that it reduced (a mean, the sum of a softmax) starts a cluster, in
    which the reduced factors are normalized; what is computed from its result, small or of the whole space, joins;
 3. a cluster that only one other cluster reads joins that one;
 4. nothing joins where a way from the cluster to the op leads through another: a cluster is one op.

A cluster that only adds is a sum, whose gradient reads nothing of it. What a cluster computes besides memory traffic is
kept in the attribute `operations`: lane operations per element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import networkx as nx

from phaze.cost.operator_work import vector_operations
from phaze.errors import GraphError
from phaze.ir import Dim, Dims, Factor, FactorKind, Graph, Op, OpKind, Phase, Rule
from phaze.ir.graph_checks import check_rule
from phaze.ir.op import PASSES_GRADIENT

__all__ = ["fuse"]

MOST_STEPS = 40
"""How far the result of a reduction is followed."""


def fuse(graph: Graph) -> Graph:
    """The graph with clusters of vector ops as one op each."""
    work = _Fusing(graph)
    for op in graph.ops:
        work.visit(op)
    work.join_private()
    return work.result()


@dataclass(slots=True)
class _Cluster:
    """Ops over one space; `dims` are those of every tensor that they touch, in the cluster's own factors."""

    ops: list[Op] = field(default_factory=list)
    dims: dict[str, Dims] = field(default_factory=dict)
    factors: dict[str, Factor] = field(default_factory=dict)
    space: Dims = ()
    reduced: set[str] = field(default_factory=set)

    @property
    def is_normalizing(self) -> bool:
        return bool(self.reduced)

    def size(self, dims: Dims) -> int:
        return math.prod(self.factors[name].size for dim in dims for name in dim.factors)

    def copy(self) -> _Cluster:
        return _Cluster(list(self.ops), dict(self.dims), dict(self.factors), self.space, set(self.reduced))

    def add(self, op: Op) -> bool:
        """Take an op in; False, and nothing changed, where its factors do not fit. Factors of 1 are left out."""
        sides = [_significant(op.rule, dims) for dims in op.rule.tensors()]
        widest = sides[0] if op.kind is OpKind.REDUCTION else sides[-1]
        names = self._names(op, sides, widest)
        if names is None:
            return False
        for name, own in names.items():
            self.factors.setdefault(own, replace(op.rule.factor(name), name=own))

        def renamed(dims: Dims) -> Dims:
            return tuple(Dim(tuple(names[name] for name in dim.factors)) for dim in dims)

        for tensor_id, dims in zip((*op.inputs, *op.outputs), sides, strict=True):
            self.dims.setdefault(tensor_id, renamed(dims))
        if not self.ops or self.size(renamed(widest)) > self.size(self.space):
            self.space = renamed(widest)
        if op.kind is OpKind.REDUCTION:
            kept = {name for dim in sides[-1] for name in dim.factors}
            self.reduced |= {own for name, own in names.items() if name not in kept}
        self.ops.append(op)
        return True

    def _names(self, op: Op, sides: list[Dims], widest: Dims) -> dict[str, str] | None:
        """The cluster's name for each factor of an op, found through shared tensors, then by place in the space."""
        names: dict[str, str] = {}
        around = zip((*op.inputs, *op.outputs), sides, strict=True)
        shared = [(dims, self.dims[tensor_id]) for tensor_id, dims in around if tensor_id in self.dims]
        if self.ops and not shared:
            return None
        if self.ops and _sizes(op.rule.size, widest) == _sizes(self._size, self.space):
            shared.append((widest, self.space))
        for theirs, own in shared:
            if _sizes(op.rule.size, theirs) != _sizes(self._size, own):
                return None
            for left, right in zip(theirs, own, strict=True):
                for name, known in zip(left.factors, right.factors, strict=True):
                    if names.setdefault(name, known) != known:
                        return None
        for name in dict.fromkeys(name for dims in sides for dim in dims for name in dim.factors):
            if name not in names:
                if self.ops and not self.is_normalizing:
                    return None
                names[name] = f"f{len({*self.factors, *names.values()})}"
        return names if len(set(names.values())) == len(names) else None

    def _size(self, name: str) -> int:
        return self.factors[name].size


def _significant(rule: Rule, dims: Dims) -> Dims:
    """Dimensions without factors of size 1."""
    return tuple(Dim(tuple(name for name in dim.factors if rule.size(name) > 1)) for dim in dims)


def _sizes(size: Callable[[str], int], dims: Dims) -> list[list[int]]:
    return [[size(name) for name in dim.factors] for dim in dims]


class _Fusing:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.layer_of = graph.layer_graph.layer_of
        self.clusters: list[_Cluster | None] = []
        self.cluster_of: dict[str, int] = {}
        self.feeds: dict[int, set[int]] = {}
        self.readers: dict[str, list[Op]] = {}
        for op in graph.ops:
            for tensor_id in dict.fromkeys(op.inputs):
                self.readers.setdefault(tensor_id, []).append(op)
        self.kept = {*graph.outputs, *(gradient for _, gradient in graph.gradients)}

    def visit(self, op: Op) -> None:
        kind = self._kind(op)
        for number in sorted(self._before(op), reverse=True) if kind == "joins" else ():
            cluster = self.clusters[number]
            if cluster is not None and self._is_near(cluster.ops[0], op) and self._fits(cluster, op):
                others = self._before(op) - {number}
                if not self._reaches(number, others) and cluster.add(op):
                    self._enter(op, number)
                    return
        self.clusters.append(_Cluster())
        number = len(self.clusters) - 1
        cluster = self.clusters[number]
        assert cluster is not None
        if kind is not None:
            cluster.add(op)
        else:
            cluster.ops.append(op)
        self._enter(op, number)

    def _kind(self, op: Op) -> str | None:
        """Whether an op may join a cluster, or only start one; None for ops that are no vector work."""
        if op.phase is Phase.UPDATE or any(dim.size is not None for dims in op.rule.tensors() for dim in dims):
            return None
        if op.kind is OpKind.ELEMENTWISE and len(op.outputs) == 1 and op.function != "cumulative_add":
            return "joins"
        if op.kind is OpKind.VIEW and op.function == "reshape" and _is_unit_view(op.rule):
            return "joins"
        if op.kind is OpKind.REDUCTION and len(op.outputs) == 1 and self._comes_back(op):
            return "joins"
        return None

    def _fits(self, cluster: _Cluster, op: Op) -> bool:
        """Rules 1 and 2; what a reduction starts from is left to rule 3."""
        first = cluster.ops[0]
        if self._kind(first) is None:
            return False
        if op.kind is OpKind.REDUCTION:
            return cluster.is_normalizing
        size = math.prod(op.rule.shape(op.rule.results[0]))
        if cluster.is_normalizing:
            return size <= cluster.size(cluster.space)
        return op.kind is OpKind.ELEMENTWISE and size == cluster.size(cluster.space)

    def _is_near(self, first: Op, op: Op) -> bool:
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

    def _before(self, op: Op) -> set[int]:
        return {self.cluster_of[p.id] for t in op.inputs if (p := self.graph.producer(t)) is not None}

    def _enter(self, op: Op, number: int) -> None:
        for before in self._before(op) - {number}:
            self.feeds.setdefault(before, set()).add(number)
        self.cluster_of[op.id] = number

    def _reaches(self, start: int, targets: Iterable[int]) -> bool:
        """Whether a way leads from a cluster to one of others."""
        wanted, waiting, seen = set(targets), [start], {start}
        layer = self._layer(start)
        while waiting and wanted:
            for after in self.feeds.get(waiting.pop(), ()):
                if after in wanted:
                    return True
                if after not in seen and self._layer(after) == layer:
                    seen.add(after)
                    waiting.append(after)
        return False

    def _layer(self, number: int) -> tuple[int | None, bool]:
        cluster = self.clusters[number]
        if cluster is None:
            return None, False
        return self.layer_of.get(cluster.ops[0].id), cluster.ops[0].phase is Phase.FORWARD

    def join_private(self) -> None:
        """Rule 3, from the last cluster to the first."""
        for number in range(len(self.clusters) - 1, -1, -1):
            cluster = self.clusters[number]
            if cluster is None or self._kind(cluster.ops[0]) is None:
                continue
            made = [tensor_id for op in cluster.ops for tensor_id in op.outputs]
            after = {self.cluster_of[r.id] for t in made for r in self.readers.get(t, ())} - {number}
            if len(after) == 1 and not self.kept.intersection(made):
                self._merge(number, next(iter(after)))

    def _merge(self, first: int, second: int) -> None:
        cluster, other = self.clusters[first], self.clusters[second]
        assert cluster is not None
        if other is None or self._kind(other.ops[0]) is None or not self._is_near(cluster.ops[0], other.ops[0]):
            return
        if not other.is_normalizing and cluster.size(cluster.space) != other.size(other.space):
            return
        if cluster.size(cluster.space) > other.size(other.space):
            return
        joined = other.copy()
        if not all(joined.add(op) for op in reversed(cluster.ops)):
            return
        for op in cluster.ops:
            self.cluster_of[op.id] = second
        self.clusters[second], self.clusters[first] = joined, None
        for after in self.feeds.values():
            if first in after:
                after.discard(first)
                after.add(second)
        self.feeds.pop(first, None)

    def result(self) -> Graph:
        position = {op.id: index for index, op in enumerate(self.graph.ops)}
        ops: list[Op] = []
        gone: set[str] = set()
        for cluster in self.clusters:
            if cluster is None:
                continue
            members = sorted(cluster.ops, key=lambda op: position[op.id])
            fused = self._fused(cluster, members) if len(members) > 1 else None
            if fused is None:
                ops += members
                continue
            gone.update(t for op in members for t in op.outputs if t not in fused.outputs)
            position[fused.id] = position[members[-1].id]
            ops.append(fused)
        tensors = {name: tensor for name, tensor in self.graph.tensors.items() if name not in gone}
        return replace(self.graph, ops=tuple(_sorted(ops, position)), tensors=tensors)

    def _fused(self, cluster: _Cluster, members: list[Op]) -> Op | None:
        """The one op; None where no rule fits, or all that it does is view."""
        inside = {op.id for op in members}
        made = dict.fromkeys(tensor_id for op in members for tensor_id in op.outputs)
        outputs = [
            t
            for op in members
            for t in op.outputs
            if t in self.kept or any(r.id not in inside for r in self.readers.get(t, ()))
        ]
        inputs = list(dict.fromkeys(t for op in members for t in op.inputs if t not in made))
        if not outputs or all(op.kind is OpKind.VIEW for op in members):
            return None
        operands, results = (tuple(cluster.dims[t] for t in side) for side in (inputs, outputs))
        rule = _rule(operands, results, cluster)
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
            origin="+".join(dict.fromkeys(functions))[:80],
            attributes=(("operations", per_element),),
        )
        try:
            check_rule(op)
        except GraphError:
            return None
        return op


def _function_of(members: list[Op], outputs: list[str]) -> str:
    adds = all(op.function in PASSES_GRADIENT or op.kind is OpKind.VIEW for op in members)
    return "fused_sum" if adds and len(outputs) == 1 else "fused"


def _kind_of(cluster: _Cluster, functions: list[str]) -> OpKind:
    if not cluster.is_normalizing:
        return OpKind.ELEMENTWISE
    return OpKind.SOFTMAX if "exp" in functions else OpKind.NORM


def _rule(operands: tuple[Dims, ...], results: tuple[Dims, ...], cluster: _Cluster) -> Rule:
    """Factors named by first appearance, reduced ones normalized."""
    names: dict[str, str] = {}
    factors: list[Factor] = []
    counts = {"b": 0, "d": 0}
    for dims in (*operands, *results):
        for dim in dims:
            for name in dim.factors:
                if name not in names:
                    known = cluster.factors[name]
                    letter = "b" if known.is_batch else "d"
                    names[name] = f"{letter}{counts[letter]}"
                    counts[letter] += 1
                    kind = FactorKind.NORMALIZED if name in cluster.reduced else known.kind
                    factors.append(replace(known, name=names[name], kind=kind))

    def renamed(dims: Dims) -> Dims:
        return tuple(Dim(tuple(names[name] for name in dim.factors)) for dim in dims)

    left, right = (tuple(renamed(dims) for dims in side) for side in (operands, results))
    return Rule(left, right, tuple(factors))


def _is_unit_view(rule: Rule) -> bool:
    """A reshape that only adds or drops dimensions of 1."""
    both = (_significant(rule, dims) for dims in (rule.operands[0], rule.results[0]))
    sides = [[dim.factors for dim in dims if dim.factors] for dims in both]
    return sides[0] == sides[1]


def _sorted(ops: list[Op], position: Mapping[str, int]) -> list[Op]:
    """A topological order, forward first, that keeps to the given places."""
    makers = {tensor_id: op.id for op in ops for tensor_id in op.outputs}
    by_id = {op.id: op for op in ops}
    digraph: nx.DiGraph[str] = nx.DiGraph()
    digraph.add_nodes_from(by_id)
    digraph.add_edges_from((makers[t], op.id) for op in ops for t in op.inputs if t in makers)
    order = nx.lexicographical_topological_sort(
        digraph, key=lambda op_id: (by_id[op_id].phase is not Phase.FORWARD, position[op_id])
    )
    return [by_id[op_id] for op_id in order]
