"""Softmax, cross entropy and norms: functions that need the whole of a factor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from oracles.numpy_reference.axes import Array, align, collapse
from phaze.ir.op import Op
from phaze.ir.rule import FactorKind, factor_names, names_of

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "mask_of",
    "masked_softmax",
    "norm",
    "norm_backward",
    "sink_softmax",
    "softmax",
    "softmax_backward",
    "softmax_slope",
]


def mask_of(op: Op, shape: Sequence[int], query_axis: int | None, key_axis: int) -> Array | None:
    """Which keys each query sees, by the attributes `causal`, `window` and `chunk`; None where it sees all."""
    if query_axis is None:
        return None
    queries, keys = (
        np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
        for axis in (query_axis, key_axis)
    )
    seen = keys <= queries
    window, chunk = op.attribute("window"), op.attribute("chunk")
    if isinstance(window, int):
        seen = seen & (keys > queries - window)
    if isinstance(chunk, int):
        seen = seen & (keys // chunk == queries // chunk)
    return np.asarray(seen)


def masked_softmax(scores: Array, axes: Sequence[int], seen: Array | None) -> Array:
    """Softmax over `axes`; where a mask is given, keys that are not seen count for nothing."""
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    shifted = np.exp(scores - scores.max(axis=tuple(axes), keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=tuple(axes), keepdims=True))


def softmax_slope(result: Array, gradient: Array, axes: Sequence[int]) -> Array:
    """The gradient of what went into a softmax."""
    return np.asarray(result * (gradient - (result * gradient).sum(axis=tuple(axes), keepdims=True)))


def softmax(op: Op, scores: Array, *bias: Array) -> tuple[Array, ...]:
    """softmax((scores + bias) * scale), causal where an attribute names the query factor."""
    order = _order(op)
    total = align(op.rule, op.rule.operands[0], scores, order)
    for dims, array in zip(op.rule.operands[1:], bias, strict=True):
        total = total + align(op.rule, dims, array, order)
    weights = masked_softmax(total * _number(op, "scale", 1.0), _normalized(op, order), _seen(op, order))
    return (collapse(op.rule, op.rule.results[0], weights, order),)


def sink_softmax(op: Op, scores: Array, sinks: Array) -> tuple[Array, ...]:
    """A softmax over the scores and one sink a head, without the sink's part of the result."""
    order = _order(op)
    aligned = align(op.rule, op.rule.operands[0], scores, order) * _number(op, "scale", 1.0)
    seen, (axis,) = _seen(op, order), _normalized(op, order)
    shown = aligned if seen is None else np.where(seen, aligned, -np.inf)
    sink = align(op.rule, op.rule.operands[1], sinks, order)
    weights = np.exp(shown) / (np.exp(shown).sum(axis=axis, keepdims=True) + np.exp(sink))
    return (collapse(op.rule, op.rule.results[0], weights, order),)


def _seen(op: Op, order: Sequence[str]) -> Array | None:
    causal = op.attribute("causal")
    query_axis = order.index(str(causal)) if causal else None
    shape = [op.rule.size(name) for name in order]
    return mask_of(op, shape, query_axis, _normalized(op, order)[0])


def softmax_backward(op: Op, gradient: Array, result: Array) -> tuple[Array, ...]:
    """The gradient of the scores."""
    order = _order(op)
    aligned = [align(op.rule, dims, a, order) for dims, a in zip(op.rule.operands, (gradient, result), strict=True)]
    slope = softmax_slope(aligned[1], aligned[0], _normalized(op, order)) * _number(op, "scale", 1.0)
    return (collapse(op.rule, op.rule.results[0], slope, order),)


def cross_entropy(op: Op, logits: Array, labels: Array) -> tuple[Array, ...]:
    """The mean over positions of -log softmax(logits)[label]."""
    spread = _classes_last(op, 0, logits)
    shifted = spread - spread.max(axis=-1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=-1))
    picked = np.take_along_axis(shifted, labels[..., None], axis=-1)[..., 0]
    return (np.asarray((total - picked).mean()),)


def cross_entropy_backward(op: Op, gradient: Array, logits: Array, labels: Array) -> tuple[Array, ...]:
    """(softmax - one at the label) / positions"""
    weights = masked_softmax(_classes_last(op, 1, logits), [-1], None)
    np.put_along_axis(weights, labels[..., None], np.take_along_axis(weights, labels[..., None], axis=-1) - 1, axis=-1)
    scaled = weights * gradient / math.prod(labels.shape)
    order = [*(name for dim in op.rule.operands[2] for name in dim.factors), *_names(op)]
    return (collapse(op.rule, op.rule.results[0], scaled, order),)


def norm(op: Op, x: Array, *affine: Array) -> tuple[Array, ...]:
    """Layer norm or root-mean-square norm over the normalized factors."""
    order = _order(op)
    centred, deviation = _standardized(op, align(op.rule, op.rule.operands[0], x, order), _normalized(op, order))
    result = centred / deviation
    if affine:
        result = result * (align(op.rule, op.rule.operands[1], affine[0], order) + _number(op, "offset", 0.0))
    if len(affine) > 1:
        result = result + align(op.rule, op.rule.operands[2], affine[1], order)
    return (collapse(op.rule, op.rule.results[0], result, order),)


def norm_backward(op: Op, gradient: Array, x: Array, *weight: Array) -> tuple[Array, ...]:
    """Gradients of the input, weight and bias, those that the attribute `gradients_of` lists."""
    rule = op.rule
    order = factor_names(rule.operands[0])
    axes = tuple(_normalized(op, order))
    incoming = align(rule, rule.operands[0], gradient, order)
    centred, deviation = _standardized(op, align(rule, rule.operands[1], x, order), axes)
    standard = centred / deviation
    scale = align(rule, rule.operands[2], weight[0], order) + _number(op, "offset", 0.0) if weight else np.asarray(1.0)
    slope = incoming * scale
    to_input = slope - standard * (slope * standard).mean(axis=axes, keepdims=True)
    if not op.function.startswith("rms"):
        to_input = to_input - slope.mean(axis=axes, keepdims=True)
    answers = (np.asarray(to_input / deviation), np.asarray(incoming * standard), incoming)
    wanted = op.attribute("gradients_of")
    assert isinstance(wanted, tuple)
    return tuple(collapse(rule, dims, answers[index], order) for index, dims in zip(wanted, rule.results, strict=True))


def _standardized(op: Op, x: Array, axes: Sequence[int]) -> tuple[Array, Array]:
    centred = x if op.function.startswith("rms") else x - x.mean(axis=tuple(axes), keepdims=True)
    variance = np.square(centred).mean(axis=tuple(axes), keepdims=True)
    return np.asarray(centred), np.asarray(np.sqrt(variance + _number(op, "epsilon", 1e-5)))


def _order(op: Op) -> list[str]:
    return factor_names(op.rule.results[0])


def _names(op: Op) -> list[str]:
    return [factor.name for factor in op.rule.factors if factor.kind is FactorKind.NORMALIZED]


def _normalized(op: Op, order: Sequence[str]) -> list[int]:
    return [order.index(name) for name in _names(op)]


def _classes_last(op: Op, operand: int, logits: Array) -> Array:
    dims, labels = op.rule.operands[operand], op.rule.operands[operand + 1]
    order = [*(name for dim in labels for name in dim.factors), *_names(op)]
    assert frozenset(order) == names_of(dims)
    return align(op.rule, dims, logits, order).copy()


def _number(op: Op, name: str, default: float) -> float:
    value = op.attribute(name)
    return float(value) if isinstance(value, int | float) else default
