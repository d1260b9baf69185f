"""Refinement: finds the factors that captured dimensions are made of by following views through the graph.

A framework's trace merges dimensions where it likes: a linear map sees `(b s)` rows in one dimension, `(h d)` columns
in another, and only a view nearby tells what they are made of. Each dimension of each tensor gets *cuts*: products of
leading factors, such as 12 for 768 = 12 x 64. An op passes cuts on along its factors, from every operand and result to
every other; this is repeated until nothing changes. Cuts that do not divide each other, such as 2 and 3 of 12, cannot
both hold: the first one stays. Nothing passes through factors that are looked up or must stay whole, nor through
dimensions that are covered in part.

A backward that was derived by rule is derived again from the refined forward ops, because its ops speak of the factors
of theirs by name. One that was captured is refined like the forward.

With a `batch_size` that divides no other dimension (a prime chosen for the capture), every factor that it divides is
made of the batch and gets its mark. Names follow first appearance in the rule, so that equal ops have equal rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from phaze.ir.backward import add_backward, without_backward
from phaze.ir.graph import Graph
from phaze.ir.op import Attribute, Op
from phaze.ir.rule import Dim, Dims, Factor, FactorKind, Rule

__all__ = ["refine_factors"]

Cuts = tuple[int, ...]
TensorCuts = tuple[Cuts, ...]

MOST_SWEEPS = 20
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
    for sweep in range(MOST_SWEEPS):
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
