"""A layer to shard: the splits that each of its ops may choose from, and the seconds of each split.

`splits_of_layer` starts from the splits that rules allow (`layout.py`) and leaves out what users' constraints, tied
parameters and the target forbid. `seconds_of_splits` prices those that are left.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from phaze.cost import Collective, PriceTable, price_ops
from phaze.errors import ShardError
from phaze.ir import FactorKind, Graph, Layer, Op, OpKind, Phase, Role
from phaze.ir.rule import Rule, factor_names, names_of
from phaze.shard.layout import (
    WHOLE,
    Layout,
    LayoutConstraint,
    OpSplit,
    Ways,
    admits,
    head_factors,
    split_choices,
    splits_of_op,
    statistics_bytes,
)
from phaze.shard.mesh_axes import WAYS, Axis, is_exchange
from phaze.solvers import AUTOMATIC_SOLVERS, SolverChain

__all__ = [
    "ShardingProblem",
    "check_heads",
    "chooses_its_split",
    "compute_seconds",
    "divides_experts",
    "has_equal_splits",
    "leaving_tensors",
    "seconds_of_splits",
    "sequence_splits",
    "settle_s",
    "splits_of_layer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingProblem:
    """A layer to shard: the axis, the layouts at its boundaries, what is asked of layouts, and who solves it.

    `layouts` gives the layout of every tensor that enters or leaves (gradients included) and of parameters that are
    settled elsewhere (tied ones); what it lacks enters and leaves whole. `expert_dims` gives the dimension that counts
    experts of each of their parameters, and `expert_tp` over how many devices each expert must be cut; None allows all.
    """

    graph: Graph
    layer: Layer
    axis: Axis
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    constraints: tuple[LayoutConstraint, ...] = ()
    may_split_sequence: bool = True
    may_stride_parameters: bool = True
    may_cut_parameters_twice: bool = True
    may_split_norms: bool = False
    expert_dims: Mapping[str, int] = field(default_factory=dict)
    expert_tp: int | None = None
    solver: SolverChain = AUTOMATIC_SOLVERS

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops of the layer, forward and then backward."""
        return (*self.layer.forward, *self.layer.backward)

    def boundary_layout(self, name: str) -> Layout:
        """The layout in which a tensor enters or leaves."""
        return self.layouts.get(name, WHOLE)


def check_heads(problem: ShardingProblem, op: Op) -> None:
    """Raise ShardError where an op's heads do not divide by tp.

    Fewer key heads than devices are fine where the query heads that share a key divide among the rest.
    """
    names, tp = head_factors(problem.graph, op), problem.axis.tp
    heads = math.prod(op.rule.size(name) for name in names) if names else 0
    if heads % tp == 0:
        return
    if tp % heads == 0 and any(op.rule.size(sharing) % (tp // heads) == 0 for sharing in _sharing_factors(op, names)):
        return
    factors = " x ".join(f"{name}={op.rule.size(name)}" for name in names)
    raise ShardError(
        f"op {op.id!r}: its {heads} heads (factor {factors}) cannot be split {tp} ways evenly; "
        f"use a tp that divides {heads}."
    )


def _sharing_factors(op: Op, heads: Sequence[str]) -> list[str]:
    """Query factors that stand right behind the heads and that keys lack: query heads per key head."""
    query, key = factor_names(op.rule.operands[0]), names_of(op.rule.operands[1])
    behind = [minor for major, minor in pairwise(query) if major in heads]
    return [name for name in behind if name not in key and name in op.rule.result_names[0]]


def splits_of_layer(problem: ShardingProblem, ops: Sequence[Op]) -> dict[str, list[OpSplit]]:
    """The splits that each op may choose from; raises ShardError where an op has nothing left."""
    sequence_factors = {} if problem.may_split_sequence else _sequence_factors(problem)
    splits: dict[str, list[OpSplit]] = {}
    choices: dict[str, list[Ways]] = {}
    for op in ops:
        if op.phase is Phase.FORWARD or chooses_its_split(op):
            choices[op.id] = [
                ways
                for ways in split_choices(op, problem.axis.tp)
                if not sequence_factors.get(op.id, frozenset()).intersection(name for name, _ in ways)
                and (problem.may_split_norms or not _splits_norm(op, ways))
            ]
        else:
            choices[op.id] = _choices_of_gradient(op, choices[op.gradient_of])
        candidates = splits_of_op(problem.graph, op, choices[op.id], problem.axis.tp)
        splits[op.id] = [split for split in candidates if _is_admitted(problem, op, split)]
        if not splits[op.id]:
            raise _no_split(problem, op, had_candidates=bool(candidates))
    return splits


def sequence_splits(problem: ShardingProblem, splits: Mapping[str, Sequence[OpSplit]]) -> set[tuple[str, Ways]]:
    """The splits, by op and factors split, that a problem forbids which splits no sequence: forward, and what follows.

    A backward op that follows a forward op may split what some split of that one does which is left.
    """
    sequence_factors = _sequence_factors(problem)
    forbidden: set[tuple[str, Ways]] = set()
    for op in problem.ops:
        ways_of_op = dict.fromkeys(split.ways for split in splits[op.id])
        if op.phase is Phase.FORWARD or chooses_its_split(op):
            along = sequence_factors[op.id]
            forbidden |= {(op.id, ways) for ways in ways_of_op if along.intersection(name for name, _ in ways)}
        else:
            left = [split.ways for split in splits[op.gradient_of] if (op.gradient_of, split.ways) not in forbidden]
            allowed = _choices_of_gradient(op, left)
            forbidden |= {(op.id, ways) for ways in ways_of_op if ways not in allowed}
    return forbidden


def _choices_of_gradient(op: Op, forward_choices: Sequence[Ways]) -> list[Ways]:
    """What a backward op may split: what its forward op does, as far as it has these factors."""
    names = {factor.name for factor in op.rule.factors}
    shared = [tuple((name, ways) for name, ways in choice if name in names) for choice in forward_choices]
    return list(dict.fromkeys(shared))


def _splits_norm(op: Op, ways: Ways) -> bool:
    """Whether a norm's normalized factor would be split: cheap, but few frameworks can run it."""
    return op.kind is OpKind.NORM and any(op.rule.factor(name).kind is FactorKind.NORMALIZED for name, _ in ways)


def chooses_its_split(op: Op) -> bool:
    """Whether a backward op chooses its split by itself: views, sums of gradients, ops that follow no forward op."""
    return op.kind is OpKind.VIEW or op.function == "add" or not op.gradient_of


def _is_admitted(problem: ShardingProblem, op: Op, split: OpSplit) -> bool:
    for name, layout in zip(op.inputs, split.operands, strict=True):
        if problem.graph.tensors[name].role is Role.PARAMETER:
            if layout.is_strided and not problem.may_stride_parameters:
                return False
            if not problem.may_cut_parameters_twice and not layout.is_one_cut(problem.graph.tensors[name].shape):
                return False
            if not admits(problem.constraints, name, layout) or problem.layouts.get(name, layout) != layout:
                return False
            if not _shares_experts_as_asked(problem, name, layout):
                return False
    return all(
        admits(problem.constraints, name, layout) for name, layout in zip(op.outputs, split.results, strict=True)
    )


def _shares_experts_as_asked(problem: ShardingProblem, name: str, layout: Layout) -> bool:
    """Whether a layout is one that a strategy asks for, if it is of experts; biases may be whole beside cuts."""
    if problem.expert_tp is None or name not in problem.expert_dims:
        return True
    divides = divides_experts(layout, problem.expert_dims[name], problem.axis.tp)
    return divides is (problem.expert_tp == 1) or (layout.is_whole and problem.expert_tp != 1)


def divides_experts(layout: Layout, dim: int, tp: int) -> bool | None:
    """Whether tp devices divide whole experts among them (True), or cut every one (False); None for neither.

    `dim` is the dimension of a parameter that counts experts.
    """
    if layout.ways != tp:
        return None
    along = {split.dim == dim for split in layout.splits}
    return along.pop() if len(along) == 1 else None


def _no_split(problem: ShardingProblem, op: Op, *, had_candidates: bool) -> ShardError:
    if had_candidates:
        names = (*op.inputs, *op.outputs)
        blamed = [
            str(constraint) for constraint in problem.constraints if any(constraint.matches(name) for name in names)
        ]
        if not blamed and not problem.may_cut_parameters_twice:
            return ShardError(
                f"op {op.id!r}: {problem.axis.tp} devices would have to cut two dimensions of its parameter, which the "
                "target does not do, or agree on a tied weight; use a smaller tp."
            )
        return ShardError(
            f"op {op.id!r}: nothing is left by the constraints to {'; to '.join(blamed) or 'agree on a tied weight'}."
        )
    factors = ", ".join(f"{factor.name}={factor.size}" for factor in op.rule.factors if not factor.is_batch)
    return ShardError(
        f"op {op.id!r}: none of its factors ({factors}) can be split {problem.axis.tp} ways so that its parameter is; "
        "use a smaller tp."
    )


def _sequence_factors(problem: ShardingProblem) -> dict[str, frozenset[str]]:
    """For each op the factors that run along the sequence: dimension 1 of what enters after a batch dimension."""
    sequence_dims: set[tuple[str, int]] = set()
    factors_of_op: dict[str, frozenset[str]] = {}
    for op in problem.ops:
        rule, along_sequence = op.rule, set[str]()
        for name, dims in zip(op.inputs, rule.operands, strict=True):
            is_entering = problem.graph.tensors[name].role is Role.BATCH or name in problem.layer.inputs
            has_batch = len(dims) > 1 and any(rule.factor(factor).is_batch for factor in dims[0].factors)
            if is_entering and has_batch:
                sequence_dims.add((name, 1))
            along_sequence |= {
                factor for index, dim in enumerate(dims) if (name, index) in sequence_dims for factor in dim.factors
            }
        if is_exchange(op):  # devices are counted along the sequence before, and along heads afterwards
            along_sequence.discard(WAYS)
        for name, dims in zip(op.outputs, rule.results, strict=True):
            sequence_dims |= {
                (name, index) for index, dim in enumerate(dims) if along_sequence.intersection(dim.factors)
            }
        factors_of_op[op.id] = frozenset(along_sequence)
    return factors_of_op


def seconds_of_splits(
    problem: ShardingProblem, ops: Sequence[Op], splits: Mapping[str, list[OpSplit]]
) -> dict[str, list[float]]:
    """The seconds of every split: the local op on all cores, and the collectives that belong to the op itself."""
    compute_s = compute_seconds(problem, ops, splits)
    return {
        op.id: [compute_s[op.id, split.ways] + settle_s(problem, op, split) for split in splits[op.id]] for op in ops
    }


def compute_seconds(
    problem: ShardingProblem,
    ops: Sequence[Op],
    splits: Mapping[str, Sequence[OpSplit]],
    known: Container[tuple[str, Ways]] = (),
    table: PriceTable | None = None,
) -> dict[tuple[str, Ways], float]:
    """The seconds of the local op of every split on all cores, by op and factors split; not those already known.

    Collectives of contexts and experts take the time of their links, whether something hides them or not.
    """
    local_ops: dict[tuple[str, Ways], Op] = {}
    for op in ops:
        for split in splits[op.id]:
            key = (op.id, split.ways)
            if key not in local_ops and key not in known:
                local_ops[key] = op.with_rule(op.rule.local(dict(split.ways))) if split.ways else op
    axis = problem.axis
    links = {key: op for key, op in local_ops.items() if is_exchange(op)}
    computing = {key: op for key, op in local_ops.items() if key not in links}
    estimate = price_ops(
        problem.graph,
        list(computing.values()),
        axis.cluster.accelerator,
        calibration=axis.calibration,
        prices={},
        table=table,
    )
    seconds = dict(zip(computing, estimate.spread_s[:, 0].tolist(), strict=True))
    return seconds | {key: axis.link_s(problem.graph, op) for key, op in links.items()}


def settle_s(problem: ShardingProblem, op: Op, split: OpSplit) -> float:
    """Seconds of the collectives that belong to an op itself: statistics of normalizations, settling of results."""
    total = 0.0
    statistics = statistics_bytes(op, split.ways)
    if statistics:
        total += problem.axis.seconds(Collective.ALL_REDUCE, statistics)
    for name, made, settled in zip(op.outputs, split.made, split.results, strict=True):
        total += problem.axis.move_s(made, settled, problem.graph.tensors[name].size_bytes)
    return total


def has_equal_splits(known: ShardingProblem, problem: ShardingProblem) -> bool:
    """Whether what was worked out for a layer holds for the same layer at another microbatch size.

    It does where the ops differ in the sizes of batch factors only, and where these stand in dimensions of their own:
    the batch is never split, so that no layout then depends on it.
    """
    tensors, others = known.graph.tensors, problem.graph.tensors
    if problem.layer is known.layer:
        return problem.graph is known.graph
    return (
        len(problem.ops) == len(known.ops)
        and (problem.layer.inputs, problem.layer.outputs) == (known.layer.inputs, known.layer.outputs)
        and all(map(_differ_in_batch_only, known.ops, problem.ops))
        and all(tensors[name].role is others[name].role for op in problem.ops for name in op.inputs)
    )


def _differ_in_batch_only(known: Op, op: Op) -> bool:
    if known is op:
        return True
    is_same_op = (known.id, known.kind, known.function, known.phase, known.gradient_of) == (
        op.id,
        op.kind,
        op.function,
        op.phase,
        op.gradient_of,
    )
    return is_same_op and (known.inputs, known.outputs) == (op.inputs, op.outputs) and _rules_alike(known.rule, op.rule)


def _rules_alike(known: Rule, rule: Rule) -> bool:
    if known.operands != rule.operands or known.results != rule.results or len(known.factors) != len(rule.factors):
        return False
    batch = set()
    for factor, other in zip(known.factors, rule.factors, strict=True):
        if factor is other:
            continue
        if (factor.name, factor.kind, factor.is_batch, factor.is_sequence) != (
            other.name,
            other.kind,
            other.is_batch,
            other.is_sequence,
        ):
            return False
        if factor.is_batch:
            batch.add(factor.name)
        elif factor.size != other.size:
            return False
    return all(len(dim.factors) == 1 or batch.isdisjoint(dim.factors) for dims in rule.tensors() for dim in dims)


def leaving_tensors(graph: Graph, layer: Layer) -> list[tuple[str, Phase]]:
    """Tensors that other layers or the graph's outputs need, with the pass in which they leave."""
    producers = {name: graph.producer(name) for name in layer.outputs}
    forward = [name for name, op in producers.items() if op is not None and op.phase is Phase.FORWARD]
    return [
        *((name, Phase.FORWARD) for name in forward),
        *((name, Phase.BACKWARD) for name in layer.gradients_out),
    ]
