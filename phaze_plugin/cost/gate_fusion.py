"""Gated activations as one kernel, whose backward makes the activated gate again, where a stack of software has one.

A gated feed-forward layer multiplies act(gate) by up. As two ops it keeps gate, act(gate) and up between forward and
backward; a fused kernel keeps gate and up, because its backward reads both and computes act(gate) in registers. That is
a sixth of what a Llama's block keeps. Stacks that do so: Megatron-Core, which fuses gates by default
(`bias_swiglu_fusion`, megatron/core/fusions/fused_bias_swiglu.py), and with it NeMo and Megatron-Bridge. Torch without
a compiler and Hugging Face's models run two ops.
"""

from __future__ import annotations

from dataclasses import replace

from phaze.cost.calibration import Calibration, Fusion
from phaze.cost.operator_work import vector_operations
from phaze.ir import Graph, Op, OpKind, Phase
from phaze.ir.backward import without_backward

__all__ = ["fuse_gates", "fuses_gates", "with_fused_gates"]

_ACTIVATIONS = frozenset({"silu", "gelu", "gelu_tanh"})
"""Functions of gates that the fused kernels have."""


def fuses_gates(calibration: Calibration) -> bool:
    """Whether the calibration's stack runs a gated activation as one kernel."""
    return calibration.stack.fusion is Fusion.CHAINS_AND_GATES


def with_fused_gates(calibration: Calibration) -> Calibration:
    """The calibration on a stack that fuses gates besides; itself where its stack says something else of fusion."""
    if calibration.stack.fusion is not Fusion.CHAINS:
        return calibration
    return replace(calibration, stack=replace(calibration.stack, fusion=Fusion.CHAINS_AND_GATES))


def fuse_gates(graph: Graph) -> Graph:
    """The graph whose products with an activated gate are single ops; itself where there are none.

    A backward that was derived by rule is derived again; a captured one stays as it is.
    """
    had_backward = any(op.phase is Phase.BACKWARD for op in graph.ops)
    if had_backward and not graph.is_backward_derived:
        return graph
    readers: dict[str, int] = {}
    for op in graph.ops_of(Phase.FORWARD):
        for name in op.inputs:
            readers[name] = readers.get(name, 0) + 1
    activations: dict[str, Op] = {}
    for op in graph.ops_of(Phase.FORWARD):
        if op.kind is OpKind.ELEMENTWISE and op.function == "multiply" and set(op.rule.operands) == {*op.rule.results}:
            makers = [graph.producer(name) for name in op.inputs]
            gate = next((maker for maker in makers if maker is not None and _is_gate(graph, maker, readers)), None)
            if gate is not None:
                activations[op.id] = gate
    if not activations:
        return graph
    gone = {gate.outputs[0]: gate.inputs[0] for gate in activations.values()}
    forward = without_backward(graph)
    ops = tuple(
        _fused(op, activations[op.id]) if op.id in activations else op
        for op in forward.ops
        if op.outputs[0] not in gone
    )
    tensors = {name: tensor for name, tensor in forward.tensors.items() if name not in gone}
    note = "gated activations are one kernel, as the target's software runs them"
    fused = replace(forward, ops=ops, tensors=tensors, notes=(*graph.notes, note))
    return fused.with_backward() if had_backward else fused


def _is_gate(graph: Graph, op: Op, readers: dict[str, int]) -> bool:
    """Whether an op is an activation that nothing but the product behind it reads."""
    is_activation = op.kind is OpKind.ELEMENTWISE and op.function in _ACTIVATIONS and len(op.inputs) == 1
    return is_activation and readers[op.outputs[0]] == 1 and op.outputs[0] not in graph.outputs


def _fused(op: Op, gate: Op) -> Op:
    """The product with the activation in it: its gradient reads both operands, as of any op without a name."""
    inputs = tuple(gate.inputs[0] if name == gate.outputs[0] else name for name in op.inputs)
    operations = round((vector_operations(op) + vector_operations(gate)) / max(1, op.rule.work))
    return replace(op, function="fused", inputs=inputs, attributes=(("operations", operations),))
