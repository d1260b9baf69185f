"""Torch reductions over dimensions, sorting, softmax, norms and losses as ops of the graph.

Reductions: sums and their like, sorting, the k largest, and counting. Norms: softmax, layer, RMS, batch, group and
weight norms, and losses.
"""

from __future__ import annotations

from collections.abc import Sequence

from phaze.frontends.torch.aten.elementwise import elementwise
from phaze.frontends.torch.operator_call import (
    OperatorCall,
    OperatorTable,
    Shape,
    Unsupported,
    Value,
    dims_of,
    factors_of,
)
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.graph_builder import elementwise_rule, reduction_rule

__all__ = ["NORMS_AND_LOSSES", "REDUCTIONS"]

_FUNCTIONS = {"amax": "max", "amin": "min"}


def _reduced_dims(call: OperatorCall, rank: int) -> tuple[int, ...]:
    """The dimensions that a call reduces over; all of them where it names none."""
    named = call["dim"]
    if named is None or (isinstance(named, list | tuple) and not named):
        return tuple(range(rank))
    return tuple(index % rank for index in ((named,) if isinstance(named, int) else named)) if rank else ()


def _reduce(call: OperatorCall) -> Value:
    x = call.tensor("self")
    shape = call.shape(x)
    rule = reduction_rule(shape, _reduced_dims(call, len(shape)), keep=bool(call["keepdim"]))
    outputs = call.nonempty_outputs()
    if len(outputs) > 1:
        rule = Rule(rule.operands, rule.results * len(outputs), rule.factors)
    return call.emit(OpKind.REDUCTION, _FUNCTIONS.get(call.name, call.name), rule, x, outputs=outputs)


def _sort(call: OperatorCall) -> Value:
    """Sorting or the k largest along a dimension, which stays whole."""
    x = call.tensor("self")
    shape, result = call.shape(x), call.out_shape()
    if not shape:
        raise Unsupported
    along = (call["dim"] if isinstance(call["dim"], int) else -1) % len(shape)
    factors = factors_of(shape, (along,))
    operand = sorted_dims = dims_of(shape)
    if result[along] != shape[along]:
        factors += (Factor("k", result[along], FactorKind.WHOLE),)
        sorted_dims = (*operand[:along], Dim(("k",)), *operand[along + 1 :])
    outputs = call.nonempty_outputs()
    rule = Rule((operand,), (sorted_dims,) * len(outputs), factors)
    return call.emit(OpKind.SORT, "top_k" if call.name == "topk" else call.name, rule, x, outputs=outputs)


def _count(call: OperatorCall) -> Value:
    """How often each bin occurs."""
    x = call.tensor("self")
    dims, factors = dims_of(call.shape(x)), factors_of(call.shape(x))
    bins = Factor("v", call.out_shape()[0], FactorKind.LOOKUP)
    return call.emit(OpKind.SCATTER, "count", Rule((dims,), ((Dim(("v",)),),), (*factors, bins)), x)


_REDUCED = "sum mean amax amin max min prod any all argmax argmin logsumexp std var var_mean std_mean norm median"

REDUCTIONS: OperatorTable = {
    **dict.fromkeys((*_REDUCED.split(), "linalg_vector_norm", "count_nonzero"), _reduce),
    **dict.fromkeys(("sort", "topk", "argsort"), _sort),
    **dict.fromkeys(("histc", "bincount"), _count),
}


def _softmax(call: OperatorCall) -> Value:
    x = call.tensor("self")
    function = "log_softmax" if "log" in call.name else "softmax"
    rule = _softmax_rule(call.shape(x), (call.dim(),), 1)
    return call.emit(OpKind.SOFTMAX, function, rule, x)


def _softmax_backward(call: OperatorCall) -> Value:
    inputs = (call.tensor("grad_output"), call.tensor("output"))
    shape = call.shape(inputs[0])
    function = "log_softmax_backward" if "log" in call.name else "softmax_backward"
    rule = _softmax_rule(shape, (call["dim"] % len(shape),), 2)
    return call.emit(OpKind.SOFTMAX, function, rule, *inputs)


def _softmax_rule(shape: Shape, over: Sequence[int], count: int) -> Rule:
    """The rule of a softmax, or with two operands of its backward."""
    dims = dims_of(shape)
    return Rule((dims,) * count, (dims,), factors_of(shape, over, FactorKind.NORMALIZED))


class _Norm:
    """The dimensions of a norm: of the whole input, of a weight, and of statistics in the shape that torch gives."""

    def __init__(self, shape: Shape, over: Sequence[int], affine: Sequence[int]) -> None:
        self.shape = shape
        self.whole: Dims = dims_of(shape)
        self.weight: Dims = tuple(self.whole[index] for index in affine)
        self.kept = [index for index in range(len(shape)) if index not in over]
        self.factors = factors_of(shape, over, FactorKind.NORMALIZED)

    def dims(self, shape: Shape) -> Dims:
        """The dimensions of a tensor of this shape: the input's, the weight's, or statistics with or without ones."""
        kept = tuple(self.whole[index] for index in self.kept)
        padded = tuple(self.whole[index] if index in self.kept else Dim() for index in range(len(self.shape)))
        for dims in (self.whole, self.weight, padded, kept):
            if self._shape(dims) == shape:
                return dims
        raise Unsupported

    def _shape(self, dims: Dims) -> Shape:
        sizes = {factor.name: factor.size for factor in self.factors}
        return tuple(sizes[dim.factors[0]] if dim.factors else 1 for dim in dims)

    def emit(self, call: OperatorCall, function: str, inputs: Sequence[str | None], outputs: Sequence[int]) -> Value:
        """Emit the norm of those inputs that were given; each tensor's dimensions are told by its shape."""
        read = [tensor_id for tensor_id in inputs if tensor_id is not None]
        operands = tuple(self.dims(call.shape(tensor_id)) for tensor_id in read)
        results = tuple(self.dims(call.out_shape(index)) for index in outputs)
        names = {name for dims in (*operands, *results) for dim in dims for name in dim.factors}
        factors = tuple(factor for factor in self.factors if factor.name in names)
        return call.emit(OpKind.NORM, function, Rule(operands, results, factors), *read, outputs=outputs)


def _layer_norm(call: OperatorCall) -> Value:
    x = call.tensor("input")
    shape = call.shape(x)
    last = tuple(range(len(shape) - len(call["normalized_shape"]), len(shape)))
    function = "rms_norm" if "rms" in call.name else "layer_norm"
    inputs = (x, call.optional("weight"), call.optional("bias"))
    return _Norm(shape, last, last).emit(call, function, inputs, call.nonempty_outputs())


def _layer_norm_backward(call: OperatorCall) -> Value:
    gradient, x = call.tensor("grad_out"), call.tensor("input")
    shape = call.shape(x)
    last = tuple(range(len(shape) - len(call["normalized_shape"]), len(shape)))
    function = "rms_norm_backward" if "rms" in call.name else "layer_norm_backward"
    inputs = (gradient, x, call.optional("weight"), call.optional("mean"), call.optional("rstd"))
    return _Norm(shape, last, last).emit(call, function, inputs, call.nonempty_outputs())


def _batch_norm(call: OperatorCall) -> Value:
    """Batch norm in training reads no running statistics, but writes new ones; their size is that of the weight."""
    x = call.tensor("input")
    shape = call.shape(x)
    over = tuple(index for index in range(len(shape)) if index != 1)
    inputs = (x, call.optional("weight"), call.optional("bias"))
    norm = _Norm(shape, over, (1,))
    outputs = tuple(index for index in call.nonempty_outputs() if call.out_shape(index) in (shape, (shape[1],)))
    return norm.emit(call, "batch_norm", inputs, outputs)


def _batch_norm_backward(call: OperatorCall) -> Value:
    gradient, x = call.tensor("grad_out", "grad_output"), call.tensor("input")
    shape = call.shape(x)
    over = tuple(index for index in range(len(shape)) if index != 1)
    inputs = (gradient, x, call.optional("weight"), call.optional("save_mean"), call.optional("save_invstd"))
    return _Norm(shape, over, (1,)).emit(call, "batch_norm_backward", inputs, call.nonempty_outputs())


def _weight_norm(call: OperatorCall) -> Value:
    """A weight as a direction times a length: normed over all dimensions but one."""
    x = call.tensor("v", "saved_v")
    shape = call.shape(x)
    over = tuple(index for index in range(len(shape)) if index != call.dim(rank=len(shape)))
    backward = "_backward" if "backward" in call.name else ""
    return _Norm(shape, over, ()).emit(call, f"weight_norm{backward}", call.tensors(), call.nonempty_outputs())


def _group_norm(call: OperatorCall) -> Value:
    return _grouped(call, "group_norm", (call.tensor("input"), call.optional("weight"), call.optional("bias")))


def _group_norm_backward(call: OperatorCall) -> Value:
    inputs = (call.tensor("grad_out"), call.tensor("input"), call.optional("weight"))
    return _grouped(call, "group_norm_backward", (*inputs, call.optional("mean"), call.optional("rstd")))


def _grouped(call: OperatorCall, function: str, inputs: Sequence[str | None]) -> Value:
    """Channels are (groups, channels of a group); statistics are found over the latter and all positions."""
    shape, groups = call.shape(call.tensor("input")), call["group"]
    spatial = [f"p{index}" for index in range(len(shape) - 2)]
    sizes = {"n": shape[0], "g": groups, "c": shape[1] // groups}
    sizes |= {name: shape[2 + index] for index, name in enumerate(spatial)}
    channels = Dim(("g", "c"))
    whole = (Dim(("n",)), channels, *(Dim((name,)) for name in spatial))
    by_shape: dict[Shape, Dims] = {
        (shape[0], groups): (Dim(("n",)), Dim(("g",))),
        (shape[1],): (channels,),
        shape: whole,
    }
    factors = tuple(
        Factor(name, size, FactorKind.FREE if name in ("n", "g") else FactorKind.NORMALIZED)
        for name, size in sizes.items()
    )
    read = [tensor_id for tensor_id in inputs if tensor_id is not None]
    outputs = call.nonempty_outputs()
    shapes = [call.shape(tensor_id) for tensor_id in read], [call.out_shape(index) for index in outputs]
    if any(shape not in by_shape for side in shapes for shape in side):
        raise Unsupported
    operands, results = (tuple(by_shape[shape] for shape in side) for side in shapes)
    return call.emit(OpKind.NORM, function, Rule(operands, results, factors), *read, outputs=outputs)


_NO_REDUCTION, _MEAN = 0, 1  # torch's own numbers for how a loss is reduced


def _class_dims(shape: Shape) -> tuple[Dims, Dims, tuple[Factor, ...]]:
    """The dimensions of log probabilities ([classes], [rows, classes] or [rows, classes, ...]) and of their targets."""
    classes = 0 if len(shape) == 1 else 1
    dims = dims_of(shape)
    rows = tuple(dim for index, dim in enumerate(dims) if index != classes)
    return dims, rows, factors_of(shape, (classes,), FactorKind.LOOKUP)


def _nll(call: OperatorCall) -> Value:
    """The log probability of each target, summed; the total weight comes with it."""
    x, target = call.tensor("self"), call.tensor("target")
    dims, rows, factors = _class_dims(call.shape(x))
    first = rows if call["reduction"] == _NO_REDUCTION else ()
    rule = Rule((dims, rows), (first, ()), factors)
    return call.emit(OpKind.LOOKUP, "nll_loss", rule, x, target, outputs=(0, 1))


def _nll_backward(call: OperatorCall) -> Value:
    gradient, target = call.tensor("grad_output"), call.tensor("target")
    dims, rows, factors = _class_dims(call.out_shape())
    first = rows if call["reduction"] == _NO_REDUCTION else ()
    return call.emit(OpKind.SCATTER, "nll_loss_backward", Rule((first, rows), (dims,), factors), gradient, target)


def _elementwise_loss(call: OperatorCall) -> Value:
    """A function of prediction and target, then its mean or sum."""
    if call["reduction"] == _NO_REDUCTION:
        return elementwise(call)
    x = call.tensor("self")
    shape = call.shape(x)
    inputs = call.tensors()
    if any(call.shape(tensor_id) != shape for tensor_id in inputs):
        raise Unsupported
    rule = elementwise_rule(shape, *(call.shape(tensor_id) for tensor_id in inputs))
    (each,) = call.add(OpKind.ELEMENTWISE, call.name, rule, *inputs, dtypes=[call.out_dtype()])
    function = "mean" if call["reduction"] == _MEAN else "sum"
    return call.emit(OpKind.REDUCTION, function, reduction_rule(shape, range(len(shape))), each)


_ELEMENTWISE_LOSSES = (
    "mse_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "smooth_l1_loss",
    "huber_loss",
)

NORMS_AND_LOSSES: OperatorTable = {
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _layer_norm_backward),
    **dict.fromkeys(
        (
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional",
            "_native_batch_norm_legit_no_training",
            "_batch_norm_with_update",
            "_batch_norm_with_update_functional",
            "cudnn_batch_norm",
        ),
        _batch_norm,
    ),
    **dict.fromkeys(("native_batch_norm_backward", "batch_norm_backward"), _batch_norm_backward),
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_backward),
    **dict.fromkeys(_ELEMENTWISE_LOSSES, _elementwise_loss),
    **dict.fromkeys((f"{name}_backward" for name in _ELEMENTWISE_LOSSES), elementwise),
}
