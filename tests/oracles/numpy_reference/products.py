"""Products: einsums, convolutions of any rank and group, attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from oracles.numpy_reference.axes import Array, align, collapse, einsum, expand
from oracles.numpy_reference.normalizing import mask_of, masked_softmax, softmax_slope
from phaze.ir.op import Op
from phaze.ir.rule import Dims, Rule, factor_names, names_of

__all__ = ["attention", "attention_backward", "contract", "convolution", "convolution_input", "convolution_weight"]


def contract(op: Op, left: Array, right: Array) -> tuple[Array, ...]:
    """The einsum that the rule says."""
    rule = op.rule
    operands = [expand(rule, dims, array) for dims, array in zip(rule.operands, (left, right), strict=True)]
    names = factor_names(rule.results[0])
    return (collapse(rule, rule.results[0], einsum(rule, operands, names), names),)


def convolution(op: Op, x: Array, weight: Array) -> tuple[Array, ...]:
    """A sum over kernel positions of contractions with shifted, strided windows of x."""
    rule = op.rule
    result = np.zeros(rule.shape(rule.results[0]), np.result_type(x, weight))
    padded = np.pad(x, _padding(op, rule.operands[0]))
    for at, tap in _taps(rule, rule.operands[0], rule.operands[1], weight):
        window = padded[_window(op, rule.operands[0], rule, at)]
        result += _contract_tap(rule, rule.operands[0], window, tap, rule.operands[1], rule.results[0])
    return (result,)


def convolution_input(op: Op, gradient: Array, weight: Array) -> tuple[Array, ...]:
    """Every window of x receives the gradient times the weight of its kernel position."""
    rule = op.rule
    dims = rule.results[0]
    padding = _padding(op, dims)
    shape = [size + low + high for size, (low, high) in zip(rule.shape(dims), padding, strict=True)]
    result = np.zeros(shape, np.result_type(gradient, weight))
    for at, tap in _taps(rule, dims, rule.operands[1], weight):
        part = _product(
            rule, (gradient, _outer(rule.operands[0])), (tap, _taps_names(rule, dims, rule.operands[1])), dims
        )
        result[_window(op, dims, rule, at)] += part
    cut = tuple(slice(low, low + size) for size, (low, _) in zip(rule.shape(dims), padding, strict=True))
    return (result[cut],)


def convolution_weight(op: Op, gradient: Array, x: Array) -> tuple[Array, ...]:
    """Every kernel position receives the contraction of the gradient with its windows of x."""
    rule = op.rule
    dims, weight_dims = rule.operands[1], rule.results[0]
    padded = np.pad(x, _padding(op, dims))
    kernel = _kernel_names(rule, dims)
    names = factor_names(weight_dims)
    result = np.zeros([rule.size(name) for name in names], np.result_type(gradient, x))
    kept = [name for name in names if name not in kernel]
    for at in _positions(rule, kernel):
        window = padded[_window(op, dims, rule, at)]
        spread = (_spread(rule, dims, window), _window_names(rule, dims))
        part = einsum(rule, [expand(rule, rule.operands[0], gradient), spread], kept)
        result[tuple(at[name] if name in kernel else slice(None) for name in names)] += part
    return (result.reshape(rule.shape(weight_dims)),)


def attention(op: Op, query: Array, key: Array, value: Array, *sinks: Array) -> tuple[Array, ...]:
    """softmax(capped(query . key * scale), causal) . value, with a sink of each head where there is one"""
    scores = _Scores(op, query, key, *sinks)
    rule = op.rule
    names = factor_names(rule.results[0])
    context = einsum(rule, [(scores.weights, scores.square), expand(rule, rule.operands[2], value)], names)
    return (collapse(rule, rule.results[0], context, names),)


def attention_backward(
    op: Op, query: Array, key: Array, value: Array, result: Array, gradient: Array, *sinks: Array
) -> tuple[Array, ...]:
    """Gradients of query, key and value, and of sinks."""
    rule = op.rule
    scores = _Scores(op, query, key, *sinks)
    weights, square = scores.weights, scores.square
    incoming = expand(rule, rule.operands[4], gradient)
    to_weights = einsum(rule, [incoming, expand(rule, rule.operands[2], value)], square)
    to_shown = softmax_slope(weights, to_weights, scores.length)
    to_scores = to_shown * scores.slope
    operands = [
        [(to_scores, square), expand(rule, rule.operands[1], key)],
        [(to_scores, square), expand(rule, rule.operands[0], query)],
        [(weights, square), incoming],
        [(-to_shown, square)],
    ]
    answers = []
    for parts, dims in zip(operands, rule.results, strict=False):
        names = factor_names(dims)
        answers.append(collapse(rule, dims, einsum(rule, parts, names), names))
    return tuple(answers)


class _Scores:
    """What lies between the products: weights over the axes `square`, and the slope of what was done to scores."""

    def __init__(self, op: Op, query: Array, key: Array, *sinks: Array) -> None:
        rule = op.rule
        queries, keys, values = (names_of(dims) for dims in rule.operands[:3])
        order = [factor.name for factor in rule.factors]
        self.square = [name for name in order if name in (queries | keys) and name not in (queries & keys) - values]
        self.length = [self.square.index(name) for name in _length_names(rule)]
        operands = [expand(rule, rule.operands[0], query), expand(rule, rule.operands[1], key)]
        scores = einsum(rule, operands, self.square) * _scale(op)
        self.slope: Array = np.full_like(scores, _scale(op))
        cap = op.attribute("softcap")
        if isinstance(cap, int | float):
            bent = np.tanh(scores / cap)
            scores, self.slope = cap * bent, self.slope * (1 - bent**2)
        causal = op.attribute("causal")
        query_axis = self.square.index(str(causal)) if causal else None
        seen = mask_of(op, scores.shape, query_axis, self.length[0])
        if sinks:
            shown = scores if seen is None else np.where(seen, scores, -np.inf)
            sink = align(rule, rule.operands[-1], sinks[0], self.square)
            total = np.exp(shown).sum(axis=tuple(self.length), keepdims=True) + np.exp(sink)
            self.weights: Array = np.exp(shown) / total
        else:
            self.weights = masked_softmax(scores, self.length, seen)


def _length_names(rule: Rule) -> list[str]:
    queries, keys, values = (names_of(dims) for dims in rule.operands[:3])
    return sorted((keys & values) - queries)


def _scale(op: Op) -> float:
    value = op.attribute("scale")
    return float(value) if isinstance(value, int | float) else 1.0


def _kernel_names(rule: Rule, dims: Dims) -> list[str]:
    return [dim.factors[1] for dim in dims if dim.size is not None]


def _positions(rule: Rule, kernel: Sequence[str]) -> Iterator[dict[str, int]]:
    for index in itertools.product(*(range(rule.size(name)) for name in kernel)):
        yield dict(zip(kernel, index, strict=True))


def _taps(rule: Rule, dims: Dims, weight_dims: Dims, weight: Array) -> Iterator[tuple[dict[str, int], Array]]:
    spread, names = expand(rule, weight_dims, weight)
    kernel = _kernel_names(rule, dims)
    for at in _positions(rule, kernel):
        yield at, spread[tuple(at[name] if name in kernel else slice(None) for name in names)]


def _taps_names(rule: Rule, dims: Dims, weight_dims: Dims) -> list[str]:
    kernel = _kernel_names(rule, dims)
    return [name for name in _outer(weight_dims) if name not in kernel]


def _outer(dims: Dims) -> list[str]:
    return factor_names(dims)


def _window_names(rule: Rule, dims: Dims) -> list[str]:
    return [name for dim in dims for name in (dim.factors if dim.size is None else dim.factors[:1])]


def _spread(rule: Rule, dims: Dims, window: Array) -> Array:
    return window.reshape([rule.size(name) for name in _window_names(rule, dims)])


def _contract_tap(rule: Rule, dims: Dims, window: Array, tap: Array, weight_dims: Dims, result: Dims) -> Array:
    operands = [(_spread(rule, dims, window), _window_names(rule, dims)), (tap, _taps_names(rule, dims, weight_dims))]
    return einsum(rule, operands, _outer(result)).reshape(rule.shape(result))


def _product(rule: Rule, left: tuple[Array, list[str]], right: tuple[Array, list[str]], dims: Dims) -> Array:
    array, names = left
    spread = array.reshape([rule.size(name) for name in names])
    shape = [rule.dim_size(dim) if dim.size is None else rule.size(dim.factors[0]) for dim in dims]
    return einsum(rule, [(spread, names), right], _window_names(rule, dims)).reshape(shape)


def _padding(op: Op, dims: Dims) -> list[tuple[int, int]]:
    pads = iter(_spatial(op, "padding", dims, 0))
    return [(pad, pad) if pad else (0, 0) for pad in (next(pads) if dim.size is not None else 0 for dim in dims)]


def _window(op: Op, dims: Dims, rule: Rule, at: dict[str, int]) -> tuple[slice, ...]:
    strides, dilations = iter(_spatial(op, "stride", dims, 1)), iter(_spatial(op, "dilation", dims, 1))
    cuts = []
    for dim in dims:
        if dim.size is None:
            cuts.append(slice(None))
            continue
        stride, start = next(strides), at[dim.factors[1]] * next(dilations)
        cuts.append(slice(start, start + stride * (rule.size(dim.factors[0]) - 1) + 1, stride))
    return tuple(cuts)


def _spatial(op: Op, name: str, dims: Dims, default: int) -> tuple[int, ...]:
    value = op.attribute(name)
    return value if isinstance(value, tuple) else (default,) * sum(dim.size is not None for dim in dims)
