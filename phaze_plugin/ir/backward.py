"""The backward of a graph: derived by rule from the forward ops, in place of a captured one where that is possible.

Derivation. `add_backward` walks the forward ops in reverse and asks `gradients.py` for the gradient of each. A tensor
that several ops read gets the sum of their gradients. Each addition belongs to the op that contributed last, so that
inside a layer everything is summed before it leaves, and a tensor that many layers read (an encoder's output) is summed
along the way back. A parameter's gradient is summed within a layer only: between layers it is a reduction that
placement prices, since the layers may sit on different devices. `split_tied_gradients` takes the sums of a framework
apart accordingly.

What is read. A derived backward reads what the software of a captured model keeps, where the capture says so
(`with_saved_activations`). JAX's derivative of a function keeps what its rule says: that of `gelu` six tensors, where
backward by rule reads one. A scan over layers stacks exactly these, and no compiler drops any. `Graph.saved` lists
them. Behind backward by rule

1. each saved tensor that backward does not read yet is read by the vector op of backward that is nearest to it: the
   gradient of the op that made it, of one beside it, or of one further off (`_Readers.nearest`);
2. vector ops of backward no longer read what is not saved of the same modules, where they can do without (`_reading`).

Products read what they need in any case, and what the captured forward no longer makes (scores of an attention that
runs as one kernel) is not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from phaze.errors import GraphError
from phaze.ir.gradients import GradientRequest, gradients_of
from phaze.ir.graph import Graph, Role
from phaze.ir.graph_builder import GraphBuilder, elementwise_rule
from phaze.ir.graph_checks import check_rule
from phaze.ir.op import Op, OpKind, Phase
from phaze.ir.rule import Dim, Dims, Factor, FactorKind, Rule

__all__ = [
    "LOOP_STATE",
    "add_backward",
    "derive_backward",
    "has_loss",
    "split_tied_gradients",
    "tensors_with_gradient",
    "with_saved_activations",
    "without_backward",
]

MOST_STEPS = 6
"""How many forward ops away from a saved tensor its reader in backward may be: the parts of one function and of a norm
are nearer, and what lies behind a product belongs to another function."""


def with_saved_activations(graph: Graph) -> Graph:
    """The graph whose backward reads what its software saves; itself where nothing is known of that."""
    saved = {graph.storage(name): None for name in graph.saved if graph.producer(name) is not None}
    if not saved:
        return graph
    modules = {producer.module for name in saved if (producer := graph.producer(name)) is not None}
    read = {graph.storage(name) for op in graph.ops_of(Phase.BACKWARD) for name in op.inputs}
    readers = _Readers(graph)
    added: dict[str, list[str]] = {}
    for name in saved:
        if name not in read and (reader := readers.nearest(name)) is not None:
            added.setdefault(reader.id, []).append(name)

    def is_dropped(name: str) -> bool:
        producer = graph.producer(graph.storage(name))
        is_inside = producer is not None and producer.phase is Phase.FORWARD and producer.module in modules
        return is_inside and graph.storage(name) not in saved

    ops = [
        _reading(graph, op, added.get(op.id, ()), {name for name in op.inputs if is_dropped(name)})
        if op.phase is Phase.BACKWARD and op.kind is OpKind.ELEMENTWISE
        else op
        for op in graph.ops
    ]
    return replace(graph, ops=tuple(ops))


class _Readers:
    """The vector ops of backward, by the forward op whose gradient they make."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.by_forward: dict[str, list[Op]] = {}
        for op in graph.ops_of(Phase.BACKWARD):
            if op.kind is OpKind.ELEMENTWISE and op.gradient_of:
                self.by_forward.setdefault(op.gradient_of, []).append(op)
        self.forward_readers: dict[str, list[Op]] = {}
        for op in graph.ops_of(Phase.FORWARD):
            for name in dict.fromkeys(op.inputs):
                self.forward_readers.setdefault(name, []).append(op)

    def nearest(self, name: str) -> Op | None:
        """The first vector op of backward, by distance in the forward, that has a place for a tensor."""
        producer = self.graph.producer(name)
        ring, seen = [] if producer is None else [producer], set[str]()
        for _ in range(MOST_STEPS):
            for op in ring:
                for reader in self.by_forward.get(op.id, ()):
                    if _dims_in(reader, self.graph.tensors[name].shape) is not None:
                        return reader
            seen |= {op.id for op in ring}
            around = {op.id: op for inner in ring for op in self._neighbours(inner) if op.module == inner.module}
            ring = [op for op_id, op in around.items() if op_id not in seen]
        return None

    def _neighbours(self, op: Op) -> Iterator[Op]:
        """The ops beside a forward op: those that make what it reads, read the same, and read what it makes."""
        for name in op.inputs:
            producer = self.graph.producer(name)
            if producer is not None and producer.kind is not OpKind.CONTRACTION:
                yield producer
            if self.graph.tensors[name].role is not Role.PARAMETER:
                yield from self.forward_readers.get(name, ())
        for name in op.outputs:
            yield from self.forward_readers.get(name, ())


def _dims_in(op: Op, shape: Sequence[int]) -> Dims | None:
    """The dimensions of a tensor of this shape in the largest tensor of an op; those of size 1 are nobody's."""
    for dims in sorted(op.rule.tensors(), key=len, reverse=True):
        chosen: list[Dim] = []
        position = 0
        for size in shape:
            if size == 1:
                chosen.append(Dim(()))
                continue
            while position < len(dims) and op.rule.shape((dims[position],)) != (size,):
                position += 1
            if position == len(dims):
                break
            chosen.append(dims[position])
            position += 1
        else:
            return tuple(chosen)
    return None


def _reading(graph: Graph, op: Op, added: Sequence[str], dropped: set[str]) -> Op:
    """A vector op of backward that also reads some tensors, and others no more where it can do without."""
    if not added and not dropped:
        return op
    reads = list(zip(op.inputs, op.rule.operands, strict=True))
    for name in added:
        dims = _dims_in(op, graph.tensors[name].shape)
        assert dims is not None, "a reader is chosen among ops that have a place for the tensor"
        reads.append((name, dims))
    for kept in ([read for read in reads if read[0] not in dropped], reads):
        changed = _with_reads(op, kept)
        if changed is not None:
            return changed
    return op


def _with_reads(op: Op, reads: Sequence[tuple[str, Dims]]) -> Op | None:
    """The op with these operands; None where its rule does not hold with them."""
    operands = tuple(dims for _, dims in reads)
    names = {name for dims in (*operands, *op.rule.results) for dim in dims for name in dim.factors}
    factors = tuple(factor for factor in op.rule.factors if factor.name in names)
    function = op.function if len(reads) == len(op.inputs) else "fused_backward"
    try:
        changed = replace(
            op,
            function=function,
            rule=Rule(operands, op.rule.results, factors),
            inputs=tuple(name for name, _ in reads),
        )
        check_rule(changed)
    except (GraphError, ValueError):
        return None
    return changed if reads else None


LOOP_STATE = "loop_state"
"""The function of a view that gives what each trip of a loop begins with, where all trips are one."""

_DERIVED_NOTE = "backward derived by rule"
"""The note for people on a graph whose backward ops were derived here; code reads `Graph.is_backward_derived`."""


def add_backward(graph: Graph) -> Graph:
    """The graph with backward ops from its first scalar float output; itself where it already has a backward."""
    if any(op.phase is Phase.BACKWARD for op in graph.ops):
        return graph
    loss = _find_loss(graph)
    walk = _BackwardWalk(graph)
    walk.seed(loss)
    for op in reversed(graph.ops_of(Phase.FORWARD)):
        walk.visit(op)
    walk.collect_parameters()
    walk.builder.is_backward_derived = True
    walk.builder.why_backward_kept = ""
    earlier_notes = (note for note in graph.notes if note != _DERIVED_NOTE)
    return with_saved_activations(walk.builder.build(graph.outputs, (*earlier_notes, _DERIVED_NOTE)))


def derive_backward(graph: Graph) -> Graph:
    """The graph with a backward by rule instead of one that was captured.

    A captured backward is kept where none can be derived, such as where no loss is among the outputs; the graph's
    `why_backward_kept` and a note say so.

    Backward ops by rule speak of the factors of their forward ops, so that both are sliced alike. What was computed
    again and updates are left out as well: these are a plan's to decide.
    """
    if graph.is_backward_derived or not any(op.phase is not Phase.FORWARD for op in graph.ops):
        return add_backward(graph)
    try:
        return add_backward(without_backward(graph))
    except GraphError as error:
        note = f"backward kept as captured, so that few of its ops can be sliced: {error}"
        return replace(graph, why_backward_kept=str(error), notes=(*graph.notes, note))


def without_backward(graph: Graph) -> Graph:
    """The forward ops alone, with the tensors that they read and make, and all parameters, also those nobody reads."""
    forward = graph.ops_of(Phase.FORWARD)
    made = {name for op in forward for name in op.outputs}
    used = made | {name for op in forward for name in op.inputs}
    return replace(
        graph,
        ops=forward,
        tensors={
            name: tensor for name, tensor in graph.tensors.items() if name in used or tensor.role is Role.PARAMETER
        },
        outputs=tuple(name for name in graph.outputs if name in made),
        gradients=(),
        is_backward_derived=False,
    )


def has_loss(graph: Graph) -> bool:
    """Whether a backward can be derived, or is there already."""
    return bool(_losses(graph)) or any(op.phase is Phase.BACKWARD for op in graph.ops)


def _losses(graph: Graph) -> list[str]:
    outputs = (graph.tensors[tensor_id] for tensor_id in graph.outputs)
    return [tensor.id for tensor in outputs if tensor.elements == 1 and tensor.dtype.is_float]


def _find_loss(graph: Graph) -> str:
    losses = _losses(graph)
    if losses:
        return losses[0]
    raise GraphError(
        f"graph {graph.name!r} has no scalar float output to differentiate "
        f"(outputs: {', '.join(graph.outputs) or 'none'}); add a loss to the model or pass one."
    )


class _BackwardWalk:
    """The backward as far as it is written: the gradient of each tensor, and of each parameter by layer."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.builder = GraphBuilder.from_graph(graph)
        readers = Counter(name for op in graph.ops_of(Phase.FORWARD) for name in dict.fromkeys(op.inputs))
        self.is_shared = {tensor.id: readers[tensor.id] > 1 for tensor in graph.parameters}
        self.wanted = tensors_with_gradient(graph)
        self.gradient_of: dict[str, str] = {}
        self.parameter_gradients: dict[str, dict[int, str]] = {}

    def seed(self, loss: str) -> None:
        """Take the gradient of the loss as an argument of the graph."""
        tensor = self.graph.tensors[loss]
        self.gradient_of[loss] = self.builder.argument(f"{loss}.gradient", tensor.shape, Role.OTHER, tensor.dtype)

    def visit(self, op: Op) -> None:
        """Write the gradients of a forward op whose results have some."""
        incoming = tuple(self.gradient_of.get(tensor_id) for tensor_id in op.outputs)
        wanted = tuple(tensor_id in self.wanted for tensor_id in op.inputs)
        if not any(incoming) or not any(wanted):
            return
        answers = gradients_of(GradientRequest(self.builder, self.graph, op, incoming, wanted))
        for tensor_id, gradient in zip(op.inputs, answers, strict=True):
            if gradient is not None and tensor_id in self.wanted:
                self._accumulate(op, tensor_id, gradient)

    def _accumulate(self, op: Op, tensor_id: str, gradient: str) -> None:
        if self.graph.tensors[tensor_id].role is Role.PARAMETER:
            layers = self.parameter_gradients.setdefault(tensor_id, {})
            # Only what several ops read has gradients in several layers, and finding layers takes long.
            layer = self.graph.layer_graph.layer_of[op.id] if self.is_shared[tensor_id] else 0
            layers[layer] = self._sum(op, tensor_id, layers.get(layer), gradient)
        else:
            self.gradient_of[tensor_id] = self._sum(op, tensor_id, self.gradient_of.get(tensor_id), gradient)

    def _sum(self, op: Op, tensor_id: str, known: str | None, gradient: str) -> str:
        """What is known of a tensor's gradient plus the part that an op adds to it."""
        if known is None:
            return gradient
        rule = self.builder.shared(_sum_rule(op.rule, op.rule.operands[op.inputs.index(tensor_id)]))
        (result,) = self.builder.add(
            f"{tensor_id}.gradient_sum",
            OpKind.ELEMENTWISE,
            "add",
            rule,
            (known, gradient),
            dtypes=(self.builder.tensors[gradient].dtype,),
            module=op.module,
            phase=Phase.BACKWARD,
            gradient_of=op.id,
        )
        return result

    def collect_parameters(self) -> None:
        """List the gradients of parameters in the order of the parameters, then of the layers."""
        order = {tensor.id: index for index, tensor in enumerate(self.graph.parameters)}
        for parameter in sorted(self.parameter_gradients, key=order.__getitem__):
            layers = self.parameter_gradients[parameter]
            self.builder.gradients.extend((parameter, layers[layer]) for layer in sorted(layers))


def _sum_rule(rule: Rule, dims: Dims) -> Rule:
    """The sum of two tensors with these dimensions; one that is covered in part becomes a factor of its own."""
    simple = tuple(dim if dim.size is None else Dim((f"part{index}",)) for index, dim in enumerate(dims))
    factors = tuple(
        replace(rule.factor(name), kind=FactorKind.FREE) for dim in dims if dim.size is None for name in dim.factors
    )
    parts = tuple(
        Factor(f"part{index}", dim.size, is_batch=any(rule.factor(name).is_batch for name in dim.factors))
        for index, dim in enumerate(dims)
        if dim.size is not None
    )
    return Rule((simple, simple), (simple,), factors + parts)


def tensors_with_gradient(graph: Graph) -> set[str]:
    """Tensors that a gradient must reach: parameters that are trained, and floats that depend on one.

    What the trips of a loop begin with, all of them as one, depends on what the trips before them made of parameters:
    each hands a gradient to the one before it.
    """
    trained = {tensor.id for tensor in graph.parameters if tensor.is_trained}
    wanted = _reached(graph, trained)
    states = [op.outputs[0] for op in graph.ops_of(Phase.FORWARD) if op.function == LOOP_STATE]
    handed = {state for state in states if state not in wanted and not wanted.isdisjoint(_reached(graph, {state}))}
    return _reached(graph, trained | handed) if handed else wanted


def _reached(graph: Graph, sources: set[str]) -> set[str]:
    """The sources and the floats that depend on one of them."""
    reached = {source for source in sources if graph.tensors[source].dtype.is_float}
    for op in graph.ops_of(Phase.FORWARD):
        if reached.intersection(op.inputs):
            reached.update(tensor_id for tensor_id in op.outputs if graph.tensors[tensor_id].dtype.is_float)
    return reached


def split_tied_gradients(graph: Graph) -> Graph:
    """The graph with one gradient per layer for each parameter that several layers use; itself where none is tied.

    A framework sums all contributions to a parameter's gradient. Between layers that sum is a reduction across devices,
    which placement prices; here it is taken apart into one gradient a layer, and sums inside a layer are kept.
    """
    tied = graph.layer_graph.tied_parameters
    if not any(parameter in tied for parameter, _ in graph.gradients):
        return graph
    builder = GraphBuilder.from_graph(graph)
    builder.gradients.clear()
    dropped: set[str] = set()
    for parameter, gradient in graph.gradients:
        leaves = _leaves(graph, gradient, dropped) if parameter in tied else [gradient]
        by_layer: dict[int, list[str]] = {}
        for leaf in leaves:
            by_layer.setdefault(_layer_of_tensor(graph, leaf), []).append(leaf)
        for layer in sorted(by_layer):
            builder.gradients.append((parameter, _summed(graph, builder, parameter, by_layer[layer])))
    builder.ops = [op for op in builder.ops if op.id not in dropped]
    for op_id in dropped:
        for tensor_id in graph.op(op_id).outputs:
            del builder.tensors[tensor_id]
    return builder.build(graph.outputs, graph.notes)


def _leaves(graph: Graph, gradient: str, dropped: set[str]) -> list[str]:
    """The terms of a sum that nothing else reads, in order; the sums themselves go to `dropped`."""
    op = graph.producer(gradient)
    if op is None or not _is_sum(op) or _is_read(graph, gradient):
        return [gradient]
    dropped.add(op.id)
    return [leaf for tensor_id in op.inputs for leaf in _leaves(graph, tensor_id, dropped)]


def _is_sum(op: Op) -> bool:
    """Whether a framework added two gradients here: a backward addition that belongs to no forward op."""
    return op.kind is OpKind.ELEMENTWISE and op.function == "add" and op.phase is Phase.BACKWARD and not op.gradient_of


def _is_read(graph: Graph, tensor_id: str) -> bool:
    """Whether anything but a further sum of two terms reads a tensor."""
    return any(tensor_id in op.inputs and not (_is_sum(op) and len(op.inputs) == 2) for op in graph.ops)


def _layer_of_tensor(graph: Graph, tensor_id: str) -> int:
    """The layer that makes a tensor; arguments count as the first layer's."""
    op = graph.producer(tensor_id)
    return graph.layer_graph.layer_of[op.id] if op is not None else 0


def _summed(graph: Graph, builder: GraphBuilder, parameter: str, terms: list[str]) -> str:
    """The sum of a parameter's gradients inside one layer."""
    total = terms[0]
    for term in terms[1:]:
        shape = graph.tensors[term].shape
        op = graph.producer(term)
        (total,) = builder.add(
            f"{parameter}.gradient_sum",
            OpKind.ELEMENTWISE,
            "add",
            elementwise_rule(shape, shape, shape),
            (total, term),
            dtypes=(graph.tensors[term].dtype,),
            phase=Phase.BACKWARD,
            gradient_of=op.gradient_of if op is not None else "",
        )
    return total
