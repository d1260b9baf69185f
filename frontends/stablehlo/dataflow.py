"""What depends on what among the ops of a training step: their dataflow, their phases, and what forward keeps.

Dataflow: which op makes and reads which tensor, before there is a graph (`Dataflow`): ancestors, descendants, an order
by depth. HLO lists operations in the order of a search from the results, so that equal layers can be listed
differently. Sorted by depth (the longest way from an argument), then by what they compute and what they read, they are
equal again (`sorted_by_depth`).

Phases: the phase of every op is told by what depends on what (`find_phases`):

forward     what the loss depends on, what has nothing to do with gradients (metrics), and what the loops of the forward
            make for those of the backward, which read it from stacks
backward    what gradients depend on, besides the forward
recompute   backward ops that compute again what a forward op has computed (`Recorder.repeats`)
update      what depends on a gradient or on optimizer state, besides the backward, and what only that reads

A whole train step has no gradients among its results. `find_gradient` finds the gradient behind a new parameter. A step
may even have no loss among them: the forward is then what all gradients depend on (`forward_of_gradients`).

Saved for backward: `minimize_saved_bytes` chooses which forward tensors backward keeps, as XLA does, with cheap vector
work computed again instead of kept. JAX's backward reads whatever its forward happened to compute. A compiler that
fuses does better: an elementwise op of the forward can as well be done again inside the backward op that reads it.
XLA's instruction fusion (`IsExpensive` and what follows it in xla/service/instruction_fusion.cc) does so

1. unless it is expensive (`EXPENSIVE`): an exponential, a quotient, a root are kept;
2. unless it would read more full tensors than the one that it makes (`_Choice.find_roots`).

What other backward ops read (products) is kept in any case. The bytes that gradients hold which XLA compiled for a CPU
are those of this choice within a tenth (`benchmarks/memory_statistics.py`). What a loop of the forward stacks for one
of the backward is kept as it is: no compiler chooses anew between two loops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phaze.ir import Graph, Op, OpKind, Phase, Tensor

__all__ = [
    "Dataflow",
    "find_gradient",
    "find_phases",
    "forward_of_gradients",
    "minimize_saved_bytes",
    "saved_activations",
    "sorted_by_depth",
]


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


def minimize_saved_bytes(graph: Graph, stacked: Collection[str] = ()) -> Graph:
    """The graph whose backward reads the fewest bytes of the forward; ops that are done again are backward ops.

    Backward goes on reading the tensors that are stacked.
    """
    choice = _Choice(graph, frozenset(stacked))
    for layer in graph.layers:
        choice.add_layer(layer.forward, layer.backward)
    return choice.graph_with_repeats()


def saved_activations(graph: Graph) -> tuple[str, ...]:
    """What the backward of a graph reads of its forward, the layer of the loss left out: it has kernels of its own."""
    layers = [layer for layer in graph.layers if not graph.outputs or graph.outputs[0] not in layer.outputs]
    made = {tensor_id for layer in layers for op in layer.forward for tensor_id in op.outputs}
    read = dict.fromkeys(graph.storage(name) for op in graph.ops_of(Phase.BACKWARD) for name in op.inputs)
    return tuple(name for name in read if name in made)


EXPENSIVE = frozenset(
    {
        *("cbrt", "cos", "divide", "erf", "exp", "expm1", "log", "log1p", "power", "remainder", "rsqrt", "sigmoid"),
        *("sin", "sqrt", "tan", "tanh", "atan2", "silu", "gelu", "softplus"),
    }
)
"""Elementwise functions that XLA does not compute again for a second reader."""


class _Choice:
    """What was chosen so far: the repeated ops by their first reader, and what readers read instead."""

    def __init__(self, graph: Graph, stacked: frozenset[str]) -> None:
        self.graph = graph
        self.stacked = stacked
        self.read_instead: dict[str, dict[str, str]] = {}
        self.repeated_ops: dict[str, list[Op]] = {}
        self.repeated_tensors: dict[str, Tensor] = {}

    def add_layer(self, forward: Iterable[Op], backward: Iterable[Op]) -> None:
        """Cut the elementwise part of a layer, and repeat what lies behind the cut."""
        cheap = {tensor_id: op for op in forward if _is_cheap(op) for tensor_id in op.outputs}
        readers: dict[str, list[Op]] = {}
        for op in backward:
            if op.phase is Phase.BACKWARD:
                for tensor_id in dict.fromkeys(op.inputs):
                    readers.setdefault(tensor_id, []).append(op)
        kept = {
            t for t, ops in readers.items() if t in self.stacked or any(op.kind is not OpKind.ELEMENTWISE for op in ops)
        }
        wanted = [tensor_id for tensor_id in readers if tensor_id in cheap and tensor_id not in kept]
        if not wanted:
            return
        chosen = set(kept)
        roots: dict[str, frozenset[str]] = {}
        for tensor_id in wanted:
            self.find_roots(tensor_id, cheap, chosen, roots)
        for tensor_id in wanted:
            if tensor_id not in chosen:
                for op in readers[tensor_id]:
                    again = self.repeat(op, tensor_id, cheap, chosen)
                    self.read_instead.setdefault(op.id, {})[tensor_id] = again

    def find_roots(
        self, tensor_id: str, cheap: dict[str, Op], kept: set[str], roots: dict[str, frozenset[str]]
    ) -> frozenset[str]:
        """The tensors that this one is computed again from; itself where it is kept instead.

        Those on the way to it that are kept are added to `kept`; `roots` has what is known already.
        """
        if tensor_id in kept or tensor_id not in cheap:
            return frozenset((tensor_id,))
        if tensor_id not in roots:
            op, size = cheap[tensor_id], self.graph.tensors[tensor_id].elements
            found = frozenset().union(*(self.find_roots(source, cheap, kept, roots) for source in op.inputs))
            as_large = {root for root in found if self.graph.tensors[root].elements >= size}
            if op.function in EXPENSIVE or sum(map(self._costs_to_keep, as_large)) > 1:
                kept.add(tensor_id)
                return frozenset((tensor_id,))
            roots[tensor_id] = found
        return roots[tensor_id]

    def _costs_to_keep(self, tensor_id: str) -> bool:
        """Whether a tensor is no argument, which is always there."""
        return self.graph.tensors[self.graph.storage(tensor_id)].role is None

    def repeat(self, reader: Op, tensor_id: str, cheap: dict[str, Op], kept: set[str]) -> str:
        """The tensor that backward computes again from what is kept; it is made before its first reader, for all."""
        if tensor_id in kept or tensor_id not in cheap:
            return tensor_id
        again = f"{tensor_id}.again"
        if again not in self.repeated_tensors:
            op = cheap[tensor_id]
            inputs = tuple(self.repeat(reader, source, cheap, kept) for source in op.inputs)
            self.repeated_tensors[again] = replace(self.graph.tensors[tensor_id], id=again)
            repeated = replace(op, id=again, inputs=inputs, outputs=(again,), phase=Phase.BACKWARD)
            self.repeated_ops.setdefault(reader.id, []).append(repeated)
        return again

    def graph_with_repeats(self) -> Graph:
        """The graph with the repeated ops before their first readers."""
        if not self.repeated_tensors:
            return self.graph
        ops: list[Op] = []
        for op in self.graph.ops:
            ops += self.repeated_ops.get(op.id, ())
            instead = self.read_instead.get(op.id)
            if instead is not None:
                op = replace(op, inputs=tuple(instead.get(tensor_id, tensor_id) for tensor_id in op.inputs))
            ops.append(op)
        return replace(self.graph, ops=tuple(ops), tensors={**self.graph.tensors, **self.repeated_tensors})


def _is_cheap(op: Op) -> bool:
    """Whether an op has one result and makes it element by element; views cost nothing."""
    return len(op.outputs) == 1 and (op.kind is OpKind.ELEMENTWISE or (op.kind is OpKind.VIEW and len(op.inputs) == 1))
