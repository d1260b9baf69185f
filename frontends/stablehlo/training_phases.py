"""Forward, backward, computed again and update, told apart by what depends on what.

forward     what the loss depends on, and what has nothing to do with gradients (metrics)
backward    what gradients depend on, besides the forward
recompute   backward ops that compute again what a forward op has computed (`Recorder.again`)
update      what depends on a gradient or on optimizer state, besides the backward, and what only that reads
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phaze.frontends.stablehlo.dataflow import Net
from phaze.ir import Op, OpKind, Phase

__all__ = ["find_gradient", "find_phases"]


def find_phases(
    net: Net, loss: Iterable[str], gradients: Iterable[str], states: Iterable[str], again: Mapping[str, str]
) -> dict[str, Phase]:
    """The phase of every op."""
    forward = net.ancestors(loss)
    backward = net.ancestors(gradients) - forward
    later = net.descendants([*gradients, *states, *(t for op in net.ops if op.id in backward for t in op.outputs)])
    updating = later - forward - backward
    updating |= net.ancestors(net.read_by(updating)) - forward - backward
    phases: dict[str, Phase] = {}
    for op in net.ops:
        if op.id in forward:
            phases[op.id] = Phase.FORWARD
        elif op.id in backward:
            is_again = again.get(op.id) in forward or op.function == "barrier"
            phases[op.id] = Phase.RECOMPUTE if is_again and op.kind is not OpKind.VIEW else Phase.BACKWARD
        else:
            phases[op.id] = Phase.UPDATE if op.id in updating else Phase.FORWARD
    return phases


def find_gradient(net: Net, updated: str, arguments: frozenset[str]) -> str | None:
    """The gradient behind an updated parameter.

    The update is the tree of elementwise ops above the new parameter. Of the tensors in it that depend on no argument
    by elementwise ops alone, the gradient is the first that is made of all that made any of them.
    """
    free: dict[str, bool] = {}
    tree: list[str] = []

    def visit(start: str) -> None:
        waiting = [(start, False)]
        while waiting:
            tensor_id, is_done = waiting.pop()
            op = net.producers.get(tensor_id)
            is_inner = op is not None and op.kind is OpKind.ELEMENTWISE
            if is_done or not is_inner:
                free[tensor_id] = _is_free(op, tensor_id, free, arguments) if is_inner else tensor_id not in arguments
                if tensor_id not in tree:
                    tree.append(tensor_id)
            elif tensor_id not in free:
                waiting.append((tensor_id, True))
                waiting.extend((inner, False) for inner in op.inputs if inner not in free)  # type: ignore[union-attr]

    visit(updated)
    shape = None if updated not in net.producers else _shape(net, updated)
    candidates = [t for t in tree if free[t] and t in net.producers and _shape(net, t) == shape]
    tops = [top for top in _tops(net, updated, free) if _shape(net, top) == shape]
    leaves = {leaf for top in tops for leaf in _leaves(net, top, free)}
    return next((t for t in candidates if leaves <= _leaves(net, t, free)), candidates[-1] if candidates else None)


def _is_free(op: Op | None, tensor_id: str, free: Mapping[str, bool], arguments: frozenset[str]) -> bool:
    assert op is not None
    return tensor_id not in arguments and all(free.get(inner, inner not in arguments) for inner in op.inputs)


def _shape(net: Net, tensor_id: str) -> tuple[int, ...]:
    op = net.producers[tensor_id]
    return op.rule.shape(op.rule.results[op.outputs.index(tensor_id)])


def _tops(net: Net, updated: str, free: Mapping[str, bool]) -> list[str]:
    """The first free tensors on every way down from the new parameter."""
    found, waiting, seen = [], [updated], set()
    while waiting:
        tensor_id = waiting.pop()
        if tensor_id in seen:
            continue
        seen.add(tensor_id)
        op = net.producers.get(tensor_id)
        if free.get(tensor_id):
            if op is not None:
                found.append(tensor_id)
        elif op is not None and op.kind is OpKind.ELEMENTWISE:
            waiting.extend(op.inputs)
    return found


def _leaves(net: Net, top: str, free: Mapping[str, bool]) -> set[str]:
    """The tensors of the same shape that a free tensor comes from by elementwise ops, and that no such op makes."""
    found, waiting, seen = set(), [top], {top}
    while waiting:
        tensor_id = waiting.pop()
        op = net.producers.get(tensor_id)
        if op is None or op.kind is not OpKind.ELEMENTWISE:
            if op is not None and _shape(net, tensor_id) == _shape(net, top):
                found.add(tensor_id)
            continue
        waiting.extend(inner for inner in op.inputs if inner in free and inner not in seen)
        seen.update(op.inputs)
    return found
