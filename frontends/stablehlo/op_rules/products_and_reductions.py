"""Rules of matrix products, convolutions, reductions over dimensions and windows, sorting and top-k."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from phaze.frontends.stablehlo.module import Operation
from phaze.frontends.stablehlo.symbols import Call, Shape, Stack, Tensor, Unsupported, Value, Values, is_constant
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.graph_builder import contraction_rule, elementwise_rule, reduction_rule

__all__ = ["PRODUCTS", "REDUCTIONS", "ragged_product"]

_CONVOLUTION_LAYOUTS = re.compile(r"\[([\w, ?]*)\]x\[([\w, ?]*)\]->\[([\w, ?]*)\]")
"""The layouts of input, kernel and output as MLIR prints them: `[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]`."""


def _dot_general(call: Call) -> Values:
    """A matrix product with any batch dimensions and any contracted dimensions."""
    batch = _dot_dimensions(call, "lhs_batching_dimensions"), _dot_dimensions(call, "rhs_batching_dimensions")
    contracted = (
        _dot_dimensions(call, "lhs_contracting_dimensions"),
        _dot_dimensions(call, "rhs_contracting_dimensions"),
    )
    return _contraction(call, batch, contracted)


def _dot_dimensions(call: Call, name: str) -> Shape:
    """One list of a product's dimension numbers; MLIR does not print the empty ones."""
    numbers = call.attribute("dot_dimension_numbers")
    dims = numbers.get(name) if isinstance(numbers, dict) else None
    return tuple(dim for dim in dims if isinstance(dim, int)) if isinstance(dims, list) else ()


def _dot(call: Call) -> Values:
    """A product of vectors or matrices: the last dimension of the left meets the first of the right."""
    return _contraction(call, ((), ()), ((len(call.shape(0)) - 1,), (0,)))


def _contraction(call: Call, batch: tuple[Shape, Shape], contracted: tuple[Shape, Shape]) -> Values:
    try:
        rule = contraction_rule(call.shape(0), call.shape(1), batch=batch, contracted=contracted)
    except (ValueError, IndexError):
        raise Unsupported from None
    return call.emit(OpKind.CONTRACTION, "einsum", rule, call.id(0), call.id(1))


def ragged_product(call: Call) -> Values:
    """A product of rows with a matrix of their own group, or of all rows with one; the gradient of such matrices.

    Each group is taken to have an equal share of the rows, as experts have. `(g m) k, g k n -> (g m) n` forward,
    `(g m) k, (g m) n -> g k n` for the matrices' gradient; the matrices may be stored transposed.
    """
    left, right, out = call.shape(0), call.shape(1), call.out_shape()
    if len(left) == 2 and len(right) == 2 and len(out) == 2:
        return _contraction(call, ((), ()), ((1,), (0 if left[1] == right[0] and right[1] == out[1] else 1,)))
    if len(left) == 2 and len(right) == 3 and len(out) == 2:
        rows, groups = left[0], right[0]
        matrix = "k n" if right[1:] == (left[1], out[1]) else "n k"
        text, sizes = f"(g m) k, g {matrix} -> (g m) n", {"k": left[1], "n": out[1]}
    elif len(left) == 2 and len(right) == 2 and len(out) == 3:
        rows, groups = left[0], out[0]
        text, sizes = "(g m) k, (g m) n -> g k n", {"k": left[1], "n": right[1]}
    else:
        raise Unsupported
    if not groups or rows % groups:
        raise Unsupported
    rule = Rule.of(text, sizes | {"g": groups, "m": rows // groups})
    return call.emit(OpKind.CONTRACTION, "einsum", rule, call.id(0), call.id(1), outputs=(0,))


class _Layout:
    """Which dimensions are batch, feature and positions (of a kernel: inputs, outputs, taps), as in `b, 0, 1, f`."""

    def __init__(self, text: str) -> None:
        words = [word.strip() for word in text.split(",")]
        self.batch = words.index("b" if "b" in words else "i")
        self.feature = words.index("f" if "f" in words else "o")
        self.spatial = [words.index(str(n)) for n in range(len(words) - 2)]

    def dims(self, batch: Dim, feature: Dim, spatial: list[Dim]) -> Dims:
        """These dimensions in the order of the layout."""
        by_index: dict[int, Dim] = {self.batch: batch, self.feature: feature}
        by_index |= dict(zip(self.spatial, spatial, strict=True))
        return tuple(by_index[index] for index in range(len(by_index)))


def _convolution(call: Call) -> Values:
    """A convolution of x with a kernel, for any order of dimensions.

    A dilated x has zeros between its elements, which need not be multiplied: this is the gradient of a convolution
    with strides, and its loop runs over the positions of x instead of those of the result. Compilers for TPUs write a
    batch dimension of a product as a window of n elements on n elements with zeros between them, with strides of n - 1.
    """
    given = call.attribute("dimension_numbers")
    match = _CONVOLUTION_LAYOUTS.search(str(given["text"] if isinstance(given, dict) else given))
    if not match:
        raise Unsupported
    x, kernel, y = (_Layout(part) for part in match.groups())
    groups, batch_groups = _group_count(call, "feature_group_count"), _group_count(call, "batch_group_count")
    shapes = call.shape(0), call.shape(1), call.out_shape()
    dilations = _integers_or_ones(call, "lhs_dilation", len(x.spatial))
    strides = _integers_or_ones(call, "window_strides", len(x.spatial))
    sizes = {
        "b": shapes[0][x.batch] // batch_groups,
        "g": groups,
        "h": batch_groups,
        "i": shapes[1][kernel.batch],
        "o": shapes[1][kernel.feature] // (groups * batch_groups),
    }
    windows: list[Dim] = []
    positions: list[Dim] = []
    taps: list[Dim] = []
    for n in range(len(x.spatial)):
        small, large, size = shapes[0][x.spatial[n]], shapes[2][y.spatial[n]], shapes[1][kernel.spatial[n]]
        part = Dim((f"p{n}",))
        if small == large == size == dilations[n] == strides[n] + 1:  # a batch dimension, as TPUs write it
            sizes[f"p{n}"] = size
            for side in (windows, positions, taps):
                side.append(part)
            continue
        is_dilated = dilations[n] > 1
        sizes |= {f"p{n}": small if is_dilated else large, f"k{n}": size}
        whole = Dim((f"p{n}", f"k{n}"), large if is_dilated else small)
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
        "convolution_input" if max(dilations, default=1) > 1 else "convolution",
        Rule((operand, weight), (result,), factors),
        call.id(0),
        call.id(1),
    )


def _group_count(call: Call, name: str) -> int:
    count = call.attribute(name) or 1
    if not isinstance(count, int):
        raise Unsupported
    return count


def _integers_or_ones(call: Call, name: str, count: int) -> Shape:
    given = call.attribute(name)
    splat = given.get("splat") if isinstance(given, dict) else 1 if given is None else None
    return (splat,) * count if isinstance(splat, int) else call.integers(name)


PRODUCTS: dict[str, Callable[[Call], Values]] = {
    "ragged_dot": ragged_product,
    "dot_general": _dot_general,
    "dot": _dot,
    "convolution": _convolution,
}


_FUNCTION_BY_BODY = {"add": "sum", "maximum": "max", "minimum": "min", "multiply": "prod", "and": "all", "or": "any"}


def _body(operation: Operation) -> str:
    """What a reduction does with two elements, by the first operation in it; `compare` where it picks by comparing."""
    names = [op.short_name for op in operation.regions[0].operations] if operation.regions else []
    return "compare" if "compare" in names else names[0] if names else ""


def _reduce(call: Call) -> Values:
    """A reduction of one tensor. Two results, the element and its index, are an argmax."""
    reduced = call.integers("dimensions")
    count = len(call.operation.types)
    data = [index for index in range(count) if not is_constant(call.values[index])]
    if len(data) != 1:
        raise Unsupported
    value = call.values[data[0]]
    if all(value.shape[dim] == 1 for dim in reduced) and count == 1:
        return (call.recorder.reshape(value, call.out_shape(), call.scope, "reduce"),)
    body = _body(call.operation)
    if isinstance(value, Stack) and count == 1 and body in _FUNCTION_BY_BODY:
        return (_reduced_by_slots(call, value, reduced, body),)
    rule = reduction_rule(value.shape, reduced)
    function = "argmax" if count > 1 else _FUNCTION_BY_BODY.get(body, "reduce")
    rule = Rule(rule.operands, rule.results * count, rule.factors)
    return call.emit(OpKind.REDUCTION, function, rule, call.id(data[0]))


def _reduced_by_slots(call: Call, stack: Stack, reduced: Sequence[int], body: str) -> Value:
    """The reduction of a stack: of each slot, and of what these give where the stack's own dimension is reduced."""
    inner = tuple(dim - (dim > stack.dim) for dim in reduced if dim != stack.dim)
    recorder, scope, function = call.recorder, call.scope, _FUNCTION_BY_BODY[body]
    rule = reduction_rule(stack.slot_shape, inner)
    dtype = call.out_dtype()
    slots: list[Value] = []
    for slot in stack.slots:
        source = recorder.id(slot, scope)
        result = (
            recorder.emit(OpKind.REDUCTION, function, rule, (source,), (dtype,), scope, "reduce")[0]
            if inner
            else source
        )
        slots.append(Tensor(result, rule.shape(rule.results[0]), dtype))
    if stack.dim not in reduced:
        dim = stack.dim - sum(other < stack.dim for other in reduced)
        return Stack(tuple(slots), call.out_shape(), dtype, stack.loop, dim)
    total = recorder.id(slots[0], scope)
    pair = elementwise_rule(call.out_shape(), call.out_shape(), call.out_shape())
    for slot in slots[1:]:
        inputs = (total, recorder.id(slot, scope))
        (total,) = recorder.emit(OpKind.ELEMENTWISE, body, pair, inputs, (dtype,), scope, "reduce")
    return Tensor(total, call.out_shape(), dtype)


def _window_dims(x: Shape, result: Shape, window: Shape) -> tuple[Dims, Dims, tuple[Factor, ...]]:
    """The dimensions of x and of the positions of its windows, with their factors.

    A dimension with a window of size 1 is the same on both sides.
    """
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
    """Pooling, or a running sum, which is a window as long as its dimension."""
    if len(call.operation.types) != 1:
        raise Unsupported
    shape, out_shape = call.shape(0), call.out_shape()
    window = _integers_or_ones(call, "window_dimensions", len(shape))
    body = _body(call.operation)
    if math.prod(window) == max(shape, default=1) and shape == out_shape:  # every element waits for those before it
        running = window.index(max(window))
        dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
        factors = tuple(
            Factor(f"d{i}", n, FactorKind.WHOLE if i == running else FactorKind.FREE) for i, n in enumerate(shape)
        )
        return call.emit(OpKind.ELEMENTWISE, f"cumulative_{body}", Rule((dims,), (dims,), factors), call.id(0))
    operand, positions, factors = _window_dims(shape, out_shape, window)
    function = {"maximum": "max_pool", "add": "sum_pool"}.get(body, f"{body}_pool")
    if shape == out_shape and all(size == 1 for size in window):
        return call.emit(OpKind.COPY, "contiguous", elementwise_rule(out_shape, shape), call.id(0))
    return call.emit(OpKind.REDUCTION, function, Rule((operand,), (positions,), factors), call.id(0))


def _select_and_scatter(call: Call) -> Values:
    """The gradient of max pooling: that of a position goes to where the largest element of its window was."""
    shape, positions_shape = call.shape(0), call.shape(1)
    window = _integers_or_ones(call, "window_dimensions", len(shape))
    operand, positions, factors = _window_dims(shape, positions_shape, window)
    rule = Rule((operand, positions), (operand,), factors)
    return call.emit(OpKind.COPY, "max_pool_backward", rule, call.id(0), call.id(1))


def _sort(call: Call) -> Values:
    """One or more tensors sorted together along a dimension, which is needed whole."""
    along = call.attribute("dimension")
    shape = call.shape(0)
    if not isinstance(along, int) or not shape:
        raise Unsupported
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    sorted_dim = along % len(shape)
    factors = tuple(
        Factor(f"d{i}", size, FactorKind.WHOLE if i == sorted_dim else FactorKind.FREE) for i, size in enumerate(shape)
    )
    inputs = [call.id(index) for index in range(len(call.values)) if not is_constant(call.values[index])]
    rule = Rule((dims,) * len(inputs), (dims,) * len(call.operation.types), factors)
    return call.emit(OpKind.SORT, "sort", rule, *inputs)


def _top_k(call: Call) -> Values:
    """The k largest along the last dimension, and where they stood."""
    shape, out_shape = call.shape(0), call.out_shape()
    if not shape or len(shape) != len(out_shape):
        raise Unsupported
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    last = len(shape) - 1
    factors = [
        Factor(f"d{i}", size, FactorKind.WHOLE if i == last else FactorKind.FREE) for i, size in enumerate(shape)
    ]
    factors.append(Factor("k", out_shape[last], FactorKind.WHOLE))
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
