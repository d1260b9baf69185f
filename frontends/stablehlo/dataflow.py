"""Which op makes and reads which tensor, before there is a graph: ancestors, descendants, an order by depth.

HLO lists operations in the order of a search from the results, so that equal layers can be listed differently. Sorted
by depth (the longest way from an argument), then by what they compute and what they read, they are equal again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phaze.ir import Op

__all__ = ["Dataflow", "sorted_by_depth"]


@dataclass(frozen=True, slots=True)
class Dataflow:
    """Ops in order, and the op that makes each tensor.

    `handed_on` has, for the state that a trip of a loop begins with, what the trip before it has made of it: the state
    depends on that, too, which no op says where all trips are one.
    """

    ops: Sequence[Op]
    handed_on: Mapping[str, str] = field(default_factory=dict)
    producers: dict[str, Op] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "producers", {tensor_id: op for op in self.ops for tensor_id in op.outputs})

    def ancestors(self, tensor_ids: Iterable[str]) -> set[str]:
        """The ids of all ops that these tensors depend on."""
        op_ids: set[str] = set()
        waiting = list(tensor_ids)
        while waiting:
            op = self.producers.get(waiting.pop())
            if op is not None and op.id not in op_ids:
                op_ids.add(op.id)
                waiting.extend(op.inputs)
                waiting.extend(self.handed_on[tensor_id] for tensor_id in op.outputs if tensor_id in self.handed_on)
        return op_ids

    def descendants(self, tensor_ids: Iterable[str]) -> set[str]:
        """The ids of all ops that depend on one of these tensors."""
        dependent = set(tensor_ids)
        op_ids: set[str] = set()
        for op in self.ops:
            if dependent.intersection(op.inputs):
                op_ids.add(op.id)
                dependent.update(op.outputs)
        return op_ids

    def read_by(self, op_ids: Iterable[str]) -> set[str]:
        """The tensors that these ops read."""
        readers = set(op_ids)
        return {tensor_id for op in self.ops if op.id in readers for tensor_id in op.inputs}

    def shape(self, tensor_id: str) -> tuple[int, ...]:
        """The shape of a tensor that some op makes."""
        op = self.producers[tensor_id]
        return op.rule.shape(op.rule.results[op.outputs.index(tensor_id)])


def sorted_by_depth(ops: Sequence[Op]) -> list[Op]:
    """The ops in an order that follows from what they compute, whatever order they are given in."""
    depths: dict[str, int] = {}
    levels: dict[int, list[Op]] = {}
    for op in ops:
        depth = 1 + max((depths.get(tensor_id, 0) for tensor_id in op.inputs), default=0)
        depths.update(dict.fromkeys(op.outputs, depth))
        levels.setdefault(depth, []).append(op)
    positions: dict[str, int] = {}
    rule_texts: dict[int, str] = {}  # by id: rules are shared between ops, and writing one takes long
    ordered: list[Op] = []
    for depth in sorted(levels):
        level = levels[depth]
        level.sort(
            key=lambda op: (
                op.function,
                rule_texts.setdefault(id(op.rule), str(op.rule)),
                [positions.get(tensor_id, -1) for tensor_id in op.inputs],
            )
        )
        for op in level:
            positions.update((tensor_id, len(ordered)) for tensor_id in op.outputs)
            ordered.append(op)
    return ordered
