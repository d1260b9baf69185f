"""The loss as one kernel that reads logits in their own type, where a stack of software has one.

A model computes cross entropy in single precision: its logits are copied to float32, kept so, and their gradient is
float32, too. A fused loss reads logits in the type in which the last product wrote them, computes in float32 in
registers and writes their gradient in the first type. Of 16-bit logits that leaves 2 bytes an element between forward
and backward and 2 in backward, instead of 4 and 6. Stacks that do so:

- XLA, whose fusion pass computes elementwise producers, conversions among them, again in each of their consumers
  (xla/service/instruction_fusion.cc): all TPUs;
- flash-attn's `CrossEntropyLoss`, which is MosaicML llm-foundry's `loss_fn: fused_crossentropy`, its default
  (llmfoundry/models/mpt/modeling_mpt.py);
- a loss under `torch.compile`, as in torchtitan (torchtitan/components/loss.py);
- Transformer Engine's `parallel_cross_entropy`, where Megatron-LM is told `cross_entropy_fusion_impl: te`.

Megatron-LM's own loss and that of Hugging Face's models make the float32 copy.
"""

from __future__ import annotations

from dataclasses import replace

from phaze.cost.calibration import Calibration, Fusion
from phaze.hardware import Accelerator
from phaze.hardware.chip_presets import preset, preset_names
from phaze.ir import DType, Graph, Op, OpKind, Phase
from phaze.ir.backward import without_backward

__all__ = ["fuse_loss", "fuses_loss", "runs_xla"]


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
