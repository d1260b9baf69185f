"""Find the dimensions of a captured graph that count samples of the batch, and those that count routed experts.

Batch: `follow_batch` finds batch factors by following the first dimension of the batch arguments, where a model cannot
be captured twice. If a parameter would grow with the batch, or the rules do not scale, the graph stays fixed to its
size and says so.

Experts: `mark_routed_experts` finds the op that makes the rows that each expert takes, and marks it for expert
parallelism. Experts show in a product that pairs every matrix of a parameter with rows of its own: a factor of the
parameter is one of the activation and of the result, too. Heads look the same. But rows of experts were chosen: going
back from such a product, one comes to an op that takes tokens without that dimension, and a mask or indices that were
made of a choice (argmax, top-k, sort) by no product. The op right before the product, by which rows are as experts take
them, gets the attribute `EXPERT_DIM`: the dimension of its result that counts experts. Mixtures that run all experts on
all tokens choose nothing before their products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from phaze.errors import GraphError
from phaze.ir import Dims, Factor, Graph, Op, OpKind, Phase, Role, Rule
from phaze.ir.factor_following import Pieces, follow_pieces, followed_factors
from phaze.ir.op import EXPERT_DIM

__all__ = ["follow_batch", "mark_routed_experts", "rule_by_appearance"]


def follow_batch(graph: Graph) -> Graph:
    """The graph with its batch factors marked; itself, with a note, where they cannot be found."""
    size = _batch_size(graph)
    if size is None:
        return _fixed(graph, "no batch of at least 2 was found")
    pieces = _batch_pieces(graph, size)
    if any(pieces.get(tensor.id) for tensor in graph.parameters):
        return _fixed(graph, "parameters would grow with it")
    rules: dict[object, Rule] = {}
    ops = []
    for op in graph.ops:
        batch_factors = followed_factors(op, pieces)
        key = (id(op.rule), batch_factors)
        if key not in rules:
            rules[key] = _with_batch_marks(op.rule, batch_factors)
        ops.append(replace(op, rule=rules[key]))
    note = "batch factors were followed from the batch arguments; not checked at another size"
    try:
        marked = replace(graph, ops=tuple(ops), micro_batch_size=size, notes=(*graph.notes, note))
        marked.with_micro_batch(2 * size)
    except GraphError as error:
        return _fixed(graph, str(error))
    return marked


def _fixed(graph: Graph, reason: str) -> Graph:
    return replace(graph, notes=(*graph.notes, f"fixed to the batch that it was captured with: {reason}"))


def _batch_size(graph: Graph) -> int | None:
    """The first dimension of the first batch argument; None where it is 1, which could not be told from other ones."""
    shapes = [tensor.shape for tensor in graph.tensors.values() if tensor.role is Role.BATCH and tensor.shape]
    return shapes[0][0] if shapes and shapes[0][0] > 1 else None


def _batch_pieces(graph: Graph, size: int) -> Pieces:
    """The pieces of every tensor that are made of the batch."""
    start = {
        tensor.id: {(0, 1, size)}
        for tensor in graph.tensors.values()
        if tensor.role is Role.BATCH and tensor.shape[:1] == (size,)
    }
    return follow_pieces(graph.ops, start)


def _with_batch_marks(rule: Rule, batch_factors: frozenset[str]) -> Rule:
    """The rule with these factors marked as batch."""
    factors = {factor.name: replace(factor, is_batch=factor.name in batch_factors) for factor in rule.factors}
    return rule_by_appearance(rule.operands, rule.results, factors)


def rule_by_appearance(operands: tuple[Dims, ...], results: tuple[Dims, ...], factors: Mapping[str, Factor]) -> Rule:
    """A rule whose factors are named by first appearance: `b0`, `b1` ... for the batch, `d0`, `d1` ... for others.

    Equal ops so have equal rules. `factors` has the factors by the names that the dimensions use.
    """
    new_names: dict[str, str] = {}
    counts = {"b": 0, "d": 0}
    for dims in (*operands, *results):
        for dim in dims:
            for name in dim.factors:
                if name not in new_names:
                    letter = "b" if factors[name].is_batch else "d"
                    new_names[name] = f"{letter}{counts[letter]}"
                    counts[letter] += 1

    def renamed(dims: Dims) -> Dims:
        return tuple(replace(dim, factors=tuple(new_names[name] for name in dim.factors)) for dim in dims)

    return Rule(
        tuple(renamed(dims) for dims in operands),
        tuple(renamed(dims) for dims in results),
        tuple(replace(factors[old], name=new) for old, new in new_names.items()),
    )


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
