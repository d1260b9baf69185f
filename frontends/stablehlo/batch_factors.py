"""Find batch factors by following the first dimension of the batch arguments, where a model cannot be captured twice.

A factor is made of the batch if it covers, in some tensor, a piece of a dimension that is. Pieces are passed on through
every op to all its tensors until nothing changes (`_batch_pieces`). If a parameter would grow with the batch, or the
rules do not scale, the graph stays fixed to its size and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from phaze.errors import GraphError
from phaze.ir import Dims, Factor, Graph, Op, Role, Rule

__all__ = ["follow_batch", "rule_by_appearance"]

Piece = tuple[int, int, int]
"""A factor in a tensor: its dimension, where in this it starts (the product of the factors before), and its size."""

MOST_SWEEPS = 20
"""Sweeps over the graph, to and fro. More than the turns that a batch takes through the views of a model."""


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
        batch_factors = _batch_factors(op, pieces)
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


def _batch_pieces(graph: Graph, size: int) -> dict[str, set[Piece]]:
    """The pieces of every tensor that are made of the batch."""
    pieces: dict[str, set[Piece]] = {}
    for tensor in graph.tensors.values():
        if tensor.role is Role.BATCH and tensor.shape[:1] == (size,):
            pieces[tensor.id] = {(0, 1, size)}
    for sweep in range(MOST_SWEEPS):
        has_changed = False
        for op in graph.ops if sweep % 2 == 0 else reversed(graph.ops):
            batch_factors = _batch_factors(op, pieces)
            if not batch_factors:
                continue
            for tensor_id, dims in zip((*op.inputs, *op.outputs), op.rule.tensors(), strict=True):
                passed_on = {piece for name, piece in _pieces(op.rule, dims) if name in batch_factors}
                known = pieces.setdefault(tensor_id, set())
                if not passed_on <= known:
                    known |= passed_on
                    has_changed = True
        if not has_changed:
            break
    return pieces


def _pieces(rule: Rule, dims: Dims) -> Iterator[tuple[str, Piece]]:
    """Every factor of a tensor with the piece that it covers; a dimension that is covered in part has none."""
    for index, dim in enumerate(dims):
        if dim.size is not None:
            continue
        start = 1
        for name in dim.factors:
            yield name, (index, start, rule.size(name))
            start *= rule.size(name)


def _batch_factors(op: Op, pieces: dict[str, set[Piece]]) -> frozenset[str]:
    """The factors of an op that cover, in some of its tensors, a piece that is made of the batch."""
    names: set[str] = set()
    for tensor_id, dims in zip((*op.inputs, *op.outputs), op.rule.tensors(), strict=True):
        known = pieces.get(tensor_id)
        if known:
            names.update(name for name, piece in _pieces(op.rule, dims) if piece in known)
    return frozenset(names)


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
