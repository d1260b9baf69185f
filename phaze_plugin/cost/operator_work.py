"""What ops and the optimizer's update ask of an accelerator: matrix products, lane operations and bytes.

Ops of every kind are turned into `Work` first (`op_work`); prices look at nothing else. The parts of a work run at the
same time, each on its own resource, so that the largest decides:

    tensor time   matrix products, one after the other
    vector time   lane operations
    memory time   bytes of the tilings, and bytes that stream through once

The `Work` of a true view is empty and occupies no cores: the only thing that costs nothing. By kind of op:

    contraction   the GEMM of its rule, on operands as they are stored, at their type or at the one that a precision
                  recipe marked it with                                                                   (`_product`)
    convolution   the GEMM that it becomes; its traffic is that of the image itself, not of unfolded patches, tiled as
                  if every block of the image were exact: optimistic where a small buffer makes windows overlap
    attention     a fused kernel: score and context products (backward also the scores again) of the keys that are
                  seen, softmax and dropout on the vector cores at the same time, scores never off the chip
                  (`_attention`, `phaze.cost.off_chip_traffic`)
    vector kinds  elements x operations per element, against every operand read and every result written once
                  (`_vector`, with the counts of `vector_operations`)
    lookup        only the rows that are picked are read; scatter also reads the rows that it adds to     (`_scatter`)
    opaque        memory-bound vector work on everything it touches
    view          nothing

Sizes come from the rule alone, so that an op with a local rule is priced at its local size; element types come from the
tensors.

Lane operations per element were counted by hand from the usual formulas: a function of one instruction counts 1, a
transcendental one 8 (range reduction and a short polynomial), composed ones the sum of their parts. They are estimates;
memory traffic decides most of these ops on real chips.

The optimizer's update (`update_work`) is done once per batch after gradients are reduced. A device updates the
parameters that it holds, or its part of them where ZeRO divides them. Each parameter moves
`PrecisionRecipe.update_bytes` over HBM (gradient read, master or parameter and state read and written, parameter copy
written) and takes `PrecisionRecipe.update_operations` lane operations. Stacks that do not fuse the update make a copy
of gradients in the master's type, read it for their norm and scale it.

Muon also orthogonalizes its updates by five Newton-Schulz steps (Jordan et al., 2024), each three products on a matrix
X of m x n, m <= n: X X^T, its square, and their sum times X. The sizes of single matrices are not known here:
parameters are taken as matrices of m x 4m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from phaze.cost.calibration import PERFECT_STACK, Stack
from phaze.cost.estimate import CoreKind
from phaze.cost.off_chip_traffic import AttentionTiling, ProductTiling, Tiling, check_amounts, check_sizes, seen_gemms
from phaze.errors import CostError
from phaze.hardware import PrecisionRecipe
from phaze.hardware.precision import PRODUCT_DTYPE, dtype_bytes
from phaze.ir import DType, FactorKind, Gemm, Op, OpKind, Phase, Tensor
from phaze.ir.rule import Dims, names_of

__all__ = [
    "VIEW",
    "Product",
    "Work",
    "attention_operations",
    "in_pieces",
    "matmul_work",
    "op_work",
    "read_bytes",
    "softmax_operations",
    "update_work",
    "vector_operations",
    "vector_work",
    "written_bytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """``batch`` products of (m, k) with (k, n) at ``dtype``.

    The length of every row in which operands and result are stored is a multiple of ``row``; 0 where nothing is known.
    A library makes it in so many ``pieces`` of its rows, one after the other.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    row: int = 0
    pieces: int = 1

    def __post_init__(self) -> None:
        """Check that sizes are sizes."""
        check_sizes("matrix product", batch=self.batch, m=self.m, n=self.n, k=self.k, pieces=self.pieces)

    @property
    def macs(self) -> float:
        """Multiply-accumulates."""
        return float(self.batch) * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one op asks for.

    ``tilings`` are its traffic that depends on the size of the buffer, ``streamed_bytes`` that which does not. All that
    is done ``trips`` times, one after the other. A work that computes without moving a byte is a `CostError`, since it
    would be priced too low.
    """

    products: tuple[Product, ...] = ()
    vector_operations: float = 0.0
    tilings: tuple[Tiling, ...] = ()
    streamed_bytes: float = 0.0
    trips: int = 1

    def __post_init__(self) -> None:
        """Check signs, and that what computes also moves bytes."""
        amounts = {"vector_operations": self.vector_operations, "streamed_bytes": self.streamed_bytes}
        check_amounts("work", may_be_zero=True, **amounts)
        computes = bool(self.products) or self.vector_operations > 0
        if computes != (self.compulsory_bytes > 0):
            raise CostError(
                f"work with {len(self.products)} products and {self.vector_operations} vector operations moves "
                f"{self.compulsory_bytes} bytes; an op either computes and moves bytes, or is a view."
            )

    @property
    def kind(self) -> CoreKind:
        """The cores that the op occupies."""
        if self.products:
            return CoreKind.BOTH if self.vector_operations else CoreKind.TENSOR
        return CoreKind.VECTOR if self.vector_operations else CoreKind.NONE

    @property
    def is_plain_product(self) -> bool:
        """Whether this is one product of operands and result off the chip, as a library's kernels make it."""
        return len(self.products) == 1 == len(self.tilings) and isinstance(self.tilings[0], ProductTiling)

    @property
    def is_fused_attention(self) -> bool:
        """Whether this is a kernel of several products that keeps the results between them on the chip."""
        return len(self.products) > 1

    @property
    def macs(self) -> float:
        """Multiply-accumulates of all products."""
        return sum(product.macs for product in self.products)

    @property
    def compulsory_bytes(self) -> float:
        """Bytes that move however large the buffer is."""
        return sum(tiling.compulsory_bytes for tiling in self.tilings) + self.streamed_bytes


def in_pieces(work: Work, pieces: int) -> Work:
    """A plain product whose rows are cut into so many parts, each a kernel of its own; any other work as it is."""
    if not work.is_plain_product or work.trips > 1:
        return work
    return replace(work, products=(replace(work.products[0], pieces=pieces),))


VIEW = Work()
"""An op that renames elements without touching them."""


def matmul_work(
    batch: int, m: int, n: int, k: int, *, dtype: str = "bfloat16", output_dtype: str | None = None
) -> Work:
    """``batch`` dense products of (m, k) with (k, n) at ``dtype``; the result has ``output_dtype``, or the same."""
    check_sizes("matrix product", batch=batch, m=m, n=n, k=k)
    size = dtype_bytes(dtype)
    tiling = ProductTiling(
        batch=batch,
        m=m,
        n=n,
        k=k,
        left_bytes=float(size) * batch * m * k,
        right_bytes=float(size) * batch * k * n,
        output_bytes=float(dtype_bytes(output_dtype or dtype)) * batch * m * n,
        element_bytes=size,
    )
    return Work(products=(Product(batch=batch, m=m, n=n, k=k, dtype=dtype),), tilings=(tiling,))


def vector_work(operations: float, moved_bytes: float) -> Work:
    """Elementwise work of so many lane operations on so many bytes."""
    return Work(vector_operations=operations, streamed_bytes=moved_bytes)


Tensors: TypeAlias = Mapping[str, Tensor]


def op_work(op: Op, tensors: Tensors) -> Work:
    """The work of one op; a `CostError` where its kind has none (a collective's depends on its mesh axis).

    That of an op in a loop is the work of one trip, as often as there are trips: each waits for the one before it.
    """
    if (trips := op.rule.trips) > 1:
        return replace(op_work(replace(op, rule=op.rule.of_one_trip), tensors), trips=trips)
    build = _BUILDERS.get(op.kind)
    if build is None:
        raise CostError(
            f"op {op.id!r}: nobody prices ops of kind {op.kind} ({op.function}). Price collectives on their mesh axis "
            "with phaze.cost.price_collective, or add a price through the hook phaze_op_prices."
        )
    return build(op, tensors)


def read_bytes(op: Op, tensors: Tensors) -> list[float]:
    """Bytes that each operand gives."""
    return [
        float(count) * tensors[tensor_id].dtype.size_bytes
        for tensor_id, count in zip(op.inputs, op.elements_read, strict=True)
    ]


def written_bytes(op: Op, tensors: Tensors) -> list[float]:
    """Bytes that each result receives."""
    return [
        float(count) * tensors[tensor_id].dtype.size_bytes
        for tensor_id, count in zip(op.outputs, op.elements_written, strict=True)
    ]


def _view(op: Op, tensors: Tensors) -> Work:
    return VIEW


def _vector(op: Op, tensors: Tensors) -> Work:
    moved = sum(read_bytes(op, tensors)) + sum(written_bytes(op, tensors))
    return Work(vector_operations=vector_operations(op), streamed_bytes=moved)


def _scatter(op: Op, tensors: Tensors) -> Work:
    """Vector work that also reads what it adds to."""
    added_to = float(op.rule.work) * tensors[op.outputs[0]].dtype.size_bytes
    moved = sum(read_bytes(op, tensors)) + sum(written_bytes(op, tensors)) + added_to
    return Work(vector_operations=vector_operations(op), streamed_bytes=moved)


def _product(op: Op, tensors: Tensors) -> Work:
    """The one GEMM that a contraction or a convolution is, on operands as they are stored."""
    (gemm,) = op.gemms
    left_bytes, right_bytes = read_bytes(op, tensors)
    dtype = _operand_dtype(op, tensors)
    tiling = ProductTiling(
        batch=gemm.batch,
        m=gemm.m,
        n=gemm.n,
        k=gemm.k,
        left_bytes=left_bytes,
        right_bytes=right_bytes,
        output_bytes=sum(written_bytes(op, tensors)),
        element_bytes=dtype.size_bytes,
    )
    runs_at = op.attribute(PRODUCT_DTYPE)
    product = _product_of(gemm, runs_at if isinstance(runs_at, str) else dtype.value)
    if op.kind is OpKind.CONTRACTION:
        product = replace(product, row=math.gcd(*(op.rule.shape(dims)[-1] for dims in op.rule.tensors() if dims)))
    return Work(products=(product,), tilings=(tiling,))


def _attention(op: Op, tensors: Tensors) -> Work:
    """A fused kernel. Tensors with query positions stay while those with key positions pass, or the other way round."""
    query, key, value = (names_of(dims) for dims in op.rule.operands[:3])
    query_positions, key_positions = query - key, (key & value) - query
    is_backward = op.phase is Phase.BACKWARD
    gemms = seen_gemms(op)
    scores, square = _scores(op, gemms), _scores(op, op.gemms)
    seen = scores.m * scores.n / (square.m * square.n)
    moved = dict.fromkeys(_Positions, 0.0)
    for dims, size in zip(op.rule.operands, read_bytes(op, tensors), strict=True):
        moved[_positions(dims, query_positions, key_positions)] += size
    accumulated = 0.0
    for dims, size in zip(op.rule.results, written_bytes(op, tensors), strict=True):
        positions = _positions(dims, query_positions, key_positions)
        if positions is _Positions.KEYS:  # a sum over queries, of which every block adds its part
            accumulated += size
        else:
            moved[positions] += size
    dtype = _operand_dtype(op, tensors)
    width = (scores.k + _size(op, value - key)) * (2 if is_backward else 1)
    computed = (scores, *gemms) if is_backward else gemms
    work = Work(
        products=tuple(_product_of(gemm, dtype.value) for gemm in computed),
        vector_operations=float(attention_operations(op)) * scores.batch * scores.m * scores.n,
        streamed_bytes=sum(moved.values()) + accumulated,
    )
    if not (moved[_Positions.QUERIES] and moved[_Positions.KEYS]):
        return work
    tiling = AttentionTiling(
        heads=square.batch,
        queries=square.m,
        keys=square.n,
        query_width=width,
        key_width=width,
        query_bytes=moved[_Positions.QUERIES],
        key_bytes=moved[_Positions.KEYS] * seen,
        accumulated_bytes=accumulated * seen,
        element_bytes=dtype.size_bytes,
    )
    once = (1 - seen) * (moved[_Positions.KEYS] + accumulated)  # a pass sees a part of the keys, all passes see all
    return replace(work, tilings=(tiling,), streamed_bytes=moved[_Positions.BOTH_OR_NEITHER] + once)


def _scores(op: Op, gemms: tuple[Gemm, ...]) -> Gemm:
    """The product of query and key; backward it is made again, from the sizes of the query's gradient."""
    if op.phase is not Phase.BACKWARD:
        return gemms[0]
    to_query = gemms[0]
    return Gemm(to_query.batch, to_query.m, to_query.k, to_query.n)


class _Positions(StrEnum):
    """Which positions a tensor of attention has: those of queries, those of keys, or both or neither."""

    QUERIES = "queries"
    KEYS = "keys"
    BOTH_OR_NEITHER = "both or neither"


def _positions(dims: Dims, query_positions: frozenset[str], key_positions: frozenset[str]) -> _Positions:
    names = names_of(dims)
    has_queries, has_keys = bool(names & query_positions), bool(names & key_positions)
    if has_queries == has_keys:
        return _Positions.BOTH_OR_NEITHER
    return _Positions.QUERIES if has_queries else _Positions.KEYS


def _size(op: Op, names: frozenset[str]) -> int:
    """Elements along these factors of an op."""
    return math.prod(op.rule.size(name) for name in names)


def _operand_dtype(op: Op, tensors: Tensors) -> DType:
    """The element type that the product runs at: its wider operand's."""
    return max((tensors[tensor_id].dtype for tensor_id in op.inputs[:2]), key=lambda dtype: dtype.size_bytes)


def _product_of(gemm: Gemm, dtype: str) -> Product:
    return Product(batch=gemm.batch, m=gemm.m, n=gemm.n, k=gemm.k, dtype=dtype)


_BUILDERS: dict[OpKind, Callable[[Op, Tensors], Work]] = {
    OpKind.CONTRACTION: _product,
    OpKind.CONVOLUTION: _product,
    OpKind.ATTENTION: _attention,
    **dict.fromkeys(
        (
            OpKind.ELEMENTWISE,
            OpKind.DROPOUT,
            OpKind.SOFTMAX,
            OpKind.NORM,
            OpKind.REDUCTION,
            OpKind.LOOKUP,
            OpKind.COPY,
            OpKind.SORT,
            OpKind.OPAQUE,
        ),
        _vector,
    ),
    OpKind.SCATTER: _scatter,
    OpKind.VIEW: _view,
}


_TRANSCENDENTAL = 8
"""Lane operations of exp, log and the like: range reduction and a short polynomial."""

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


def softmax_operations() -> int:
    """Lane operations per element of a softmax."""
    return _BY_FUNCTION["softmax"]


def attention_operations(op: Op) -> int:
    """Lane operations per score of fused attention, whose scores and mask are made again backward.

    Its attribute ``operations`` counts what is done to scores besides softmax and dropout, backward as often again.
    """
    functions = ["softmax"]
    if op.attribute("probability") is not None:
        functions.append("dropout")
    besides = op.attribute("operations")
    more = besides if isinstance(besides, int) else 0
    if op.phase is Phase.BACKWARD:
        functions += [f"{function}_backward" for function in functions]
        more *= 2
    return sum(_BY_FUNCTION[function] for function in functions) + more


_NEWTON_SCHULZ_STEPS = 5
_LARGEST_SIDE = 4096
"""The shorter side of the matrices that Muon is priced on: that of models around ten billion parameters."""
_ASPECT = 4
"""The longer side over the shorter one, as in the feed-forward part of a transformer."""
_PASSES_OVER_GRADIENTS = 4
"""Copies are written, read for the norm, read and written to be scaled."""


def update_work(recipe: PrecisionRecipe, parameters: int, *, stack: Stack = PERFECT_STACK) -> Work:
    """The update of the ``parameters`` that one device updates; where there are none, it is a `CostError`."""
    check_sizes("update", parameters=parameters)
    moved = recipe.update_bytes
    if not stack.fuses_update:
        size = recipe.master_bytes or recipe.gradient_bytes
        moved += recipe.gradient_bytes + _PASSES_OVER_GRADIENTS * size
    work = vector_work(recipe.update_operations * parameters, moved * parameters)
    return replace(work, products=_newton_schulz(parameters)) if recipe.orthogonalizes_updates else work


def _newton_schulz(parameters: int) -> tuple[Product, ...]:
    """The products that orthogonalize the updates of so many parameters, in bf16."""
    side = min(_LARGEST_SIDE, max(1, math.isqrt(parameters // _ASPECT)))
    steps = _NEWTON_SCHULZ_STEPS * math.ceil(parameters / (_ASPECT * side * side))
    sizes = ((side, side, _ASPECT * side), (side, side, side), (side, _ASPECT * side, side))
    return tuple(Product(batch=steps, m=m, n=n, k=k, dtype="bfloat16") for m, n, k in sizes)
