"""Torch views (free), copies, casts, concatenation, padding, new tensors: elements are moved, not computed with."""

from __future__ import annotations

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
from phaze.ir import Dim, Factor, FactorKind, OpKind, Rule
from phaze.ir.graph_builder import (
    broadcast_rule,
    concatenate_rule,
    elementwise_rule,
    reshape_rule,
    slice_rule,
    transpose_rule,
)

__all__ = ["DATA_MOVEMENT"]


def _same(call: OperatorCall) -> Value:
    """The tensor itself."""
    return call.tensor("self", "a", "input")


def _reshape(call: OperatorCall) -> Value:
    x = call.tensor("self")
    if call.shape(x) == call.out_shape():
        return x
    return call.emit(OpKind.VIEW, "reshape", reshape_rule(call.shape(x), call.out_shape()), x)


def _transposed(call: OperatorCall, order: list[int]) -> Value:
    x = call.tensor("self")
    if order == sorted(order):
        return x
    return call.emit(OpKind.VIEW, "transpose", transpose_rule(call.shape(x), order), x)


def _t(call: OperatorCall) -> Value:
    return _transposed(call, list(range(len(call.out_shape())))[::-1])


def _transpose(call: OperatorCall) -> Value:
    order = list(range(len(call.out_shape())))
    first, second = call.dim("dim0"), call.dim("dim1")
    order[first], order[second] = order[second], order[first]
    return _transposed(call, order)


def _permute(call: OperatorCall) -> Value:
    rank = len(call.out_shape())
    return _transposed(call, [index % rank for index in call["dims"]])


def _expand(call: OperatorCall) -> Value:
    x = call.tensor("self")
    shape, result = call.shape(x), call.out_shape()
    if shape == result:
        return x
    into = range(len(result) - len(shape), len(result))
    return call.emit(OpKind.VIEW, "expand", broadcast_rule(shape, result, tuple(into)), x)


def _slice(call: OperatorCall) -> Value:
    x = call.tensor("self")
    if call.shape(x) == call.out_shape() and call["step"] in (1, None):
        return x
    rule = slice_rule(call.shape(x), call.out_shape())
    start = call["start"] if isinstance(call["start"], int) else 0
    return call.emit(OpKind.VIEW, "slice", rule, x, attributes={"start": start})


def _select(call: OperatorCall) -> Value:
    x = call.tensor("self")
    shape, removed = call.shape(x), call.dim()
    dims = dims_of(shape)
    remaining = tuple(dim for index, dim in enumerate(dims) if index != removed)
    rule = Rule((dims,), (remaining,), factors_of(shape, (removed,)))
    return call.emit(OpKind.VIEW, "select", rule, x, attributes={"index": call["index"]})


def _split(call: OperatorCall) -> Value:
    """Equal parts are one view along a whole factor; unequal ones a view each."""
    x = call.tensor("self")
    shape, along = call.shape(x), call.dim()
    shapes = [tuple(value.shape) for value in call.outputs]
    if len(shapes) == 1 and shapes[0] == shape:
        return (x,)
    if len(set(shapes)) > 1:
        return _unequal_parts(call, x, along)
    is_unbound = len(shapes[0]) < len(shape)  # the dimension is gone from the parts
    sizes = {f"d{index}": size for index, size in enumerate(shape)} | {"c": len(shapes)}
    if not is_unbound:
        sizes[f"d{along}"] = shapes[0][along]
    dims = dims_of(shape)
    split = Dim(("c",) if is_unbound else ("c", f"d{along}"))
    operand = (*dims[:along], split, *dims[along + 1 :])
    part = (*dims[:along], *dims[along + 1 :]) if is_unbound else dims
    names = [name for dim in operand for name in dim.factors]
    factors = tuple(Factor(name, sizes[name], FactorKind.WHOLE if name == "c" else FactorKind.FREE) for name in names)
    rule = Rule((operand,), (part,) * len(shapes), factors)
    return call.emit(OpKind.VIEW, "split", rule, x, outputs=range(len(shapes)))


def _unequal_parts(call: OperatorCall, x: str, along: int) -> Value:
    """A slice for each part; an empty part has no tensor."""
    start = 0
    part_ids: list[str | None] = []
    for index in range(len(call.outputs)):
        shape = call.out_shape(index)
        if shape[along] == 0:
            part_ids.append(None)
            continue
        rule = slice_rule(call.shape(x), shape)
        dtypes = [call.out_dtype(index)]
        part_ids.append(call.add(OpKind.VIEW, "slice", rule, x, dtypes=dtypes, attributes={"start": start})[0])
        start += shape[along]
    return tuple(part_ids)


def _complex_pairs(call: OperatorCall) -> Value:
    """Pairs of numbers as complex ones, or back: a last dimension of 2 goes or comes."""
    x = call.tensor("self")
    shape, result = call.shape(x), call.out_shape()
    longer = max(shape, result, key=len)
    if longer[-1] != 2 or abs(len(shape) - len(result)) != 1:
        raise Unsupported
    dims = dims_of(longer)
    operand, viewed = (dims, dims[:-1]) if len(shape) > len(result) else (dims[:-1], dims)
    rule = Rule((operand,), (viewed,), factors_of(longer, (len(longer) - 1,)))
    return call.emit(OpKind.VIEW, "complex", rule, x)


def _new_tensor(call: OperatorCall) -> Value:
    """A new tensor; the contents come from no other."""
    rule = elementwise_rule(call.out_shape())
    return call.emit(OpKind.COPY, "zeros" if call.name != "arange" else "arange", rule)


def _clone(call: OperatorCall) -> Value:
    x = call.tensor("self")
    return call.emit(OpKind.COPY, "contiguous", elementwise_rule(call.out_shape(), call.shape(x)), x)


def _to_copy(call: OperatorCall) -> Value:
    x = call.tensor("self")
    if call.dtype(x) == call.out_dtype():
        return x
    return call.emit(OpKind.ELEMENTWISE, "cast", elementwise_rule(call.out_shape(), call.shape(x)), x)


def _copy(call: OperatorCall) -> Value:
    """`copy(old, new)`: the new contents, stretched to the old shape."""
    x = call.tensor("src")
    if call.shape(x) == call.out_shape() and call.dtype(x) == call.out_dtype():
        return x
    return call.emit(OpKind.ELEMENTWISE, "cast", elementwise_rule(call.out_shape(), call.shape(x)), x)


def _cat(call: OperatorCall) -> Value:
    parts = [part for part in call["tensors"] if isinstance(part, TensorId)]
    if len(parts) == 1:
        return parts[0]
    shapes = [call.shape(part) for part in parts]
    along = (call["dim"] or 0) % len(shapes[0])
    if len({shape[along] for shape in shapes}) == 1:
        return call.emit(OpKind.COPY, "stack", _joined_rule(shapes, along), *parts)
    return call.emit(OpKind.COPY, "concatenate", concatenate_rule(shapes, along), *parts)


def _joined_rule(shapes: list[Shape], along: int) -> Rule:
    """Equal parts one after another: along the joined dimension a whole factor counts the parts."""
    part = dims_of(shapes[0])
    joined = tuple(Dim(("c", f"d{index}")) if index == along else dim for index, dim in enumerate(part))
    count = Factor("c", len(shapes), FactorKind.WHOLE)
    return Rule((part,) * len(shapes), (joined,), (count, *factors_of(shapes[0])))


def _stack(call: OperatorCall) -> Value:
    parts = list(call["tensors"])
    if not all(isinstance(part, TensorId) for part in parts):
        raise Unsupported
    shape = call.shape(parts[0])
    new_dim = (call["dim"] or 0) % (len(shape) + 1)
    part = dims_of(shape)
    stacked = (*part[:new_dim], Dim(("c",)), *part[new_dim:])
    count = Factor("c", len(parts), FactorKind.WHOLE)
    rule = Rule((part,) * len(parts), (stacked,), (*factors_of(shape), count))
    return call.emit(OpKind.COPY, "stack", rule, *parts)


def _pad(call: OperatorCall) -> Value:
    """A tensor inside a larger one (or cut, where the padding is negative)."""
    x = call.tensor("self", "grad_output")
    shape, result = call.shape(x), call.out_shape()
    if len(shape) != len(result):
        raise Unsupported
    if shape == result:
        return x
    if all(size <= larger for size, larger in zip(shape, result, strict=True)):
        cut = slice_rule(result, shape)
        return call.emit(OpKind.COPY, "pad", Rule(cut.results, cut.operands, cut.factors), x)
    if all(size >= smaller for size, smaller in zip(shape, result, strict=True)):
        return call.emit(OpKind.VIEW, "slice", slice_rule(shape, result), x)
    raise Unsupported


def _select_backward(call: OperatorCall) -> Value:
    gradient, result = call.tensor("grad_output"), call.out_shape()
    selected = call.dim(rank=len(result))
    dims = dims_of(result)
    operand = tuple(dim for index, dim in enumerate(dims) if index != selected)
    return call.emit(OpKind.COPY, "pad", Rule((operand,), (dims,), factors_of(result, (selected,))), gradient)


def _replace_part(call: OperatorCall) -> Value:
    """`slice_scatter` and `select_scatter`: a tensor with a part of it replaced."""
    x, part = call.tensor("self"), call.tensor("src")
    shape, along = call.out_shape(), call.dim()
    if call.shape(part) == shape and call.name == "slice_scatter":
        return part
    dims = dims_of(shape)
    if call.name == "slice_scatter":
        sliced = Dim((f"d{along}",), call.shape(part)[along])
        covered = (*dims[:along], sliced, *dims[along + 1 :])
    else:
        covered = (*dims[:along], *dims[along + 1 :])
    return call.emit(OpKind.COPY, call.name, Rule((dims, covered), (dims,), factors_of(shape, (along,))), x, part)


def _rearranged(call: OperatorCall) -> Value:
    """Elements of some dimensions in another order: those dimensions stay whole."""
    x = call.tensor("self")
    shape = call.shape(x)
    named = call["dims"] if call["dims"] is not None else call["dim"]
    named = (named,) if isinstance(named, int) else named
    moved = {index % len(shape) for index in named} if named else set(range(len(shape)))
    dims = dims_of(shape)
    return call.emit(OpKind.COPY, call.name, Rule((dims,), (dims,), factors_of(shape, moved)), x)


def _repeat(call: OperatorCall) -> Value:
    x = call.tensor("self")
    result = call.out_shape()
    shape = (1,) * (len(result) - len(call.shape(x))) + call.shape(x)
    operand, repeated, factors = [], [], []
    for index, (size, whole) in enumerate(zip(shape, result, strict=True)):
        factors.append(Factor(f"d{index}", size))
        operand.append(Dim((f"d{index}",)))
        repeated.append(Dim((f"d{index}",)))
        if whole != size:
            factors.append(Factor(f"r{index}", whole // size))
            repeated[-1] = Dim((f"r{index}", f"d{index}"))
    kept = tuple(operand[len(result) - len(call.shape(x)) :])
    names = {name for dim in (*kept, *repeated) for name in dim.factors}
    rule = Rule((kept,), (tuple(repeated),), tuple(factor for factor in factors if factor.name in names))
    return call.emit(OpKind.COPY, "repeat", rule, x)


_NEW_TENSORS = (
    "arange zeros ones full empty scalar_tensor zeros_like ones_like full_like empty_like new_zeros new_ones new_full "
    "new_empty eye linspace rand randn randint randperm rand_like randn_like randint_like empty_strided "
    "new_empty_strided tril_indices triu_indices logspace"
)

DATA_MOVEMENT: OperatorTable = {
    **dict.fromkeys(("detach", "alias", "lift_fresh_copy", "lift_fresh", "lift", "contiguous", "conj"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias", "flatten"), _reshape),
    "view_as_complex": _complex_pairs,
    "view_as_real": _complex_pairs,
    "t": _t,
    "transpose": _transpose,
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _split),
    **dict.fromkeys(_NEW_TENSORS.split(), _new_tensor),
    "clone": _clone,
    "_to_copy": _to_copy,
    "copy": _copy,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "slice_backward": _pad,
    "select_backward": _select_backward,
    "slice_scatter": _replace_part,
    "select_scatter": _replace_part,
    **dict.fromkeys(("roll", "flip"), _rearranged),
    "repeat": _repeat,
}
