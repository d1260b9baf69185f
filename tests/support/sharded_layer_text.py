"""A sharded layer as text, for golden dumps: a line per op with its split, collectives with their cost in between."""

from __future__ import annotations

from phaze.cost import Collective, price_ops
from phaze.ir import Graph, Op, OpKind
from phaze.shard import ShardedLayer, slice_layer

__all__ = ["format_sharded_layer"]


def format_sharded_layer(sharded: ShardedLayer) -> str:
    """Parameters with their layouts, then the local ops of forward and backward in order, microseconds in front."""
    local = slice_layer(sharded)
    seconds = _seconds_of_ops(sharded, local)
    lines = [
        f"layer {sharded.problem.layer.name}, {sharded.problem.axis.tp} ways: "
        f"{sharded.compute_s * 1e6:.1f} us of work, {sharded.move_s * 1e6:.1f} us of collectives"
    ]
    lines += [f"  parameter {name}: {layout}" for name, layout in sharded.parameters.items()]
    lines += [f"  {op.phase:<8} {seconds[op.id] * 1e6:8.1f} us  {_described(sharded, op)}" for op in local.ops]
    return "\n".join(lines) + "\n"


def _seconds_of_ops(sharded: ShardedLayer, local: Graph) -> dict[str, float]:
    """What each local op and each collective takes."""
    axis = sharded.problem.axis
    ops = [op for op in local.ops if op.kind is not OpKind.COLLECTIVE]
    estimate = price_ops(local, ops, axis.cluster.accelerator, calibration=axis.calibration, prices={})
    seconds = dict(zip((op.id for op in ops), estimate.spread_s[:, 0].tolist(), strict=True))
    for op in local.ops:
        if op.kind is OpKind.COLLECTIVE:
            seconds[op.id] = axis.seconds(Collective(op.function), op.collective_bytes)
    return seconds


def _described(sharded: ShardedLayer, op: Op) -> str:
    source = ", ".join(op.inputs)
    if op.kind is OpKind.COLLECTIVE:
        return f"{op.function}({source}) of {op.collective_bytes} bytes -> {op.outputs[0]}"
    split = sharded.splits.get(op.id)
    if split is None:
        return f"own part of {source}"
    factors = " ".join(f"{name}/{ways}" for name, ways in split.ways) or "all"
    layouts = ", ".join(dict.fromkeys(str(layout) for layout in split.made))
    return f"{op.id} = {op.function} by {factors} -> {layouts}"
