"""Ops and what feeds what, before there is a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phaze.ir import Graph, Op
from phaze.ir.layers import canonical_key

__all__ = ["Net", "by_depth", "repeated_blocks"]


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


def by_depth(ops: Sequence[Op]) -> list[Op]:
    """The ops of one phase, or of several, in an order that follows from what they compute."""
    depths: dict[str, int] = {}
    levels: dict[int, list[Op]] = {}
    for op in ops:
        depth = 1 + max((depths.get(tensor_id, 0) for tensor_id in op.inputs), default=0)
        depths.update(dict.fromkeys(op.outputs, depth))
        levels.setdefault(depth, []).append(op)
    places: dict[str, int] = {}
    texts: dict[int, str] = {}
    found: list[Op] = []
    for depth in sorted(levels):
        level = levels[depth]
        level.sort(
            key=lambda op: (
                op.function,
                texts.setdefault(id(op.rule), str(op.rule)),
                [places.get(tensor_id, -1) for tensor_id in op.inputs],
            )
        )
        for op in level:
            places.update((tensor_id, len(found)) for tensor_id in op.outputs)
            found.append(op)
    return found


def repeated_blocks(graph: Graph) -> dict[str, str] | None:
    """Names of blocks by forward op, for a graph without module paths; None where nothing repeats."""
    layers = graph.layers
    texts: dict[int, str] = {}
    run = _longest_run([canonical_key(graph, layer.forward, layer.outputs, texts) for layer in layers])
    if run is None:
        return None
    start, period, count = run
    names = ["first"] * start
    names += [f"block.{index // period}" for index in range(period * count)]
    names += ["last"] * (len(layers) - len(names))
    return {op.id: names[layer.index] for layer in layers for op in layer.forward}


def _longest_run(keys: Sequence[str]) -> tuple[int, int, int] | None:
    """Start, period and number of repetitions of the run that covers the most, at least two of them."""
    best: tuple[int, int, int] | None = None
    for period in range(1, len(keys) // 2 + 1):
        for start in range(len(keys) - 2 * period + 1):
            count = 1
            while keys[start : start + period] == keys[start + count * period : start + (count + 1) * period]:
                count += 1
            if count > 1 and (best is None or period * count > best[1] * best[2]):
                best = (start, period, count)
    return best
