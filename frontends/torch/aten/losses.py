"""Losses that torch has as one operator."""

from __future__ import annotations

from collections.abc import Callable

from phaze.frontends.torch.aten.elementwise import elementwise
from phaze.frontends.torch.call import Call, Unsupported, Value
from phaze.ir import Dim, Dims, Factor, FactorKind, OpKind, Rule
from phaze.ir.shape_rules import elementwise_rule, reduction_rule

__all__ = ["LOSSES"]

_NO_REDUCTION, _MEAN = 0, 1


def _class_dims(shape: tuple[int, ...]) -> tuple[Dims, Dims, tuple[Factor, ...]]:
    """log probabilities [classes], [rows, classes] or [rows, classes, ...], targets without the classes."""
    at = 0 if len(shape) == 1 else 1
    dims = tuple(Dim((f"d{index}",)) for index in range(len(shape)))
    factors = tuple(
        Factor(f"d{i}", size, FactorKind.LOOKUP if i == at else FactorKind.FREE) for i, size in enumerate(shape)
    )
    return dims, tuple(dim for index, dim in enumerate(dims) if index != at), factors


def _nll(call: Call) -> Value:
    """The log probability of each target, summed; the total weight comes with it."""
    x, target = call.tensor("self"), call.tensor("target")
    dims, rows, factors = _class_dims(call.shape(x))
    first = rows if call["reduction"] == _NO_REDUCTION else ()
    rule = Rule((dims, rows), (first, ()), factors)
    return call.emit(OpKind.LOOKUP, "nll_loss", rule, x, target, outputs=(0, 1))


def _nll_backward(call: Call) -> Value:
    gradient, target = call.tensor("grad_output"), call.tensor("target")
    dims, rows, factors = _class_dims(call.out_shape())
    first = rows if call["reduction"] == _NO_REDUCTION else ()
    return call.emit(OpKind.SCATTER, "nll_loss_backward", Rule((first, rows), (dims,), factors), gradient, target)


def _elementwise_loss(call: Call) -> Value:
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


_NAMES = ("mse_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "smooth_l1_loss", "huber_loss")

LOSSES: dict[str, Callable[[Call], Value]] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_backward),
    **dict.fromkeys(_NAMES, _elementwise_loss),
    **dict.fromkeys((f"{name}_backward" for name in _NAMES), elementwise),
}
