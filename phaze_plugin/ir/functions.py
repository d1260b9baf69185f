"""What the gradient of each function reads: the forward tensors that a layer must keep.

An elementwise function's gradient is the op `<function>_backward`, which reads the incoming gradient and what is
listed here: an input by its index, or the result. Functions that are not listed and not handled by name in
`gradients.py` are treated as opaque: their gradient reads every float input.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["PASSES_GRADIENT", "UNARY_READS", "Saved"]


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

PASSES_GRADIENT = frozenset({"add", "add_constant", "contiguous", "identity"})
