"""Functions of one element at a time, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from oracles.numpy_reference.axes import Array, align, collapse
from phaze.ir.op import UNARY_READS, Op, Saved
from phaze.ir.rule import FactorKind, factor_names

__all__ = ["ELEMENTWISE", "dropout", "dropout_backward", "linear_scan_backward"]

_erf = np.vectorize(math.erf, otypes=[np.float64])
_TANH_SCALE = math.sqrt(2 / math.pi)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _gelu_tanh_inner(x: Array) -> Array:
    return np.asarray(np.tanh(_TANH_SCALE * (x + 0.044715 * x**3)))


def _gelu_tanh_slope(x: Array) -> Array:
    inner = _gelu_tanh_inner(x)
    return np.asarray(0.5 * (1 + inner) + 0.5 * x * (1 - inner**2) * _TANH_SCALE * (1 + 3 * 0.044715 * x**2))


def _gelu_slope(x: Array) -> Array:
    return np.asarray(0.5 * (1 + _erf(x / math.sqrt(2))) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi))


def _silu_slope(x: Array) -> Array:
    gate = _sigmoid(x)
    return np.asarray(gate * (1 + x * (1 - gate)))


_UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "cos": np.cos,
    "erf": _erf,
    "exp": np.exp,
    "gelu": lambda x: np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2)))),
    "gelu_tanh": lambda x: np.asarray(0.5 * x * (1 + _gelu_tanh_inner(x))),
    "log": np.log,
    "negative": np.negative,
    "reciprocal": lambda x: np.asarray(1 / x),
    "relu": lambda x: np.maximum(x, 0),
    "rsqrt": lambda x: np.asarray(1 / np.sqrt(x)),
    "sigmoid": _sigmoid,
    "silu": lambda x: np.asarray(x * _sigmoid(x)),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "tanh": np.tanh,
}

_SLOPE: dict[str, Callable[[Array], Array]] = {
    "abs": np.sign,
    "cos": lambda x: -np.sin(x),
    "erf": lambda x: np.asarray(2 / math.sqrt(math.pi) * np.exp(-(x**2))),
    "exp": lambda y: y,
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "log": lambda x: np.asarray(1 / x),
    "negative": lambda y: np.asarray(-1.0),
    "reciprocal": lambda y: -np.square(y),
    "relu": lambda y: np.asarray(y > 0),
    "rsqrt": lambda y: np.asarray(-0.5 * y**3),
    "sigmoid": lambda y: np.asarray(y * (1 - y)),
    "silu": _silu_slope,
    "sin": np.cos,
    "sqrt": lambda y: np.asarray(0.5 / y),
    "square": lambda x: np.asarray(2 * x),
    "tanh": lambda y: 1 - np.square(y),
}
"""Derivatives, as a function of the input or of the result, whichever `UNARY_READS` says is kept."""


def _rotate(x: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([-second, first], axis=-1)


def _rotary(x: Array, cosine: Array, sine: Array) -> Array:
    return np.asarray(x * cosine + _rotate(x) * sine)


def _rotary_backward(gradient: Array, cosine: Array, sine: Array) -> Array:
    return np.asarray(gradient * cosine - _rotate(gradient * sine))


def _mean_backward(op: Op, gradient: Array) -> Array:
    repeats = op.rule.work / math.prod(op.rule.shape(op.rule.operands[0]))
    return np.asarray(gradient / repeats)


def _where_backward(op: Op, gradient: Array, condition: Array) -> Array:
    is_first = op.attribute("gradients_of") == (1,)
    return np.where(condition, gradient, 0.0) if is_first else np.where(condition, 0.0, gradient)


def _axis(op: Op) -> int:
    """The axis that must stay whole."""
    order = factor_names(op.rule.results[0])
    return next(order.index(factor.name) for factor in op.rule.factors if factor.kind is FactorKind.WHOLE)


def _linear_scan(op: Op, decay: Array, drive: Array) -> Array:
    """state = decay * state + drive, along the whole axis."""
    axis = _axis(op)
    decays, drives = np.moveaxis(decay, axis, 0), np.moveaxis(drive, axis, 0)
    states = np.zeros(np.broadcast_shapes(decays.shape, drives.shape))
    for index in range(len(states)):
        states[index] = decays[index] * (states[index - 1] if index else 0.0) + drives[index]
    return np.moveaxis(states, 0, axis)


def linear_scan_backward(op: Op, gradient: Array, decay: Array, drive: Array) -> tuple[Array, ...]:
    """Gradients of decay and drive: what each state gets from its result and from the next state."""
    order = factor_names(op.rule.results[0])
    parts = zip(op.rule.operands, (gradient, decay, drive), strict=True)
    incoming, decays, drives = (align(op.rule, dims, array, order) for dims, array in parts)
    axis = _axis(op)
    states = np.moveaxis(_linear_scan(op, decays, drives), axis, 0)
    incoming, decays = np.moveaxis(incoming, axis, 0), np.moveaxis(decays, axis, 0)
    to_states, to_decay = incoming.copy(), np.zeros_like(incoming)
    for index in reversed(range(len(states))):
        if index + 1 < len(states):
            to_states[index] += decays[index + 1] * to_states[index + 1]
        to_decay[index] = to_states[index] * (states[index - 1] if index else 0.0)
    answers = (np.moveaxis(to_decay, 0, axis), np.moveaxis(to_states, 0, axis))
    return tuple(collapse(op.rule, dims, answer, order) for dims, answer in zip(op.rule.results, answers, strict=True))


def _cumulative_sum_backward(op: Op, gradient: Array, _: Array) -> Array:
    return np.flip(np.cumsum(np.flip(gradient, _axis(op)), _axis(op)), _axis(op))


def _number(op: Op, name: str) -> float:
    value = op.attribute(name)
    assert isinstance(value, int | float)
    return float(value)


def _apply(function: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
    def run(op: Op, *inputs: Array) -> tuple[Array, ...]:
        order = factor_names(op.rule.results[0])
        aligned = [align(op.rule, dims, array, order) for dims, array in zip(op.rule.operands, inputs, strict=True)]
        return (collapse(op.rule, op.rule.results[0], function(op, *aligned), order),)

    return run


def _plain(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda op, *inputs: function(*inputs)


def _slope(name: str) -> Callable[..., Array]:
    if UNARY_READS[name] is Saved.NOTHING:
        return lambda op, gradient: np.asarray(gradient * _SLOPE[name](gradient))
    return lambda op, gradient, kept: np.asarray(gradient * _SLOPE[name](kept))


ELEMENTWISE: dict[str, Callable[..., tuple[Array, ...]]] = {
    **{name: _apply(_plain(function)) for name, function in _UNARY.items()},
    **{f"{name}_backward": _apply(_slope(name)) for name in _UNARY},
    "add": _apply(_plain(np.add)),
    "add_constant": _apply(lambda op, x: np.asarray(x + _number(op, "value"))),
    "cumulative_sum": _apply(lambda op, x: np.cumsum(x, _axis(op))),
    "cumulative_sum_backward": _apply(_cumulative_sum_backward),
    "linear_scan": _apply(_linear_scan),
    "softplus": _apply(lambda op, x: np.log1p(np.exp(x))),
    "softplus_backward": _apply(lambda op, gradient, x: np.asarray(gradient * _sigmoid(x))),
    "cast": _apply(lambda op, x: x),
    "divide": _apply(_plain(np.divide)),
    "divisor_backward": _apply(lambda op, gradient, divisor, result: np.asarray(-gradient * result / divisor)),
    "identity": _apply(lambda op, x: x),
    "mean_backward": _apply(_mean_backward),
    "multiply": _apply(_plain(np.multiply)),
    "rotary": _apply(_plain(_rotary)),
    "rotary_backward": _apply(_plain(_rotary_backward)),
    "scale": _apply(lambda op, x: np.asarray(x * _number(op, "factor"))),
    "scale_backward": _apply(lambda op, gradient: np.asarray(gradient * _number(op, "factor"))),
    "subtract": _apply(_plain(np.subtract)),
    "where": _apply(_plain(np.where)),
    "where_backward": _apply(_where_backward),
}


def dropout(op: Op, x: Array) -> tuple[Array, ...]:
    """A fixed pseudo-random mask, a function of each element's position alone."""
    probability = _number(op, "probability")
    draws = (np.arange(x.size, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)) / 2**32
    mask = (draws >= probability).reshape(x.shape)
    return np.asarray(x * mask / (1 - probability)), mask


def dropout_backward(op: Op, gradient: Array, mask: Array) -> tuple[Array, ...]:
    """The gradient where the mask let the value pass."""
    return (np.asarray(gradient * mask / (1 - _number(op, "probability"))),)
