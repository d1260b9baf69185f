"""What the gradient of each function reads: the forward tensors that a layer must keep.

A unary function's gradient is the op `<function>_backward`, which reads the incoming gradient and what is listed here:
the input, the result or nothing. Functions that are not listed and not handled by name in
`gradients.py` are treated as opaque: their gradient reads every float input.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["OPERANDS_AND_RESULTS", "PASSES_GRADIENT", "UNARY_READS", "Saved"]


class Saved(StrEnum):
    """What a unary function's gradient reads besides the incoming gradient."""

    INPUT = "input"
    RESULT = "result"
    NOTHING = "nothing"


UNARY_READS: dict[str, Saved] = {
    "abs": Saved.INPUT,
    "cos": Saved.INPUT,
    "erf": Saved.INPUT,
    "exp": Saved.RESULT,
    "gelu": Saved.INPUT,
    "gelu_tanh": Saved.INPUT,
    "log": Saved.INPUT,
    "negative": Saved.NOTHING,
    "reciprocal": Saved.RESULT,
    "relu": Saved.RESULT,
    "rsqrt": Saved.RESULT,
    "scale": Saved.NOTHING,
    "sigmoid": Saved.RESULT,
    "silu": Saved.INPUT,
    "sin": Saved.INPUT,
    "sqrt": Saved.RESULT,
    "square": Saved.INPUT,
    "tanh": Saved.RESULT,
}

PASSES_GRADIENT = frozenset({"add", "add_constant", "contiguous", "fused_sum", "identity"})

OPERANDS_AND_RESULTS: dict[str, tuple[tuple[int, ...], int]] = {
    **dict.fromkeys(UNARY_READS, ((1,), 1)),
    "add": ((2,), 1),
    "attention": ((3, 4, 5), 1),
    "biased_softmax": ((2,), 1),
    "cast": ((1,), 1),
    "combine": ((3,), 1),
    "cross_entropy": ((2,), 1),
    "dispatch": ((2,), 1),
    "divide": ((2,), 1),
    "dropout": ((1,), 2),
    "einsum": ((2,), 1),
    "embedding": ((2,), 1),
    "layer_norm": ((1, 2, 3), 1),
    "max": ((1,), 1),
    "mean": ((1,), 1),
    "multiply": ((2,), 1),
    "rms_norm": ((1, 2), 1),
    "rotary": ((3,), 1),
    "select": ((1,), 1),
    "softmax": ((1,), 1),
    "subtract": ((2,), 1),
    "sum": ((1,), 1),
    "top_k": ((1,), 2),
}
"""How many operands a function takes and results it gives at least, for those whose gradient is known by name.

Further results are statistics that a framework keeps for its own backward.
"""
