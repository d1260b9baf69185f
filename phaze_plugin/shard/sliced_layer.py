"""The layer as one device runs it: local shapes and explicit collectives in forward and backward.

The slice is a Graph, so that cost, scheduling and the count of kept bytes read it like any other. Shapes are those of
the device that holds most. A collective is an op of kind `collective` on the mesh axis `tensor`, and its
`collective_bytes` is the size of the whole tensor that it works on. Taking one's part of a whole tensor is a view.
"""

from __future__ import annotations

from phaze.cost import Collective
from phaze.ir import Dim, Factor, Graph, GraphBuilder, Op, OpKind, Phase, Role, Rule, Tensor
from phaze.shard.layer_sharding import ShardedLayer
from phaze.shard.layout import Layout, statistics_bytes
from phaze.shard.mesh_axes import TENSOR_AXIS, collective_of
from phaze.shard.sharding_problem import leaving_tensors

__all__ = ["slice_layer"]


def slice_layer(sharded: ShardedLayer) -> Graph:
    """The local graph of a sharded layer; what enters from other layers is its batch, gradients come in as `other`."""
    return _Slicer(sharded).run()


class _Slicer:
    """Writes the local ops; `layouts` says in which layout each tensor lies that was written so far."""

    def __init__(self, sharded: ShardedLayer) -> None:
        self.problem, self.splits, self.parameters = sharded.problem, sharded.splits, sharded.parameters
        self.graph = sharded.problem.graph
        name = f"{self.problem.layer.name} on one of {self.problem.axis.tp}"
        self.builder = GraphBuilder(name, micro_batch_size=self.graph.micro_batch_size)
        self.layouts: dict[str, Layout] = {}
        self.moved: dict[tuple[str, Layout, Phase], str] = {}

    def run(self) -> Graph:
        for op in self.problem.ops:
            wanted_layouts = self.splits[op.id].operands
            inputs = [self._fetch(name, wanted, op) for name, wanted in zip(op.inputs, wanted_layouts, strict=True)]
            self._write(op, inputs)
        outputs = [self._deliver(name) for name, _ in leaving_tensors(self.graph, self.problem.layer)]
        parameter_of = self.graph.parameter_of_gradient
        self.builder.gradients.extend((parameter_of[name], name) for name in self.layouts if name in parameter_of)
        return self.builder.build(outputs, (f"sliced {self.problem.axis.tp} ways along mesh axis {TENSOR_AXIS}",))

    def _fetch(self, name: str, wanted: Layout, op: Op) -> str:
        """The id under which an op reads a tensor in the layout that it wants."""
        if name not in self.layouts:
            self._enter(name, wanted)
        return self._move(name, wanted, op)

    def _enter(self, name: str, wanted: Layout) -> None:
        """Add a tensor that comes from outside as an argument, in the layout in which it arrives."""
        tensor = self.graph.tensors[name]
        if tensor.role is Role.PARAMETER:
            layout = self.parameters.get(name, wanted)
        else:
            layout = self.problem.boundary_layout(name)
        producer = self.graph.producer(name)
        is_forward = producer is not None and producer.phase is Phase.FORWARD
        role = tensor.role or (Role.BATCH if is_forward else Role.OTHER)
        shape = layout.local_shape(tensor.shape)
        self.builder.argument(name, shape, role, tensor.dtype, is_frozen=tensor.is_frozen)
        self.layouts[name] = layout

    def _move(self, name: str, wanted: Layout, op: Op) -> str:
        """The id of a tensor in the wanted layout; readers of one pass share the move."""
        before = self.layouts[name]
        if before == wanted:
            return name
        key = (name, wanted, op.phase)
        if key not in self.moved:
            self.moved[key] = self._reshard(name, name, before, wanted, op)
        return self.moved[key]

    def _reshard(self, source: str, name: str, before: Layout, after: Layout, op: Op, result: str = "") -> str:
        """Add the collective (or view) from one layout of tensor `name` to another; returns the id of its result."""
        collective = collective_of(before, after)
        tensor = self.graph.tensors[name]
        rule = _moving_rule(before.local_shape(tensor.shape), after.local_shape(tensor.shape))
        result = result or self._unused(f"{name}:{collective or 'part'}")
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
            attributes=() if collective is None else (("axis", TENSOR_AXIS),),
            collective_bytes=0 if collective is None else tensor.size_bytes,
        )
        return self.builder.insert(moved, [tensor.dtype])[0]

    def _unused(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.builder.tensors:
            count += 1
            candidate = f"{name}.{count}"
        return candidate

    def _write(self, op: Op, inputs: list[str]) -> None:
        """Add the local op, with the collectives that belong to it: its statistics, and its settled results."""
        split = self.splits[op.id]
        statistics = statistics_bytes(op, split.ways)
        if statistics:
            inputs[0] = self._reduce_statistics(op, inputs[0], statistics)
        must_settle = [made != settled for made, settled in zip(split.made, split.results, strict=True)]
        names = [f"{name}:partial" if must else name for name, must in zip(op.outputs, must_settle, strict=True)]
        rule = op.rule.local(dict(split.ways)) if split.ways else op.rule
        # Where two factors are split and a result has one of them, a device sums up only its part of the result.
        is_part = [
            made.is_partial and rule.shape(dims) != self.graph.tensors[name].shape
            for name, made, dims in zip(op.outputs, split.made, rule.results, strict=True)
        ]
        written = [f"{name}:part" if part else name for name, part in zip(names, is_part, strict=True)]
        local = Op(
            id=op.id if op.id not in self.builder.tensors else f"{op.id}:op",
            kind=op.kind,
            function=op.function,
            rule=rule,
            inputs=tuple(inputs),
            outputs=tuple(written),
            module=op.module,
            phase=op.phase,
            gradient_of=op.gradient_of,
            origin=op.origin,
            attributes=op.attributes,
            collective_bytes=op.collective_bytes,
        )
        self.builder.insert(local, [self.graph.tensors[name].dtype for name in op.outputs])
        for index, name in enumerate(op.outputs):
            if is_part[index]:
                self._place_part(op, written[index], names[index], self.graph.tensors[name])
            self.layouts[name] = split.results[index]
            if must_settle[index]:
                self._reshard(names[index], name, split.made[index], split.results[index], op, name)

    def _place_part(self, op: Op, part: str, result: str, whole: Tensor) -> None:
        """Add the copy of a device's part of a sum into zeros of the whole shape, so that all devices' sums add up."""
        placed = Op(
            id=f"{result}:place",
            kind=OpKind.COPY,
            function="place",
            rule=_moving_rule(self.builder.tensors[part].shape, whole.shape),
            inputs=(part,),
            outputs=(result,),
            module=op.module,
            phase=op.phase,
            gradient_of=op.gradient_of,
        )
        self.builder.insert(placed, [whole.dtype])

    def _reduce_statistics(self, op: Op, source: str, size_bytes: int) -> str:
        """Add an all-reduce of a split normalization's statistics; what it works on passes through unchanged."""
        tensor = self.builder.tensors[source]
        result = self._unused(f"{op.id}:statistics")
        reduced = Op(
            id=result,
            kind=OpKind.COLLECTIVE,
            function=Collective.ALL_REDUCE.value,
            rule=_moving_rule(tensor.shape, tensor.shape),
            inputs=(source,),
            outputs=(result,),
            module=op.module,
            phase=op.phase,
            gradient_of=op.gradient_of,
            attributes=(("axis", TENSOR_AXIS),),
            collective_bytes=size_bytes,
        )
        return self.builder.insert(reduced, [tensor.dtype])[0]

    def _deliver(self, name: str) -> str:
        """The id of a tensor that leaves, in the layout in which the next layer expects it."""
        producer = self.graph.producer(name)
        assert producer is not None
        return self._move(name, self.problem.boundary_layout(name), producer)


def _moving_rule(before: tuple[int, ...], after: tuple[int, ...]) -> Rule:
    """Dimension by dimension; where sizes differ the factor has the larger one and covers the other in part."""
    factors, operand, result = [], list[Dim](), list[Dim]()
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        name = f"d{index}"
        factors.append(Factor(name, max(old, new)))
        operand.append(Dim((name,), None if old >= new else old))
        result.append(Dim((name,), None if new >= old else new))
    return Rule((tuple(operand),), (tuple(result),), tuple(factors))
