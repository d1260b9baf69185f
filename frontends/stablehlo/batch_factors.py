"""Batch factors followed from the first dimension of the batch arguments, where a model cannot be captured twice.

A factor is made of the batch if it covers, in some tensor, a piece of a dimension that is. Pieces are passed on through
every op to all its tensors until nothing changes. If a parameter would grow, or the rules do not scale, the graph stays
fixed to its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phaze.errors import GraphError
from phaze.ir import Dims, Graph, Op, Role, Rule

__all__ = ["follow_batch"]

Piece = tuple[int, int, int]
"""A dimension, where in it a factor starts (the product of those before it), and the factor's size."""

MOST_SWEEPS = 20


def follow_batch(graph: Graph) -> Graph:
    """The graph with its batch factors marked; itself, with a note, where they cannot be found."""
    size = _batch_size(graph)
    if size is None:
        return _fixed(graph, "no batch of at least 2 was found")
    pieces = _find_pieces(graph, size)
    if any(pieces.get(tensor.id) for tensor in graph.parameters):
        return _fixed(graph, "parameters would grow with it")
    rules: dict[object, Rule] = {}
    ops = []
    for op in graph.ops:
        marked = _marked(op, pieces)
        key = (id(op.rule), marked)
        if key not in rules:
            rules[key] = _with_marks(op.rule, marked)
        ops.append(replace(op, rule=rules[key]))
    note = "batch factors were followed from the batch arguments; not checked at another size"
    try:
        found = replace(graph, ops=tuple(ops), micro_batch_size=size, notes=(*graph.notes, note))
        found.with_micro_batch(2 * size)
    except GraphError as error:
        return _fixed(graph, str(error))
    return found


def _fixed(graph: Graph, reason: str) -> Graph:
    return replace(graph, notes=(*graph.notes, f"fixed to the batch that it was captured with: {reason}"))


def _batch_size(graph: Graph) -> int | None:
    shapes = [tensor.shape for tensor in graph.tensors.values() if tensor.role is Role.BATCH and tensor.shape]
    return shapes[0][0] if shapes and shapes[0][0] > 1 else None


def _find_pieces(graph: Graph, size: int) -> dict[str, set[Piece]]:
    pieces: dict[str, set[Piece]] = {}
    for tensor in graph.tensors.values():
        if tensor.role is Role.BATCH and tensor.shape[:1] == (size,):
            pieces[tensor.id] = {(0, 1, size)}
    for sweep in range(MOST_SWEEPS):
        has_changed = False
        for op in graph.ops if sweep % 2 == 0 else reversed(graph.ops):
            marked = _marked(op, pieces)
            if not marked:
                continue
            for tensor_id, dims in zip((*op.inputs, *op.outputs), op.rule.tensors(), strict=True):
                found = {piece for name, piece in _pieces(op.rule, dims) if name in marked}
                known = pieces.setdefault(tensor_id, set())
                if not found <= known:
                    known |= found
                    has_changed = True
        if not has_changed:
            break
    return pieces


def _pieces(rule: Rule, dims: Dims) -> Iterator[tuple[str, Piece]]:
    for index, dim in enumerate(dims):
        if dim.size is not None:
            continue
        start = 1
        for name in dim.factors:
            yield name, (index, start, rule.size(name))
            start *= rule.size(name)


def _marked(op: Op, pieces: dict[str, set[Piece]]) -> frozenset[str]:
    found: set[str] = set()
    for tensor_id, dims in zip((*op.inputs, *op.outputs), op.rule.tensors(), strict=True):
        known = pieces.get(tensor_id)
        if known:
            found.update(name for name, piece in _pieces(op.rule, dims) if piece in known)
    return frozenset(found)


def _with_marks(rule: Rule, marked: frozenset[str]) -> Rule:
    """The rule with batch factors marked, and named after first appearance: `b0` and on for them, `d0` for others."""
    names: dict[str, str] = {}
    counts = {"b": 0, "d": 0}
    for dims in rule.tensors():
        for dim in dims:
            for name in dim.factors:
                if name not in names:
                    letter = "b" if name in marked else "d"
                    names[name] = f"{letter}{counts[letter]}"
                    counts[letter] += 1

    def renamed(dims: Dims) -> Dims:
        return tuple(replace(dim, factors=tuple(names[name] for name in dim.factors)) for dim in dims)

    by_name = {factor.name: factor for factor in rule.factors}
    factors = tuple(replace(by_name[old], name=new, is_batch=old in marked) for old, new in names.items())
    return Rule(tuple(renamed(dims) for dims in rule.operands), tuple(renamed(dims) for dims in rule.results), factors)
