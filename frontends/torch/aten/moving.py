"""Operators that make or move elements without computing with them."""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.torch.call import Call, TensorId, Unsupported, Value
from phaze.ir import Dim, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import concatenate_rule, elementwise_rule, slice_rule

__all__ = ["MOVING"]


def exchanged(rule: Rule) -> Rule:
    """The rule with its one operand and its one result exchanged."""
    return Rule(rule.results, rule.operands, rule.factors)


def _source(call: Call) -> Value:
    """A new tensor; the contents come from no other."""
    rule = elementwise_rule(call.out_shape())
    return call.emit(OpKind.COPY, "zeros" if call.name != "arange" else "arange", rule)


def _clone(call: Call) -> Value:
    x = call.tensor("self")
    return call.emit(OpKind.COPY, "contiguous", elementwise_rule(call.out_shape(), call.shape(x)), x)


def _to_copy(call: Call) -> Value:
    x = call.tensor("self")
    if call.dtype(x) == call.out_dtype():
        return x
    return call.emit(OpKind.ELEMENTWISE, "cast", elementwise_rule(call.out_shape(), call.shape(x)), x)


def _copy(call: Call) -> Value:
    """`copy(old, new)`: the new contents, stretched to the old shape."""
    x = call.tensor("src")
    if call.shape(x) == call.out_shape() and call.dtype(x) == call.out_dtype():
        return x
    return call.emit(OpKind.ELEMENTWISE, "cast", elementwise_rule(call.out_shape(), call.shape(x)), x)


def _cat(call: Call) -> Value:
    parts = [part for part in call["tensors"] if isinstance(part, TensorId)]
    if len(parts) == 1:
        return parts[0]
    shapes = [call.shape(part) for part in parts]
    axis = (call["dim"] or 0) % len(shapes[0])
    if len({shape[axis] for shape in shapes}) == 1:
        return call.emit(OpKind.COPY, "stack", _joined_rule(shapes, axis), *parts)
    return call.emit(OpKind.COPY, "concatenate", concatenate_rule(shapes, axis), *parts)


def _joined_rule(shapes: list[tuple[int, ...]], axis: int) -> Rule:
    """Equal parts one after another: along the joined dimension a whole factor counts the parts."""
    part = tuple(Dim((f"d{index}",)) for index in range(len(shapes[0])))
    joined = tuple(Dim(("c", f"d{index}")) if index == axis else dim for index, dim in enumerate(part))
    count = Factor("c", len(shapes), FactorKind.WHOLE)
    factors = tuple(Factor(f"d{index}", size) for index, size in enumerate(shapes[0]))
    return Rule((part,) * len(shapes), (joined,), (count, *factors))


def _stack(call: Call) -> Value:
    parts = list(call["tensors"])
    if not all(isinstance(part, TensorId) for part in parts):
        raise Unsupported
    shape = call.shape(parts[0])
    axis = (call["dim"] or 0) % (len(shape) + 1)
    part = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    factors = tuple(Factor(f"d{index}", size) for index, size in enumerate(shape))
    rule = Rule(
        (part,) * len(parts),
        ((*part[:axis], Dim(("c",)), *part[axis:]),),
        (*factors, Factor("c", len(parts), FactorKind.WHOLE)),
    )
    return call.emit(OpKind.COPY, "stack", rule, *parts)


def _pad(call: Call) -> Value:
    """A tensor inside a larger one (or cut, where the padding is negative)."""
    x = call.tensor("self", "grad_output")
    shape, result = call.shape(x), call.out_shape()
    if len(shape) != len(result):
        raise Unsupported
    if shape == result:
        return x
    if all(size <= larger for size, larger in zip(shape, result, strict=True)):
        return call.emit(OpKind.COPY, "pad", exchanged(slice_rule(result, shape)), x)
    if all(size >= smaller for size, smaller in zip(shape, result, strict=True)):
        return call.emit(OpKind.VIEW, "slice", slice_rule(shape, result), x)
    raise Unsupported


def _select_backward(call: Call) -> Value:
    gradient, result = call.tensor("grad_output"), call.out_shape()
    at = call.dim(rank=len(result))
    dims = tuple(Dim((f"d{index}",)) for index in range(len(result)))
    factors = tuple(
        Factor(f"d{index}", size, FactorKind.WHOLE if index == at else FactorKind.FREE)
        for index, size in enumerate(result)
    )
    operand = tuple(dim for index, dim in enumerate(dims) if index != at)
    return call.emit(OpKind.COPY, "pad", Rule((operand,), (dims,), factors), gradient)


def _put_back(call: Call) -> Value:
    """`slice_scatter` and `select_scatter`: a tensor with a part of it replaced."""
    x, part = call.tensor("self"), call.tensor("src")
    shape, at = call.out_shape(), call.dim()
    small = list(call.shape(part))
    if len(small) < len(shape):
        small.insert(at, 1)
    if tuple(small) == shape and call.name == "slice_scatter":
        return part
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    factors = tuple(
        Factor(f"d{index}", size, FactorKind.WHOLE if index == at else FactorKind.FREE)
        for index, size in enumerate(shape)
    )
    covered = tuple(
        Dim((f"d{index}",), small[index]) if index == at else dim
        for index, dim in enumerate(dims)
        if index != at or call.name == "slice_scatter"
    )
    return call.emit(OpKind.COPY, call.name, Rule((dims, covered), (dims,), factors), x, part)


def _rearranged(call: Call) -> Value:
    """Elements of some dimensions in another order: those dimensions stay whole."""
    x = call.tensor("self")
    shape = call.shape(x)
    given = call["dims"] if call["dims"] is not None else call["dim"]
    given = (given,) if isinstance(given, int) else given
    moved = {index % len(shape) for index in given} if given else set(range(len(shape)))
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    factors = tuple(
        Factor(f"d{i}", size, FactorKind.WHOLE if i in moved else FactorKind.FREE) for i, size in enumerate(shape)
    )
    return call.emit(OpKind.COPY, call.name, Rule((dims,), (dims,), factors), x)


def _repeat(call: Call) -> Value:
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


_SOURCES = (
    "arange zeros ones full empty scalar_tensor zeros_like ones_like full_like empty_like new_zeros new_ones new_full "
    "new_empty eye linspace rand randn randint randperm rand_like randn_like randint_like empty_strided "
    "new_empty_strided tril_indices triu_indices logspace"
)

MOVING: dict[str, Callable[[Call], Value]] = {
    **dict.fromkeys(_SOURCES.split(), _source),
    "clone": _clone,
    "_to_copy": _to_copy,
    "copy": _copy,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "slice_backward": _pad,
    "select_backward": _select_backward,
    "slice_scatter": _put_back,
    "select_scatter": _put_back,
    **dict.fromkeys(("roll", "flip"), _rearranged),
    "repeat": _repeat,
}
