"""Whether layers that recompute within a budget keep what they say, shown a second time by an integer program.

For one distinct layer and its budget, with k_t whether tensor t is kept and r_o whether forward op o runs again:

    minimise    the sum over ops of their seconds times r_o
    subject to  k_t + r_p >= 1      for every t that backward reads, made by op p of the layer             (1)
                k_t + r_p >= r_o    for every input t of op o that op p of the layer makes                 (2)
                k_t >= r_o          for every input t of op o that enters the layer                        (3)
                k_t = 1             for every t that backward reads and that enters the layer              (4)
                the bytes of all k_t within the budget                                                     (5)

Planning walks through states instead (`phaze.ir.recompute_budget`); both share the seconds of single ops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from phaze.ir import Graph, Layer, OpKind, Phase, RecomputeMode, Role, kept_tensors
from phaze.ir.layers import single_layer
from phaze.plan.plan import LayerKind, Plan
from phaze.planner.strategy_search import Answer
from phaze.profile.layer_passes import op_seconds
from phaze.profile.model_profiles import profile_options
from phaze.shard import slice_layer
from phaze.solvers import AUTOMATIC_SOLVERS, ProblemBuilder, WorkLimits, solve_linear

__all__ = ["BudgetCheck", "budget_checks", "least_again_s"]

_WHOLE_UNITS = 1e6
"""Seconds are counted in microseconds, so that the solver's absolute tolerances lie far below an op."""


class BudgetCheck(NamedTuple):
    """What a layer with a budget claims, and the most that it may be."""

    what: str
    claimed: float
    most: float


def budget_checks(plan: Plan, answer: Answer) -> Iterator[BudgetCheck]:
    """That each distinct layer with a budget stays within it, and computes no more again than it must."""
    slices = answer.candidate.slices
    layers = {entry.kind: entry.index for stage in plan.stages for entry in stage.layers}
    for number, kind in enumerate(plan.layer_kinds):
        mode = RecomputeMode(kind.recompute)
        if mode.budget is None or number not in layers or not slices.report(layers[number], mode).recompute.ops:
            continue  # layers that are not recomputed at all keep everything in every mode
        sharded = slices.sharded.layers[layers[number]]
        local = slice_layer(sharded)
        layer = single_layer(local)
        seconds = op_seconds(sharded, local, layer.forward, profile_options(answer.question))
        yield from _layer_checks(kind, local, layer, mode.budget, seconds)


def _layer_checks(
    kind: LayerKind, local: Graph, layer: Layer, share: float, seconds: Mapping[str, float]
) -> Iterator[BudgetCheck]:
    def size(names: tuple[str, ...]) -> int:
        return sum(local.tensors[name].size_bytes for name in names)

    least, most = (size(kept_tensors(local, layer, mode)) for mode in (RecomputeMode.FULL, RecomputeMode.NONE))
    budget = least + share * max(most - least, 0)
    is_known = all(name in local.tensors for name in kind.kept)
    yield BudgetCheck(f"bytes that {kind.name} keeps", size(kind.kept) if is_known else math.inf, budget)
    claimed_s = _again_s(local, layer, frozenset(kind.kept), seconds)
    yield BudgetCheck(
        f"seconds that {kind.name} computes again", claimed_s, least_again_s(local, layer, budget, seconds)
    )


def _again_s(local: Graph, layer: Layer, kept: frozenset[str], seconds: Mapping[str, float]) -> float:
    """Seconds of all ops that must run again where some tensors are kept; infinite where one cannot be made again."""
    makers = {name: op for op in layer.forward for name in op.outputs}
    waiting, again = [name for name in _read_by_backward(local, layer) if name not in kept], set()
    while waiting:
        op = makers.get(waiting.pop())
        if op is None:
            return math.inf
        if op.id not in again:
            again.add(op.id)
            reads = (local.storage(name) for name in op.inputs)
            waiting += [name for name in reads if name not in kept and _is_activation(local, name)]
    return math.fsum(seconds[name] for name in again)


def least_again_s(local: Graph, layer: Layer, budget_bytes: float, seconds: Mapping[str, float]) -> float:
    """The least seconds of ops that run again where no more bytes are kept, by the integer program above."""
    ops = [op for op in layer.forward if op.kind is not OpKind.VIEW]
    makers = {name: index for index, op in enumerate(ops) for name in op.outputs}
    reads = [{storage for name in op.inputs if _is_activation(local, storage := local.storage(name))} for op in ops]
    wanted = _read_by_backward(local, layer)
    tensors = sorted({*wanted, *makers, *(name for names in reads for name in names)})
    builder = ProblemBuilder("recompute budget")
    again = builder.binaries(len(ops), cost=[seconds[op.id] * _WHOLE_UNITS for op in ops]).tolist()
    kept = dict(zip(tensors, builder.binaries(len(tensors)).tolist(), strict=True))
    for name in wanted:
        maker = [again[makers[name]]] if name in makers else []
        builder.rows([kept[name], *maker], lower=1.0)  # (1), (4)
    for index, names in enumerate(reads):
        for name in names:
            maker = [again[makers[name]]] if name in makers else []
            builder.rows([again[index], kept[name], *maker], [-1.0, 1.0, *([1.0] * len(maker))], lower=0.0)  # (2), (3)
    scale = max(1.0, budget_bytes)
    sizes = [local.tensors[name].size_bytes / scale for name in tensors]
    builder.rows([kept[name] for name in tensors], sizes, upper=budget_bytes / scale)  # (5)
    result = solve_linear(builder.build(), WorkLimits(), AUTOMATIC_SOLVERS)
    return result.objective / _WHOLE_UNITS


def _is_activation(local: Graph, name: str) -> bool:
    """Whether a tensor must be kept or made again: parameters and constants are there anyway."""
    return local.tensors[name].role in (None, Role.BATCH)


def _read_by_backward(local: Graph, layer: Layer) -> list[str]:
    """The forward tensors that backward ops read."""
    forward = {name for op in layer.forward for name in op.outputs}
    names = {local.storage(name) for op in layer.backward for name in op.inputs}

    def is_kept(name: str) -> bool:
        producer = local.producer(name)
        is_made = producer is not None and producer.phase is Phase.FORWARD
        return name in forward or is_made or local.tensors[name].role is Role.BATCH

    return sorted(filter(is_kept, names))
