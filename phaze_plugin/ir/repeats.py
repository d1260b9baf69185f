"""Repeat detection: a key that is equal for layers with equal ops, shapes and wiring, whatever their names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from phaze.ir.graph import Graph
from phaze.ir.op import Op

__all__ = ["canonical_key"]


def canonical_key(graph: Graph, ops: Sequence[Op], outputs: Iterable[str], texts: dict[int, str]) -> str:
    """Hash a layer's ops with tensors numbered by first appearance; `texts` keeps the text of rules seen before.

    Tensors from outside enter by role, shape and type; those that leave are marked, since they must be kept.
    """
    numbers: dict[str, int] = {}
    made = {tensor_id for op in ops for tensor_id in op.outputs}
    lines = []
    for op in ops:
        rule = texts.setdefault(id(op.rule), str(op.rule))
        inputs = [_number(graph, tensor_id, numbers, made) for tensor_id in op.inputs]
        results = [_number(graph, tensor_id, numbers, made) for tensor_id in op.outputs]
        lines.append(f"{op.phase} {op.kind} {op.function} {op.attributes} {rule} {inputs} {results}")
    lines.append(f"out {sorted(numbers[tensor_id] for tensor_id in outputs if tensor_id in numbers)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _number(graph: Graph, tensor_id: str, numbers: dict[str, int], made: set[str]) -> str:
    if tensor_id in numbers:
        return str(numbers[tensor_id])
    numbers[tensor_id] = len(numbers)
    tensor = graph.tensors[tensor_id]
    origin = "" if tensor_id in made else f" {tensor.role or 'boundary'} {tensor.shape}"
    return f"{numbers[tensor_id]}{origin} {tensor.dtype}"
