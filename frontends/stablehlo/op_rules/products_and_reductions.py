"""Matrix products and convolutions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from phaze.frontends.stablehlo.module import Operation
from phaze.frontends.stablehlo.symbols import Call, Shape, Unsupported, Values, is_constant
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import contraction_rule, elementwise_rule, reduction_rule

__all__ = ["PRODUCTS", "REDUCTIONS"]

_LAYOUT = re.compile(r"\[([\w, ?]*)\]x\[([\w, ?]*)\]->\[([\w, ?]*)\]")


def _dot_general(call: Call) -> Values:
    numbers = call.attribute("dot_dimension_numbers") or {}
    if not isinstance(numbers, dict):
        numbers = {}
    batch = tuple(tuple(numbers.get(f"{side}_batching_dimensions", ())) for side in ("lhs", "rhs"))
    contracted = tuple(tuple(numbers.get(f"{side}_contracting_dimensions", ())) for side in ("lhs", "rhs"))
    return _contraction(call, (batch[0], batch[1]), (contracted[0], contracted[1]))


def _dot(call: Call) -> Values:
    """Vectors and matrices: the last dimension of the left meets the first of the right."""
    return _contraction(call, ((), ()), ((len(call.shape(0)) - 1,), (0,)))


def _contraction(call: Call, batch: tuple[Shape, Shape], contracted: tuple[Shape, Shape]) -> Values:
    try:
        rule = contraction_rule(call.shape(0), call.shape(1), batch=batch, contracted=contracted)
    except (ValueError, IndexError):
        raise Unsupported from None
    return call.emit(OpKind.CONTRACTION, "einsum", rule, call.id(0), call.id(1))


class _Layout:
    """Where batch and features (inputs and outputs of a kernel) and positions stand, such as `b, 0, 1, f`."""

    def __init__(self, text: str) -> None:
        words = [word.strip() for word in text.split(",")]
        self.batch = words.index("b" if "b" in words else "i")
        self.feature = words.index("f" if "f" in words else "o")
        self.spatial = [words.index(str(n)) for n in range(len(words) - 2)]

    def dims(self, batch: Dim, feature: Dim, spatial: list[Dim]) -> Dims:
        """Dimensions in this order."""
        found: dict[int, Dim] = {self.batch: batch, self.feature: feature}
        found |= dict(zip(self.spatial, spatial, strict=True))
        return tuple(found[index] for index in range(len(found)))


def _convolution(call: Call) -> Values:
    """x, kernel -> y for any order of dimensions.

    A dilated x has zeros between its elements, which are multiplied with nothing: it is the gradient of a convolution
    with strides, and its loop runs over the positions of x.
    """
    text = call.attribute("dimension_numbers")
    match = _LAYOUT.search(text["text"] if isinstance(text, dict) else str(text))
    if not match:
        raise Unsupported
    x, kernel, y = (_Layout(part) for part in match.groups())
    groups, batch_groups = (int(call.attribute(f"{n}_group_count") or 1) for n in ("feature", "batch"))
    shapes = call.shape(0), call.shape(1), call.out_shape()
    dilation = _optional(call, "lhs_dilation", len(x.spatial))
    is_dilated = math.prod(dilation) > 1
    sizes = {
        "b": shapes[0][x.batch] // batch_groups,
        "g": groups,
        "h": batch_groups,
        "i": shapes[1][kernel.batch],
        "o": shapes[1][kernel.feature] // (groups * batch_groups),
    }
    windows, positions, taps = [], [], []
    for n in range(len(x.spatial)):
        small, large = shapes[0][x.spatial[n]], shapes[2][y.spatial[n]]
        sizes |= {f"p{n}": small if is_dilated else large, f"k{n}": shapes[1][kernel.spatial[n]]}
        whole, part = Dim((f"p{n}", f"k{n}"), large if is_dilated else small), Dim((f"p{n}",))
        windows.append(part if is_dilated else whole)
        positions.append(whole if is_dilated else part)
        taps.append(Dim((f"k{n}",)))
    outputs = tuple(n for n in ("g", "h") if sizes[n] > 1)
    operand = x.dims(
        Dim(("h", "b") if batch_groups > 1 else ("b",)), Dim(("g", "i") if groups > 1 else ("i",)), windows
    )
    weight = kernel.dims(Dim(("i",)), Dim((*outputs, "o")), taps)
    result = y.dims(Dim(("b",)), Dim((*outputs, "o")), positions)
    used = {name for dims in (operand, weight, result) for dim in dims for name in dim.factors}
    factors = tuple(Factor(name, size) for name, size in sizes.items() if name in used)
    return call.emit(
        OpKind.CONVOLUTION,
        "convolution_input" if is_dilated else "convolution",
        Rule((operand, weight), (result,), factors),
        call.id(0),
        call.id(1),
    )


def _optional(call: Call, name: str, count: int) -> Shape:
    return call.integers(name) if call.attribute(name) is not None else (1,) * count


PRODUCTS: dict[str, Callable[[Call], Values]] = {
    "dot_general": _dot_general,
    "dot": _dot,
    "convolution": _convolution,
}


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
