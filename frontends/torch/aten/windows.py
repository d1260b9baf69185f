"""Convolutions, pooling and resizing: results that look at windows of their input."""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.torch.call import Call, Shape, Unsupported, Value
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import convolution_rule, elementwise_rule, reduction_rule

__all__ = ["WINDOWS"]


def _rule(x: Shape, weight: Shape, result: Shape, call: Call) -> Rule:
    """The rule of (x, weight) -> result; a transposed one is that of its gradient, with x and result exchanged."""
    if not call["transposed"]:
        return convolution_rule(x, weight, result, call["groups"])
    rule = convolution_rule(result, weight, x, call["groups"])
    return Rule((rule.results[0], rule.operands[1]), (rule.operands[0],), rule.factors)


def _convolution(call: Call) -> Value:
    x, weight, bias = call.tensor("input"), call.tensor("weight"), call.optional("bias")
    rule = _rule(call.shape(x), call.shape(weight), call.out_shape(), call)
    function = "convolution_input" if call["transposed"] else "convolution"
    if bias is None:
        return call.emit(OpKind.CONVOLUTION, function, rule, x, weight)
    (y,) = call.add(OpKind.CONVOLUTION, function, rule, x, weight, dtypes=[call.out_dtype()])
    shape = call.out_shape()
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    factors = tuple(Factor(f"d{index}", size) for index, size in enumerate(shape))
    return call.emit(OpKind.ELEMENTWISE, "add", Rule((dims, (dims[1],)), (dims,), factors), y, bias)


def _convolution_backward(call: Call) -> Value:
    gradient, x, weight = call.tensor("grad_output"), call.tensor("input"), call.tensor("weight")
    rule = _rule(call.shape(x), call.shape(weight), call.shape(gradient), call)
    made: list[str | None] = [None, None, None]
    to_x, to_weight, to_bias = call["output_mask"]
    if to_x:
        back = Rule((rule.results[0], rule.operands[1]), (rule.operands[0],), rule.factors)
        function = "convolution" if call["transposed"] else "convolution_input"
        (made[0],) = call.add(OpKind.CONVOLUTION, function, back, gradient, weight, dtypes=[call.dtype(x)])
    if to_weight:
        back = Rule((rule.results[0], rule.operands[0]), (rule.operands[1],), rule.factors)
        dtypes = [call.dtype(weight)]
        (made[1],) = call.add(OpKind.CONVOLUTION, "convolution_weight", back, gradient, x, dtypes=dtypes)
    if to_bias:
        shape = call.shape(gradient)
        over = [index for index in range(len(shape)) if index != 1]
        (made[2],) = call.add(
            OpKind.REDUCTION, "sum", reduction_rule(shape, over), gradient, dtypes=[call.dtype(gradient)]
        )
    return tuple(made)


def _window_dims(x: Shape, result: Shape, kernel: Shape) -> tuple[Dims, Dims, tuple[Factor, ...]]:
    """Leading dimensions as they are; each of the last ones is a window of `kernel` for every position."""
    spatial, leading = len(kernel), len(x) - len(kernel)
    lead = tuple(Dim((f"d{index}",)) for index in range(leading))
    windows = tuple(Dim((f"p{n}", f"k{n}"), x[leading + n]) for n in range(spatial))
    positions = tuple(Dim((f"p{n}",)) for n in range(spatial))
    factors = tuple(Factor(f"d{index}", x[index]) for index in range(leading))
    factors += tuple(Factor(f"p{n}", result[leading + n]) for n in range(spatial))
    factors += tuple(Factor(f"k{n}", kernel[n]) for n in range(spatial))
    return (*lead, *windows), (*lead, *positions), factors


def _kernel(call: Call, x: Shape, result: Shape) -> Shape:
    given = call["kernel_size"]
    if given is None:
        spatial = 3 if "3d" in call.name else 2 if "2d" in call.name else 1
        pairs = zip(x[-spatial:], result[-spatial:], strict=True)
        return tuple(max(1, -(-size // max(1, position))) for size, position in pairs)
    return tuple(given)


def _pool(call: Call) -> Value:
    x = call.tensor("self")
    shape, result = call.shape(x), call.out_shape()
    kernel = _kernel(call, shape, result)
    operand, positions, factors = _window_dims(shape, result, kernel)
    outputs = call.made()
    rule = Rule((operand,), (positions,) * len(outputs), factors)
    return call.emit(OpKind.REDUCTION, "max_pool" if "max" in call.name else "average_pool", rule, x, outputs=outputs)


def _pool_backward(call: Call) -> Value:
    gradient = call.tensor("grad_output")
    shape, result = call.out_shape(), call.shape(gradient)
    operand, positions, factors = _window_dims(shape, result, _kernel(call, shape, result))
    indices = call.optional("indices")
    inputs = (gradient,) if indices is None else (gradient, indices)
    rule = Rule((positions,) * len(inputs), (operand,), factors)
    function = "max_pool_backward" if "max" in call.name else "average_pool_backward"
    return call.emit(OpKind.COPY, function, rule, *inputs)


def _resize(call: Call) -> Value:
    """Each position of the larger side reads or adds to a few of the smaller: the resized dimensions stay whole."""
    x = call.tensor("self", "grad_output", "input")
    shape, result = call.shape(x), call.out_shape()
    if len(shape) != len(result):
        raise Unsupported
    if shape == result:
        return call.emit(OpKind.COPY, "resize", elementwise_rule(result, shape), x)
    larger = tuple(map(max, shape, result))
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))

    def covering(side: Shape) -> Dims:
        return tuple(
            dim if size == full else Dim(dim.factors, size) for dim, size, full in zip(dims, side, larger, strict=True)
        )

    factors = tuple(
        Factor(f"d{i}", size, FactorKind.FREE if shape[i] == result[i] else FactorKind.WHOLE)
        for i, size in enumerate(larger)
    )
    return call.emit(OpKind.COPY, "resize", Rule((covering(shape),), (covering(result),), factors), x)


_RESIZING = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.format(n=n) for n in (1, 2, 3))


WINDOWS: dict[str, Callable[[Call], Value]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        (
            *_names("max_pool{n}d_with_indices"),
            *_names("avg_pool{n}d"),
            *_names("_adaptive_avg_pool{n}d"),
            *_names("adaptive_max_pool{n}d"),
        ),
        _pool,
    ),
    **dict.fromkeys(
        (
            *_names("max_pool{n}d_with_indices_backward"),
            *_names("avg_pool{n}d_backward"),
            *_names("_adaptive_avg_pool{n}d_backward"),
            *_names("adaptive_max_pool{n}d_backward"),
        ),
        _pool_backward,
    ),
    **dict.fromkeys((f"{name}{suffix}" for name in _RESIZING.split() for suffix in ("", "_backward")), _resize),
}
