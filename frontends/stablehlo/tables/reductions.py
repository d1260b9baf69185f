"""Reductions over dimensions and windows, sorting."""

from __future__ import annotations

import math
from collections.abc import Callable

from phaze.frontends.stablehlo.call import Call, Values
from phaze.frontends.stablehlo.module import Operation
from phaze.frontends.stablehlo.values import Shape, Unsupported, is_constant
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import elementwise_rule, reduction_rule

__all__ = ["REDUCTIONS"]

_BY_BODY = {"add": "sum", "maximum": "max", "minimum": "min", "multiply": "prod", "and": "all", "or": "any"}


def _body(operation: Operation) -> str:
    """What a reduction computes of two elements; `compare` where it also picks by comparing."""
    names = [op.short_name for op in operation.regions[0].operations] if operation.regions else []
    return "compare" if "compare" in names else names[0] if names else ""


def _reduce(call: Call) -> Values:
    over = call.integers("dimensions")
    count = len(call.operation.types)
    read = [index for index in range(count) if not is_constant(call.values[index])]
    if len(read) != 1:
        raise Unsupported
    value = call.values[read[0]]
    if all(value.shape[index] == 1 for index in over) and count == 1:
        return (call.recorder.reshape(value, call.out_shape(), call.scope, "reduce"),)
    rule = reduction_rule(value.shape, over)
    function = "argmax" if count > 1 else _BY_BODY.get(_body(call.operation), "reduce")
    rule = Rule(rule.operands, rule.results * count, rule.factors)
    return call.emit(OpKind.REDUCTION, function, rule, call.id(read[0]))


def _window(call: Call, rank: int) -> Shape:
    return call.integers("window_dimensions") if call.attribute("window_dimensions") is not None else (1,) * rank


def _window_dims(x: Shape, result: Shape, window: Shape) -> tuple[Dims, Dims, tuple[Factor, ...]]:
    """Windows of x for every position of the result; dimensions with a window of 1 are as they are."""
    operand, positions, factors = [], [], []
    for index, size in enumerate(window):
        factors.append(Factor(f"p{index}", result[index]))
        positions.append(Dim((f"p{index}",)))
        if size == 1 and x[index] == result[index]:
            operand.append(Dim((f"p{index}",)))
        else:
            factors.append(Factor(f"k{index}", size))
            operand.append(Dim((f"p{index}", f"k{index}"), x[index]))
    return tuple(operand), tuple(positions), tuple(factors)


def _reduce_window(call: Call) -> Values:
    if len(call.operation.types) != 1:
        raise Unsupported
    shape, result = call.shape(0), call.out_shape()
    window = _window(call, len(shape))
    body = _body(call.operation)
    if math.prod(window) == max(shape, default=1) and shape == result:  # a running sum: every element waits for others
        at = window.index(max(window))
        dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
        factors = tuple(
            Factor(f"d{i}", n, FactorKind.WHOLE if i == at else FactorKind.FREE) for i, n in enumerate(shape)
        )
        return call.emit(OpKind.ELEMENTWISE, f"cumulative_{body}", Rule((dims,), (dims,), factors), call.id(0))
    operand, positions, factors = _window_dims(shape, result, window)
    function = {"maximum": "max_pool", "add": "sum_pool"}.get(body, f"{body}_pool")
    if shape == result and all(size == 1 for size in window):
        return call.emit(OpKind.COPY, "contiguous", elementwise_rule(result, shape), call.id(0))
    return call.emit(OpKind.REDUCTION, function, Rule((operand,), (positions,), factors), call.id(0))


def _select_and_scatter(call: Call) -> Values:
    """The gradient of max pooling: each position's goes to where the largest element of its window was."""
    shape, source = call.shape(0), call.shape(1)
    window = _window(call, len(shape))
    operand, positions, factors = _window_dims(shape, source, window)
    rule = Rule((operand, positions), (operand,), factors)
    return call.emit(OpKind.COPY, "max_pool_backward", rule, call.id(0), call.id(1))


def _sort(call: Call) -> Values:
    along = call.attribute("dimension")
    shape = call.shape(0)
    if not isinstance(along, int) or not shape:
        raise Unsupported
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    at = along % len(shape)
    factors = tuple(
        Factor(f"d{i}", size, FactorKind.WHOLE if i == at else FactorKind.FREE) for i, size in enumerate(shape)
    )
    inputs = [call.id(index) for index in range(len(call.values)) if not is_constant(call.values[index])]
    rule = Rule((dims,) * len(inputs), (dims,) * len(call.operation.types), factors)
    return call.emit(OpKind.SORT, "sort", rule, *inputs)


def _top_k(call: Call) -> Values:
    """The k largest along the last dimension, and where they stood."""
    shape, result = call.shape(0), call.out_shape()
    if not shape or len(shape) != len(result):
        raise Unsupported
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    last = len(shape) - 1
    factors = [
        Factor(f"d{i}", size, FactorKind.WHOLE if i == last else FactorKind.FREE) for i, size in enumerate(shape)
    ]
    factors.append(Factor("k", result[last], FactorKind.WHOLE))
    picked = (*dims[:-1], Dim(("k",)))
    count = len(call.operation.types)
    return call.emit(OpKind.SORT, "top_k", Rule((dims,), (picked,) * count, tuple(factors)), call.id(0))


REDUCTIONS: dict[str, Callable[[Call], Values]] = {
    "reduce": _reduce,
    "reduce_window": _reduce_window,
    "select_and_scatter": _select_and_scatter,
    "sort": _sort,
    "top_k": _top_k,
    "topk": _top_k,
}
