"""Operators: kinds, functions known by name, and what follows from a rule alone (flops, traffic, GEMM view)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum

from phaze.errors import GraphError, shown
from phaze.ir.rule import FactorKind, Rule, names_of

__all__ = [
    "EXPERT_DIM",
    "OPERANDS_AND_RESULTS",
    "PASSES_GRADIENT",
    "UNARY_READS",
    "Attribute",
    "Gemm",
    "Op",
    "OpKind",
    "Phase",
    "Saved",
    "attention_gemms",
    "gemm_view",
]

Attribute = int | float | str | tuple[int, ...]

EXPERT_DIM = "expert_dim"
"""The attribute of a captured op that brings tokens to experts: the dimension of its result that counts experts."""


class OpKind(StrEnum):
    """The class of an operator: what it is priced as. `Op.function` says which one of the class it is."""

    CONTRACTION = "contraction"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    DROPOUT = "dropout"
    SOFTMAX = "softmax"
    NORM = "norm"
    REDUCTION = "reduction"
    LOOKUP = "lookup"
    SCATTER = "scatter"
    COPY = "copy"
    SORT = "sort"
    VIEW = "view"
    COLLECTIVE = "collective"
    OPAQUE = "opaque"

    @property
    def is_matrix(self) -> bool:
        """Whether ops of this kind run on tensor cores and count as matmul flops."""
        return self in (OpKind.CONTRACTION, OpKind.CONVOLUTION, OpKind.ATTENTION)


class Phase(StrEnum):
    """The part of a training step that an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix op as `batch` products of an m x k with a k x n matrix."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k


_COUNTED_BY_SIZE = (OpKind.OPAQUE, OpKind.COPY, OpKind.SORT, OpKind.COLLECTIVE)
"""Kinds whose arithmetic is taken as one operation for each element of their largest tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator of a graph.

    `module` is the dotted path of the module that it came from, `gradient_of` the forward op that a backward op
    belongs to, `origin` what the source framework called it. `collective_bytes` is the size of the whole tensor that a
    collective of a sliced layer works on; 0 for all other ops.
    """

    id: str
    kind: OpKind
    function: str
    rule: Rule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: str = ""
    phase: Phase = Phase.FORWARD
    gradient_of: str = ""
    origin: str = ""
    attributes: tuple[tuple[str, Attribute], ...] = ()
    collective_bytes: int = 0

    def __post_init__(self) -> None:
        if self.collective_bytes < 0 or (self.collective_bytes and self.kind is not OpKind.COLLECTIVE):
            raise GraphError(
                f"op {self.id!r} has {shown(self.collective_bytes)} collective bytes but is of kind {self.kind}; "
                "only collectives move a tensor, of at least 0 bytes."
            )
        for name, value in self.attributes:
            is_integers = isinstance(value, tuple) and all(isinstance(item, int) for item in value)
            if not isinstance(name, str) or not (is_integers or isinstance(value, int | float | str)):
                raise GraphError(
                    f"op {self.id!r}: attribute {name!r} is {shown(value)}; expected a number, text or integers."
                )

    def attribute(self, name: str) -> Attribute | None:
        """The value of an attribute, or None."""
        return next((value for key, value in self.attributes if key == name), None)

    def with_rule(self, rule: Rule) -> Op:
        """The op with another rule; itself where it has that rule."""
        if rule is self.rule:
            return self
        # Nothing that is checked depends on the rule, and graphs with thousands of ops are rescaled often.
        changed = object.__new__(Op)
        for name in _OP_FIELDS:
            object.__setattr__(changed, name, getattr(self, name))
        object.__setattr__(changed, "rule", rule)
        return changed

    @property
    def matmul_flops(self) -> int:
        """Flops of matrix work: the whole square of attention whether causal or not, and nothing recomputed."""
        return sum(gemm.flops for gemm in self.gemms)

    @property
    def flops(self) -> int:
        """All arithmetic, one operation an element where it is not matrix work; views do none.

        Ops that only move elements, and those without a rule of their own, count their largest tensor.
        """
        if self.kind is OpKind.VIEW:
            return 0
        if self.kind in _COUNTED_BY_SIZE:
            return max(math.prod(self.rule.shape(dims)) for dims in self.rule.tensors())
        return self.matmul_flops if self.kind.is_matrix else self.rule.work

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The matrix products that the op is made of; none where it is not a matrix op."""
        if self.kind is OpKind.ATTENTION:
            return attention_gemms(self)
        return (gemm_view(self.rule),) if self.kind.is_matrix else ()

    @property
    def elements_read(self) -> tuple[int, ...]:
        """Elements that each operand gives: all of it, or only what is picked where a factor is looked up."""
        if self.kind is OpKind.VIEW:
            return (0,) * len(self.inputs)
        return tuple(_elements_read(self.rule, index) for index in range(len(self.inputs)))

    @property
    def elements_written(self) -> tuple[int, ...]:
        """Elements that each result receives."""
        if self.kind is OpKind.VIEW:
            return (0,) * len(self.outputs)
        return tuple(math.prod(self.rule.shape(dims)) for dims in self.rule.results)


_OP_FIELDS = tuple(field.name for field in fields(Op))


def gemm_view(rule: Rule) -> Gemm:
    """Sort the factors of a two-operand contraction or convolution into batch, m, n and k."""
    if len(rule.operands) != 2 or len(rule.results) != 1:
        raise GraphError(f"rule '{rule}' is not a product of two operands; only those have a GEMM view.")
    left, right = rule.operand_names
    result = names_of(rule.results[0])
    k = frozenset(factor.name for factor in rule.factors) - result
    batch = result & left & right
    n = (result & right) - batch
    return Gemm(
        batch=_product(rule, batch), m=_product(rule, result - batch - n), n=_product(rule, n), k=_product(rule, k)
    )


def attention_gemms(op: Op, *, rows: int | None = None, keys: int | None = None) -> tuple[Gemm, ...]:
    """Scores and context forward (query, key, value -> context); the gradients of both operands of each backward.

    The factor that only value and context have is the value width, the one that only query and key have the query
    width, the one that key and value share the key length; query factors that keys lack are query positions or
    repeated heads. ``rows`` and ``keys`` stand for all of the latter and for the key length where they are given.
    """
    query, key, value = (names_of(dims) for dims in op.rule.operands[:3])
    batch = _product(op.rule, query & key & value)
    length = _product(op.rule, (key & value) - query) if keys is None else keys
    width = _product(op.rule, (query & key) - value)
    value_width = _product(op.rule, value - key)
    rows = _product(op.rule, query - key) if rows is None else rows
    scores, context = Gemm(batch, rows, length, width), Gemm(batch, rows, value_width, length)
    if op.phase is not Phase.BACKWARD:
        return (scores, context)
    return (
        Gemm(batch, rows, width, length),
        Gemm(batch, length, width, rows),
        Gemm(batch, rows, length, value_width),
        Gemm(batch, length, value_width, rows),
    )


def _elements_read(rule: Rule, index: int) -> int:
    dims = rule.operands[index]
    whole = math.prod(rule.shape(dims))
    looked_up = [factor.name for factor in rule.factors if factor.kind is FactorKind.LOOKUP]
    if looked_up and not names_of(dims).isdisjoint(looked_up):
        return min(whole, rule.work)
    return whole


def _product(rule: Rule, names: Iterable[str]) -> int:
    return math.prod(rule.size(name) for name in names)


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

"""What the gradient of each unary function reads, and so what a layer must keep for it.

The gradient of a unary function is the op `<function>_backward`. Functions that are neither listed here nor handled by
name in `gradients.py` are treated as opaque: their gradient reads every float input.
"""

PASSES_GRADIENT = frozenset({"add", "add_constant", "contiguous", "fused_sum", "identity"})
"""Functions whose gradient is the incoming one, summed over what was broadcast; nothing is kept for them."""

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
    "sink_attention": ((4,), 1),
    "sink_softmax": ((2,), 1),
    "softmax": ((1,), 1),
    "subtract": ((2,), 1),
    "sum": ((1,), 1),
    "top_k": ((1,), 2),
}
"""How many operands a function takes and results it gives at least, for those whose gradient is known by name.

Further results are statistics that a framework keeps for its own backward.
"""
