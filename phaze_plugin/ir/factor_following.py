"""Follow dimensions of some tensors through a graph: which factors of which ops are made of them.

A factor is made of a followed dimension if it covers, in some tensor, a piece of a dimension that is. Pieces are passed
on through every op to all its tensors, to and fro over the ops, until nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from phaze.ir.op import Op
from phaze.ir.rule import Dims, Rule

__all__ = ["Piece", "Pieces", "follow_pieces", "followed_factors", "pieces_of"]

Piece = tuple[int, int, int]
"""A factor in a tensor: its dimension, where in this it starts (the product of the factors before), and its size."""

Pieces = dict[str, set[Piece]]
"""The followed pieces of each tensor that has some."""

MOST_SWEEPS = 20
"""Sweeps over the graph, to and fro. More than the turns that a dimension takes through the views of a model."""


def follow_pieces(ops: Sequence[Op], start: Mapping[str, set[Piece]]) -> Pieces:
    """The pieces of every tensor that are made of those at the start."""
    pieces = {tensor_id: set(known) for tensor_id, known in start.items()}
    of_rule = {id(op.rule): [*map(partial(pieces_of, op.rule), op.rule.tensors())] for op in ops}
    for sweep in range(MOST_SWEEPS):
        has_changed = False
        for op in ops if sweep % 2 == 0 else reversed(ops):
            around = [*zip((*op.inputs, *op.outputs), of_rule[id(op.rule)], strict=True)]
            followed = _followed(around, pieces)
            if not followed:
                continue
            for tensor_id, factors in around:
                passed_on = {piece for name, piece in factors if name in followed}
                known = pieces.setdefault(tensor_id, set())
                if not passed_on <= known:
                    known |= passed_on
                    has_changed = True
        if not has_changed:
            break
    return pieces


def followed_factors(op: Op, pieces: Mapping[str, set[Piece]]) -> frozenset[str]:
    """The factors of an op that cover, in some of its tensors, a piece that is followed."""
    around = zip((*op.inputs, *op.outputs), map(partial(pieces_of, op.rule), op.rule.tensors()), strict=True)
    return frozenset(_followed(around, pieces))


def _followed(around: Iterable[tuple[str, list[tuple[str, Piece]]]], pieces: Mapping[str, set[Piece]]) -> set[str]:
    """The followed factors of an op, given its tensors with the piece that each factor covers in them."""
    names: set[str] = set()
    for tensor_id, factors in around:
        known = pieces.get(tensor_id)
        if known:
            names.update(name for name, piece in factors if piece in known)
    return names


def pieces_of(rule: Rule, dims: Dims) -> list[tuple[str, Piece]]:
    """Every factor of a tensor with the piece that it covers; a dimension that is covered in part has none."""
    pieces = []
    for index, dim in enumerate(dims):
        if dim.size is not None:
            continue
        start = 1
        for name in dim.factors:
            pieces.append((name, (index, start, rule.size(name))))
            start *= rule.size(name)
    return pieces
