"""Which elementwise ops run in one kernel with the op before them, and what the fused kernel still moves.

An elementwise op (dropout included) joins (`_joins`) the group of a matrix op when

1. the last result of the group is one of its operands,
2. it is of the same phase and runs over the same elements as that result,
3. its other operands were made before the matrix op, so that nothing waits in a circle.

Inside a group results pass from tensor to vector cores without leaving the chip. A tensor that is also needed outside
(kept for backward, read by another group, an output of the graph) is still written, never read back. The op then
occupies both kinds of core.

Frameworks that call a library for matrix products fuse elementwise ops with each other only: a chain then begins with
the first of them, by the same three conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from phaze.cost.calibration import Fusion
from phaze.cost.off_chip_traffic import ProductTiling
from phaze.cost.operator_work import Tensors, Work, op_work, read_bytes, vector_operations, written_bytes
from phaze.ir import Graph, Op, OpKind

__all__ = [
    "OpGroup",
    "fuse_epilogues",
    "group_work",
    "single_groups",
]

_EPILOGUES = frozenset({OpKind.ELEMENTWISE, OpKind.DROPOUT})
_HEADS = {
    Fusion.NONE: frozenset[OpKind](),
    Fusion.LOSS: frozenset[OpKind](),
    Fusion.CHAINS: _EPILOGUES,
    Fusion.CHAINS_AND_LOSS: _EPILOGUES,
    Fusion.CHAINS_AND_GATES: _EPILOGUES,
    Fusion.EPILOGUES: frozenset({OpKind.CONTRACTION, OpKind.CONVOLUTION}),
}


@dataclass(frozen=True, slots=True)
class OpGroup:
    """Ops that run as one: a head, and elementwise ops fused behind it; ``writes`` are the tensors that leave."""

    head: Op
    epilogue: tuple[Op, ...] = ()
    writes: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, in order."""
        return (self.head, *self.epilogue)

    @property
    def reads(self) -> tuple[str, ...]:
        """Tensors that come from outside, each once."""
        inside = {tensor_id for op in self.ops for tensor_id in op.outputs}
        names = dict.fromkeys(tensor_id for op in self.ops for tensor_id in op.inputs)
        return tuple(tensor_id for tensor_id in names if tensor_id not in inside)


def single_groups(ops: Iterable[Op]) -> tuple[OpGroup, ...]:
    """Every op by itself."""
    return tuple(OpGroup(op, (), op.outputs) for op in ops)


def fuse_epilogues(
    graph: Graph, ops: Sequence[Op] | None = None, fusion: Fusion = Fusion.EPILOGUES
) -> tuple[OpGroup, ...]:
    """Groups of ``ops`` (all of the graph's when left out), in the order of their heads, in which they can run."""
    wanted = graph.ops if ops is None else tuple(ops)
    position = {op.id: index for index, op in enumerate(graph.ops)}
    members: dict[str, list[Op]] = {}
    head_of: dict[str, str] = {}
    tail_of: dict[str, str] = {}
    for op in wanted:
        candidates = {head_of[name] for name in op.inputs if name in head_of and tail_of[head_of[name]] == name}
        latest_first = sorted(candidates, key=lambda head_id: -position[head_id])
        head_id = next((head_id for head_id in latest_first if _joins(graph, op, members[head_id], position)), op.id)
        members.setdefault(head_id, []).append(op)
        if members[head_id][0].kind in _HEADS[fusion]:
            head_of[op.outputs[0]] = head_id
            tail_of[head_id] = op.outputs[0]
    readers = _readers(graph)
    return tuple(_closed(group, readers) for group in members.values())


def _joins(graph: Graph, op: Op, group: Sequence[Op], position: dict[str, int]) -> bool:
    """Whether an op that reads a group's last result may join it: conditions 2 and 3 of the module."""
    head, tail = group[0], group[-1].outputs[0]
    if op.kind not in _EPILOGUES or op.phase is not head.phase or op.rule.work != graph.tensors[tail].elements:
        return False
    if op.rule.trips != head.rule.trips:
        return False
    made_inside = {tensor_id for member in group for tensor_id in member.outputs}
    producers = [graph.producer(name) for name in op.inputs if name not in made_inside]
    return all(producer is None or position[producer.id] < position[head.id] for producer in producers)


def _readers(graph: Graph) -> dict[str, set[str]]:
    """Ops that read each tensor; outputs of the graph and gradients count as read by nobody in particular."""
    readers: dict[str, set[str]] = {}
    for op in graph.ops:
        for tensor_id in op.inputs:
            readers.setdefault(tensor_id, set()).add(op.id)
    for tensor_id in (*graph.outputs, *(gradient for _, gradient in graph.gradients)):
        readers.setdefault(tensor_id, set()).add("")
    return readers


def _closed(group: Sequence[Op], readers: dict[str, set[str]]) -> OpGroup:
    """A finished group, with the tensors that somebody outside of it reads."""
    inside = {op.id for op in group}
    made = [tensor_id for op in group for tensor_id in op.outputs]
    leaving = [name for name in made if readers.get(name, {""}) - inside]
    return OpGroup(group[0], tuple(group[1:]), tuple(leaving or made[-1:]))


def group_work(group: OpGroup, tensors: Tensors) -> Work:
    """The work of a group: the head's own, with the traffic inside the group left out."""
    if group.epilogue and (trips := group.head.rule.trips) > 1:
        head, *epilogue = (replace(op, rule=op.rule.of_one_trip) for op in group.ops)
        return replace(group_work(OpGroup(head, tuple(epilogue), group.writes), tensors), trips=trips)
    work = op_work(group.head, tensors)
    if not group.epilogue:
        return work
    is_matrix = bool(work.products)
    arriving: dict[str, float] = {}
    inside = set(group.head.outputs) if is_matrix else set[str]()
    for op in group.epilogue if is_matrix else group.ops:
        for tensor_id, moved in zip(op.inputs, read_bytes(op, tensors), strict=True):
            if tensor_id not in inside:
                arriving[tensor_id] = max(moved, arriving.get(tensor_id, 0.0))
        inside.update(op.outputs)
    written = {
        tensor_id: moved
        for op in group.ops
        for tensor_id, moved in zip(op.outputs, written_bytes(op, tensors), strict=True)
    }
    return Work(
        products=work.products,
        vector_operations=sum(vector_operations(op) for op in (group.epilogue if is_matrix else group.ops)),
        tilings=tuple(
            replace(tiling, output_bytes=0.0) for tiling in work.tilings if isinstance(tiling, ProductTiling)
        ),
        streamed_bytes=sum(arriving.values()) + sum(written[name] for name in group.writes),
    )
