"""A layer to shard, and the answer with what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phaze.cost import Collective
from phaze.ir import Graph, Layer, Op, Phase, Role
from phaze.shard.constraints import LayoutConstraint
from phaze.shard.layout import WHOLE, Layout
from phaze.shard.moves import Axis, collective_of
from phaze.shard.strategies import Strategy, statistics_bytes

__all__ = ["LayerTask", "ShardedLayer", "add_up", "layer_moves", "leaving", "settle_s", "unsharded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTask:
    """A layer to shard: the axis, the layouts at its boundaries, and what is asked of layouts.

    `layouts` gives the layout of every tensor that enters or leaves (gradients included) and of parameters that are
    settled elsewhere (tied ones); what it lacks enters and leaves whole.
    """

    graph: Graph
    layer: Layer
    axis: Axis
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    constraints: tuple[LayoutConstraint, ...] = ()
    may_split_sequence: bool = True
    may_stride_parameters: bool = True
    may_split_norms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedLayer:
    """The chosen strategy of every op, the layout of every parameter, and the seconds they take (compute, moves)."""

    task: LayerTask
    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, Layout]
    compute_s: float
    move_s: float

    @property
    def seconds(self) -> float:
        """What was minimised."""
        return self.compute_s + self.move_s


def unsharded(task: LayerTask) -> ShardedLayer:
    """The layer on one device, or on each of several that do the same: everything whole, no collectives."""
    strategies = {}
    for op in (*task.layer.forward, *task.layer.backward):
        results = (WHOLE,) * len(op.outputs)
        strategies[op.id] = Strategy(ways=(), operands=(WHOLE,) * len(op.inputs), made=results, results=results)
    return add_up(task, strategies, 0.0)


def add_up(task: LayerTask, chosen: Mapping[str, Strategy], compute_s: float) -> ShardedLayer:
    """Add up what chosen strategies cost in moves, from the layouts alone."""
    ops = (*task.layer.forward, *task.layer.backward)
    moves = sum(settle_s(task, op, chosen[op.id]) for op in ops)
    moves += sum(
        task.axis.move_s(before, after, task.graph.tensors[name].size_bytes)
        for name, before, after, _ in layer_moves(task, chosen)
    )
    parameters = {
        name: layout
        for op in task.layer.forward
        for name, layout in zip(op.inputs, chosen[op.id].operands, strict=True)
        if task.graph.tensors[name].role is Role.PARAMETER
    }
    return ShardedLayer(task=task, strategies=chosen, parameters=parameters, compute_s=compute_s, move_s=moves)


def layer_moves(task: LayerTask, chosen: Mapping[str, Strategy]) -> list[tuple[str, Layout, Layout, Phase]]:
    """Every (tensor, layout before, layout after, pass) that some reader needs, each once, in order of first need."""
    ops = (*task.layer.forward, *task.layer.backward)
    made = {name: layout for op in ops for name, layout in zip(op.outputs, chosen[op.id].results, strict=True)}
    found: dict[tuple[str, Layout, Layout, Phase], None] = {}
    for op in ops:
        for name, wanted in zip(op.inputs, chosen[op.id].operands, strict=True):
            if task.graph.tensors[name].role is None:
                before = made.get(name, task.layouts.get(name, WHOLE))
                if before != wanted and collective_of(before, wanted) is not None:
                    found[name, before, wanted, op.phase] = None
    for name, phase in leaving(task.graph, task.layer):
        before, wanted = made[name], task.layouts.get(name, WHOLE)
        if before != wanted and collective_of(before, wanted) is not None:
            found[name, before, wanted, phase] = None
    return list(found)


def leaving(graph: Graph, layer: Layer) -> list[tuple[str, Phase]]:
    """Tensors that other layers or the graph's outputs need, with the pass in which they leave."""
    ops = (*layer.forward, *layer.backward)
    own = {op.id for op in ops}
    made_forward = {name for op in layer.forward for name in op.outputs}
    made_backward = {name for op in layer.backward for name in op.outputs}
    wanted: dict[str, None] = {}
    for op in graph.ops:
        if op.id not in own:
            wanted.update(dict.fromkeys(name for name in op.inputs if name in made_backward))
    forward = [(name, Phase.FORWARD) for name in layer.outputs if name in made_forward]
    return forward + [(name, Phase.BACKWARD) for name in wanted]


def settle_s(task: LayerTask, op: Op, strategy: Strategy) -> float:
    """Seconds of the collectives that belong to an op itself."""
    total = 0.0
    statistics = statistics_bytes(op, strategy.ways)
    if statistics:
        total += task.axis.seconds(Collective.ALL_REDUCE, statistics)
    for name, made, settled in zip(op.outputs, strategy.made, strategy.results, strict=True):
        total += task.axis.move_s(made, settled, task.graph.tensors[name].size_bytes)
    return total
