"""Attention as a fused kernel: a graph pass that puts scores, softmax, dropout and context into one op.

It looks in the forward ops for

    scores = contraction(query, key);  p = softmax(scores);  [p = dropout(p)];  context = contraction(p, value)

where nothing else reads what lies between, and writes one attention op in the place of the last. The key is the operand
that holds the normalized factor. Three things have the same form and are not attention: a router that weighs experts
(its key is a parameter), values that differ from query to query, and a context that keeps the key positions apart. They
are left alone, and so is anything whose fused matrix work would differ from that of its parts.

Backward is derived again by rule, so that neither phase moves or keeps anything of the size of the scores; dropout's
mask is made again from its seed. Softmax with a learned bias is left alone, because the fused op would have no gradient
for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from phaze.errors import CostError
from phaze.ir import Dim, Dims, FactorKind, Graph, Op, OpKind, Phase, Role, Rule
from phaze.ir.rule import names_of

__all__ = [
    "fuse_attention",
]


def fuse_attention(graph: Graph) -> Graph:
    """``graph`` with fused attention ops; itself where there is nothing to fuse.

    A graph with phases that cannot be derived again by rule is refused with a `CostError`.
    """
    foreign = {op.phase for op in graph.ops} - {Phase.FORWARD, Phase.BACKWARD}
    if foreign:
        raise CostError(
            f"graph {graph.name!r} holds {', '.join(sorted(foreign))} ops; fuse attention in a graph of forward ops."
        )
    readers: dict[str, list[Op]] = {}
    for op in graph.ops_of(Phase.FORWARD):
        for tensor_id in op.inputs:
            readers.setdefault(tensor_id, []).append(op)
    matches = [match for op in graph.ops_of(Phase.FORWARD) if (match := _match(graph, op, readers)) is not None]
    return _rewritten(graph, matches) if matches else graph


@dataclass(frozen=True, slots=True)
class _Match:
    """The ops to remove, and the attention op that stands for them under the last one's id."""

    removed: tuple[Op, ...]
    fused: Op


def _match(graph: Graph, softmax: Op, readers: Mapping[str, list[Op]]) -> _Match | None:
    """The attention around a softmax, or None where its neighbours are not those of attention."""
    if softmax.kind is not OpKind.SOFTMAX or softmax.function != "softmax" or len(softmax.inputs) != 1:
        return None
    scores = graph.producer(softmax.inputs[0])
    chain: list[Op] = [softmax]
    following = _only_reader(graph, softmax.outputs[0], readers)
    if following is not None and following.kind is OpKind.DROPOUT:
        chain.append(following)
        following = _only_reader(graph, following.outputs[0], readers)
    if scores is None or scores.kind is not OpKind.CONTRACTION or following is None:
        return None
    if following.kind is not OpKind.CONTRACTION or _only_reader(graph, scores.outputs[0], readers) is not softmax:
        return None
    rule, inputs = _joined(scores, softmax, following, chain[-1].outputs[0])
    if rule is None or _is_parameter(graph, inputs[1]):
        return None
    attributes = dict(sorted(pair for op in chain for pair in op.attributes))
    fused = replace(
        following,
        kind=OpKind.ATTENTION,
        function="attention",
        rule=rule,
        inputs=inputs,
        attributes=tuple(attributes.items()),
    )
    is_same_work = fused.matmul_flops == scores.matmul_flops + following.matmul_flops
    return _Match((scores, *chain, following), fused) if is_same_work else None


def _is_parameter(graph: Graph, tensor_id: str) -> bool:
    """Whether a tensor is a parameter, or a view of one."""
    producer = graph.producer(tensor_id)
    while producer is not None and producer.kind is OpKind.VIEW:
        tensor_id = producer.inputs[0]
        producer = graph.producer(tensor_id)
    return graph.tensors[tensor_id].role is Role.PARAMETER


def _only_reader(graph: Graph, tensor_id: str, readers: Mapping[str, list[Op]]) -> Op | None:
    """The op that alone reads a tensor; None where several do, nobody does, or the graph gives it out."""
    tensor_readers = readers.get(tensor_id, [])
    return tensor_readers[0] if len(tensor_readers) == 1 and tensor_id not in graph.outputs else None


def _joined(scores: Op, softmax: Op, context: Op, probabilities: str) -> tuple[Rule | None, tuple[str, ...]]:
    """The rule (query, key, value -> context) in the names of the scores' rule, and the operands in that order."""
    score_dims = scores.rule.results[0]
    left = context.inputs.index(probabilities)
    right = 1 - left  # a contraction has two operands: the probabilities and the value
    from_softmax = _renaming(softmax.rule.operands[0], score_dims)
    from_context = _renaming(context.rule.operands[left], score_dims)
    if from_softmax is None or from_context is None:
        return None, ()
    normalized = {from_softmax[factor.name] for factor in softmax.rule.factors if factor.kind is FactorKind.NORMALIZED}
    key = next((index for index, names in enumerate(scores.rule.operand_names) if normalized <= names), None)
    value, result = context.rule.operands[right], context.rule.results[0]
    if key is None or not _is_value(value, result, from_context, scores.rule.operand_names[key], normalized):
        return None, ()
    taken = {factor.name for factor in scores.rule.factors}
    value_factors = [factor for factor in context.rule.factors if factor.name not in from_context]
    names = from_context | {factor.name: _fresh(factor.name, taken) for factor in value_factors}
    factors = [
        replace(factor, kind=FactorKind.NORMALIZED) if factor.name in normalized else factor
        for factor in scores.rule.factors
    ] + [replace(factor, name=names[factor.name]) for factor in value_factors]
    query_dims, key_dims = scores.rule.operands[1 - key], scores.rule.operands[key]
    rule = Rule((query_dims, key_dims, _renamed(value, names)), (_renamed(result, names),), tuple(factors))
    return rule, (scores.inputs[1 - key], scores.inputs[key], context.inputs[right])


def _is_value(
    value: Dims, result: Dims, from_context: Mapping[str, str], key: frozenset[str], normalized: set[str]
) -> bool:
    """Whether an operand of the context product is a value in the sense of attention.

    Each of its factors must either be one of the key's or appear in the result, and the key positions (the normalized
    factors) must be summed. ``from_context`` renames the context's factors to those of the scores.
    """
    shared = {from_context[name] for name in names_of(value) if name in from_context}
    value_only = {name for name in names_of(value) if name not in from_context}
    kept = {from_context.get(name) for name in names_of(result)}
    return normalized <= shared <= key and value_only <= names_of(result) and not normalized & kept


def _renaming(dims: Dims, target_dims: Dims) -> dict[str, str] | None:
    """The target's name of each factor in ``dims``, or None where the two are not made of factors in the same way."""
    if [len(dim.factors) for dim in dims] != [len(dim.factors) for dim in target_dims]:
        return None
    return {
        name: target_name
        for dim, target_dim in zip(dims, target_dims, strict=True)
        for name, target_name in zip(dim.factors, target_dim.factors, strict=True)
    }


def _renamed(dims: Dims, names: Mapping[str, str]) -> Dims:
    return tuple(Dim(tuple(names[name] for name in dim.factors), dim.size) for dim in dims)


def _fresh(name: str, taken: set[str]) -> str:
    """A factor name that is not taken yet; it is taken from then on."""
    while name in taken:
        name = f"{name}_v"
    taken.add(name)
    return name


def _rewritten(graph: Graph, matches: list[_Match]) -> Graph:
    """The graph with every match replaced by its attention op; a backward that was there is derived again."""
    removed = {op.id for match in matches for op in match.removed}
    fused = {match.fused.id: match.fused for match in matches}
    ops = tuple(fused.get(op.id, op) for op in graph.ops_of(Phase.FORWARD) if op.id not in removed or op.id in fused)
    used = {tensor_id for op in ops for tensor_id in (*op.inputs, *op.outputs)} | set(graph.outputs)
    keep = {Role.PARAMETER, Role.BATCH, Role.OPTIMIZER_STATE}
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name in used or tensor.role in keep}
    had_backward = len(graph.ops_of(Phase.BACKWARD)) > 0
    notes = (*graph.notes, f"{len(matches)} attentions fused")
    forward = replace(graph, tensors=tensors, ops=ops, gradients=(), notes=notes)
    return forward.with_backward() if had_backward else forward
