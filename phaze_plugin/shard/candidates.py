"""The strategies that a layer's ops may choose from, and the seconds of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from phaze.cost import price_ops
from phaze.errors import ShardError
from phaze.ir import FactorKind, Op, OpKind, Phase, Role
from phaze.ir.rule import factor_names, names_of
from phaze.shard.constraints import admits
from phaze.shard.strategies import Strategy, Ways, head_factors, op_strategies, split_choices
from phaze.shard.task import LayerTask, settle_s

__all__ = ["check_heads", "is_free", "layer_strategies", "strategy_seconds"]


def check_heads(task: LayerTask, op: Op) -> None:
    """Raise ShardError where an op's heads do not divide by the width.

    Fewer key heads than devices are fine where the query heads that share a key divide among the rest.
    """
    names, width = head_factors(task.graph, op), task.axis.width
    heads = math.prod(op.rule.size(name) for name in names) if names else 0
    if heads % width == 0:
        return
    if width % heads == 0 and any(
        op.rule.size(sharing) % (width // heads) == 0 for sharing in _sharing_factors(op, names)
    ):
        return
    factors = " x ".join(f"{name}={op.rule.size(name)}" for name in names)
    raise ShardError(
        f"op {op.id!r}: its {heads} heads (factor {factors}) cannot be split {width} ways evenly; "
        f"use a width that divides {heads}."
    )


def _sharing_factors(op: Op, heads: Sequence[str]) -> list[str]:
    """Query factors that stand right behind the heads and that keys lack: query heads per key head."""
    query, key = factor_names(op.rule.operands[0]), names_of(op.rule.operands[1])
    behind = [later for name, later in pairwise(query) if name in heads]
    return [name for name in behind if name not in key and name in op.rule.result_names[0]]


def layer_strategies(task: LayerTask, ops: Sequence[Op]) -> dict[str, list[Strategy]]:
    """What each op may choose from; raises ShardError where an op has nothing left."""
    sequence = {} if task.may_split_sequence else _sequence_factors(task)
    found: dict[str, list[Strategy]] = {}
    choices: dict[str, list[Ways]] = {}
    for op in ops:
        if op.phase is Phase.FORWARD or is_free(op):
            choices[op.id] = [
                ways
                for ways in split_choices(op, task.axis.width)
                if not sequence.get(op.id, frozenset()).intersection(name for name, _ in ways)
                and (task.may_split_norms or not splits_norm(op, ways))
            ]
        else:
            names = {factor.name for factor in op.rule.factors}
            own = [tuple(pair for pair in ways if pair[0] in names) for ways in choices[op.gradient_of]]
            choices[op.id] = list(dict.fromkeys(own))
        candidates = op_strategies(task.graph, op, choices[op.id], task.axis.width)
        found[op.id] = [strategy for strategy in candidates if _is_admitted(task, op, strategy)]
        if not found[op.id]:
            raise _no_strategy(task, op, had_candidates=bool(candidates))
    return found


def splits_norm(op: Op, ways: Ways) -> bool:
    """Whether a norm's normalized factor would be split: cheap, but few frameworks can run it."""
    return op.kind is OpKind.NORM and any(op.rule.factor(name).kind is FactorKind.NORMALIZED for name, _ in ways)


def is_free(op: Op) -> bool:
    """Whether a backward op chooses its split by itself: views, sums of gradients, ops that follow no forward op."""
    return op.kind is OpKind.VIEW or op.function == "add" or not op.gradient_of


def _is_admitted(task: LayerTask, op: Op, strategy: Strategy) -> bool:
    for name, layout in zip(op.inputs, strategy.operands, strict=True):
        if task.graph.tensors[name].role is Role.PARAMETER:
            if layout.is_strided and not task.may_stride_parameters:
                return False
            if not admits(task.constraints, name, layout) or task.layouts.get(name, layout) != layout:
                return False
    return all(
        admits(task.constraints, name, layout) for name, layout in zip(op.outputs, strategy.results, strict=True)
    )


def _no_strategy(task: LayerTask, op: Op, *, had_candidates: bool) -> ShardError:
    if had_candidates:
        names = (*op.inputs, *op.outputs)
        blamed = [str(c) for c in task.constraints if any(c.matches(name) for name in names)]
        return ShardError(
            f"op {op.id!r}: nothing is left by the constraints to {'; to '.join(blamed) or 'agree on a tied weight'}."
        )
    factors = ", ".join(f"{f.name}={f.size}" for f in op.rule.factors if not f.is_batch)
    return ShardError(
        f"op {op.id!r}: none of its factors ({factors}) can be split {task.axis.width} ways so that its parameter is; "
        "use a smaller width."
    )


def _sequence_factors(task: LayerTask) -> dict[str, frozenset[str]]:
    """For each op the factors that run along the sequence: dimension 1 of what enters after a batch dimension."""
    marked: set[tuple[str, int]] = set()
    found: dict[str, frozenset[str]] = {}
    for op in (*task.layer.forward, *task.layer.backward):
        rule, names = op.rule, set[str]()
        for name, dims in zip(op.inputs, rule.operands, strict=True):
            tensor = task.graph.tensors[name]
            is_entering = tensor.role is Role.BATCH or name in task.layer.inputs
            has_batch = len(dims) > 1 and any(rule.factor(n).is_batch for n in dims[0].factors)
            if is_entering and has_batch:
                marked.add((name, 1))
            names |= {n for index, dim in enumerate(dims) if (name, index) in marked for n in dim.factors}
        for name, dims in zip(op.outputs, rule.results, strict=True):
            marked |= {(name, index) for index, dim in enumerate(dims) if names.intersection(dim.factors)}
        found[op.id] = frozenset(names)
    return found


def strategy_seconds(
    task: LayerTask, ops: Sequence[Op], strategies: Mapping[str, list[Strategy]]
) -> dict[str, list[float]]:
    """Seconds of every strategy: the local op, statistics of split normalizations, settling of partial results."""
    local: dict[tuple[str, Ways], Op] = {}
    for op in ops:
        for strategy in strategies[op.id]:
            key = (op.id, strategy.ways)
            if key not in local:
                local[key] = replace(op, rule=op.rule.local(dict(strategy.ways))) if strategy.ways else op
    estimate = price_ops(
        task.graph, list(local.values()), task.axis.cluster.accelerator, calibration=task.axis.calibration, prices={}
    )
    compute = dict(zip(local, estimate.spread_s[:, 0].tolist(), strict=True))
    return {
        op.id: [compute[op.id, strategy.ways] + settle_s(task, op, strategy) for strategy in strategies[op.id]]
        for op in ops
    }
