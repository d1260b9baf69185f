"""Sequence factors: found by following dimension 1 of the token inputs through the graph.

Tokens are integers that enter as [batch, positions, ...]. Every factor that is made of their positions gets its mark,
and so do the rows that a mixture of experts takes of each sequence, because their number grows with its length. What
enters in another form (images, sounds) has no sequence here, and neither has a graph without tokens. Where a model
drops some of the positions first, as losses over shifted labels do, the sequence is what is left of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from phaze.ir.factor_following import Piece, Pieces, follow_pieces, followed_factors
from phaze.ir.graph import Graph
from phaze.ir.op import Op, Phase
from phaze.ir.rule import Dim, Rule
from phaze.ir.tensor import Role, Tensor

__all__ = ["mark_sequences", "marks_sequence", "token_lengths"]


def marks_sequence(graph: Graph) -> bool:
    """Whether some factor of a graph runs along the sequence."""
    return any(factor.is_sequence for op in graph.ops for factor in op.rule.factors)


def mark_sequences(graph: Graph) -> Graph:
    """The graph with its sequence factors marked; itself where it has none, or has them marked already."""
    if marks_sequence(graph):
        return graph
    forward = graph.ops_of(Phase.FORWARD)
    start = _token_pieces(graph)
    pieces = follow_pieces(forward, start) if start else {}
    rows = _routed_rows(forward, pieces)
    if rows:
        pieces = follow_pieces(forward, pieces | rows)
    names = {op.id: followed_factors(op, pieces) for op in forward}
    if not any(names.values()):
        return graph
    is_derived = graph.is_backward_derived
    marked: dict[object, Rule] = {}
    ops = []
    for op in graph.ops:
        # Backward ops by rule speak of the factors of their forward ops; captured ones are left as they are.
        followed = names.get(op.gradient_of if is_derived and op.gradient_of else op.id, frozenset())
        key = (id(op.rule), followed)
        if key not in marked:
            marked[key] = _with_marks(op.rule, followed)
        ops.append(op.with_rule(marked[key]))
    return replace(graph, ops=tuple(ops))


def token_lengths(graph: Graph) -> dict[str, int]:
    """The positions of each token input that all ops work on, by its name; some may drop the first or the last."""
    tokens = {tensor.id: tensor for tensor in graph.tensors.values() if _may_be_tokens(tensor)}
    lengths: dict[str, int] = {}
    for op in graph.ops_of(Phase.FORWARD):
        for name, dims in zip(op.inputs, op.rule.operands, strict=True):
            is_token = name in tokens and len(dims) > 1
            along = [factor for factor in dims[1].factors if op.rule.factor(factor).is_sequence] if is_token else []
            if along:
                length = math.prod(op.rule.size(factor) for factor in along)
                lengths[name] = min(length, lengths.get(name, length))
    return lengths


def _may_be_tokens(tensor: Tensor) -> bool:
    """Whether an argument may hold tokens: integers, one for each position of each sample."""
    is_integer = not tensor.dtype.is_float
    return tensor.role is Role.BATCH and is_integer and len(tensor.shape) > 1 and tensor.shape[1] > 1


def _token_pieces(graph: Graph) -> dict[str, set[Piece]]:
    """Dimension 1 of every token input whose dimension 0 is the batch, as far as the graph marks one."""
    start: dict[str, set[Piece]] = {}
    is_marked = any(factor.is_batch for op in graph.ops for factor in op.rule.factors)
    for op in graph.ops_of(Phase.FORWARD):
        for name, dims in zip(op.inputs, op.rule.operands, strict=True):
            tensor = graph.tensors[name]
            if not _may_be_tokens(tensor):
                continue
            if not is_marked or any(op.rule.factor(factor).is_batch for factor in dims[0].factors):
                start[name] = {(1, 1, tensor.shape[1])}
                # Labels are the tokens one further on: models drop the last of the inputs and the first of the labels.
                for result, result_dims in zip(op.outputs, op.rule.results, strict=True):
                    if dims[1].size is not None and result_dims[1:2] == (Dim(dims[1].factors),):
                        start[result] = {(1, 1, op.rule.dim_size(result_dims[1]))}
    return start


def _routed_rows(forward: tuple[Op, ...], pieces: Pieces) -> Pieces:
    """The rows of each sequence that experts take: dimension 2 of what is dispatched to them."""
    return {
        op.outputs[0]: {(2, 1, op.rule.shape(op.rule.results[0])[2])}
        for op in forward
        if op.function == "dispatch" and followed_factors(op, pieces)
    }


def _with_marks(rule: Rule, names: frozenset[str]) -> Rule:
    if not names.intersection(factor.name for factor in rule.factors):
        return rule
    factors = tuple(replace(factor, is_sequence=factor.name in names) for factor in rule.factors)
    return Rule(rule.operands, rule.results, factors)
