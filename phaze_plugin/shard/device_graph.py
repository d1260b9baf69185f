"""The graph that one device of cp and ep runs, before tensor parallelism divides it further.

Forward ops are rewritten (`context_slicing.py`, `expert_slicing.py`) and backward is derived again by rule, in which
the gradient of a collective is the collective that brings gradients back.

Some sequences lose positions at their end, as logits do that are compared with labels shifted by one. Where that is
asked for, they are lengthened before they are sliced (`with_dropped_positions`). A part of such a sequence is no
shorter than before: the last device goes on to compute what was dropped, and leaves it out of sums. So the ops behind
are written as ops on the whole sequence, which every device has an equal part of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from phaze.errors import ShardError
from phaze.ir import Dim, Dims, Factor, FactorKind, Graph, GraphBuilder, Op, Phase, Rule
from phaze.ir.backward import without_backward
from phaze.ir.factor_following import token_lengths
from phaze.ir.rule import names_of
from phaze.shard.context_slicing import KeyExchange, gather_again, slice_context
from phaze.shard.expert_slicing import expert_counts, slice_experts

__all__ = ["device_graph", "with_dropped_positions"]


def with_dropped_positions(graph: Graph, cp: int) -> Graph:
    """The forward ops with what they dropped at the ends of sequences that cp divides; the graph itself where none did.

    A graph stays as it is where it drops the first positions of what it learned, whose parts would have to move, or
    where it makes short sequences whole again, as rolled or padded labels are.
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
    if not lengths or any(_drops_the_first(graph, op, lengths) or _makes_whole(op, lengths) for op in forward):
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


def _makes_whole(op: Op, lengths: dict[int, int]) -> bool:
    """Whether an op puts a short sequence into a whole one."""
    return any(
        dim.size in lengths and any(op.rule.factor(name).size == lengths[dim.size] for name in dim.factors)
        for dims in op.rule.operands
        for dim in dims
    )


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


def device_graph(
    graph: Graph,
    *,
    cp: int = 1,
    ep: int = 1,
    exchanges: Mapping[str, KeyExchange] | None = None,
    expert_imbalance: float = 1.0,
    keeps_dropped: bool = False,
    keeps_gathered: bool = False,
) -> Graph:
    """The graph of one device when sequences are split over cp and experts divided over ep devices.

    `exchanges` says how each fused attention gets its keys, by op, where that is not by an all-gather. With
    `keeps_dropped`, positions that a model drops at the end of a sequence are computed and left out, so that cp divides
    what is left. With `keeps_gathered`, gathered keys are kept for backward and not gathered again. A graph without
    anything to slice is given back as it is.

    Raises:
        ShardError: cp or ep does not divide what it splits, there is nothing to split, an op cannot be sliced, or
            backward was captured and could not be derived by rule.
    """
    has_imbalance = expert_imbalance != 1 and bool(expert_counts(graph))
    if cp == 1 and ep == 1 and not has_imbalance:
        return graph
    has_backward = any(op.phase is Phase.BACKWARD for op in graph.ops)
    if has_backward and not graph.is_backward_derived:
        raise ShardError(
            f"cp={cp} and ep={ep} need a backward by rule, but that of model {graph.name!r} is kept as captured: "
            f"{graph.why_backward_kept or 'it was not derived'}. Use cp=1 and ep=1."
        )
    forward = without_backward(graph)
    if cp > 1:
        forward = with_dropped_positions(forward, cp) if keeps_dropped else forward
        forward = slice_context(forward, cp, exchanges)
    if ep > 1 or has_imbalance:
        forward = slice_experts(forward, ep, expert_imbalance)
    return gather_again(forward.with_backward(), keeps_gathered=keeps_gathered) if has_backward else forward
