"""Follow dimensions through a graph: which factors are made of them, where the sequence is, what dimensions consist of.

Following (`follow_pieces`, `followed_factors`). A factor is made of a followed dimension if it covers, in some tensor,
a piece of a dimension that is. Pieces are passed on through every op to all its tensors, to and fro over the ops, until
nothing changes.

Sequence factors (`mark_sequences`) are found by following dimension 1 of the token inputs. Tokens are integers that
enter as [batch, positions, ...]. Every factor that is made of their positions gets its mark, and so do the rows that a
mixture of experts takes of each sequence, because their number grows with its length. What enters in another form
(images, sounds) has no sequence here, and neither has a graph without tokens. Where a model drops some of the positions
first, as losses over shifted labels do, the sequence is what is left of them.

Refinement (`refine_factors`) finds the factors that captured dimensions are made of by following views. A framework's
trace merges dimensions where it likes: a linear map sees `(b s)` rows in one dimension, `(h d)` columns in another, and
only a view nearby tells what they are made of. Each dimension of each tensor gets *cuts*: products of leading factors,
such as 12 for 768 = 12 x 64. An op passes cuts on along its factors, from every operand and result to every other; this
is repeated until nothing changes. Cuts that do not divide each other, such as 2 and 3 of 12, cannot both hold: the
first one stays. Nothing passes through factors that are looked up or must stay whole, nor through dimensions that are
covered in part.

A backward that was derived by rule is derived again from the refined forward ops, because its ops speak of the factors
of theirs by name. One that was captured is refined like the forward.

With a `batch_size` that divides no other dimension (a prime chosen for the capture), every factor that it divides is
made of the batch and gets its mark. Names follow first appearance in the rule, so that equal ops have equal rules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from phaze.ir.backward import add_backward, without_backward
from phaze.ir.graph import Graph, Role, Tensor
from phaze.ir.op import Attribute, Op, Phase
from phaze.ir.rule import Dim, Dims, Factor, FactorKind, Rule

__all__ = [
    "Piece",
    "Pieces",
    "follow_pieces",
    "followed_factors",
    "mark_sequences",
    "marks_sequence",
    "pieces_of",
    "refine_factors",
    "token_lengths",
]

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
    """The positions of each token input that all ops work on, by its name; some may drop the first or the last.

    What only moves tokens, such as ids that are shifted by one for a decoder, says nothing of what the model works on.
    """
    tokens = {tensor.id: tensor for tensor in graph.tensors.values() if _may_be_tokens(tensor)}
    learned = {tensor.id for tensor in graph.parameters}
    lengths: dict[str, set[int]] = {}
    worked_on: set[int] = set()
    for op in graph.ops_of(Phase.FORWARD):
        if not learned.isdisjoint(op.inputs):
            learned.update(op.outputs)
            worked_on.update(factor.size for factor in op.rule.factors if factor.is_sequence)
        for name, dims in zip(op.inputs, op.rule.operands, strict=True):
            is_token = name in tokens and len(dims) > 1
            along = [factor for factor in dims[1].factors if op.rule.factor(factor).is_sequence] if is_token else []
            if along:
                lengths.setdefault(name, set()).add(math.prod(op.rule.size(factor) for factor in along))
    return {name: min(read & worked_on) if read & worked_on else max(read) for name, read in lengths.items()}


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


Cuts = tuple[int, ...]
TensorCuts = tuple[Cuts, ...]

MOST_REFINEMENT_SWEEPS = 20
"""The most sweeps over the graph, to and fro. Each carries cuts as far as ops stand in order, so that a few suffice;
the limit only ends a walk that would never settle."""


def refine_factors(graph: Graph, batch_size: int | None = None) -> Graph:
    """The graph with every factor split as finely as views anywhere in it tell; batch factors marked where asked."""
    if graph.is_backward_derived:
        return add_backward(refine_factors(without_backward(graph), batch_size))
    cuts = _find_cuts(graph)
    written: dict[object, Rule] = {}
    ops = []
    for op in graph.ops:
        around = _around(op, cuts)
        key = (id(op.rule), around)
        if key not in written:
            rule = _split(op.rule, _factor_cuts(op.rule, around), batch_size)
            written[key] = written.setdefault(rule, rule)
        ops.append(replace(op, rule=written[key], attributes=_renamed_positions(op, written[key])))
    return replace(graph, ops=tuple(ops))


def _renamed_positions(op: Op, rule: Rule) -> tuple[tuple[str, Attribute], ...]:
    """The attributes of an op under its new rule: `causal` names the factors of query positions, major first."""
    causal = op.attribute("causal")
    if not isinstance(causal, str):
        return op.attributes
    names = tuple(causal.split())
    place = next(index for index, dim in enumerate(op.rule.operands[0]) if dim.factors == names)
    renamed = " ".join(rule.operands[0][place].factors)
    return tuple((name, renamed if name == "causal" else value) for name, value in op.attributes)


def _find_cuts(graph: Graph) -> dict[str, TensorCuts]:
    """The cuts of every tensor, passed to and fro over the ops until nothing changes."""
    cuts: dict[str, TensorCuts] = {tensor.id: ((),) * len(tensor.shape) for tensor in graph.tensors.values()}
    known: dict[object, tuple[TensorCuts, ...]] = {}
    for sweep in range(MOST_REFINEMENT_SWEEPS):
        has_changed = False
        for op in graph.ops if sweep % 2 == 0 else reversed(graph.ops):
            around = _around(op, cuts)
            key = (id(op.rule), around)
            if key not in known:
                known[key] = _passed_on(op.rule, around)
            for tensor_id, passed_on in zip((*op.inputs, *op.outputs), known[key], strict=True):
                merged = tuple(map(_merged, cuts[tensor_id], passed_on))
                if merged != cuts[tensor_id]:
                    cuts[tensor_id] = merged
                    has_changed = True
        if not has_changed:
            break
    return cuts


def _around(op: Op, cuts: Mapping[str, TensorCuts]) -> tuple[TensorCuts, ...]:
    return tuple(cuts[tensor_id] for tensor_id in (*op.inputs, *op.outputs))


def _merged(known: Cuts, more: Iterable[int]) -> Cuts:
    """The known cuts, and each further one that divides or is a multiple of every cut accepted before it."""
    accepted = list(known)
    for cut in more:
        if cut not in accepted and all(cut % earlier == 0 or earlier % cut == 0 for earlier in accepted):
            accepted.append(cut)
    return known if len(accepted) == len(known) else tuple(sorted(accepted))


def _starts(rule: Rule, dim: Dim) -> list[tuple[str, int]]:
    """Each factor of a dimension with the product of those before it."""
    start, starts = 1, []
    for name in dim.factors:
        starts.append((name, start))
        start *= rule.size(name)
    return starts


def _is_open(factor: Factor) -> bool:
    """Whether cuts pass through a factor: it is neither looked up nor must it stay whole."""
    return factor.kind in (FactorKind.FREE, FactorKind.NORMALIZED)


def _factor_cuts(rule: Rule, around: tuple[TensorCuts, ...]) -> dict[str, Cuts]:
    """The cuts inside each factor that the tensors around the op tell."""
    factor_cuts: dict[str, Cuts] = {factor.name: () for factor in rule.factors}
    is_open = {factor.name: _is_open(factor) for factor in rule.factors}
    for dims, tensor_cuts in zip(rule.tensors(), around, strict=True):
        for dim, cuts in zip(dims, tensor_cuts, strict=True):
            if not cuts or dim.size is not None:
                continue
            for name, start in _starts(rule, dim):
                size = rule.size(name)
                inside = [cut // start for cut in cuts if cut % start == 0 and start < cut < start * size]
                if inside and is_open[name]:
                    factor_cuts[name] = _merged(factor_cuts[name], [cut for cut in inside if size % cut == 0])
    return factor_cuts


def _passed_on(rule: Rule, around: tuple[TensorCuts, ...]) -> tuple[TensorCuts, ...]:
    """The cuts of every tensor that follow from the op: where its factors meet, and where they are cut themselves."""
    inside = _factor_cuts(rule, around)
    return tuple(tuple(_dim_cuts(rule, dim, inside) for dim in dims) for dims in rule.tensors())


def _dim_cuts(rule: Rule, dim: Dim, inside: Mapping[str, Cuts]) -> Cuts:
    """The cuts of one dimension: where its factors meet, and where they are cut inside."""
    if dim.size is not None:
        return ()
    total = rule.dim_size(dim)
    cuts = {start * cut for name, start in _starts(rule, dim) for cut in (1, *inside[name])}
    return tuple(sorted(cut for cut in cuts if 1 < cut < total))


@dataclass(slots=True)
class _Names:
    """Names by first appearance: `b` for batch factors, `d` for others."""

    counts: dict[str, int]

    def next(self, is_batch: bool) -> str:
        letter = "b" if is_batch else "d"
        self.counts[letter] += 1
        return f"{letter}{self.counts[letter] - 1}"


def _split(rule: Rule, inside: Mapping[str, Cuts], batch_size: int | None) -> Rule:
    """The rule with each factor taken apart at its cuts, and the parts made of the batch marked."""
    names = _Names({"b": 0, "d": 0})
    parts: dict[str, tuple[str, ...]] = {}
    factors: list[Factor] = []

    def parts_of(name: str) -> tuple[str, ...]:
        if name not in parts:
            factor = rule.factor(name)
            bounds = (1, *inside[name], factor.size)
            made = []
            for before, after in itertools.pairwise(bounds):
                size = after // before
                is_batch = factor.is_batch or (batch_size is not None and size % batch_size == 0)
                made.append(Factor(names.next(is_batch), size, factor.kind, is_batch))
            factors.extend(made)
            parts[name] = tuple(part.name for part in made)
        return parts[name]

    def rewritten(dims: Dims) -> Dims:
        return tuple(Dim(tuple(part for name in dim.factors for part in parts_of(name)), dim.size) for dim in dims)

    operands = tuple(rewritten(dims) for dims in rule.operands)
    results = tuple(rewritten(dims) for dims in rule.results)
    return Rule(operands, results, tuple(factors))
