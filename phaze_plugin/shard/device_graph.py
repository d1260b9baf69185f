"""The graph that one device of cp and ep runs, before tensor parallelism divides it further.

Forward ops are rewritten (`context_slicing.py`, `expert_slicing.py`) and backward is derived again by rule, in which
the gradient of a collective is the collective that brings gradients back.
"""

from __future__ import annotations

from collections.abc import Mapping

from phaze.errors import ShardError
from phaze.ir import Graph, Phase
from phaze.ir.backward import without_backward
from phaze.shard.context_slicing import KeyExchange, gather_again, slice_context
from phaze.shard.dropped_positions import with_dropped_positions
from phaze.shard.expert_slicing import expert_counts, slice_experts

__all__ = ["device_graph"]


def device_graph(
    graph: Graph,
    *,
    cp: int = 1,
    ep: int = 1,
    exchanges: Mapping[str, KeyExchange] | None = None,
    expert_imbalance: float = 1.0,
    keeps_dropped: bool = False,
) -> Graph:
    """The graph of one device when sequences are split over cp and experts divided over ep devices.

    `exchanges` says how each fused attention gets its keys, by op, where that is not by an all-gather. With
    `keeps_dropped`, positions that a model drops at the end of a sequence are computed and left out, so that cp divides
    what is left. A graph without anything to slice is given back as it is.

    Raises:
        ShardError: cp or ep does not divide what it splits, there is nothing to split, an op cannot be sliced, or
            backward was captured and could not be derived by rule.
    """
    has_imbalance = expert_imbalance != 1 and bool(expert_counts(graph))
    if cp == 1 and ep == 1 and not has_imbalance:
        return graph
    has_backward = any(op.phase is Phase.BACKWARD for op in graph.ops)
    if has_backward and not graph.is_backward_derived:
        raise ShardError(
            f"cp={cp} and ep={ep} need a backward by rule, but that of model {graph.name!r} is kept as captured: "
            f"{graph.why_backward_kept or 'it was not derived'}. Use cp=1 and ep=1."
        )
    forward = without_backward(graph)
    if cp > 1:
        forward = with_dropped_positions(forward, cp) if keeps_dropped else forward
        forward = slice_context(forward, cp, exchanges)
    if ep > 1 or has_imbalance:
        forward = slice_experts(forward, ep, expert_imbalance)
    return gather_again(forward.with_backward()) if has_backward else forward
