"""Softmax and the norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phaze.frontends.torch.call import Call, Shape, Unsupported, Value
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule

__all__ = ["NORMALIZING"]


def _softmax(call: Call) -> Value:
    x = call.tensor("self")
    function = "log_softmax" if "log" in call.name else "softmax"
    rule = _normalized(call.shape(x), (call.dim(),), 1)
    return call.emit(OpKind.SOFTMAX, function, rule, x)


def _softmax_backward(call: Call) -> Value:
    inputs = (call.tensor("grad_output"), call.tensor("output"))
    shape = call.shape(inputs[0])
    function = "log_softmax_backward" if "log" in call.name else "softmax_backward"
    rule = _normalized(shape, (call["dim"] % len(shape),), 2)
    return call.emit(OpKind.SOFTMAX, function, rule, *inputs)


def _normalized(shape: Shape, over: Sequence[int], count: int) -> Rule:
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    return Rule((dims,) * count, (dims,), _factors(shape, over))


def _factors(shape: Shape, over: Sequence[int]) -> tuple[Factor, ...]:
    kinds = [FactorKind.NORMALIZED if index in over else FactorKind.FREE for index in range(len(shape))]
    return tuple(Factor(f"d{index}", size, kinds[index]) for index, size in enumerate(shape))


class _Norm:
    """The dimensions of a norm: of the whole input, of a weight, and of statistics in the shape that torch gives."""

    def __init__(self, shape: Shape, over: Sequence[int], affine: Sequence[int]) -> None:
        self.shape = shape
        self.whole: Dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
        self.weight: Dims = tuple(self.whole[index] for index in affine)
        self.kept = [index for index in range(len(shape)) if index not in over]
        self.factors = _factors(shape, over)

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

    def emit(self, call: Call, function: str, inputs: Sequence[str | None], outputs: Sequence[int]) -> Value:
        read = [tensor_id for tensor_id in inputs if tensor_id is not None]
        operands = tuple(self.dims(call.shape(tensor_id)) for tensor_id in read)
        results = tuple(self.dims(call.out_shape(index)) for index in outputs)
        names = {name for dims in (*operands, *results) for dim in dims for name in dim.factors}
        factors = tuple(factor for factor in self.factors if factor.name in names)
        return call.emit(OpKind.NORM, function, Rule(operands, results, factors), *read, outputs=outputs)


def _layer(call: Call) -> Value:
    x = call.tensor("input")
    shape = call.shape(x)
    last = tuple(range(len(shape) - len(call["normalized_shape"]), len(shape)))
    function = "rms_norm" if "rms" in call.name else "layer_norm"
    inputs = (x, call.optional("weight"), call.optional("bias"))
    return _Norm(shape, last, last).emit(call, function, inputs, call.made())


def _layer_backward(call: Call) -> Value:
    gradient, x = call.tensor("grad_out"), call.tensor("input")
    shape = call.shape(x)
    last = tuple(range(len(shape) - len(call["normalized_shape"]), len(shape)))
    function = "rms_norm_backward" if "rms" in call.name else "layer_norm_backward"
    inputs = (gradient, x, call.optional("weight"), call.optional("mean"), call.optional("rstd"))
    return _Norm(shape, last, last).emit(call, function, inputs, call.made())


def _batch(call: Call) -> Value:
    """Batch norm in training reads no running statistics, but writes new ones; their size is that of the weight."""
    x = call.tensor("input")
    shape = call.shape(x)
    over = tuple(index for index in range(len(shape)) if index != 1)
    inputs = (x, call.optional("weight"), call.optional("bias"))
    norm = _Norm(shape, over, (1,))
    outputs = tuple(index for index in call.made() if call.out_shape(index) in (shape, (shape[1],)))
    return norm.emit(call, "batch_norm", inputs, outputs)


def _batch_backward(call: Call) -> Value:
    gradient, x = call.tensor("grad_out", "grad_output"), call.tensor("input")
    shape = call.shape(x)
    over = tuple(index for index in range(len(shape)) if index != 1)
    inputs = (gradient, x, call.optional("weight"), call.optional("save_mean"), call.optional("save_invstd"))
    return _Norm(shape, over, (1,)).emit(call, "batch_norm_backward", inputs, call.made())


def _weight(call: Call) -> Value:
    """A weight as a direction times a length: normed over all dimensions but one."""
    x = call.tensor("v", "saved_v")
    shape = call.shape(x)
    over = tuple(index for index in range(len(shape)) if index != call.dim(rank=len(shape)))
    backward = "_backward" if "backward" in call.name else ""
    return _Norm(shape, over, ()).emit(call, f"weight_norm{backward}", call.tensors(), call.made())


def _group(call: Call) -> Value:
    return _grouped(call, "group_norm", (call.tensor("input"), call.optional("weight"), call.optional("bias")))


def _group_backward(call: Call) -> Value:
    inputs = (call.tensor("grad_out"), call.tensor("input"), call.optional("weight"))
    return _grouped(call, "group_norm_backward", (*inputs, call.optional("mean"), call.optional("rstd")))


def _grouped(call: Call, function: str, inputs: Sequence[str | None]) -> Value:
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
    free = ("n", "g")
    factors = tuple(Factor(n, s, FactorKind.FREE if n in free else FactorKind.NORMALIZED) for n, s in sizes.items())
    read = [tensor_id for tensor_id in inputs if tensor_id is not None]
    outputs = call.made()
    shapes = [call.shape(tensor_id) for tensor_id in read], [call.out_shape(index) for index in outputs]
    if any(known not in by_shape for side in shapes for known in side):
        raise Unsupported
    operands, results = (tuple(by_shape[known] for known in side) for side in shapes)
    return call.emit(OpKind.NORM, function, Rule(operands, results, factors), *read, outputs=outputs)


NORMALIZING: dict[str, Callable[[Call], Value]] = {
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _layer_backward),
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
        _batch,
    ),
    **dict.fromkeys(("native_batch_norm_backward", "batch_norm_backward"), _batch_backward),
    "_weight_norm_interface": _weight,
    "_weight_norm_interface_backward": _weight,
    "native_group_norm": _group,
    "native_group_norm_backward": _group_backward,
}
