"""What a stack of software runs as one kernel (the loss, gates, attention), and the graph that is planned accordingly.

Loss (`fuse_loss`). A model computes cross entropy in single precision: its logits are copied to float32, kept so, and
their gradient is float32, too. A fused loss reads logits in the type in which the last product wrote them, computes in
float32 in registers and writes their gradient in the first type. Of 16-bit logits that leaves 2 bytes an element
between forward and backward and 2 in backward, instead of 4 and 6. Stacks that do so:

- XLA, whose fusion pass computes elementwise producers, conversions among them, again in each of their consumers
  (xla/service/instruction_fusion.cc): all TPUs;
- flash-attn's `CrossEntropyLoss`, which is MosaicML llm-foundry's `loss_fn: fused_crossentropy`, its default
  (llmfoundry/models/mpt/modeling_mpt.py);
- a loss under `torch.compile`, as in torchtitan (torchtitan/components/loss.py);
- Transformer Engine's `parallel_cross_entropy`, where Megatron-LM is told `cross_entropy_fusion_impl: te`.

Megatron-LM's own loss and that of Hugging Face's models make the float32 copy.

Gates (`fuse_gates`). A gated feed-forward layer multiplies act(gate) by up. As two ops it keeps gate, act(gate) and up
between forward and backward; a fused kernel keeps gate and up, because its backward reads both and computes act(gate)
in registers. That is a sixth of what a Llama's block keeps. Stacks that do so: Megatron-Core, which fuses gates by
default (`bias_swiglu_fusion`, megatron/core/fusions/fused_bias_swiglu.py), and with it NeMo and Megatron-Bridge. Torch
without a compiler and Hugging Face's models run two ops.

Attention (`settled_attention`, `planned_graph`) runs as one kernel or as products, by the chip unless the user says it.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from phaze.cost.attention_fusion import fuse_attention
from phaze.cost.calibration import Calibration, Fusion
from phaze.cost.operator_work import vector_operations
from phaze.errors import GraphError, QuestionError, shown
from phaze.hardware import Accelerator
from phaze.hardware.chip_presets import preset, preset_names
from phaze.ir import DType, Graph, Op, OpKind, Phase
from phaze.ir.backward import add_backward, derive_backward, without_backward

__all__ = [
    "AttentionMode",
    "fuse_gates",
    "fuse_loss",
    "fuses_gates",
    "fuses_loss",
    "planned_graph",
    "runs_xla",
    "settled_attention",
    "with_fused_gates",
]


def fuses_loss(accelerator: Accelerator, calibration: Calibration) -> bool:
    """Whether the loss reads logits in their own type: where the calibration's stack says so, and on TPUs."""
    return calibration.stack.fusion in (Fusion.LOSS, Fusion.CHAINS_AND_LOSS) or runs_xla(accelerator)


def runs_xla(accelerator: Accelerator) -> bool:
    """Whether programs of a chip are XLA's: of the TPUs those of today; the paper's template is no product."""
    if accelerator.name not in preset_names():
        return False
    chip = preset(accelerator.name)
    return chip.maker == "Google" and chip.attention_kernel is not None


def fuse_loss(graph: Graph) -> Graph:
    """The graph whose cross entropies read what was copied to float32 for them; itself where there is none.

    A backward that was there is derived again.
    """
    readers: dict[str, int] = {}
    for op in graph.ops_of(Phase.FORWARD):
        for name in op.inputs:
            readers[name] = readers.get(name, 0) + 1
    casts: dict[str, Op] = {}
    for op in graph.ops_of(Phase.FORWARD):
        if op.kind is OpKind.SOFTMAX and op.function == "cross_entropy":
            cast = graph.producer(op.inputs[0])
            if cast is not None and readers[op.inputs[0]] == 1 and _widens(graph, cast):
                casts[cast.outputs[0]] = cast
    casts = {name: cast for name, cast in casts.items() if name not in graph.outputs}
    if not casts:
        return graph
    had_backward = any(op.phase is Phase.BACKWARD for op in graph.ops)
    forward = without_backward(graph)
    ops = tuple(
        replace(op, inputs=tuple(casts[name].inputs[0] if name in casts else name for name in op.inputs))
        for op in forward.ops
        if op.outputs[0] not in casts
    )
    tensors = {name: tensor for name, tensor in forward.tensors.items() if name not in casts}
    note = "the loss reads logits in their own type, as the chip's software does"
    fused = replace(forward, ops=ops, tensors=tensors, notes=(*graph.notes, note))
    return fused.with_backward() if had_backward else fused


def _widens(graph: Graph, op: Op) -> bool:
    """Whether an op copies 16-bit floats to float32."""
    if op.function != "cast" or len(op.inputs) != 1:
        return False
    before, after = graph.tensors[op.inputs[0]].dtype, graph.tensors[op.outputs[0]].dtype
    return after is DType.FLOAT32 and before.is_float and before.size_bytes < after.size_bytes


_ACTIVATIONS = frozenset({"silu", "gelu", "gelu_tanh"})
"""Functions of gates that the fused kernels have."""


def fuses_gates(calibration: Calibration) -> bool:
    """Whether the calibration's stack runs a gated activation as one kernel."""
    return calibration.stack.fusion is Fusion.CHAINS_AND_GATES


def with_fused_gates(calibration: Calibration) -> Calibration:
    """The calibration on a stack that fuses gates besides; itself where its stack says something else of fusion.

    Such stacks run 8-bit products by Transformer Engine, which keeps their inputs in 8 bits.
    """
    if calibration.stack.fusion is not Fusion.CHAINS:
        return calibration
    stack = replace(calibration.stack, fusion=Fusion.CHAINS_AND_GATES, keeps_narrow_inputs=True)
    return replace(calibration, stack=stack)


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


class AttentionMode(StrEnum):
    """How attention runs: as one kernel, or as products with a softmax between whose scores are stored."""

    FUSED = "fused"
    UNFUSED = "unfused"


def settled_attention(asked: object, accelerator: Accelerator) -> AttentionMode:
    """How attention runs on a chip: as asked, or (None) as its software does it.

    That is fused, but for the known chips whose software has no such kernel. Raises QuestionError for another word.
    """
    if asked is None:
        has_none = accelerator.name in preset_names() and preset(accelerator.name).attention_kernel is None
        return AttentionMode.UNFUSED if has_none else AttentionMode.FUSED
    if asked not in list(AttentionMode):
        words = " or ".join(repr(mode.value) for mode in AttentionMode)
        raise QuestionError(
            f"attention is {shown(asked)}; expected {words}, or None for what the chip's software does."
        )
    return AttentionMode(str(asked))


def planned_graph(
    graph: Graph, attention: AttentionMode, *, trains: bool = True, has_fused_loss: bool = False
) -> Graph:
    """The graph as it is planned: attention and loss as they run, and a backward by rule; none for inference.

    Ops of such a backward can be sliced like those of forward. A captured one is kept only where none can be derived,
    such as where no loss is known; its attention then stays as it was captured, and a note says so.
    """
    if has_fused_loss and trains:
        graph = fuse_loss(graph)
    if not trains:
        forward = without_backward(graph)
        return forward if attention is AttentionMode.UNFUSED else fuse_attention(forward)
    if attention is AttentionMode.UNFUSED:
        return derive_backward(graph)
    is_plain = graph.is_backward_derived or all(op.phase is Phase.FORWARD for op in graph.ops)
    forward = graph if is_plain else without_backward(graph)
    fused = fuse_attention(forward)
    if fused is forward:
        return derive_backward(graph)
    try:
        return add_backward(fused)
    except GraphError:
        kept = derive_backward(graph)
        return replace(kept, notes=(*kept.notes, "attention is priced as it was captured, with its backward"))
