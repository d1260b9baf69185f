"""Sequences that lose positions at their end, as logits do that are compared with labels shifted by one.

A part of such a sequence is no shorter than before: the last device goes on to compute what was dropped, and leaves it
out of sums. So the ops behind are written as ops on the whole sequence, which every device has an equal part of.
"""

from __future__ import annotations

from dataclasses import replace

from phaze.ir import Dim, Dims, Factor, FactorKind, Graph, GraphBuilder, Op, Phase, Rule
from phaze.ir.rule import names_of
from phaze.ir.sequence_factors import token_lengths

__all__ = ["with_dropped_positions"]


def with_dropped_positions(graph: Graph, cp: int) -> Graph:
    """The forward ops with what they dropped at the ends of sequences that cp divides; the graph itself where none did.

    A graph that drops the first positions of what it learned stays as it is: its parts would have to move.
    """
    forward = graph.ops_of(Phase.FORWARD)
    whole = {graph.tensors[name].shape[1] for name in token_lengths(graph)}
    lengths = {
        factor.size: length
        for op in forward
        for factor in op.rule.factors
        for length in whole
        if factor.is_sequence and length % cp == 0 and 0 < length - factor.size < cp
    }
    if not lengths or any(_drops_the_first(graph, op, lengths) for op in forward):
        return graph
    builder = GraphBuilder(graph.name, micro_batch_size=graph.micro_batch_size)
    for tensor in graph.tensors.values():
        if tensor.role is not None:
            builder.argument(tensor.id, tensor.shape, tensor.role, tensor.dtype, is_frozen=tensor.is_frozen)
    for op in forward:
        rule = builder.shared(_lengthened(op.rule, lengths))
        builder.insert(replace(op, rule=rule), [graph.tensors[name].dtype for name in op.outputs])
    note = "positions that are dropped at the end of a sequence are computed and left out, so that its parts are equal"
    return builder.build(graph.outputs, (*graph.notes, note))


def _drops_the_first(graph: Graph, op: Op, lengths: dict[int, int]) -> bool:
    """Whether an op takes another part of what was learned than the first positions."""
    short = {factor.name for factor in op.rule.factors if factor.is_sequence and factor.size in lengths}
    is_cut = any(dim.size is not None and short.intersection(dim.factors) for dims in op.rule.operands for dim in dims)
    reads_activations = any(graph.tensors[name].dtype.is_float for name in op.inputs)
    return is_cut and reads_activations and op.attribute("start") != 0


def _lengthened(rule: Rule, lengths: dict[int, int]) -> Rule:
    """A rule whose short sequences are whole ones."""
    short = {factor.name for factor in rule.factors if factor.is_sequence and factor.size in lengths}
    if not short:
        return rule
    cut = {name for dims in rule.tensors() for dim in dims if dim.size is not None for name in dim.factors}

    def factor_of(factor: Factor) -> Factor:
        if factor.name not in short:
            return factor
        kind = FactorKind.FREE if factor.name in cut else factor.kind
        return replace(factor, size=lengths[factor.size], kind=kind)

    def dims_of(dims: Dims) -> Dims:
        return tuple(Dim(dim.factors) if short & names_of((dim,)) else dim for dim in dims)

    return Rule(
        tuple(map(dims_of, rule.operands)), tuple(map(dims_of, rule.results)), tuple(map(factor_of, rule.factors))
    )
