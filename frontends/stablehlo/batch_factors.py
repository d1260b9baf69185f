"""Find batch factors by following the first dimension of the batch arguments, where a model cannot be captured twice.

If a parameter would grow with the batch, or the rules do not scale, the graph stays fixed to its size and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from phaze.errors import GraphError
from phaze.ir import Dims, Factor, Graph, Role, Rule
from phaze.ir.factor_following import Pieces, follow_pieces, followed_factors

__all__ = ["follow_batch", "rule_by_appearance"]


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
