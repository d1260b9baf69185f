"""The gradient of each kind of op: the backward ops that it becomes, and what they read, from its rule.

Products (contraction, convolution): the gradient of an operand is the product of the other operand with the incoming
gradient; its rule is the forward rule with that operand and the result exchanged. Elementwise: the incoming gradient
times the local derivative, summed over the factors that were broadcast. Views: the view back, or a copy where parts
are put together. The rest is one op that reads what its entry here says and gives all gradients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from phaze.errors import GraphError
from phaze.ir.graph import DType, Graph
from phaze.ir.graph_builder import GraphBuilder
from phaze.ir.op import PASSES_GRADIENT, UNARY_READS, Attribute, Op, OpKind, Phase, Saved
from phaze.ir.rule import Dims, FactorKind, Rule, names_of

__all__ = ["GradientRequest", "gradients_of"]

Answers = Sequence[str | None]
"""The id of the gradient of each operand; None for an operand that has none."""


@dataclass(frozen=True, slots=True)
class GradientRequest:
    """A forward op whose gradients are asked for: those that came in, and the operands that want one."""

    builder: GraphBuilder
    graph: Graph
    op: Op
    incoming: tuple[str | None, ...]
    wanted: tuple[bool, ...]

    @property
    def first(self) -> str:
        """The gradient of the first result."""
        assert self.incoming[0] is not None
        return self.incoming[0]

    def dtype(self, tensor_id: str) -> DType:
        """The element type of a forward tensor, which is also its gradient's."""
        return self.graph.tensors[tensor_id].dtype

    def emit(
        self,
        function: str,
        reads: Sequence[tuple[str, Dims]],
        writes: Sequence[tuple[str, Dims]],
        *,
        kind: OpKind | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> tuple[str, ...]:
        """Add a backward op that reads (tensor, dims) and makes the gradient of each written (forward tensor, dims)."""
        op = self.op
        operands, results = tuple(dims for _, dims in reads), tuple(dims for _, dims in writes)
        names = frozenset[str]().union(*(names_of(dims) for dims in (*operands, *results)))
        factors = tuple(factor for factor in op.rule.factors if factor.name in names)
        if kind is OpKind.SCATTER:
            read = frozenset[str]().union(*(names_of(dims) for dims in operands))
            factors = tuple(
                factor if factor.name in read else replace(factor, kind=FactorKind.LOOKUP) for factor in factors
            )
        rule = self.builder.shared(Rule(operands, results, factors))
        return self.builder.add(
            f"{writes[0][0]}.gradient",
            kind or op.kind,
            function,
            rule,
            (tensor_id for tensor_id, _ in reads),
            dtypes=tuple(self.dtype(tensor_id) for tensor_id, _ in writes),
            results=tuple(f"{index}" for index in range(1, len(writes))),
            module=op.module,
            phase=Phase.BACKWARD,
            gradient_of=op.id,
            attributes=dict(op.attributes) if attributes is None else attributes,
        )

    def operand(self, index: int) -> tuple[str, Dims]:
        """An operand with its dimensions."""
        return self.op.inputs[index], self.op.rule.operands[index]

    def result(self, index: int = 0) -> tuple[str, Dims]:
        """A result with its dimensions."""
        return self.op.outputs[index], self.op.rule.results[index]

    def came_in(self, index: int = 0) -> tuple[str, Dims]:
        """The incoming gradient of a result with the result's dimensions."""
        gradient = self.incoming[index]
        assert gradient is not None
        return gradient, self.op.rule.results[index]


def gradients_of(request: GradientRequest) -> Answers:
    """The gradient of every operand, None for those that have none."""
    if request.op.function == "fused" and request.op.kind is OpKind.ELEMENTWISE:
        return _unnamed(request)
    if request.incoming[0] is None and request.op.kind is not OpKind.VIEW:
        return _opaque(request)
    by_function = _BY_FUNCTION.get(request.op.function)
    if by_function is not None:
        return by_function(request)
    return _BY_KIND.get(request.op.kind, _opaque)(request)


def _product(request: GradientRequest) -> Answers:
    """The gradient of an operand is the incoming gradient times the other operand."""
    answers: list[str | None] = [None, None]
    suffix = {OpKind.CONVOLUTION: ("_input", "_weight")}.get(request.op.kind, ("", ""))
    for index in (0, 1):
        if request.wanted[index]:
            reads = (request.came_in(), request.operand(1 - index))
            (answers[index],) = request.emit(request.op.function + suffix[index], reads, (request.operand(index),))
    return answers


def _elementwise(request: GradientRequest) -> Answers:
    saved = UNARY_READS.get(request.op.function)
    if saved is None or len(request.op.inputs) != 1:
        return _unnamed(request)
    reads = [request.came_in()]
    if saved is Saved.INPUT:
        reads.append(request.operand(0))
    elif saved is Saved.RESULT:
        reads.append(request.result())
    full = (request.op.inputs[0], request.op.rule.results[0])
    (gradient,) = request.emit(f"{request.op.function}_backward", reads, (full,))
    return (_summed_to(request, 0, gradient),)


def _unnamed(request: GradientRequest) -> Answers:
    """The gradients of an elementwise op whose function is not known by name, such as several ops fused into one.

    One op gives what flows back at the result's size; sums bring it to the size of broadcast operands.
    """
    full = request.op.rule.results[0]
    came_in = [request.came_in(index) for index, gradient in enumerate(request.incoming) if gradient is not None]
    floats = [request.operand(i) for i, tensor_id in enumerate(request.op.inputs) if request.dtype(tensor_id).is_float]
    whole = [index for index, want in enumerate(request.wanted) if want and request.op.rule.operands[index] == full]
    first = whole or [request.wanted.index(True)]
    writes = [(request.op.inputs[index], full) for index in first]
    gradients = request.emit(f"{request.op.function}_backward", (*came_in, *floats), writes)
    answers: list[str | None] = [None] * len(request.wanted)
    for index, want in enumerate(request.wanted):
        if want and index in whole:
            answers[index] = gradients[whole.index(index)]
        elif want:
            answers[index] = _summed_to(request, index, gradients[0])
    return answers


def _passing(request: GradientRequest) -> Answers:
    """The incoming gradient itself, summed over what was broadcast."""
    return [_summed_to(request, index, request.first) if want else None for index, want in enumerate(request.wanted)]


def _subtract(request: GradientRequest) -> Answers:
    answers = list(_passing(request))
    if request.wanted[1]:
        full = (request.op.inputs[1], request.op.rule.results[0])
        (negated,) = request.emit("negative", (request.came_in(),), (full,))
        answers[1] = _summed_to(request, 1, negated)
    return answers


def _multiply(request: GradientRequest) -> Answers:
    answers: list[str | None] = [None, None]
    for index in (0, 1):
        if request.wanted[index]:
            full = (request.op.inputs[index], request.op.rule.results[0])
            (gradient,) = request.emit("multiply", (request.came_in(), request.operand(1 - index)), (full,))
            answers[index] = _summed_to(request, index, gradient)
    return answers


def _divide(request: GradientRequest) -> Answers:
    answers: list[str | None] = [None, None]
    if request.wanted[0]:
        full = (request.op.inputs[0], request.op.rule.results[0])
        (gradient,) = request.emit("divide", (request.came_in(), request.operand(1)), (full,))
        answers[0] = _summed_to(request, 0, gradient)
    if request.wanted[1]:
        full = (request.op.inputs[1], request.op.rule.results[0])
        reads = (request.came_in(), request.operand(1), request.result())
        (gradient,) = request.emit("divisor_backward", reads, (full,))
        answers[1] = _summed_to(request, 1, gradient)
    return answers


def _where(request: GradientRequest) -> Answers:
    """Each branch gets the gradient where the condition chose it; `gradients_of` lists the branch's index."""
    if request.dtype(request.op.inputs[0]).is_float:
        return _unnamed(request)
    answers: list[str | None] = [None] * len(request.wanted)
    for index, want in enumerate(request.wanted):
        if want:
            full = (request.op.inputs[index], request.op.rule.results[0])
            reads, branch = (request.came_in(), request.operand(0)), {"gradients_of": (index,)}
            (gradient,) = request.emit("where_backward", reads, (full,), attributes=branch)
            answers[index] = _summed_to(request, index, gradient)
    return answers


def _cast(request: GradientRequest) -> Answers:
    return request.emit("cast", (request.came_in(),), (request.operand(0),))


def _rotary(request: GradientRequest) -> Answers:
    reads = (request.came_in(), request.operand(1), request.operand(2))
    return (*request.emit("rotary_backward", reads, (request.operand(0),)), None, None)


def _dropout(request: GradientRequest) -> Answers:
    return request.emit("dropout_backward", (request.came_in(), request.result(1)), (request.operand(0),))


def _softmax(request: GradientRequest) -> Answers:
    """Its first operand is what is normalized, but where several ops were joined: then it may be any of them."""
    wanted = [index for index, want in enumerate(request.wanted) if want] or [0]
    reads = (request.came_in(), request.result())
    gradients = request.emit("softmax_backward", reads, [request.operand(index) for index in wanted])
    answers: list[str | None] = [None] * len(request.op.inputs)
    for index, gradient in zip(wanted, gradients, strict=True):
        answers[index] = gradient
    return answers


def _biased_softmax(request: GradientRequest) -> Answers:
    (gradient,) = request.emit("softmax_backward", (request.came_in(), request.result()), (request.operand(0),))
    return (gradient, _summed_to(request, 1, gradient) if request.wanted[1] else None)


def _sink_softmax(request: GradientRequest) -> Answers:
    """A sink takes part in the softmax and gives nothing: its gradient is minus what all scores of its row get.

    The scores are scaled in the softmax, sinks are not.
    """
    (gradient,) = request.emit("softmax_backward", (request.came_in(), request.result()), (request.operand(0),))
    if not request.wanted[1]:
        return gradient, None
    total = _summed_to(request, 1, gradient)
    sink, scale = request.operand(1), request.op.attribute("scale")
    attributes = {"factor": -1 / float(scale) if isinstance(scale, int | float) else -1.0}
    reads = ((total, sink[1]),)
    return gradient, request.emit("scale", reads, (sink,), kind=OpKind.ELEMENTWISE, attributes=attributes)[0]


def _cross_entropy(request: GradientRequest) -> Answers:
    reads = (request.came_in(), request.operand(0), request.operand(1))
    return (*request.emit("cross_entropy_backward", reads, (request.operand(0),)), None)


def _norm(request: GradientRequest) -> Answers:
    """Reads the input and the weight; mean and variance are found again from the input."""
    reads = (request.came_in(), *(request.operand(index) for index in range(min(2, len(request.op.inputs)))))
    return _jointly(request, f"{request.op.function}_backward", reads)


def _attention(request: GradientRequest) -> Answers:
    """One op gives the gradients of query, key, value and, where heads have sinks, of these; masks have none."""
    count = 4 if request.op.function == "sink_attention" else 3
    if any(request.wanted[count:]):
        raise GraphError(
            f"op {request.op.id!r}: only query, key, value and sinks of a fused attention have gradients, but "
            f"{request.op.inputs[request.wanted.index(True, count)]!r} wants one; write it as products and a softmax."
        )
    operands = [request.operand(index) for index in range(count)]
    reads = (*operands[:3], request.result(), request.came_in(), *operands[3:])
    answers = request.emit(f"{request.op.function}_backward", reads, operands)
    return (*answers, *[None] * (len(request.op.inputs) - count))


def _lookup(request: GradientRequest) -> Answers:
    """The gradient of the table; several index tensors pick along several of its dimensions, as resizing does."""
    ids = [request.operand(index) for index in range(1, len(request.op.inputs))]
    (gradient,) = request.emit("scatter_add", (request.came_in(), *ids), (request.operand(0),), kind=OpKind.SCATTER)
    return gradient, *[None] * len(ids)


def _dispatch(request: GradientRequest) -> Answers:
    (gradient,) = request.emit("undispatch", (request.came_in(), request.operand(1)), (request.operand(0),))
    return gradient, None


def _combine(request: GradientRequest) -> Answers:
    """out = sum over k of weight[k] * row picked by ids[k]: rows get weight * gradient, weights get row . gradient."""
    rows, weights, ids = (request.operand(index) for index in range(3))
    answers: list[str | None] = [None, None, None]
    if request.wanted[0]:
        (answers[0],) = request.emit("combine_rows_backward", (request.came_in(), weights, ids), (rows,))
    if request.wanted[1]:
        (answers[1],) = request.emit("combine_weights_backward", (request.came_in(), rows, ids), (weights,))
    return answers


def _top_k(request: GradientRequest) -> Answers:
    reads = (request.came_in(), (request.op.outputs[1], request.op.rule.results[1]))
    return request.emit("top_k_backward", reads, (request.operand(0),), kind=OpKind.SCATTER)


def _reduction(request: GradientRequest) -> Answers:
    if request.op.function == "sum":
        return (_expanded(request, request.first),)
    if request.op.function == "mean":
        return request.emit("mean_backward", (request.came_in(),), (request.operand(0),), kind=OpKind.ELEMENTWISE)
    reads = (request.came_in(), request.operand(0), request.result())
    is_window = any(dim.size is not None for dims in request.op.rule.tensors() for dim in dims)
    kind = OpKind.OPAQUE if is_window else OpKind.ELEMENTWISE
    return request.emit(f"{request.op.function}_backward", reads, (request.operand(0),), kind=kind)


def _expanded(request: GradientRequest, gradient: str) -> str:
    """A view that repeats a gradient over the factors that the forward reduction summed."""
    reads = ((gradient, request.op.rule.results[0]),)
    return request.emit("expand", reads, (request.operand(0),), kind=OpKind.VIEW)[0]


def _view(request: GradientRequest) -> Answers:
    """The view back; a copy where parts are put together again, a sum where elements were repeated."""
    rule = request.op.rule
    operand = request.operand(0)
    if len(rule.results) > 1:
        reads = tuple((_or_zeros(request, index), dims) for index, dims in enumerate(rule.results))
        return request.emit("stack", reads, (operand,), kind=OpKind.COPY)
    if any(dim.size is not None for dims in rule.tensors() for dim in dims):
        return request.emit("pad", (request.came_in(),), (operand,), kind=OpKind.COPY)
    kept, given = names_of(operand[1]), names_of(rule.results[0])
    if given > kept:
        return request.emit("sum", (request.came_in(),), (operand,), kind=OpKind.REDUCTION)
    if kept > given:
        return request.emit("pad", (request.came_in(),), (operand,), kind=OpKind.COPY)
    return request.emit("reshape", (request.came_in(),), (operand,), kind=OpKind.VIEW)


def _or_zeros(request: GradientRequest, index: int) -> str:
    gradient = request.incoming[index]
    if gradient is not None:
        return gradient
    return request.emit("zeros", (), (request.result(index),), kind=OpKind.COPY)[0]


def _stack(request: GradientRequest) -> Answers:
    answers: list[str | None] = []
    for index, want in enumerate(request.wanted):
        writes, place = (request.operand(index),), {"index": index}
        answers.append(
            request.emit("select", (request.came_in(),), writes, kind=OpKind.VIEW, attributes=place)[0]
            if want
            else None
        )
    return answers


def _concatenate(request: GradientRequest) -> Answers:
    answers: list[str | None] = []
    start = 0
    for index, want in enumerate(request.wanted):
        reads, writes, place = (request.came_in(),), (request.operand(index),), {"start": start}
        answers.append(request.emit("slice", reads, writes, kind=OpKind.VIEW, attributes=place)[0] if want else None)
        start += next(dim.size for dim in request.op.rule.operands[index] if dim.size is not None)
    return answers


def _pad(request: GradientRequest) -> Answers:
    return request.emit("slice", (request.came_in(),), (request.operand(0),), kind=OpKind.VIEW)


def _collective(request: GradientRequest) -> Answers:
    """The collective that brings gradients back: what was gathered is reduced and scattered, and so on."""
    dual = _DUAL_COLLECTIVES.get(request.op.function)
    if dual is None:
        return _opaque(request)
    return request.emit(dual, (request.came_in(),), (request.operand(0),))


_DUAL_COLLECTIVES = {
    "all_gather": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "reduce_scatter": "all_gather",
}
"""The collective that carries the gradient of each: the transpose of its linear map over all devices."""


def _opaque(request: GradientRequest) -> Answers:
    """One op that reads every float input and gives every gradient: right in traffic, silent about the mathematics."""
    came_in = [request.came_in(index) for index, gradient in enumerate(request.incoming) if gradient is not None]
    floats = [request.operand(i) for i, tensor_id in enumerate(request.op.inputs) if request.dtype(tensor_id).is_float]
    return _jointly(request, f"{request.op.function}_backward", (*came_in, *floats))


def _jointly(request: GradientRequest, function: str, reads: Sequence[tuple[str, Dims]]) -> Answers:
    """One op for the gradients of all operands that want one; its attribute `gradients_of` lists their indices."""
    indices = tuple(index for index, want in enumerate(request.wanted) if want)
    attributes = {**dict(request.op.attributes), "gradients_of": indices}
    gradients = request.emit(function, reads, [request.operand(index) for index in indices], attributes=attributes)
    answers: list[str | None] = [None] * len(request.wanted)
    for index, gradient in zip(indices, gradients, strict=True):
        answers[index] = gradient
    return answers


def _summed_to(request: GradientRequest, index: int, gradient: str) -> str:
    """Sum a gradient of the result's shape over the factors that the operand was broadcast over."""
    operand, dims = request.operand(index)
    full = request.op.rule.results[0]
    if full == dims:
        return gradient
    if names_of(full) == names_of(dims):
        return request.emit("reshape", ((gradient, full),), ((operand, dims),), kind=OpKind.VIEW)[0]
    return request.emit("sum", ((gradient, full),), ((operand, dims),), kind=OpKind.REDUCTION)[0]


_BY_KIND: dict[OpKind, Callable[[GradientRequest], Answers]] = {
    OpKind.CONTRACTION: _product,
    OpKind.CONVOLUTION: _product,
    OpKind.ATTENTION: _attention,
    OpKind.ELEMENTWISE: _elementwise,
    OpKind.DROPOUT: _dropout,
    OpKind.SOFTMAX: _softmax,
    OpKind.NORM: _norm,
    OpKind.LOOKUP: _lookup,
    OpKind.REDUCTION: _reduction,
    OpKind.VIEW: _view,
    OpKind.COLLECTIVE: _collective,
}

_BY_FUNCTION: dict[str, Callable[[GradientRequest], Answers]] = {
    **dict.fromkeys(PASSES_GRADIENT, _passing),
    "subtract": _subtract,
    "multiply": _multiply,
    "divide": _divide,
    "where": _where,
    "cast": _cast,
    "rotary": _rotary,
    "biased_softmax": _biased_softmax,
    "sink_softmax": _sink_softmax,
    "cross_entropy": _cross_entropy,
    "dispatch": _dispatch,
    "combine": _combine,
    "top_k": _top_k,
    "stack": _stack,
    "concatenate": _concatenate,
    "pad": _pad,
}
