"""How attention runs on a chip, as one kernel or as products, and the graph that is planned accordingly.

How the loss runs is a fact of the software (`loss_fusion.py`).
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from phaze.cost.attention_fusion import fuse_attention
from phaze.cost.loss_fusion import fuse_loss
from phaze.errors import GraphError, QuestionError, shown
from phaze.hardware import Accelerator
from phaze.hardware.chip_presets import preset, preset_names
from phaze.ir import Graph, Phase
from phaze.ir.backward import add_backward, derive_backward, without_backward

__all__ = ["AttentionMode", "planned_graph", "settled_attention"]


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
