"""Attention as a fused kernel: a graph pass that puts scores, softmax, dropout and context into one op.

It looks in the forward ops for

    scores = contraction(query, key);  p = softmax(scores);  context = contraction(p, value)

where nothing else reads what lies between, and writes one attention op in the place of the last. Between the products
may stand what kernels apply to scores on the chip: views, scaling, caps, masks, casts, dropout (`_Walk`). The key is
the operand that holds the normalized factor. Keys and values that were repeated for several query heads are read as
they were before (`_before_repeat`), as kernels for grouped queries do. Three things have the same form and are not
attention: a router that weighs experts (its key is a parameter), values that differ from query to query, and a context
that keeps the key positions apart. They are left alone, and so is anything whose fused matrix work would differ from
that of its parts.

Backward is derived again by rule, so that neither phase moves or keeps anything of the size of the scores: it reads
query, key, value, context and its gradient, computes the scores again and so does five products where four are enough
with the scores at hand (Dao et al., arXiv:2205.14135, algorithm 4; Dao, arXiv:2307.08691, section 3.1). Dropout's mask
is made again from its seed. The logarithms of sums that kernels keep for each row are left out: four bytes beside the
row of the context.

A learned sink of each head is an operand, whose gradient kernels sum on the way. A learned bias of the scores (T5's
positions) keeps its attention apart, with a note: flash and splash kernels take none that has a gradient, and those
that do (torch's memory-efficient one) write that gradient at the size of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phaze.cost.operator_work import softmax_operations, vector_operations
from phaze.errors import CostError
from phaze.ir import Attribute, Dim, Dims, FactorKind, Graph, Op, OpKind, Phase, Role, Rule
from phaze.ir.backward import tensors_with_gradient
from phaze.ir.rule import names_of

__all__ = ["fuse_attention"]


def fuse_attention(graph: Graph) -> Graph:
    """``graph`` with fused attention ops; itself where there is nothing to fuse.

    A graph with phases that cannot be derived again by rule is refused with a `CostError`.
    """
    foreign = {op.phase for op in graph.ops} - {Phase.FORWARD, Phase.BACKWARD}
    if foreign:
        raise CostError(
            f"graph {graph.name!r} holds {', '.join(sorted(foreign))} ops; fuse attention in a graph of forward ops."
        )
    matcher = _Matcher(graph)
    matches = [match for op in graph.ops_of(Phase.FORWARD) if (match := matcher.match(op)) is not None]
    return _rewritten(graph, matches, matcher.learned_biases) if matches else graph


@dataclass(frozen=True, slots=True)
class _Match:
    """The ops to remove, and the attention op that stands for them under the last one's id."""

    removed: tuple[Op, ...]
    fused: Op


@dataclass(slots=True)
class _Walk:
    """The way of the scores: the tensor that they are now, its dims in the score product's names, what was passed.

    ``extras`` are the other operands that were met, with their dims in the same names; ``cap`` is how far scores are on
    the way through ``cap * tanh(scale * scores / cap)``.
    """

    scores: Op
    tensor: str
    dims: Dims
    ops: list[Op] = field(default_factory=list)
    extras: list[tuple[str, Dims]] = field(default_factory=list)
    softmax: Op | None = None
    normalized: frozenset[str] = frozenset()
    attributes: dict[str, Attribute] = field(default_factory=dict)
    scale: float | None = 1.0
    is_capped: bool = False
    operations: int = 0

    def passes(self, op: Op, readers: Mapping[str, list[Op]]) -> bool:
        """Take the scores through an op; False where it is nothing that a kernel does on the chip."""
        if op.inputs.count(self.tensor) != 1 or not _is_inside(op):
            return False
        index = op.inputs.index(self.tensor)
        names = _renaming(op.rule, op.rule.operands[index], self.dims, self.scores.rule.size)
        leaving = [place for place, tensor_id in enumerate(op.outputs) if readers.get(tensor_id)]
        if names is None or len(leaving) != 1:
            return False
        dims = _renamed(op.rule, op.rule.results[leaving[0]], names)
        sides = [_renamed(op.rule, side, names) for side in op.rule.operands]
        if any(side is None for side in sides) or dims is None or names_of(dims) != names_of(self.dims):
            return False
        if op.kind is OpKind.SOFTMAX and not self._normalizes(op, names):
            return False
        self.extras += [
            (tensor_id, side)
            for place, (tensor_id, side) in enumerate(zip(op.inputs, sides, strict=True))
            if place != index and side is not None
        ]
        self._counts(op)
        self.ops.append(op)
        self.tensor, self.dims = op.outputs[leaving[0]], dims
        return True

    def _normalizes(self, op: Op, names: Mapping[str, str]) -> bool:
        """Whether this softmax is the first one on the way; it says what is normalized and which keys are seen."""
        if self.softmax is not None or op.function not in _SOFTMAXES:
            return False
        self.softmax = op
        normalized = {factor.name for factor in op.rule.factors if factor.kind is FactorKind.NORMALIZED}
        self.normalized = frozenset(names[name] for name in normalized if name in names)
        self.attributes |= {name: value for name, value in op.attributes if name in ("window", "chunk")}
        causal = op.attribute("causal")
        if isinstance(causal, str):
            self.attributes["causal"] = " ".join(names[name] for name in causal.split())
        scale = op.attribute("scale")
        if isinstance(scale, int | float):
            self.scale = None if self.scale is None else self.scale * scale
        return True

    def _counts(self, op: Op) -> None:
        """Note what an op does to each score."""
        elements = max(1, op.rule.work)
        if op.kind is OpKind.DROPOUT:
            probability = op.attribute("probability")
            self.attributes["probability"] = 0.0 if probability is None else probability
        elif op.kind is OpKind.SOFTMAX:
            self.operations += max(0, round(vector_operations(op) / elements) - softmax_operations())
        elif op.kind is OpKind.ELEMENTWISE:
            self.operations += round(vector_operations(op) / elements)
            self._scales(op)

    def _scales(self, op: Op) -> None:
        """Follow the factor that scores are multiplied with, and their cap; forget it where an op is another one."""
        factor = op.attribute("factor")
        if self.softmax is not None or op.function == "cast":
            return
        if op.function == "scale" and isinstance(factor, int | float) and self.scale is not None:
            self.scale *= factor
            if self.is_capped and "softcap" not in self.attributes:
                self.attributes["softcap"] = factor
        elif op.function == "tanh" and not self.is_capped:
            self.is_capped = True
        else:
            self.scale = None if op.function == "scale" else self.scale


def _is_inside(op: Op) -> bool:
    """Whether an op is of a kind that kernels run on scores: elementwise work, softmax, dropout, and views of them."""
    inside = (OpKind.ELEMENTWISE, OpKind.DROPOUT, OpKind.SOFTMAX, OpKind.VIEW)
    is_whole = all(dim.size is None for dims in op.rule.tensors() for dim in dims)
    return (op.kind in inside or op.function == "contiguous") and is_whole


_SOFTMAXES = ("softmax", "biased_softmax", "sink_softmax", "fused")
"""Functions of the softmax of an attention; frontends that join vector ops call a whole softmax fused."""

_MOST_MASKS = 2
"""Masks that the op of an attention takes as operands; more of them are not met and leave the attention apart."""


class _Matcher:
    """What is looked up for every match: readers of tensors, and which of them have a gradient."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers: dict[str, list[Op]] = {}
        for op in graph.ops_of(Phase.FORWARD):
            for tensor_id in op.inputs:
                self.readers.setdefault(tensor_id, []).append(op)
        self.learned = tensors_with_gradient(graph)
        self.learned_biases = 0

    def match(self, scores: Op) -> _Match | None:
        """The attention that begins with a product, or None where what follows is not that of attention.

        One that was captured as a kernel is matched where its keys were repeated before it.
        """
        if scores.kind is OpKind.ATTENTION:
            match = self._without_repeats(scores, (scores,))
            return None if match.fused is scores else match
        if scores.kind is not OpKind.CONTRACTION or any(map(self._is_parameter, scores.inputs)):
            return None
        walk = _Walk(scores, scores.outputs[0], scores.rule.results[0])
        while (op := self._only_reader(walk.tensor)) is not None and op.kind is not OpKind.CONTRACTION:
            if not walk.passes(op, self.readers):
                return None
        if op is None or walk.softmax is None:
            return None
        return self._matched(walk, op)

    def _matched(self, walk: _Walk, context: Op) -> _Match | None:
        """The match of a way that ends in a product, if that gathers values."""
        rule, inputs = _joined(walk, context)
        if rule is None:
            return None
        has_sinks = walk.softmax is not None and walk.softmax.function == "sink_softmax"
        extras = self._kept_extras(walk)
        if extras is None or (has_sinks and len(extras) != 1):
            return None
        rule = Rule((*rule.operands, *(dims for _, dims in extras)), rule.results, rule.factors)
        plain = replace(
            context,
            kind=OpKind.ATTENTION,
            function="sink_attention" if has_sinks else "attention",
            rule=rule,
            inputs=(*inputs, *(tensor_id for tensor_id, _ in extras)),
            attributes=_attributes(walk),
        )
        if plain.matmul_flops != walk.scores.matmul_flops + context.matmul_flops:
            return None
        return self._without_repeats(plain, (walk.scores, *walk.ops, context))

    def _without_repeats(self, attention: Op, inside: tuple[Op, ...]) -> _Match:
        """The match on keys and values as they were before they were repeated for the query heads that share them."""
        before = [_before_repeat(self.graph, attention, index) for index in (1, 2)]
        key, value = before
        if key is None or value is None:
            return _Match(inside, attention)
        operands = (attention.rule.operands[0], key[1], value[1], *attention.rule.operands[3:])
        fused = replace(
            attention,
            rule=Rule(operands, attention.rule.results, attention.rule.factors),
            inputs=(attention.inputs[0], key[0], value[0], *attention.inputs[3:]),
        )
        if fused.matmul_flops != attention.matmul_flops:
            return _Match(inside, attention)
        removed = {op.id: op for op in inside}
        for op in (*key[2], *value[2]):
            if all(reader.id in removed for name in op.outputs for reader in self.readers.get(name, ())):
                removed[op.id] = op
        return _Match(tuple(removed.values()), fused)

    def _kept_extras(self, walk: _Walk) -> list[tuple[str, Dims]] | None:
        """Operands that the kernel reads besides query, key and value; None where one of them rules a kernel out.

        Constants are known to a kernel beforehand: it makes masks itself.
        """
        kept: list[tuple[str, Dims]] = []
        is_sink = walk.softmax is not None and walk.softmax.function == "sink_softmax"
        for tensor_id, dims in walk.extras:
            tensor = self.graph.tensors[self.graph.storage(tensor_id)]
            if tensor_id in self.learned and not (is_sink and tensor.role is Role.PARAMETER):
                self.learned_biases += 1
                return None
            if tensor.role is not Role.OTHER and tensor.elements > 1:
                kept.append((tensor_id, dims))
        return kept if len(kept) <= _MOST_MASKS else None

    def _is_parameter(self, tensor_id: str) -> bool:
        """Whether a tensor is a parameter, or a view of one."""
        return self.graph.tensors[self.graph.storage(tensor_id)].role is Role.PARAMETER

    def _only_reader(self, tensor_id: str) -> Op | None:
        """The op that alone reads a tensor; None where several do, nobody does, or the graph gives it out."""
        readers = self.readers.get(tensor_id, [])
        return readers[0] if len(readers) == 1 and tensor_id not in self.graph.outputs else None


def _attributes(walk: _Walk) -> tuple[tuple[str, Attribute], ...]:
    """Scale, mask, cap and dropout of the kernel, and its lane operations per score besides softmax and dropout."""
    attributes = dict(walk.attributes)
    if walk.scale is not None and walk.scale != 1.0:
        attributes["scale"] = walk.scale
    if walk.operations:
        attributes["operations"] = walk.operations
    return tuple(sorted(attributes.items()))


def _joined(walk: _Walk, context: Op) -> tuple[Rule | None, tuple[str, ...]]:
    """The rule (query, key, value -> context) in the names of the scores' rule, and the operands in that order."""
    scores, normalized = walk.scores.rule, walk.normalized
    if context.inputs.count(walk.tensor) != 1:
        return None, ()
    left = context.inputs.index(walk.tensor)
    right = 1 - left  # a contraction has two operands: the probabilities and the value
    from_context = _renaming(context.rule, context.rule.operands[left], walk.dims, scores.size)
    if from_context is None:
        return None, ()
    key = next((index for index, names in enumerate(scores.operand_names) if normalized <= names), None)
    value, result = context.rule.operands[right], context.rule.results[0]
    if key is None or not _is_value(value, result, from_context, scores.operand_names[key], normalized):
        return None, ()
    taken = {factor.name for factor in scores.factors}
    value_factors = [factor for factor in context.rule.factors if factor.name not in from_context]
    names = from_context | {factor.name: _fresh(factor.name, taken) for factor in value_factors}
    factors = [
        replace(factor, kind=FactorKind.NORMALIZED) if factor.name in normalized else factor
        for factor in scores.factors
    ] + [replace(factor, name=names[factor.name]) for factor in value_factors]
    value_dims, result_dims = _renamed(context.rule, value, names), _renamed(context.rule, result, names)
    if value_dims is None or result_dims is None:
        return None, ()
    query_dims, key_dims = scores.operands[1 - key], scores.operands[key]
    rule = Rule((query_dims, key_dims, value_dims), (result_dims,), tuple(factors))
    return rule, (walk.scores.inputs[1 - key], walk.scores.inputs[key], context.inputs[right])


def _is_value(
    value: Dims, result: Dims, from_context: Mapping[str, str], key: frozenset[str], normalized: frozenset[str]
) -> bool:
    """Whether an operand of the context product is a value in the sense of attention.

    Each of its factors must either be one of the key's or appear in the result, and the key positions (the normalized
    factors) must be summed. ``from_context`` renames the context's factors to those of the scores.
    """
    shared = {from_context[name] for name in names_of(value) if name in from_context}
    value_only = {name for name in names_of(value) if name not in from_context}
    kept = {from_context.get(name) for name in names_of(result)}
    return normalized <= shared <= key and value_only <= names_of(result) and not normalized & kept


def _before_repeat(graph: Graph, attention: Op, index: int) -> tuple[str, Dims, tuple[Op, ...]] | None:
    """A key or value as it was before heads were repeated, with the ops on the way; None where none were."""
    tensor_id, dims, sizes = attention.inputs[index], attention.rule.operands[index], attention.rule.size
    passed: list[Op] = []
    while (op := graph.producer(tensor_id)) is not None and (op.kind is OpKind.VIEW or op.function == "contiguous"):
        names = _renaming(op.rule, op.rule.results[0], dims, sizes) if _is_inside(op) else None
        before = None if names is None else _renamed(op.rule, op.rule.operands[0], names)
        if before is None:
            return None
        passed.append(op)
        tensor_id, is_repeated = op.inputs[0], names_of(before) < names_of(dims)
        dims = before
        if is_repeated:
            return tensor_id, dims, tuple(passed)
    return None


def _renaming(rule: Rule, dims: Dims, target_dims: Dims, size_of: Callable[[str], int]) -> dict[str, str] | None:
    """The target's name of each factor in ``dims``, or None where the two are not made of factors in the same way.

    Factors of size 1 that the target lacks get no name.
    """
    if len(dims) != len(target_dims):
        return None
    names: dict[str, str] = {}
    for dim, target_dim in zip(dims, target_dims, strict=True):
        is_same = len(dim.factors) == len(target_dim.factors)
        factors = dim.factors if is_same else tuple(name for name in dim.factors if rule.size(name) > 1)
        if [rule.size(name) for name in factors] != [size_of(name) for name in target_dim.factors]:
            return None
        names |= dict(zip(factors, target_dim.factors, strict=True))
    return names


def _renamed(rule: Rule, dims: Dims, names: Mapping[str, str]) -> Dims | None:
    """Dims under other names, without factors of size 1 that have none; None where a larger one has none."""
    if any(name not in names and rule.size(name) > 1 for dim in dims for name in dim.factors):
        return None
    return tuple(Dim(tuple(names[name] for name in dim.factors if name in names), dim.size) for dim in dims)


def _fresh(name: str, taken: set[str]) -> str:
    """A factor name that is not taken yet; it is taken from then on."""
    while name in taken:
        name = f"{name}_v"
    taken.add(name)
    return name


def _rewritten(graph: Graph, matches: Sequence[_Match], learned_biases: int) -> Graph:
    """The graph with every match replaced by its attention op; a backward that was there is derived again."""
    removed = {op.id for match in matches for op in match.removed}
    fused = {match.fused.id: match.fused for match in matches}
    ops = tuple(fused.get(op.id, op) for op in graph.ops_of(Phase.FORWARD) if op.id not in removed or op.id in fused)
    used = {tensor_id for op in ops for tensor_id in (*op.inputs, *op.outputs)} | set(graph.outputs)
    keep = {Role.PARAMETER, Role.BATCH, Role.OPTIMIZER_STATE}
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name in used or tensor.role in keep}
    had_backward = len(graph.ops_of(Phase.BACKWARD)) > 0
    notes = [*graph.notes, f"{len(matches)} attentions fused"]
    if learned_biases:
        notes.append(
            f"{learned_biases} attentions stay products with a softmax: kernels would write the gradient of their "
            "learned bias at the size of the scores"
        )
    forward = replace(graph, tensors=tensors, ops=ops, gradients=(), notes=tuple(notes), is_backward_derived=False)
    return forward.with_backward() if had_backward else forward
