"""A sharded layer as text: a line per op with its split; collectives in their place, with their cost."""

from __future__ import annotations

from phaze.cost import Collective
from phaze.ir import Op, OpKind
from phaze.shard.slice import slice_layer
from phaze.shard.task import ShardedLayer

__all__ = ["format_sharded_layer"]


def format_sharded_layer(sharded: ShardedLayer) -> str:
    """Parameters with their layouts, then the local ops of forward and backward in order, microseconds in front."""
    task = sharded.task
    local = slice_layer(sharded)
    lines = [
        f"layer {task.layer.name}, {task.axis.width} ways: "
        f"{sharded.compute_s * 1e6:.1f} us of work, {sharded.move_s * 1e6:.1f} us of collectives"
    ]
    for name, layout in sharded.parameters.items():
        lines.append(f"  parameter {name}: {layout}")
    for op in local.ops:
        lines.append(f"  {op.phase:<8} {_seconds(sharded, op)} {_described(sharded, op)}")
    return "\n".join(lines) + "\n"


def _seconds(sharded: ShardedLayer, op: Op) -> str:
    if op.kind is not OpKind.COLLECTIVE:
        return " " * 9
    size = op.attribute("bytes")
    assert isinstance(size, int)
    return f"{sharded.task.axis.seconds(Collective(op.function), size) * 1e6:7.1f}us"


def _described(sharded: ShardedLayer, op: Op) -> str:
    source = ", ".join(op.inputs)
    if op.kind is OpKind.COLLECTIVE:
        return f"{op.function}({source}) of {op.attribute('bytes')} bytes -> {op.outputs[0]}"
    strategy = sharded.strategies.get(op.id)
    if strategy is None:
        return f"own part of {source}"
    split = " ".join(f"{name}/{ways}" for name, ways in strategy.ways) or "all"
    layouts = ", ".join(dict.fromkeys(str(layout) for layout in strategy.made))
    return f"{op.id} = {op.function} by {split} -> {layouts}"
