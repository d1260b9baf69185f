"""Cutting a forward graph where it is narrow: after ops where a single tensor carries everything that follows needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phaze.ir.graph import Graph, Role
from phaze.ir.op import Op

__all__ = ["cut_at_waists", "reads_parameter"]


def cut_at_waists(graph: Graph, forward: Sequence[Op]) -> dict[str, str]:
    """Name a group for every forward op: runs of ops between waists, each holding at least one parameter.

    Tensors that depend on no parameter (masks, position tables) do not widen a waist.
    """
    last_use = {tensor_id: position for position, op in enumerate(forward) for tensor_id in op.inputs}
    learned = {tensor.id for tensor in graph.parameters}
    alive: set[str] = set()
    runs: list[list[Op]] = [[]]
    for position, op in enumerate(forward):
        runs[-1].append(op)
        if learned.intersection(op.inputs):
            learned.update(op.outputs)
            alive.update(tensor_id for tensor_id in op.outputs if tensor_id in last_use)
        alive = {tensor_id for tensor_id in alive if last_use[tensor_id] > position}
        if len(alive) == 1 and reads_parameter(graph, runs[-1]):
            runs.append([])
    if len(runs) > 1 and not reads_parameter(graph, runs[-1]):
        last = runs.pop()
        runs[-1].extend(last)
    return {op.id: f"part {index}" for index, run in enumerate(runs) for op in run}


def reads_parameter(graph: Graph, ops: Iterable[Op]) -> bool:
    """Whether some op reads a parameter."""
    return any(graph.tensors[tensor_id].role is Role.PARAMETER for op in ops for tensor_id in op.inputs)
