"""Picking and placing by index: embeddings, gathers, scatters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phaze.frontends.torch.call import Call, Shape, TensorId, Unsupported, Value
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import lookup_rule

__all__ = ["INDEXING"]


def _embedding(call: Call) -> Value:
    table, ids = call.tensor("weight"), call.tensor("indices")
    return call.emit(OpKind.LOOKUP, "embedding", lookup_rule(call.shape(table), 0, call.shape(ids)), table, ids)


def _embedding_backward(call: Call) -> Value:
    gradient, ids = call.tensor("grad_output", "grad"), call.tensor("indices")
    rule = lookup_rule(call.out_shape(), 0, call.shape(ids))
    back = Rule((rule.results[0], rule.operands[1]), (rule.operands[0],), rule.factors)
    return call.emit(OpKind.SCATTER, "scatter_add", back, gradient, ids)


def _index_select(call: Call) -> Value:
    x, ids = call.tensor("self"), call.tensor("index")
    return call.emit(OpKind.LOOKUP, "lookup", lookup_rule(call.shape(x), call.dim(), call.shape(ids)), x, ids)


def _index_add(call: Call) -> Value:
    x, ids, source = call.tensor("self"), call.tensor("index"), call.tensor("source", "src")
    rule = lookup_rule(call.shape(x), call.dim(), call.shape(ids))
    back = Rule((rule.operands[0], rule.operands[1], rule.results[0]), (rule.operands[0],), rule.factors)
    return call.emit(OpKind.SCATTER, "scatter_add", back, x, ids, source)


class _Indexed:
    """A tensor indexed by integer tensors in some of its dimensions, and the shape that they broadcast to."""

    def __init__(self, call: Call, x: str, indices: Sequence[object]) -> None:
        self.given = [(at, index) for at, index in enumerate(indices) if isinstance(index, TensorId)]
        shape = call.shape(x)
        if not self.given or any(str(call.dtype(index)) in ("bool", "uint8") for _, index in self.given):
            raise Unsupported
        at = [place for place, _ in self.given]
        self.ids = tuple(index for _, index in self.given)
        self.picked_shape = _broadcast([call.shape(index) for index in self.ids])
        kinds = [FactorKind.LOOKUP if place in at else FactorKind.FREE for place in range(len(shape))]
        self.whole: Dims = tuple(Dim((f"d{place}",)) for place in range(len(shape)))
        picked = tuple(Dim((f"p{place}",)) for place in range(len(self.picked_shape)))
        self.factors = (
            *(Factor(f"d{place}", size, kinds[place]) for place, size in enumerate(shape)),
            *(Factor(f"p{place}", size) for place, size in enumerate(self.picked_shape)),
        )
        self.id_dims = tuple(_stretched(call.shape(index), picked, self.picked_shape) for index in self.ids)
        rest = [dim for place, dim in enumerate(self.whole) if place not in at]
        front = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
        self.result: Dims = (*rest[:front], *picked, *rest[front:])

    def result_shape(self) -> Shape:
        sizes = {factor.name: factor.size for factor in self.factors}
        return tuple(sizes[dim.factors[0]] for dim in self.result)


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def _stretched(shape: Shape, dims: Dims, whole: Shape) -> Dims:
    start = len(dims) - len(shape)
    aligned = zip(shape, dims[start:], whole[start:], strict=True)
    return tuple(dim if size == full else Dim() for size, dim, full in aligned)


def _index(call: Call) -> Value:
    x = call.tensor("self")
    indexed = _Indexed(call, x, call["indices"])
    rule = Rule((indexed.whole, *indexed.id_dims), (indexed.result,), indexed.factors)
    return call.emit(OpKind.LOOKUP, "lookup", rule, x, *indexed.ids)


def _index_put(call: Call) -> Value:
    x, values = call.tensor("self"), call.tensor("values")
    indexed = _Indexed(call, x, call["indices"])
    dims = _stretched(call.shape(values), indexed.result, indexed.result_shape())
    rule = Rule((indexed.whole, *indexed.id_dims, dims), (indexed.whole,), indexed.factors)
    return call.emit(OpKind.SCATTER, "scatter_add" if call["accumulate"] else "scatter", rule, x, *indexed.ids, values)


def _along(shape: Shape, picked: Shape, at: int) -> tuple[Dims, Dims, tuple[Factor, ...]]:
    """The dimensions of a tensor and of ids that pick along one of them, covering the others whole or in part."""
    if len(shape) != len(picked) or not shape:
        raise Unsupported
    names = [f"d{place}" for place in range(len(shape))]
    whole = tuple(
        Dim((name,), None if place == at or shape[place] == picked[place] else shape[place])
        for place, name in enumerate(names)
    )
    ids = tuple(Dim(("p",)) if place == at else Dim((name,)) for place, name in enumerate(names))
    factors = tuple(
        Factor(name, shape[place], FactorKind.LOOKUP) if place == at else Factor(name, picked[place])
        for place, name in enumerate(names)
    )
    return whole, ids, (*factors, Factor("p", picked[at]))


def _gather(call: Call) -> Value:
    x, ids = call.tensor("self"), call.tensor("index")
    whole, picked, factors = _along(call.shape(x), call.shape(ids), call.dim())
    return call.emit(OpKind.LOOKUP, "gather", Rule((whole, picked), (picked,), factors), x, ids)


def _scatter(call: Call) -> Value:
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


INDEXING: dict[str, Callable[[Call], Value]] = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "index_select": _index_select,
    "index_add": _index_add,
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), _index_put),
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _scatter),
}
