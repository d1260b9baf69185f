"""Torch functions of every element (arithmetic, activations and their gradients), dropout and running sums."""

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
from phaze.ir import Dim, Factor, FactorKind, OpKind, Rule
from phaze.ir.graph_builder import elementwise_rule

__all__ = ["ELEMENTWISE", "elementwise"]

_FUNCTIONS = {
    "clamp": "clamp",
    "div": "divide",
    "mul": "multiply",
    "neg": "negative",
    "sub": "subtract",
    "threshold_backward": "relu_backward",
}


def elementwise(call: OperatorCall, function: str | None = None) -> Value:
    """One op of all tensor arguments."""
    inputs = call.tensors()
    shapes = [call.shape(tensor_id) for tensor_id in inputs]
    result = call.out_shape()
    if not all(_stretches(shape, result) for shape in shapes):
        raise Unsupported
    name = function or _FUNCTIONS.get(call.name, call.name)
    return call.emit(OpKind.ELEMENTWISE, name, elementwise_rule(result, *shapes), *inputs)


def _stretches(shape: Shape, result: Shape) -> bool:
    """Whether a shape broadcasts to the result by numpy's rules."""
    pairs = zip(reversed(shape), reversed(result), strict=False)
    return len(shape) <= len(result) and all(size in (1, whole) for size, whole in pairs)


def _arithmetic(call: OperatorCall) -> Value:
    """A sum or product; with a number it is one function of one tensor."""
    if len(call.tensors()) != 1 or len(call.arguments) < 2:
        return elementwise(call)
    x = call.tensors()[0]
    numbers = [value for value in (call["self"], call["other"]) if isinstance(value, int | float)]
    if not numbers:
        return elementwise(call)
    number = numbers[0]
    rule = elementwise_rule(call.out_shape(), call.shape(x))
    if call.name in ("add", "sub", "rsub"):
        return call.emit(OpKind.ELEMENTWISE, "add_constant", rule, x, attributes={"constant": float(number)})
    factor = float(number) if call.name == "mul" else 1.0 / number if number else 0.0
    return call.emit(OpKind.ELEMENTWISE, "scale", rule, x, attributes={"factor": factor})


def _power(call: OperatorCall) -> Value:
    return elementwise(call, "square" if call["exponent"] == 2 else "power")


def _gelu(call: OperatorCall) -> Value:
    tanh = "_tanh" if call["approximate"] == "tanh" else ""
    return elementwise(call, f"gelu{tanh}" + ("_backward" if call.name.endswith("backward") else ""))


def _dropout(call: OperatorCall) -> Value:
    x = call.tensor("input", "self")
    if len(call.nonempty_outputs()) != 2:
        raise Unsupported
    without_mask = elementwise_rule(call.out_shape(), call.shape(x))
    rule = Rule(without_mask.operands, without_mask.results * 2, without_mask.factors)
    return call.emit(OpKind.DROPOUT, "dropout", rule, x, outputs=(0, 1), attributes={"probability": float(call["p"])})


def _dropout_backward(call: OperatorCall) -> Value:
    inputs = (call.tensor("grad_output"), call.tensor("mask"))
    rule = elementwise_rule(call.out_shape(), *(call.shape(tensor_id) for tensor_id in inputs))
    return call.emit(OpKind.DROPOUT, "dropout_backward", rule, *inputs)


def _scan(call: OperatorCall) -> Value:
    """A running sum or the like: every element along a dimension waits for those before it."""
    x = call.tensor("self")
    shape = call.shape(x)
    if not shape:
        return elementwise(call)
    along = call.dim()
    dims = dims_of(shape)
    outputs = call.nonempty_outputs()
    rule = Rule((dims,), (dims,) * len(outputs), factors_of(shape, (along,)))
    return call.emit(OpKind.ELEMENTWISE, call.name, rule, x, outputs=outputs)


def _glu(call: OperatorCall) -> Value:
    """Half of a dimension times the sigmoid of the other half."""
    x = call.tensor("self")
    result = call.out_shape()
    halved = call.dim()
    dims = dims_of(result)
    operand = tuple(Dim(("c", f"d{index}")) if index == halved else dim for index, dim in enumerate(dims))
    factors = (Factor("c", 2, FactorKind.WHOLE), *factors_of(result))
    return call.emit(OpKind.REDUCTION, "glu", Rule((operand,), (dims,), factors), x)


_POINTWISE = (
    "abs erf exp log negative reciprocal relu rsqrt sigmoid silu sin cos sqrt tanh where masked_fill clamp neg "
    "threshold_backward silu_backward sigmoid_backward tanh_backward hardtanh_backward leaky_relu_backward "
    "hardswish_backward hardsigmoid_backward elu_backward mish_backward softplus_backward log_sigmoid_backward "
    "floor_divide remainder fmod bernoulli fill exponential hardtanh leaky_relu hardswish elu softplus "
    "log_sigmoid_forward hardsigmoid mish tril triu addcmul addcdiv polar nan_to_num lerp _conj _conj_physical "
    "complex logit_backward"
)

ELEMENTWISE: OperatorTable = {
    **dict.fromkeys(_POINTWISE.split(), elementwise),
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div"), _arithmetic),
    "pow": _power,
    "gelu": _gelu,
    "gelu_backward": _gelu,
    "native_dropout": _dropout,
    "native_dropout_backward": _dropout_backward,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), _scan),
    "glu": _glu,
}
