"""Lane operations per element of vector functions.

Counted by hand from the usual formulas: a function of one instruction counts 1, a transcendental one 8 (range reduction
and a short polynomial), composed ones the sum of their parts. They are estimates; memory traffic decides most of these
ops on real chips.
"""

from __future__ import annotations

import math

from phaze.ir import FactorKind, Op, OpKind, Phase

__all__ = ["attention_operations", "vector_operations"]

_TRANSCENDENTAL = 8

_BY_FUNCTION: dict[str, int] = {
    **dict.fromkeys(("exp", "log", "sin", "cos", "tanh", "erf", "sigmoid"), _TRANSCENDENTAL),
    **dict.fromkeys(("sqrt", "rsqrt", "reciprocal", "divide"), 4),
    "gelu": _TRANSCENDENTAL + 4,
    "gelu_tanh": _TRANSCENDENTAL + 7,
    "gelu_backward": 2 * _TRANSCENDENTAL + 6,
    "gelu_tanh_backward": _TRANSCENDENTAL + 14,
    "silu": _TRANSCENDENTAL + 1,
    "silu_backward": _TRANSCENDENTAL + 5,
    "sigmoid_backward": 3,
    "tanh_backward": 3,
    "divisor_backward": 6,
    "rotary": 3,
    "rotary_backward": 3,
    "dropout": 6,
    "dropout_backward": 2,
    "softmax": _TRANSCENDENTAL + 5,
    "biased_softmax": _TRANSCENDENTAL + 6,
    "softmax_backward": 5,
    "cross_entropy": _TRANSCENDENTAL + 4,
    "cross_entropy_backward": _TRANSCENDENTAL + 4,
    "layer_norm": 8,
    "layer_norm_backward": 14,
    "rms_norm": 5,
    "rms_norm_backward": 10,
}

_BY_KIND: dict[OpKind, int] = {OpKind.SOFTMAX: _TRANSCENDENTAL + 5, OpKind.NORM: 8, OpKind.DROPOUT: 6}


_COUNTED_BY_SIZE = frozenset({OpKind.OPAQUE, OpKind.COPY, OpKind.SORT})
"""Kinds whose factors do not multiply to what they touch: the largest tensor does."""


def vector_operations(op: Op) -> float:
    """Lane operations of an op on the vector cores."""
    counted = op.attribute("operations")  # of ops that a frontend fused
    per_element = counted if isinstance(counted, int) else _BY_FUNCTION.get(op.function, _BY_KIND.get(op.kind, 1))
    if op.kind in _COUNTED_BY_SIZE:
        touched = max(1, *op.elements_written, *op.elements_read)
    else:
        touched = max(op.rule.work, *op.elements_written)
    if op.kind is OpKind.SORT:
        longest = max((f.size for f in op.rule.factors if f.kind is FactorKind.WHOLE), default=op.rule.work)
        per_element = max(1, math.ceil(math.log2(max(2, longest))))
    return float(per_element) * touched


def attention_operations(op: Op) -> int:
    """Lane operations per score of fused attention, whose scores and mask are made again backward."""
    functions = ["softmax"]
    if op.attribute("probability") is not None:
        functions.append("dropout")
    if op.phase is Phase.BACKWARD:
        functions += [f"{function}_backward" for function in functions]
    return sum(_BY_FUNCTION[function] for function in functions)
