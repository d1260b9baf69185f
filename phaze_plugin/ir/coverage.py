"""How much of a graph is understood: the share of its flops and bytes whose ops have a rule of their own.

Ops without one are kept as opaque ops and priced as memory-bound work; they are never free.
"""

from __future__ import annotations

from dataclasses import dataclass

from phaze.ir.graph import Graph
from phaze.ir.op import Op, OpKind

__all__ = ["Coverage", "UnknownOp", "measure_coverage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownOp:
    """A function without a rule: how often it occurs and what share of the work it stands for."""

    function: str
    count: int
    flops_share: float
    bytes_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Shares of flops and bytes that ops with a rule stand for, and what is left, largest first."""

    op_count: int
    flops_share: float
    bytes_share: float
    unknown: tuple[UnknownOp, ...]


def measure_coverage(graph: Graph) -> Coverage:
    """Measure a graph's coverage."""
    flops = sum(op.flops for op in graph.ops)
    traffic = {op.id: op_bytes(graph, op) for op in graph.ops}
    total = sum(traffic.values())
    functions: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.kind is OpKind.OPAQUE:
            functions.setdefault(op.function, []).append(op)
    unknown = [
        UnknownOp(
            function=function,
            count=len(ops),
            flops_share=_share(sum(op.flops for op in ops), flops),
            bytes_share=_share(sum(traffic[op.id] for op in ops), total),
        )
        for function, ops in functions.items()
    ]
    unknown.sort(key=lambda entry: (-entry.bytes_share, -entry.flops_share, entry.function))
    return Coverage(
        op_count=len(graph.ops),
        flops_share=1.0 - sum(entry.flops_share for entry in unknown),
        bytes_share=1.0 - sum(entry.bytes_share for entry in unknown),
        unknown=tuple(unknown),
    )


def op_bytes(graph: Graph, op: Op) -> int:
    """Bytes that an op reads and writes when nothing stays on the chip; 0 for views."""
    read = zip(op.inputs, op.elements_read, strict=True)
    written = zip(op.outputs, op.elements_written, strict=True)
    return sum(count * graph.tensors[tensor_id].dtype.size_bytes for tensor_id, count in (*read, *written))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
