"""The layer as one device sees it: local shapes, and explicit collectives in forward and backward.

The slice is a Graph, so that cost, scheduling and the count of kept bytes read it like any other. Shapes are those of
the device that holds most. A collective is an op of kind `collective` on the mesh axis `tensor`; its attribute `bytes`
is the size of the whole tensor that it works on. Taking one's part of a whole tensor is a view.
"""

from __future__ import annotations

from collections.abc import Mapping

from phaze.cost import Collective
from phaze.ir import Dim, Dims, Factor, Graph, GraphBuilder, Op, OpKind, Phase, Role, Rule
from phaze.shard.layout import WHOLE, Layout
from phaze.shard.moves import collective_of
from phaze.shard.strategies import Strategy, statistics_bytes
from phaze.shard.task import LayerTask, ShardedLayer, leaving

__all__ = ["AXIS", "slice_layer"]

AXIS = "tensor"


def slice_layer(sharded: ShardedLayer) -> Graph:
    """The local graph of a sharded layer; what enters from other layers is its batch, gradients come in as `other`."""
    return _Slicer(sharded.task, sharded.strategies, sharded.parameters).run()


class _Slicer:
    """Writes the local ops; `at` says under which id and in which layout each tensor lies."""

    def __init__(self, task: LayerTask, strategies: Mapping[str, Strategy], parameters: Mapping[str, Layout]) -> None:
        self.task, self.graph, self.strategies, self.parameters = task, task.graph, strategies, parameters
        name = f"{task.layer.name} on one of {task.axis.width}"
        self.builder = GraphBuilder(name, micro_batch_size=task.graph.micro_batch_size)
        self.at: dict[str, Layout] = {}
        self.moved: dict[tuple[str, Layout, Phase], str] = {}

    def run(self) -> Graph:
        for op in (*self.task.layer.forward, *self.task.layer.backward):
            inputs = [self._fetch(name, wanted, op) for name, wanted in zip(op.inputs, self._operands(op), strict=True)]
            self._write(op, inputs)
        outputs = [self._deliver(name, phase) for name, phase in leaving(self.graph, self.task.layer)]
        self.builder.gradients.extend((p, g) for p, g in self.graph.gradients if g in self.at)
        return self.builder.build(outputs, (f"sliced {self.task.axis.width} ways along mesh axis {AXIS}",))

    def _operands(self, op: Op) -> tuple[Layout, ...]:
        return self.strategies[op.id].operands

    def _fetch(self, name: str, wanted: Layout, op: Op) -> str:
        """The id under which an op reads a tensor in the layout that it wants."""
        if name not in self.at:
            self._enter(name, wanted)
        return self._move(name, wanted, op)

    def _enter(self, name: str, wanted: Layout) -> None:
        tensor = self.graph.tensors[name]
        if tensor.role is Role.PARAMETER:
            layout = self.parameters.get(name, wanted)
        else:
            layout = self.task.layouts.get(name, WHOLE)
        producer = self.graph.producer(name)
        is_forward = producer is not None and producer.phase is Phase.FORWARD
        role = tensor.role or (Role.BATCH if is_forward else Role.OTHER)
        self.builder.argument(name, layout.local_shape(tensor.shape), role, tensor.dtype)
        self.at[name] = layout

    def _move(self, name: str, wanted: Layout, op: Op) -> str:
        before = self.at[name]
        if before == wanted:
            return name
        key = (name, wanted, op.phase)
        if key not in self.moved:
            self.moved[key] = self._collect(name, name, before, wanted, op)
        return self.moved[key]

    def _collect(self, source: str, name: str, before: Layout, after: Layout, op: Op, result: str = "") -> str:
        """Add the collective (or view) from one layout of tensor `name` to another; returns the id of its result."""
        collective = collective_of(before, after)
        tensor = self.graph.tensors[name]
        rule = _moving_rule(before.local_shape(tensor.shape), after.local_shape(tensor.shape))
        result = result or self._fresh(f"{name}:{collective or 'part'}")
        moved = Op(
            id=f"{result}:{collective or 'part'}" if result == name else result,
            kind=OpKind.VIEW if collective is None else OpKind.COLLECTIVE,
            function="part" if collective is None else collective.value,
            rule=rule,
            inputs=(source,),
            outputs=(result,),
            module=op.module,
            phase=op.phase,
            gradient_of=op.gradient_of,
            attributes=() if collective is None else (("axis", AXIS), ("bytes", tensor.size_bytes)),
        )
        return self.builder.insert(moved, [tensor.dtype])[0]

    def _fresh(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.builder.tensors:
            count += 1
            candidate = f"{name}.{count}"
        return candidate

    def _write(self, op: Op, inputs: list[str]) -> None:
        strategy = self.strategies[op.id]
        statistics = statistics_bytes(op, strategy.ways)
        if statistics:
            inputs[0] = self._reduce_statistics(op, inputs[0], statistics)
        settles = [made != settled for made, settled in zip(strategy.made, strategy.results, strict=True)]
        names = [f"{name}:partial" if must else name for name, must in zip(op.outputs, settles, strict=True)]
        local = Op(
            id=op.id if op.id not in self.builder.tensors else f"{op.id}:op",
            kind=op.kind,
            function=op.function,
            rule=op.rule.local(dict(strategy.ways)) if strategy.ways else op.rule,
            inputs=tuple(inputs),
            outputs=tuple(names),
            module=op.module,
            phase=op.phase,
            gradient_of=op.gradient_of,
            origin=op.origin,
            attributes=op.attributes,
        )
        self.builder.insert(local, [self.graph.tensors[name].dtype for name in op.outputs])
        for index, name in enumerate(op.outputs):
            self.at[name] = strategy.results[index]
            if settles[index]:
                self._collect(names[index], name, strategy.made[index], strategy.results[index], op, f"{name}")

    def _reduce_statistics(self, op: Op, source: str, size: int) -> str:
        """An all-reduce of a split normalization's statistics; what it works on passes through unchanged."""
        tensor = self.builder.tensors[source]
        rule = _moving_rule(tensor.shape, tensor.shape)
        result = self._fresh(f"{op.id}:statistics")
        attributes = (("axis", AXIS), ("bytes", size), ("is_statistics", 1))
        reduced = Op(
            id=result,
            kind=OpKind.COLLECTIVE,
            function=Collective.ALL_REDUCE.value,
            rule=rule,
            inputs=(source,),
            outputs=(result,),
            module=op.module,
            phase=op.phase,
            gradient_of=op.gradient_of,
            attributes=attributes,
        )
        return self.builder.insert(reduced, [tensor.dtype])[0]

    def _deliver(self, name: str, phase: Phase) -> str:
        """The id of a tensor that leaves, in the layout in which the next layer expects it."""
        producer = self.graph.producer(name)
        assert producer is not None
        return self._move(name, self.task.layouts.get(name, WHOLE), producer)


def _moving_rule(before: tuple[int, ...], after: tuple[int, ...]) -> Rule:
    """Dimension by dimension; where sizes differ the factor has the larger one and covers the other in part."""
    factors, operand, result = [], list[Dim](), list[Dim]()
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        name = f"d{index}"
        factors.append(Factor(name, max(old, new)))
        operand.append(Dim((name,), None if old >= new else old))
        result.append(Dim((name,), None if new >= old else new))
    dims: tuple[Dims, Dims] = (tuple(operand), tuple(result))
    return Rule((dims[0],), (dims[1],), tuple(factors))
