"""The phase of every op (forward, backward, recompute or update), told by what depends on what.

forward     what the loss depends on, what has nothing to do with gradients (metrics), and what the loops of the forward
            make for those of the backward, which read it from stacks
backward    what gradients depend on, besides the forward
recompute   backward ops that compute again what a forward op has computed (`Recorder.repeats`)
update      what depends on a gradient or on optimizer state, besides the backward, and what only that reads

A whole train step has no gradients among its results. `find_gradient` finds the gradient behind a new parameter. A step
may even have no loss among them: the forward is then what all gradients depend on (`forward_of_gradients`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from phaze.frontends.stablehlo.dataflow import Dataflow
from phaze.ir import Op, OpKind, Phase

__all__ = ["find_gradient", "find_phases", "forward_of_gradients"]


def find_phases(
    dataflow: Dataflow,
    loss: Sequence[str],
    gradients: Sequence[str],
    states: Sequence[str],
    repeats: Mapping[str, str],
    stacking: Mapping[str, int] | None = None,
) -> dict[str, Phase]:
    """The phase of every op.

    `loss`, `gradients` and `states` are tensors; `repeats` has, for an op, the earlier one that it computes again;
    `stacking` the loop of each op whose stacks a later loop reads.
    """
    forward = dataflow.ancestors(loss) if loss else forward_of_gradients(dataflow, gradients)
    forward = forward | _stacked_for_backward(dataflow, forward, stacking or {})
    backward = dataflow.ancestors(gradients) - forward
    made_backward = (tensor_id for op in dataflow.ops if op.id in backward for tensor_id in op.outputs)
    update = dataflow.descendants([*gradients, *states, *made_backward]) - forward - backward
    update |= dataflow.ancestors(dataflow.read_by(update)) - forward - backward
    phases: dict[str, Phase] = {}
    for op in dataflow.ops:
        if op.id in forward:
            phases[op.id] = Phase.FORWARD
        elif op.id in backward:
            is_repeated = repeats.get(op.id) in forward or op.function == "barrier"
            phases[op.id] = Phase.RECOMPUTE if is_repeated and op.kind is not OpKind.VIEW else Phase.BACKWARD
        else:
            phases[op.id] = Phase.UPDATE if op.id in update else Phase.FORWARD
    return phases


def _stacked_for_backward(dataflow: Dataflow, forward: Collection[str], stacking: Mapping[str, int]) -> set[str]:
    """The ops of stacking loops of the forward that are computed from the forward alone."""
    loops = {stacking[op_id] for op_id in forward if op_id in stacking}
    made_forward: set[str] = set()
    for op in dataflow.ops:
        producers = (dataflow.producers.get(tensor_id) for tensor_id in op.inputs)
        is_ready = all(made is None or made.id in forward or made.id in made_forward for made in producers)
        if op.id not in forward and stacking.get(op.id) in loops and is_ready:
            made_forward.add(op.id)
    return made_forward


def forward_of_gradients(dataflow: Dataflow, gradients: Sequence[str]) -> set[str]:
    """The ops that all gradients depend on, without the last product or sum of each, which is of the backward.

    That of the last bias depends on nothing but the forward and the derivative of the loss by the last layer.
    """
    common: set[str] | None = None
    for gradient in gradients:
        made_by = dataflow.ancestors([gradient]) - _last_steps(dataflow, gradient)
        common = made_by if common is None else common & made_by
    return common or set()


def _last_steps(dataflow: Dataflow, gradient: str) -> set[str]:
    """The product or sum that makes a gradient, and the ops of one operand behind it."""
    steps: set[str] = set()
    op = dataflow.producers.get(gradient)
    while op is not None:
        steps.add(op.id)
        made = [tensor_id for tensor_id in op.inputs if tensor_id in dataflow.producers]
        if op.kind not in (OpKind.ELEMENTWISE, OpKind.COPY, OpKind.VIEW, OpKind.COLLECTIVE) or len(made) != 1:
            return steps
        op = dataflow.producers[made[0]]
    return steps


def find_gradient(dataflow: Dataflow, updated: str, arguments: frozenset[str]) -> str | None:
    """The gradient behind an updated parameter.

    The update is the tree of elementwise ops above the new parameter. A tensor in it is *free* if it depends on no
    argument by elementwise ops alone. The gradient is the first free tensor that is made of all that made any of the
    free tensors.
    """
    is_free = _free_tensors(dataflow, updated, arguments)
    shape = None if updated not in dataflow.producers else dataflow.shape(updated)
    candidates = [
        tensor_id
        for tensor_id in is_free
        if is_free[tensor_id] and tensor_id in dataflow.producers and dataflow.shape(tensor_id) == shape
    ]
    topmost = [top for top in _topmost_free(dataflow, updated, is_free) if dataflow.shape(top) == shape]
    leaves = {leaf for top in topmost for leaf in _leaves(dataflow, top, is_free)}
    whole = (tensor_id for tensor_id in candidates if leaves <= _leaves(dataflow, tensor_id, is_free))
    return next(whole, candidates[-1] if candidates else None)


def _is_pointwise(op: Op) -> bool:
    """Whether every element of the result comes from the elements at its place; annotations of shardings are so too."""
    return op.kind is OpKind.ELEMENTWISE or (op.kind is OpKind.VIEW and op.function == "sharding_constraint")


def _free_tensors(dataflow: Dataflow, updated: str, arguments: frozenset[str]) -> dict[str, bool]:
    """Whether each tensor of an update is free, operands before results."""
    is_free: dict[str, bool] = {}
    waiting = [(updated, False)]
    while waiting:
        tensor_id, are_operands_done = waiting.pop()
        op = dataflow.producers.get(tensor_id)
        if op is None or not _is_pointwise(op):
            is_free[tensor_id] = tensor_id not in arguments
        elif are_operands_done:
            operands_free = all(is_free.get(operand, operand not in arguments) for operand in op.inputs)
            is_free[tensor_id] = tensor_id not in arguments and operands_free
        elif tensor_id not in is_free:
            waiting.append((tensor_id, True))
            waiting.extend((operand, False) for operand in op.inputs if operand not in is_free)
    return is_free


def _topmost_free(dataflow: Dataflow, updated: str, is_free: Mapping[str, bool]) -> list[str]:
    """The first free tensors on every way down from the new parameter."""
    topmost, waiting, seen = [], [updated], set()
    while waiting:
        tensor_id = waiting.pop()
        if tensor_id in seen:
            continue
        seen.add(tensor_id)
        op = dataflow.producers.get(tensor_id)
        if is_free.get(tensor_id):
            if op is not None:
                topmost.append(tensor_id)
        elif op is not None and _is_pointwise(op):
            waiting.extend(op.inputs)
    return topmost


def _leaves(dataflow: Dataflow, top: str, is_free: Mapping[str, bool]) -> set[str]:
    """The tensors of the same shape that a free tensor comes from by elementwise ops, and that no such op makes."""
    leaves, waiting, seen = set(), [top], {top}
    while waiting:
        tensor_id = waiting.pop()
        op = dataflow.producers.get(tensor_id)
        if op is None or not _is_pointwise(op):
            if op is not None and dataflow.shape(tensor_id) == dataflow.shape(top):
                leaves.add(tensor_id)
            continue
        waiting.extend(operand for operand in op.inputs if operand in is_free and operand not in seen)
        seen.update(op.inputs)
    return leaves
