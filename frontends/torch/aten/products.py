"""Matrix products, among them those of experts, whose rows are grouped by the expert that takes them."""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.torch.call import Call, Unsupported, Value
from phaze.ir import Dim, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import contraction_rule, elementwise_rule

__all__ = ["PRODUCTS"]


def _matrix_rule(left: tuple[int, ...], right: tuple[int, ...]) -> Rule:
    """Products of the last two dimensions, or of a vector, for every element of equal leading ones."""
    leading = tuple(range(len(left) - 2)) if len(left) == len(right) else ()
    contracted = ((len(left) - 1,), (max(0, len(right) - 2),))
    return contraction_rule(left, right, batch=(leading, leading), contracted=contracted)


def _product(call: Call, left: str, right: str) -> Value:
    rule = _matrix_rule(call.shape(left), call.shape(right))
    return call.emit(OpKind.CONTRACTION, "einsum", rule, left, right)


def _mm(call: Call) -> Value:
    return _product(call, call.tensor("self"), call.tensor("mat2", "vec", "tensor", "other"))


def _addmm(call: Call) -> Value:
    """A product, perhaps scaled, and the sum with a bias: an op each."""
    left = call.tensor("mat1", "batch1", "mat")
    right = call.tensor("mat2", "batch2", "vec")
    rule = _matrix_rule(call.shape(left), call.shape(right))
    (product,) = call.add(OpKind.CONTRACTION, "einsum", rule, left, right, dtypes=[call.out_dtype()])
    if call["alpha"] not in (1, None):
        scaled, attributes = elementwise_rule(call.out_shape(), call.out_shape()), {"factor": float(call["alpha"])}
        dtypes = [call.out_dtype()]
        (product,) = call.add(OpKind.ELEMENTWISE, "scale", scaled, product, dtypes=dtypes, attributes=attributes)
    if call["beta"] == 0:
        return product
    bias = call.tensor("self")
    added = elementwise_rule(call.out_shape(), call.out_shape(), call.shape(bias))
    return call.emit(OpKind.ELEMENTWISE, "add", added, product, bias)


def _linear(call: Call) -> Value:
    x, weight, bias = call.tensor("input"), call.tensor("weight"), call.optional("bias")
    left, right = call.shape(x), call.shape(weight)
    rule = contraction_rule(left, right, contracted=((len(left) - 1,), (1,)))
    if bias is None:
        return call.emit(OpKind.CONTRACTION, "einsum", rule, x, weight)
    (product,) = call.add(OpKind.CONTRACTION, "einsum", rule, x, weight, dtypes=[call.out_dtype()])
    added = elementwise_rule(call.out_shape(), call.out_shape(), call.shape(bias))
    return call.emit(OpKind.ELEMENTWISE, "add", added, product, bias)


def _grouped(call: Call) -> Value:
    """Rows grouped by expert, as many each: rows are (e c).

    Where experts do not divide the rows, which of them a row takes is looked up instead.
    """
    left, right = call.tensor("self", "input"), call.tensor("mat2", "weight")
    ranks = (len(call.shape(left)), len(call.shape(right)))
    if ranks == (3, 3):
        return _product(call, left, right)
    if ranks not in ((2, 3), (2, 2)):
        raise Unsupported
    rows = call.shape(left)[0 if ranks == (2, 3) else 1]
    experts = (call.shape(right) if ranks == (2, 3) else call.out_shape())[0]
    is_even = rows % experts == 0
    inner = call.shape(left)[1 if ranks == (2, 3) else 0]
    factors = (
        Factor("e", experts, FactorKind.FREE if is_even else FactorKind.LOOKUP),
        Factor("c", rows // experts if is_even else rows),
        Factor("i", inner),
        Factor("o", call.shape(right)[-1]),
    )
    row, expert, i, o = Dim(("e", "c") if is_even else ("c",)), Dim(("e",)), Dim(("i",)), Dim(("o",))
    if ranks == (2, 3):
        rule = Rule(((row, i), (expert, i, o)), ((row, o),), factors)
    else:
        rule = Rule(((i, row), (row, o)), ((expert, i, o),), factors)
    return call.emit(OpKind.CONTRACTION, "einsum", rule, left, right)


PRODUCTS: dict[str, Callable[[Call], Value]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), _mm),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _addmm),
    "linear": _linear,
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped),
}
