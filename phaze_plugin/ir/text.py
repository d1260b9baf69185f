"""A graph as text that a person can read: one op a line."""

from __future__ import annotations

from collections.abc import Iterable

from phaze.ir.graph import Graph
from phaze.ir.op import Op, Phase

__all__ = ["format_graph", "format_ops"]


def format_graph(graph: Graph) -> str:
    """Arguments, then the ops of each phase."""
    lines = [f"graph {graph.name} (microbatch {graph.micro_batch_size})"]
    for tensor in graph.tensors.values():
        if tensor.role is not None:
            lines.append(f"  {tensor.role} {tensor.id}: {tensor.dtype}{list(tensor.shape)}")
    for phase in Phase:
        ops = graph.ops_of(phase)
        if ops:
            lines += [f"{phase}:", *(f"  {line}" for line in format_ops(graph, ops))]
    lines += [f"gradient {parameter}: {gradient}" for parameter, gradient in graph.gradients]
    lines += [f"output {tensor_id}" for tensor_id in graph.outputs]
    lines += [f"note {note}" for note in graph.notes]
    return "\n".join(lines) + "\n"


def format_ops(graph: Graph, ops: Iterable[Op]) -> list[str]:
    """One line an op: results with type and shape, function, operands, rule."""
    return [_format_op(graph, op) for op in ops]


def _format_op(graph: Graph, op: Op) -> str:
    results = ", ".join(_format_result(graph, tensor_id) for tensor_id in op.outputs)
    function = op.function if op.function == op.kind else f"{op.kind}.{op.function}"
    options = "".join(f" {name}={value}" for name, value in op.attributes)
    return f"{results} = {function}({', '.join(op.inputs)}){options}  [{op.rule}]"


def _format_result(graph: Graph, tensor_id: str) -> str:
    tensor = graph.tensors[tensor_id]
    return f"{tensor_id}: {tensor.dtype}{list(tensor.shape)}"
