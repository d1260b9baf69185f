"""Torch convolutions, pooling and resizing: operators whose results look at windows of their input."""

from __future__ import annotations

from phaze.frontends.torch.operator_call import (
    OperatorCall,
    OperatorTable,
    Shape,
    Unsupported,
    Value,
    dims_of,
    factors_of,
)
from phaze.ir import Dim, Dims, Factor, OpKind, Rule
from phaze.ir.shape_rules import convolution_rule, elementwise_rule, reduction_rule

__all__ = ["CONVOLUTIONS"]


def _convolution_rule(x: Shape, weight: Shape, result: Shape, call: OperatorCall) -> Rule:
    """The rule of (x, weight) -> result; a transposed one is that of its gradient, with x and result exchanged."""
    if not call["transposed"]:
        return convolution_rule(x, weight, result, call["groups"])
    rule = convolution_rule(result, weight, x, call["groups"])
    return Rule((rule.results[0], rule.operands[1]), (rule.operands[0],), rule.factors)


def _convolution(call: OperatorCall) -> Value:
    x, weight, bias = call.tensor("input"), call.tensor("weight"), call.optional("bias")
    rule = _convolution_rule(call.shape(x), call.shape(weight), call.out_shape(), call)
    function = "convolution_input" if call["transposed"] else "convolution"
    if bias is None:
        return call.emit(OpKind.CONVOLUTION, function, rule, x, weight)
    (y,) = call.add(OpKind.CONVOLUTION, function, rule, x, weight, dtypes=[call.out_dtype()])
    shape = call.out_shape()
    dims = dims_of(shape)
    return call.emit(OpKind.ELEMENTWISE, "add", Rule((dims, (dims[1],)), (dims,), factors_of(shape)), y, bias)


def _convolution_backward(call: OperatorCall) -> Value:
    gradient, x, weight = call.tensor("grad_output"), call.tensor("input"), call.tensor("weight")
    rule = _convolution_rule(call.shape(x), call.shape(weight), call.shape(gradient), call)
    gradients: list[str | None] = [None, None, None]
    to_x, to_weight, to_bias = call["output_mask"]
    if to_x:
        back = Rule((rule.results[0], rule.operands[1]), (rule.operands[0],), rule.factors)
        function = "convolution" if call["transposed"] else "convolution_input"
        (gradients[0],) = call.add(OpKind.CONVOLUTION, function, back, gradient, weight, dtypes=[call.dtype(x)])
    if to_weight:
        back = Rule((rule.results[0], rule.operands[0]), (rule.operands[1],), rule.factors)
        dtypes = [call.dtype(weight)]
        (gradients[1],) = call.add(OpKind.CONVOLUTION, "convolution_weight", back, gradient, x, dtypes=dtypes)
    if to_bias:
        shape = call.shape(gradient)
        over = [index for index in range(len(shape)) if index != 1]
        (gradients[2],) = call.add(
            OpKind.REDUCTION, "sum", reduction_rule(shape, over), gradient, dtypes=[call.dtype(gradient)]
        )
    return tuple(gradients)


def _window_dims(x: Shape, result: Shape, kernel: Shape) -> tuple[Dims, Dims, tuple[Factor, ...]]:
    """Leading dimensions as they are; each of the last ones is a window of `kernel` for every position."""
    spatial, leading = len(kernel), len(x) - len(kernel)
    lead = dims_of(x[:leading])
    windows = tuple(Dim((f"p{index}", f"k{index}"), x[leading + index]) for index in range(spatial))
    positions = tuple(Dim((f"p{index}",)) for index in range(spatial))
    factors = factors_of(x[:leading])
    factors += tuple(Factor(f"p{index}", result[leading + index]) for index in range(spatial))
    factors += tuple(Factor(f"k{index}", kernel[index]) for index in range(spatial))
    return (*lead, *windows), (*lead, *positions), factors


def _kernel(call: OperatorCall, x: Shape, result: Shape) -> Shape:
    """The size of a pooling window; where it adapts to the result, the input over the result, rounded up."""
    kernel_size = call["kernel_size"]
    if kernel_size is None:
        spatial = 3 if "3d" in call.name else 2 if "2d" in call.name else 1
        pairs = zip(x[-spatial:], result[-spatial:], strict=True)
        return tuple(max(1, -(-size // max(1, position))) for size, position in pairs)
    return tuple(kernel_size)


def _pool(call: OperatorCall) -> Value:
    x = call.tensor("self")
    shape, result = call.shape(x), call.out_shape()
    kernel = _kernel(call, shape, result)
    operand, positions, factors = _window_dims(shape, result, kernel)
    outputs = call.nonempty_outputs()
    rule = Rule((operand,), (positions,) * len(outputs), factors)
    return call.emit(OpKind.REDUCTION, "max_pool" if "max" in call.name else "average_pool", rule, x, outputs=outputs)


def _pool_backward(call: OperatorCall) -> Value:
    gradient = call.tensor("grad_output")
    shape, result = call.out_shape(), call.shape(gradient)
    operand, positions, factors = _window_dims(shape, result, _kernel(call, shape, result))
    indices = call.optional("indices")
    inputs = (gradient,) if indices is None else (gradient, indices)
    rule = Rule((positions,) * len(inputs), (operand,), factors)
    function = "max_pool_backward" if "max" in call.name else "average_pool_backward"
    return call.emit(OpKind.COPY, function, rule, *inputs)


def _resize(call: OperatorCall) -> Value:
    """Each position of the larger side reads or adds to a few of the smaller: the resized dimensions stay whole."""
    x = call.tensor("self", "grad_output", "input")
    shape, result = call.shape(x), call.out_shape()
    if len(shape) != len(result):
        raise Unsupported
    if shape == result:
        return call.emit(OpKind.COPY, "resize", elementwise_rule(result, shape), x)
    larger = tuple(map(max, shape, result))
    dims = dims_of(larger)

    def covering(side: Shape) -> Dims:
        return tuple(
            dim if size == full else Dim(dim.factors, size) for dim, size, full in zip(dims, side, larger, strict=True)
        )

    resized = [index for index in range(len(shape)) if shape[index] != result[index]]
    rule = Rule((covering(shape),), (covering(result),), factors_of(larger, resized))
    return call.emit(OpKind.COPY, "resize", rule, x)


_RESIZING = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)


def _in_each_rank(template: str) -> tuple[str, ...]:
    """The names of an operator that torch has for one, two and three spatial dimensions."""
    return tuple(template.format(n=rank) for rank in (1, 2, 3))


CONVOLUTIONS: OperatorTable = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        (
            *_in_each_rank("max_pool{n}d_with_indices"),
            *_in_each_rank("avg_pool{n}d"),
            *_in_each_rank("_adaptive_avg_pool{n}d"),
            *_in_each_rank("adaptive_max_pool{n}d"),
        ),
        _pool,
    ),
    **dict.fromkeys(
        (
            *_in_each_rank("max_pool{n}d_with_indices_backward"),
            *_in_each_rank("avg_pool{n}d_backward"),
            *_in_each_rank("_adaptive_avg_pool{n}d_backward"),
            *_in_each_rank("adaptive_max_pool{n}d_backward"),
        ),
        _pool_backward,
    ),
    **dict.fromkeys((f"{name}{suffix}" for name in _RESIZING.split() for suffix in ("", "_backward")), _resize),
}
