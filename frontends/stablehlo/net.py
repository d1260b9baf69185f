"""Ops and what feeds what, before there is a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phaze.ir import Op

__all__ = ["Net"]


@dataclass(frozen=True, slots=True)
class Net:
    """Ops in order, and the op that makes each tensor."""

    ops: Sequence[Op]
    producers: dict[str, Op] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "producers", {tensor_id: op for op in self.ops for tensor_id in op.outputs})

    def ancestors(self, tensor_ids: Iterable[str]) -> set[str]:
        """The ids of all ops that these tensors depend on."""
        found: set[str] = set()
        waiting = list(tensor_ids)
        while waiting:
            op = self.producers.get(waiting.pop())
            if op is not None and op.id not in found:
                found.add(op.id)
                waiting.extend(op.inputs)
        return found

    def read_by(self, op_ids: Iterable[str]) -> set[str]:
        """The tensors that these ops read."""
        wanted = set(op_ids)
        return {tensor_id for op in self.ops if op.id in wanted for tensor_id in op.inputs}

    def descendants(self, tensor_ids: Iterable[str]) -> set[str]:
        """The ids of all ops that depend on one of these tensors."""
        known = set(tensor_ids)
        found: set[str] = set()
        for op in self.ops:
            if known.intersection(op.inputs):
                found.add(op.id)
                known.update(op.outputs)
        return found
