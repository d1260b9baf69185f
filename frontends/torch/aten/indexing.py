"""Torch embeddings, gathers and scatters: elements picked or placed by index."""

from __future__ import annotations

from collections.abc import Sequence

from phaze.frontends.torch.operator_call import (
    OperatorCall,
    OperatorTable,
    Shape,
    TensorId,
    Unsupported,
    Value,
    dims_of,
    factors_of,
)
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.graph_builder import lookup_rule

__all__ = ["INDEXING"]


def _embedding(call: OperatorCall) -> Value:
    table, ids = call.tensor("weight"), call.tensor("indices")
    return call.emit(OpKind.LOOKUP, "embedding", lookup_rule(call.shape(table), 0, call.shape(ids)), table, ids)


def _embedding_backward(call: OperatorCall) -> Value:
    gradient, ids = call.tensor("grad_output", "grad"), call.tensor("indices")
    rule = lookup_rule(call.out_shape(), 0, call.shape(ids))
    back = Rule((rule.results[0], rule.operands[1]), (rule.operands[0],), rule.factors)
    return call.emit(OpKind.SCATTER, "scatter_add", back, gradient, ids)


def _index_select(call: OperatorCall) -> Value:
    x, ids = call.tensor("self"), call.tensor("index")
    return call.emit(OpKind.LOOKUP, "lookup", lookup_rule(call.shape(x), call.dim(), call.shape(ids)), x, ids)


def _index_add(call: OperatorCall) -> Value:
    x, ids, source = call.tensor("self"), call.tensor("index"), call.tensor("source", "src")
    rule = lookup_rule(call.shape(x), call.dim(), call.shape(ids))
    back = Rule((rule.operands[0], rule.operands[1], rule.results[0]), (rule.operands[0],), rule.factors)
    return call.emit(OpKind.SCATTER, "scatter_add", back, x, ids, source)


class _Indexed:
    """A tensor indexed by integer tensors in some of its dimensions, and the shape that they broadcast to."""

    def __init__(self, call: OperatorCall, x: str, indices: Sequence[object]) -> None:
        indexed = [dim for dim, index in enumerate(indices) if isinstance(index, TensorId)]
        self.ids = tuple(index for index in indices if isinstance(index, TensorId))
        shape = call.shape(x)
        if not self.ids or any(str(call.dtype(index)) in ("bool", "uint8") for index in self.ids):
            raise Unsupported
        picked_shape = _broadcast([call.shape(index) for index in self.ids])
        self.whole: Dims = dims_of(shape)
        picked = tuple(Dim((f"p{position}",)) for position in range(len(picked_shape)))
        self.factors = (
            *factors_of(shape, indexed, FactorKind.LOOKUP),
            *(Factor(f"p{position}", size) for position, size in enumerate(picked_shape)),
        )
        self.id_dims = tuple(_stretched(call.shape(index), picked, picked_shape) for index in self.ids)
        rest = [dim for position, dim in enumerate(self.whole) if position not in indexed]
        # What the ids pick stands where adjacent indexed dimensions were, else in front, as in numpy.
        are_adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
        start = indexed[0] if are_adjacent else 0
        self.result: Dims = (*rest[:start], *picked, *rest[start:])

    def result_shape(self) -> Shape:
        """The shape of what is picked, or of the values that are placed."""
        sizes = {factor.name: factor.size for factor in self.factors}
        return tuple(sizes[dim.factors[0]] for dim in self.result)


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that these shapes have together by numpy's rules."""
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def _stretched(shape: Shape, dims: Dims, whole: Shape) -> Dims:
    """The dimensions of a tensor that is stretched to `whole`, whose dimensions are `dims`."""
    start = len(dims) - len(shape)
    aligned = zip(shape, dims[start:], whole[start:], strict=True)
    return tuple(dim if size == full else Dim() for size, dim, full in aligned)


def _index(call: OperatorCall) -> Value:
    x = call.tensor("self")
    indexed = _Indexed(call, x, call["indices"])
    rule = Rule((indexed.whole, *indexed.id_dims), (indexed.result,), indexed.factors)
    return call.emit(OpKind.LOOKUP, "lookup", rule, x, *indexed.ids)


def _index_put(call: OperatorCall) -> Value:
    x, values = call.tensor("self"), call.tensor("values")
    indexed = _Indexed(call, x, call["indices"])
    dims = _stretched(call.shape(values), indexed.result, indexed.result_shape())
    rule = Rule((indexed.whole, *indexed.id_dims, dims), (indexed.whole,), indexed.factors)
    return call.emit(OpKind.SCATTER, "scatter_add" if call["accumulate"] else "scatter", rule, x, *indexed.ids, values)


def _along(shape: Shape, picked: Shape, along: int) -> tuple[Dims, Dims, tuple[Factor, ...]]:
    """The dimensions of a tensor and of ids that pick along one of them, covering the others whole or in part."""
    if len(shape) != len(picked) or not shape:
        raise Unsupported
    whole = tuple(
        Dim((f"d{dim}",), None if dim == along or size == picked[dim] else size) for dim, size in enumerate(shape)
    )
    covered = (*picked[:along], shape[along], *picked[along + 1 :])
    dims = dims_of(covered)
    ids = (*dims[:along], Dim(("p",)), *dims[along + 1 :])
    return whole, ids, (*factors_of(covered, (along,), FactorKind.LOOKUP), Factor("p", picked[along]))


def _gather(call: OperatorCall) -> Value:
    x, ids = call.tensor("self"), call.tensor("index")
    whole, picked, factors = _along(call.shape(x), call.shape(ids), call.dim())
    return call.emit(OpKind.LOOKUP, "gather", Rule((whole, picked), (picked,), factors), x, ids)


def _scatter(call: OperatorCall) -> Value:
    x, ids, source = call.tensor("self"), call.tensor("index"), call.optional("src")
    whole, picked, factors = _along(call.shape(x), call.shape(ids), call.dim())
    inputs: tuple[str, ...] = (x, ids)
    operands: tuple[Dims, ...] = (whole, picked)
    if source is not None:
        if call.shape(source) != call.shape(ids):
            raise Unsupported
        inputs, operands = (*inputs, source), (*operands, picked)
    function = "scatter_add" if "add" in call.name else "scatter"
    return call.emit(OpKind.SCATTER, function, Rule(operands, (whole,), factors), *inputs)


def _masked_scatter(call: OperatorCall) -> Value:
    """A tensor with the rows of another, in their order, where a mask of rows is true (parts of images among words).

    Every sample is taken to get as many rows as every other, so that the batch is a factor of both.
    """
    x, mask, source = call.tensor("self"), call.tensor("mask"), call.tensor("source")
    dims, masked, rows, factors = _masked_rows(call.shape(x), call.shape(mask), call.shape(source))
    return call.emit(OpKind.SCATTER, "masked_scatter", Rule((dims, masked, rows), (dims,), factors), x, mask, source)


def _masked_scatter_backward(call: OperatorCall) -> Value:
    """The rows of a gradient where the mask is true."""
    gradient, mask = call.tensor("grad_output"), call.tensor("mask")
    dims, masked, rows, factors = _masked_rows(call.shape(gradient), call.shape(mask), call.out_shape())
    rule = Rule((dims, masked), (rows,), factors)
    return call.emit(OpKind.LOOKUP, "masked_scatter_backward", rule, gradient, mask)


def _masked_rows(shape: Shape, mask: Shape, source: Shape) -> tuple[Dims, Dims, Dims, tuple[Factor, ...]]:
    """The dimensions of [batch, positions, features], of a mask [batch, positions, 1], of rows, and all factors.

    Rows are [batch, rows, features] or [(batch rows), features].
    """
    if len(shape) != 3 or mask != (*shape[:2], 1) or source[-1] != shape[2] or len(source) not in (2, 3):
        raise Unsupported
    batch, of_each = (source[0], source[1]) if len(source) == 3 else (shape[0], source[0] // shape[0])
    if batch != shape[0] or source[:-1] not in ((batch, of_each), (batch * of_each,)):
        raise Unsupported
    dims = dims_of(shape)
    rows = (dims[0], Dim(("rows",)), dims[2]) if len(source) == 3 else (Dim(("d0", "rows")), dims[2])
    factors = (*factors_of(shape), Factor("rows", of_each, FactorKind.LOOKUP))
    return dims, (dims[0], dims[1], Dim()), rows, factors


INDEXING: OperatorTable = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "index_select": _index_select,
    "index_add": _index_add,
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), _index_put),
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _scatter),
    "masked_scatter": _masked_scatter,
    "masked_scatter_backward": _masked_scatter_backward,
}
