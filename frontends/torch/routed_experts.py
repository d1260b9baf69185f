"""The experts of captured mixtures: where tokens come to them, so that plans can divide them over devices (ep).

An experts module, as Hugging Face writes them, takes tokens, the experts that each of them chose and their weights, and
its parameters count experts first. Its code sorts the choices, looks up the tokens' rows in this order and multiplies
them by each expert's matrices. The capture shows one dimension of rows, (experts rows), which every expert has an equal
share of. `mark_routed_experts` marks the op that looks the rows up with `EXPERT_DIM`; expert parallelism takes it from
there (`phaze.shard.expert_slicing`). Other mixtures are left alone: what target torch could not run is not offered.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace

import torch

from phaze.ir import Graph, Op, OpKind, Phase
from phaze.ir.op import EXPERT_DIM

__all__ = ["holds_experts", "mark_routed_experts"]

_MOST_STEPS_BACK = 6
"""How many functions of each element or views (a cast, a permutation) lie at most between rows and their product."""


def mark_routed_experts(graph: Graph, module: torch.nn.Module) -> Graph:
    """The graph with the ops marked that bring tokens to experts modules; itself where it has none."""
    experts = {path: len(next(part.parameters())) for path, part in module.named_modules() if holds_experts(part)}
    found = dict(_routes(graph, experts)) if experts else {}
    if not found:
        return graph
    ops = tuple(
        replace(op, attributes=(*op.attributes, (EXPERT_DIM, found[op.id]))) if op.id in found else op
        for op in graph.ops
    )
    return replace(graph, ops=ops)


def holds_experts(module: torch.nn.Module) -> bool:
    """Whether a module's parameters all count experts first, and its forward takes tokens, choices and weights."""
    count, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(count, int) or not parameters or len(parameters) != len(list(module.parameters())):
        return False
    takes_choices = len(inspect.signature(module.forward).parameters) == 3
    return takes_choices and all(parameter.dim() > 1 and len(parameter) == count for parameter in parameters)


def _routes(graph: Graph, experts: dict[str, int]) -> Iterator[tuple[str, int]]:
    """The ops that look up the rows of experts, by id, with the dimension of their result that holds experts."""
    made_of_parameters = {tensor.id for tensor in graph.parameters}
    for op in graph.ops_of(Phase.FORWARD):
        if op.inputs and made_of_parameters.issuperset(op.inputs):
            made_of_parameters.update(op.outputs)
        count = experts.get(op.module)
        if count is None or op.kind is not OpKind.CONTRACTION or len(op.inputs) < 2:
            continue
        if op.inputs[1] in made_of_parameters and op.inputs[0] not in made_of_parameters:
            maker = _lookup_behind(graph, op.inputs[0])
            if maker is not None and _leads_with_experts(maker, count):
                yield maker.id, 0


def _lookup_behind(graph: Graph, name: str) -> Op | None:
    """The op that looked up the rows of a tensor."""
    for _ in range(_MOST_STEPS_BACK):
        op = graph.producer(name)
        if op is None or op.kind is OpKind.LOOKUP:
            return op
        if op.kind not in (OpKind.ELEMENTWISE, OpKind.VIEW, OpKind.COPY) or len(op.inputs) != 1:
            return None
        name = op.inputs[0]
    return None


def _leads_with_experts(op: Op, count: int) -> bool:
    """Whether the first dimension of an op's result is (experts rows), with rows of the batch."""
    first, *rows = op.rule.results[0][0].factors
    is_split = op.rule.size(first) == count and not op.rule.factor(first).is_batch
    return is_split and len(rows) == 1 and op.rule.factor(rows[0]).is_batch
