"""Cutting a forward graph where it is narrow: after ops where a single tensor carries everything that follows needs."""

from __future__ import annotations

from collections.abc import Sequence

from phaze.ir.graph import Graph, Role
from phaze.ir.op import Op

__all__ = ["cut_at_waists"]


def cut_at_waists(graph: Graph, forward: Sequence[Op]) -> dict[str, str]:
    """Name a group for every forward op: runs of ops between waists, each holding at least one parameter."""
    last_use = {tensor_id: position for position, op in enumerate(forward) for tensor_id in op.inputs}
    groups: dict[str, str] = {}
    alive: set[str] = set()
    run: list[Op] = []
    names: list[list[Op]] = []
    for position, op in enumerate(forward):
        run.append(op)
        alive.update(tensor_id for tensor_id in op.outputs if tensor_id in last_use)
        alive = {tensor_id for tensor_id in alive if last_use[tensor_id] > position}
        if len(alive) == 1 and _reads_parameter(graph, run):
            names.append(run)
            run = []
    if run and names and not _reads_parameter(graph, run):
        names[-1].extend(run)
    elif run:
        names.append(run)
    for index, ops in enumerate(names):
        groups.update({op.id: f"part {index}" for op in ops})
    return groups


def _reads_parameter(graph: Graph, ops: Sequence[Op]) -> bool:
    return any(graph.tensors[tensor_id].role is Role.PARAMETER for op in ops for tensor_id in op.inputs)
