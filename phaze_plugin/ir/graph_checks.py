"""The checks that every graph passes when it is built: shapes, order, phases, and rules that fit their ops.

A graph that contradicts itself is refused with the op or tensor named. Checked, in this order:
 1. ids of ops are unique, and each tensor is stored under its own id (`_check_tensors`, `_find_producers`);
 2. shapes are positive and small enough to count with 64-bit integers (`_check_tensors`);
 3. every tensor is an argument with a role or the result of exactly one op (`_check_arguments`);
 4. ops stand in topological order; a cycle is shown as a path (`_check_order`);
 5. operands and results match the op's rule in number and shape (`_check_shapes`);
 6. rules fit the kind of op and its function (`check_rule`), batch factors are multiples of the microbatch
    (`_check_batch`), and parameters do not grow with it (`_check_parameters`);
 7. a forward op reads nothing that backward or update made (`_check_phases`);
 8. outputs, gradients and `gradient_of` name what exists, and a gradient has its parameter's shape (`_check_results`).
"""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx

from phaze.errors import GraphError, shown
from phaze.ir.graph import LARGEST_TENSOR, Graph, Role
from phaze.ir.op import OPERANDS_AND_RESULTS, Op, OpKind, Phase
from phaze.ir.rule import LARGEST_FACTOR, Dims, FactorKind, Rule, factor_names, names_of

__all__ = ["check_graph", "check_rule"]

MOST_DIMENSIONS = 64
"""The most dimensions of a tensor; numpy, which the reference runs on, has the same limit."""


def check_graph(graph: Graph) -> dict[str, Op]:
    """Raise GraphError where the graph contradicts itself; return the producer of every tensor."""
    _check_tensors(graph)
    producers = _find_producers(graph)
    _check_arguments(graph, producers)
    _check_order(graph, producers)
    checked: set[tuple[int, str, str]] = set()
    shapes_checked: set[tuple[object, ...]] = set()
    for op in graph.ops:
        shapes = (id(op.rule), len(op.inputs), *(graph.tensors[name].shape for name in (*op.inputs, *op.outputs)))
        if shapes not in shapes_checked:
            _check_shapes(graph, op)
            shapes_checked.add(shapes)
        _check_parameters(graph, op)
        key = (id(op.rule), op.kind, op.function)
        if key not in checked:
            check_rule(op)
            _check_batch(graph, op)
            checked.add(key)
    _check_phases(graph, producers)
    _check_results(graph)
    return producers


def _check_tensors(graph: Graph) -> None:
    """Checks 1 and 2: tensors stand under their own ids and have sizes that can be counted with."""
    if not _is_size(graph.micro_batch_size) or graph.micro_batch_size < 1:
        raise GraphError(f"micro_batch_size is {shown(graph.micro_batch_size)}; expected an integer of at least 1.")
    for key, tensor in graph.tensors.items():
        if key != tensor.id:
            raise GraphError(f"tensor {tensor.id!r} is stored under another id, {key!r}.")
        if len(tensor.shape) > MOST_DIMENSIONS:
            raise GraphError(
                f"tensor {tensor.id!r} has {len(tensor.shape)} dimensions; at most {MOST_DIMENSIONS} are supported."
            )
        for size in tensor.shape:
            if not _is_size(size) or not 1 <= size <= LARGEST_FACTOR:
                raise GraphError(
                    f"tensor {tensor.id!r} has a dimension of {shown(size)}; "
                    f"expected an integer from 1 to {LARGEST_FACTOR}."
                )
        if tensor.elements > LARGEST_TENSOR:
            raise GraphError(
                f"tensor {tensor.id!r} has {tensor.elements} elements; at most {LARGEST_TENSOR} are supported."
            )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _find_producers(graph: Graph) -> dict[str, Op]:
    """The op that makes each tensor; check 1: ids are unique, and ops refer to tensors that exist."""
    producers: dict[str, Op] = {}
    seen: set[str] = set()
    for op in graph.ops:
        if op.id in seen:
            raise GraphError(f"two ops have the id {op.id!r}; ids must be unique.")
        seen.add(op.id)
        for tensor_id in op.outputs:
            if tensor_id in producers:
                raise GraphError(f"tensor {tensor_id!r} is made twice, by {producers[tensor_id].id!r} and {op.id!r}.")
            producers[tensor_id] = op
        for tensor_id in (*op.inputs, *op.outputs):
            if tensor_id not in graph.tensors:
                raise GraphError(f"op {op.id!r} refers to tensor {tensor_id!r}, which does not exist.")
    return producers


def _check_arguments(graph: Graph, producers: dict[str, Op]) -> None:
    """Check 3: a tensor is either an argument with a role or made by an op."""
    for tensor in graph.tensors.values():
        if tensor.role is None and tensor.id not in producers:
            raise GraphError(f"tensor {tensor.id!r} dangles: no op makes it and it has no role as an argument.")
        if tensor.role is not None and tensor.id in producers:
            raise GraphError(
                f"tensor {tensor.id!r} is an argument ({tensor.role}) and made by {producers[tensor.id].id!r}."
            )


def _check_order(graph: Graph, producers: dict[str, Op]) -> None:
    """Check 4: every op reads only what stands before it."""
    ready: set[str] = set()
    for op in graph.ops:
        ready.update(op.outputs)
        late = next(
            (
                tensor_id
                for tensor_id in op.inputs
                if tensor_id in producers and (tensor_id not in ready or tensor_id in op.outputs)
            ),
            None,
        )
        if late is not None:
            _raise_order(graph, producers, op, late)


def _raise_order(graph: Graph, producers: dict[str, Op], op: Op, late: str) -> None:
    """Raise GraphError for ops out of order, with the cycle as a path where there is one."""
    digraph = nx.DiGraph(
        (producers[tensor_id].id, reader.id)
        for reader in graph.ops
        for tensor_id in reader.inputs
        if tensor_id in producers
    )
    try:
        cycle = [edge[0] for edge in nx.find_cycle(digraph)]
    except nx.NetworkXNoCycle:
        raise GraphError(
            f"op {op.id!r} reads {late!r} before {producers[late].id!r} makes it; list ops in topological order."
        ) from None
    raise GraphError(f"the graph has a cycle: {' -> '.join([*cycle, cycle[0]])}.")


def _check_shapes(graph: Graph, op: Op) -> None:
    """Check 5: operands and results match the rule in number and shape."""
    rule = op.rule
    _check_side(graph, op, "operand", op.inputs, rule.operands)
    _check_side(graph, op, "result", op.outputs, rule.results)
    if not op.outputs:
        raise GraphError(f"op {op.id!r} has no result.")


def _check_side(graph: Graph, op: Op, side: str, tensor_ids: tuple[str, ...], sides: tuple[Dims, ...]) -> None:
    if len(tensor_ids) != len(sides):
        raise GraphError(f"op {op.id!r} has {len(tensor_ids)} {side}s, but its rule '{op.rule}' has {len(sides)}.")
    for index, (tensor_id, dims) in enumerate(zip(tensor_ids, sides, strict=True)):
        expected, actual = op.rule.shape(dims), graph.tensors[tensor_id].shape
        if expected != actual:
            raise GraphError(
                f"op {op.id!r}: {side} {index} {tensor_id!r} has shape {list(actual)}, "
                f"but its rule '{op.rule}' says {list(expected)}."
            )


def _check_batch(graph: Graph, op: Op) -> None:
    """Check 6: batch factors are multiples of the microbatch."""
    for factor in op.rule.factors:
        if factor.is_batch and factor.size % graph.micro_batch_size:
            raise GraphError(
                f"op {op.id!r}: batch factor {factor} is not a multiple of the microbatch {graph.micro_batch_size}."
            )


def _check_parameters(graph: Graph, op: Op) -> None:
    """Check 6: no parameter grows with the microbatch."""
    for tensor_id, dims in zip(op.inputs, op.rule.operands, strict=True):
        if graph.tensors[tensor_id].role is not Role.PARAMETER:
            continue
        for name in factor_names(dims):
            if op.rule.factor(name).is_batch:
                raise GraphError(
                    f"op {op.id!r}: parameter {tensor_id!r} would grow with the microbatch: its rule '{op.rule}' marks "
                    f"factor {name!r} of it as batch."
                )


def _check_phases(graph: Graph, producers: dict[str, Op]) -> None:
    """Check 7: forward reads nothing that backward or the update made."""
    phases = {op.phase for op in graph.ops}
    if phases & {Phase.BACKWARD, Phase.RECOMPUTE} and Phase.FORWARD not in phases:
        raise GraphError(f"graph {graph.name!r} has {len(graph.ops)} ops but none of them is a forward op.")
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            continue
        for tensor_id in op.inputs:
            producer = producers.get(tensor_id)
            if producer is not None and producer.phase is not Phase.FORWARD:
                raise GraphError(
                    f"forward op {op.id!r} reads {tensor_id!r}, which {producer.phase} op {producer.id!r} makes."
                )


def _check_results(graph: Graph) -> None:
    """Check 8: outputs, gradients and `gradient_of` name what exists and fit it."""
    for tensor_id in graph.outputs:
        if tensor_id not in graph.tensors:
            raise GraphError(f"output {tensor_id!r} does not exist.")
    op_ids = {op.id for op in graph.ops}
    for op in graph.ops:
        if op.gradient_of and op.gradient_of not in op_ids:
            raise GraphError(f"op {op.id!r} is the gradient of {op.gradient_of!r}, which does not exist.")
    parameters = {tensor.id: tensor for tensor in graph.parameters}
    for tensor in graph.tensors.values():
        if tensor.is_frozen and tensor.role is not Role.PARAMETER:
            raise GraphError(f"tensor {tensor.id!r} is frozen, which only parameters can be.")
    for parameter, gradient in graph.gradients:
        if parameter not in parameters:
            raise GraphError(f"gradient {gradient!r} belongs to {parameter!r}, which is not a parameter.")
        if parameters[parameter].is_frozen:
            raise GraphError(f"gradient {gradient!r} belongs to {parameter!r}, which is frozen and has none.")
        if gradient not in graph.tensors:
            raise GraphError(f"the gradient {gradient!r} of {parameter!r} does not exist.")
        shape, gradient_shape = graph.tensors[parameter].shape, graph.tensors[gradient].shape
        if shape != gradient_shape:
            raise GraphError(
                f"gradient {gradient!r} has shape {list(gradient_shape)}, "
                f"its parameter {parameter!r} has {list(shape)}."
            )


LARGEST_WORK = 2**62
"""The most loop iterations of an op: twice that, its flops, still fits into a 64-bit integer."""

_NOT_LOOPED = frozenset({OpKind.VIEW, OpKind.COPY, OpKind.SORT, OpKind.OPAQUE, OpKind.COLLECTIVE})
"""Kinds that are counted by the size of their tensors and not by their loops."""

_PARTLY_COVERED = frozenset(
    {
        OpKind.VIEW,
        OpKind.COPY,
        OpKind.CONVOLUTION,
        OpKind.REDUCTION,
        OpKind.LOOKUP,
        OpKind.SCATTER,
        OpKind.SORT,
        OpKind.COLLECTIVE,
        OpKind.OPAQUE,
    }
)
"""Kinds whose rules may cover a dimension in part: those that move, pick, pad or slide over elements."""


def check_rule(op: Op) -> None:
    """Raise GraphError where a rule does not fit the kind of its op."""
    rule = op.rule
    if op.kind not in _PARTLY_COVERED and any(dim.size is not None for dims in rule.tensors() for dim in dims):
        raise GraphError(f"op {op.id!r}: a rule of kind {op.kind} cannot cover a dimension in part: '{rule}'.")
    used = frozenset[str]().union(*(names_of(dims) for dims in rule.tensors()))
    unused = [factor.name for factor in rule.factors if factor.name not in used]
    if unused:
        raise GraphError(f"op {op.id!r}: factors {', '.join(unused)} of '{rule}' stand in no tensor.")
    complaint = _CHECKS[op.kind](rule) if op.kind in _CHECKS else ""
    complaint = complaint or _function_complaint(op)
    if complaint:
        raise GraphError(f"op {op.id!r} of kind {op.kind}: its rule '{rule}' {complaint}.")


def _function_complaint(op: Op) -> str:
    """What is wrong with a rule for its op's function; empty where nothing is."""
    rule = op.rule
    if op.kind not in _NOT_LOOPED and rule.work > LARGEST_WORK:
        return f"runs more than {LARGEST_WORK} times, which is more than can be counted"
    if op.function == "concatenate":
        return _concatenation(rule)
    if op.function not in OPERANDS_AND_RESULTS:
        return ""
    operands, results = OPERANDS_AND_RESULTS[op.function]
    if len(rule.operands) in operands and len(rule.results) >= results:
        return ""
    takes = " or ".join(str(count) for count in operands)
    return f"does not fit {op.function}, which takes {takes} operands and gives at least {results} results"


def _concatenation(rule: Rule) -> str:
    """What is wrong with a concatenation: its parts must fill the joined dimension."""
    covered = [[dim for dim in dims if dim.size is not None] for dims in rule.operands]
    if any(len(dims) != 1 or len(dims[0].factors) != 1 for dims in covered):
        return "must cover one dimension of each operand in part"
    total = sum(dims[0].size or 0 for dims in covered)
    whole = rule.size(covered[0][0].factors[0])
    return "" if total == whole else f"joins parts of {total} in all into a dimension of {whole}"


def _product(rule: Rule) -> str:
    return "" if len(rule.operands) == 2 and len(rule.results) == 1 else "must have two operands and one result"


def _attention(rule: Rule) -> str:
    return "" if len(rule.operands) >= 3 else "must have query, key and value as operands"


def _elementwise(rule: Rule) -> str:
    results = rule.result_names
    if all(names <= result for names in rule.operand_names for result in results):
        return ""
    return "has an operand factor that a result lacks, so it is not elementwise"


def _normalizing(rule: Rule) -> str:
    return _needs(rule, FactorKind.NORMALIZED, "must mark the normalized factors with '~'")


def _looking_up(rule: Rule) -> str:
    return _needs(rule, FactorKind.LOOKUP, "must mark the looked-up factors with '?'")


def _reduction(rule: Rule) -> str:
    if len(rule.operands) != 1:
        return "must have one operand"
    is_inside = all(names <= rule.operand_names[0] for names in rule.result_names)
    return "" if is_inside else "has a result factor that its operand lacks"


def _view(rule: Rule) -> str:
    return "" if len(rule.operands) == 1 else "must have one operand"


def _needs(rule: Rule, kind: FactorKind, complaint: str) -> str:
    return "" if any(factor.kind is kind for factor in rule.factors) else complaint


_CHECKS: dict[OpKind, Callable[[Rule], str]] = {
    OpKind.CONTRACTION: _product,
    OpKind.CONVOLUTION: _product,
    OpKind.ATTENTION: _attention,
    OpKind.ELEMENTWISE: _elementwise,
    OpKind.DROPOUT: _elementwise,
    OpKind.SOFTMAX: _normalizing,
    OpKind.NORM: _normalizing,
    OpKind.LOOKUP: _looking_up,
    OpKind.SCATTER: _looking_up,
    OpKind.REDUCTION: _reduction,
    OpKind.VIEW: _view,
}
