"""Operators that only look at memory in another way: free."""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.torch.call import Call, Unsupported, Value
from phaze.ir import Dim, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import broadcast_rule, reshape_rule, slice_rule, transpose_rule

__all__ = ["VIEWS"]


def _same(call: Call) -> Value:
    """The tensor itself."""
    return call.tensor("self", "a", "input")


def _reshape(call: Call) -> Value:
    x = call.tensor("self")
    if call.shape(x) == call.out_shape():
        return x
    return call.emit(OpKind.VIEW, "reshape", reshape_rule(call.shape(x), call.out_shape()), x)


def _transposed(call: Call, order: list[int]) -> Value:
    x = call.tensor("self")
    if order == sorted(order):
        return x
    return call.emit(OpKind.VIEW, "transpose", transpose_rule(call.shape(x), order), x)


def _t(call: Call) -> Value:
    return _transposed(call, list(range(len(call.out_shape())))[::-1])


def _transpose(call: Call) -> Value:
    order = list(range(len(call.out_shape())))
    first, second = call.dim("dim0"), call.dim("dim1")
    order[first], order[second] = order[second], order[first]
    return _transposed(call, order)


def _permute(call: Call) -> Value:
    rank = len(call.out_shape())
    return _transposed(call, [index % rank for index in call["dims"]])


def _expand(call: Call) -> Value:
    x = call.tensor("self")
    shape, result = call.shape(x), call.out_shape()
    if shape == result:
        return x
    into = range(len(result) - len(shape), len(result))
    return call.emit(OpKind.VIEW, "expand", broadcast_rule(shape, result, tuple(into)), x)


def _slice(call: Call) -> Value:
    x = call.tensor("self")
    if call.shape(x) == call.out_shape() and call["step"] in (1, None):
        return x
    rule = slice_rule(call.shape(x), call.out_shape())
    start = call["start"] if isinstance(call["start"], int) else 0
    return call.emit(OpKind.VIEW, "slice", rule, x, attributes={"start": start})


def _select(call: Call) -> Value:
    x = call.tensor("self")
    shape, gone = call.shape(x), call.dim()
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    factors = tuple(
        Factor(f"d{index}", size, FactorKind.WHOLE if index == gone else FactorKind.FREE)
        for index, size in enumerate(shape)
    )
    rule = Rule((dims,), (tuple(dim for index, dim in enumerate(dims) if index != gone),), factors)
    return call.emit(OpKind.VIEW, "select", rule, x, attributes={"index": call["index"]})


def _split(call: Call) -> Value:
    """Equal parts are one view along a whole factor; unequal ones a view each."""
    x = call.tensor("self")
    shape, along = call.shape(x), call.dim()
    shapes = [tuple(value.shape) for value in call.outputs]
    if len(shapes) == 1 and shapes[0] == shape:
        return (x,)
    if len(set(shapes)) > 1:
        return _parts(call, x, along)
    removes = len(shapes[0]) < len(shape)
    sizes = {f"d{index}": size for index, size in enumerate(shape)}
    sizes |= {"c": len(shapes)}
    if not removes:
        sizes[f"d{along}"] = shapes[0][along]
    names = [
        ("c",) if removes else ("c", f"d{along}") if index == along else (f"d{index}",) for index in range(len(shape))
    ]
    operand = tuple(Dim(names[index] if index == along else (f"d{index}",)) for index in range(len(shape)))
    part = tuple(Dim((f"d{index}",)) for index in range(len(shape)) if index != along or not removes)
    used = [name for dim in operand for name in dim.factors]
    factors = tuple(Factor(n, sizes[n], FactorKind.WHOLE if n == "c" else FactorKind.FREE) for n in used)
    rule = Rule((operand,), (part,) * len(shapes), factors)
    return call.emit(OpKind.VIEW, "split", rule, x, outputs=range(len(shapes)))


def _parts(call: Call, x: str, along: int) -> Value:
    start = 0
    made: list[str | None] = []
    for index in range(len(call.outputs)):
        shape = call.out_shape(index)
        if shape[along] == 0:
            made.append(None)
            continue
        rule = slice_rule(call.shape(x), shape)
        dtypes = [call.out_dtype(index)]
        made.append(call.add(OpKind.VIEW, "slice", rule, x, dtypes=dtypes, attributes={"start": start})[0])
        start += shape[along]
    return tuple(made)


def _last_pair(call: Call) -> Value:
    """Pairs of numbers as complex ones, or back: a last dimension of 2 goes or comes."""
    x = call.tensor("self")
    shape, result = call.shape(x), call.out_shape()
    longer = max(shape, result, key=len)
    if longer[-1] != 2 or abs(len(shape) - len(result)) != 1:
        raise Unsupported
    dims = tuple(Dim((f"d{index}",)) for index in range(len(longer)))
    last = len(longer) - 1
    factors = tuple(
        Factor(f"d{i}", n, FactorKind.WHOLE if i == last else FactorKind.FREE) for i, n in enumerate(longer)
    )
    sides = (dims, dims[:-1]) if len(shape) > len(result) else (dims[:-1], dims)
    return call.emit(OpKind.VIEW, "complex", Rule((sides[0],), (sides[1],), factors), x)


VIEWS: dict[str, Callable[[Call], Value]] = {
    **dict.fromkeys(("detach", "alias", "lift_fresh_copy", "lift_fresh", "lift", "contiguous", "conj"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias", "flatten"), _reshape),
    "view_as_complex": _last_pair,
    "view_as_real": _last_pair,
    "t": _t,
    "transpose": _transpose,
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _split),
}
