"""Experts in captured models: which op makes the rows that each expert takes, marked for expert parallelism.

Experts show in a product that pairs every matrix of a parameter with rows of its own: a factor of the parameter is one
of the activation and of the result, too. Heads look the same. But rows of experts were chosen: going back from such a
product, one comes to an op that takes tokens without that dimension, and a mask or indices that were made of a choice
(argmax, top-k, sort) by no product. The op right before the product, by which rows are as experts take them, gets the
attribute `EXPERT_DIM`: the dimension of its result that counts experts. Mixtures that run all experts on all tokens
choose nothing before their products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phaze.ir import Dims, Graph, Op, OpKind, Phase, Role
from phaze.ir.op import EXPERT_DIM

__all__ = ["mark_routed_experts"]

_CHOICES = frozenset({"argmax", "argmin", "sort", "top_k"})
"""Functions that choose."""

_ROUTES = frozenset({OpKind.CONTRACTION, OpKind.LOOKUP, OpKind.SCATTER})
"""Kinds of ops that bring tokens to experts: by a product with a mask of zeros and ones, or by indices."""

MOST_STEPS_BACK = 60
"""How many ops are looked at on the way back from a mask to a choice: several times what published routers have."""


def mark_routed_experts(graph: Graph) -> Graph:
    """The graph with its routing ops marked; itself where it has none, or where its batch factors are not known."""
    found = dict(_Routes(graph, _made_of_parameters(graph)).find())
    if not found:
        return graph
    ops = tuple(
        replace(op, attributes=(*op.attributes, (EXPERT_DIM, found[op.id]))) if op.id in found else op
        for op in graph.ops
    )
    return replace(graph, ops=ops)


def _made_of_parameters(graph: Graph) -> frozenset[str]:
    """Parameters, and what is made of parameters alone, such as a change of their type."""
    made = {tensor.id for tensor in graph.parameters}
    for op in graph.ops_of(Phase.FORWARD):
        if op.inputs and made.issuperset(op.inputs):
            made.update(op.outputs)
    return frozenset(made)


def _dim_of(dims: Dims, factor: str) -> int | None:
    """The dimension that is this factor and nothing else."""
    return next((index for index, dim in enumerate(dims) if dim.factors == (factor,) and dim.size is None), None)


@dataclass(frozen=True, slots=True)
class _Routes:
    graph: Graph
    made_of_parameters: frozenset[str]

    def find(self) -> Iterator[tuple[str, int]]:
        """The routing ops, by id, with the dimension of their result that counts experts."""
        for op in self.graph.ops_of(Phase.FORWARD):
            if op.kind is not OpKind.CONTRACTION or len(op.inputs) != 2:
                continue
            for side in (0, 1):
                if op.inputs[side] in self.made_of_parameters and op.inputs[1 - side] not in self.made_of_parameters:
                    yield from self._routes_of_product(op, side)

    def _routes_of_product(self, op: Op, side: int) -> Iterator[tuple[str, int]]:
        own, other = op.rule.operands[side], op.rule.operands[1 - side]
        for dim in own:
            factor = dim.factors[0] if len(dim.factors) == 1 else None
            if factor is None or _dim_of(op.rule.results[0], factor) is None or op.rule.factor(factor).is_batch:
                continue
            place, maker = _dim_of(other, factor), self.graph.producer(op.inputs[1 - side])
            if place is None or maker is None or len(maker.outputs) > 1 or not _has_batch(maker):
                continue
            if self._is_routed(op.inputs[1 - side], place):
                yield maker.id, place

    def _is_routed(self, tensor: str, dim: int) -> bool:
        """Whether a choice made the rows of a tensor, going back along one of its dimensions."""
        for _ in range(MOST_STEPS_BACK):
            op = self.graph.producer(tensor)
            if op is None:
                return False
            result = op.rule.results[op.outputs.index(tensor)]
            if len(result[dim].factors) != 1:
                return False
            (factor,) = result[dim].factors
            if self._is_route(op, factor):
                return True
            places = {
                name: _dim_of(dims, factor)
                for name, dims in zip(op.inputs, op.rule.operands, strict=True)
                if self._is_activation(name)
            }
            name = next((name for name, place in places.items() if place is not None), None)
            if name is None or op.kind is OpKind.CONTRACTION:
                return False
            tensor, dim = name, places[name] or 0
        return False

    def _is_route(self, op: Op, factor: str) -> bool:
        """Whether an op brings tokens, which do not have this factor yet, where a choice says."""
        if op.kind not in _ROUTES or len(op.outputs) > 1:
            return False
        pairs = [*zip(op.inputs, op.rule.operands, strict=True)]
        tokens = {name for name, dims in pairs if self._is_activation(name) and not _has(dims, factor)}
        return bool(tokens) and any(self._is_chosen(name) for name in op.inputs if name not in tokens)

    def _is_activation(self, name: str) -> bool:
        tensor = self.graph.tensors[name]
        return tensor.dtype.is_float and tensor.role is None and name not in self.made_of_parameters

    def _is_chosen(self, name: str) -> bool:
        """Whether a tensor is made of a choice, without a product on the way."""
        open_names, seen = [name], set[str]()
        while open_names and len(seen) < MOST_STEPS_BACK:
            op = self.graph.producer(open_names.pop(0))
            if op is None or op.id in seen or op.kind is OpKind.CONTRACTION:
                continue
            if op.function in _CHOICES or op.kind is OpKind.SORT:
                return True
            seen.add(op.id)
            open_names.extend(name for name in op.inputs if self.graph.tensors[name].role is not Role.PARAMETER)
        return False


def _has_batch(op: Op) -> bool:
    return any(op.rule.factor(name).is_batch for dim in op.rule.results[0] for name in dim.factors)


def _has(dims: Dims, factor: str) -> bool:
    return any(factor in dim.factors for dim in dims)
