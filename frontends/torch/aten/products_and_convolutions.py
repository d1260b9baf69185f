"""Torch matrix products, fused attention kernels, convolutions, pooling and resizing as ops of the graph.

Products: linear, bmm, those of experts, and attention. Convolutions, pooling and resizing: operators whose results look
at windows of their input.
"""

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
from phaze.ir import Attribute, Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.graph_builder import contraction_rule, convolution_rule, elementwise_rule, reduction_rule

__all__ = ["CONVOLUTIONS", "PRODUCTS"]


def _matrix_rule(left: tuple[int, ...], right: tuple[int, ...]) -> Rule:
    """Products of the last two dimensions, or of a vector, for every element of equal leading ones."""
    leading = tuple(range(len(left) - 2)) if len(left) == len(right) else ()
    contracted = ((len(left) - 1,), (max(0, len(right) - 2),))
    return contraction_rule(left, right, batch=(leading, leading), contracted=contracted)


def _product(call: OperatorCall, left: str, right: str) -> Value:
    rule = _matrix_rule(call.shape(left), call.shape(right))
    return call.emit(OpKind.CONTRACTION, "einsum", rule, left, right)


def _mm(call: OperatorCall) -> Value:
    return _product(call, call.tensor("self"), call.tensor("mat2", "vec", "tensor", "other"))


def _addmm(call: OperatorCall) -> Value:
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


def _linear(call: OperatorCall) -> Value:
    x, weight, bias = call.tensor("input"), call.tensor("weight"), call.optional("bias")
    left, right = call.shape(x), call.shape(weight)
    rule = contraction_rule(left, right, contracted=((len(left) - 1,), (1,)))
    if bias is None:
        return call.emit(OpKind.CONTRACTION, "einsum", rule, x, weight)
    (product,) = call.add(OpKind.CONTRACTION, "einsum", rule, x, weight, dtypes=[call.out_dtype()])
    added = elementwise_rule(call.out_shape(), call.out_shape(), call.shape(bias))
    return call.emit(OpKind.ELEMENTWISE, "add", added, product, bias)


def _grouped_product(call: OperatorCall) -> Value:
    """Rows that are grouped by the expert which takes them, as many for each: the rows are (e c).

    Where the experts do not divide the rows, the expert of a row is looked up instead. The weight's gradient has the
    rows on the contracted side of both operands.
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


class _AttentionDims:
    """The dimensions of query[b, h, s, d], key[b, g, t, d] and value[b, g, t, e].

    h is g, or (g r) where r query heads share a key.
    """

    def __init__(self, query: Shape, key: Shape, value: Shape) -> None:
        if len(query) != 4 or len(key) != 4 or query[1] % key[1]:
            raise Unsupported
        self.sizes = {"b": query[0], "g": key[1], "r": query[1] // key[1], "s": query[2], "d": query[3]}
        self.sizes |= {"t": key[2], "e": value[3]}
        heads = Dim(("g", "r")) if self.sizes["r"] > 1 else Dim(("g",))
        b, g = Dim(("b",)), Dim(("g",))
        self.query: Dims = (b, heads, Dim(("s",)), Dim(("d",)))
        self.key: Dims = (b, g, Dim(("t",)), Dim(("d",)))
        self.value: Dims = (b, g, Dim(("t",)), Dim(("e",)))
        self.context: Dims = (b, heads, Dim(("s",)), Dim(("e",)))
        self.statistics: Dims = (b, heads, Dim(("s",)))

    def mask(self, shape: Shape) -> Dims:
        """A mask broadcast over the scores."""
        scores = (self.query[0], self.query[1], self.query[2], self.key[2])
        aligned = scores[len(scores) - len(shape) :]
        return tuple(dim if size != 1 else Dim() for size, dim in zip(shape, aligned, strict=True))

    def rule(self, operands: tuple[Dims, ...], results: tuple[Dims, ...]) -> Rule:
        """A rule of these dimensions; the softmax runs over the keys."""
        names = {name for dims in (*operands, *results) for dim in dims for name in dim.factors}
        factors = tuple(
            Factor(name, size, FactorKind.NORMALIZED if name == "t" else FactorKind.FREE)
            for name, size in self.sizes.items()
            if name in names
        )
        return Rule(operands, results, factors)


def _attention_dims(call: OperatorCall) -> tuple[_AttentionDims, tuple[str, ...]]:
    """The dimensions of a call, and the ids of its query, key and value."""
    inputs = (call.tensor("query"), call.tensor("key"), call.tensor("value"))
    return _AttentionDims(*(call.shape(tensor_id) for tensor_id in inputs)), inputs


def _attention(call: OperatorCall) -> Value:
    dims, inputs = _attention_dims(call)
    operands: tuple[Dims, ...] = (dims.query, dims.key, dims.value)
    mask = call.optional("attn_mask") or call.optional("attn_bias")
    if mask is not None and mask not in call.constants:  # kernels apply a mask known beforehand without reading it
        inputs += (mask,)
        operands += (dims.mask(call.shape(mask)),)
    sizes = dims.sizes
    heads = sizes["g"] * sizes["r"]
    has_statistics = len(call.outputs) > 1 and call.out_shape(1) == (sizes["b"], heads, sizes["s"])
    results = (dims.context, dims.statistics) if has_statistics else (dims.context,)
    rule, attributes = dims.rule(operands, results), _attention_attributes(call, sizes["d"])
    return call.emit(OpKind.ATTENTION, "attention", rule, *inputs, outputs=range(len(results)), attributes=attributes)


def _attention_attributes(call: OperatorCall, width: int) -> dict[str, Attribute]:
    """Scale, causal mask and dropout of a call; the mask's attribute names the factor of query positions."""
    scale = call["scale"]
    attributes: dict[str, Attribute] = {"scale": width**-0.5 if scale is None else float(scale)}
    if call["is_causal"]:
        attributes["causal"] = "s"
    if call["dropout_p"]:
        attributes["probability"] = float(call["dropout_p"])
    return attributes


def _attention_backward(call: OperatorCall) -> Value:
    dims, inputs = _attention_dims(call)
    reads: tuple[str, ...] = (*inputs, call.tensor("out"), call.tensor("grad_out", "grad_out_"))
    operands: tuple[Dims, ...] = (dims.query, dims.key, dims.value, dims.context, dims.context)
    statistics = call.optional("logsumexp")
    if statistics is not None and len(call.shape(statistics)) == 3:
        reads, operands = (*reads, statistics), (*operands, dims.statistics)
    results = (dims.query, dims.key, dims.value)
    return call.emit(OpKind.ATTENTION, "attention_backward", dims.rule(operands, results), *reads, outputs=(0, 1, 2))


_ATTENTION_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)

PRODUCTS: OperatorTable = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), _mm),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _addmm),
    "linear": _linear,
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped_product),
    **dict.fromkeys(("scaled_dot_product_attention", *_ATTENTION_KERNELS), _attention),
    **{f"{name}_backward": _attention_backward for name in _ATTENTION_KERNELS},
}


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
