"""From an op and its rule to the work that it asks for, by kind.

    contraction   the GEMM of its rule, on operands as they are stored
    convolution   the GEMM that it becomes; its traffic is that of the image itself, not of unfolded patches, tiled as
                  if every block of the image were exact: optimistic where a small buffer makes windows overlap
    attention     a fused kernel: score and context products (backward also the scores again), softmax and dropout on
                  the vector cores at the same time, scores never off the chip
    vector kinds  elements x operations per element, against every operand read and every result written once
    lookup        only the rows that are picked are read; scatter also reads the rows that it adds to
    opaque        memory-bound vector work on everything it touches
    view          nothing

Sizes come from the rule alone, so an op with a local rule is priced at its local size; element types come from the
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from phaze.cost.traffic import AttentionTiling, ProductTiling
from phaze.cost.vector import attention_operations, vector_operations
from phaze.cost.work import VIEW, Product, Work
from phaze.errors import CostError
from phaze.ir import DType, Gemm, Op, OpKind, Phase, Tensor
from phaze.ir.rule import Dims, names_of

__all__ = ["op_work", "read_bytes", "written_bytes"]

Tensors = Mapping[str, Tensor]


def op_work(op: Op, tensors: Tensors) -> Work:
    """The work of one op; a `CostError` where its kind has none (a collective's depends on its mesh axis)."""
    build = _BUILDERS.get(op.kind)
    if build is None:
        raise CostError(
            f"op {op.id!r}: nobody prices ops of kind {op.kind} ({op.function}). Price collectives on their mesh axis "
            "with phaze.cost.price_collective, or add a price through the hook phaze_op_prices."
        )
    return build(op, tensors)


def read_bytes(op: Op, tensors: Tensors) -> tuple[float, ...]:
    """Bytes that each operand gives."""
    return tuple(
        float(count) * tensors[tensor_id].dtype.size_bytes
        for tensor_id, count in zip(op.inputs, op.elements_read, strict=True)
    )


def written_bytes(op: Op, tensors: Tensors) -> tuple[float, ...]:
    """Bytes that each result receives."""
    return tuple(
        float(count) * tensors[tensor_id].dtype.size_bytes
        for tensor_id, count in zip(op.outputs, op.elements_written, strict=True)
    )


def _view(op: Op, tensors: Tensors) -> Work:
    return VIEW


def _vector(op: Op, tensors: Tensors) -> Work:
    moved = sum(read_bytes(op, tensors)) + sum(written_bytes(op, tensors))
    return Work(vector_operations=vector_operations(op), streamed_bytes=moved)


def _scatter(op: Op, tensors: Tensors) -> Work:
    added_to = float(op.rule.work) * tensors[op.outputs[0]].dtype.size_bytes
    moved = sum(read_bytes(op, tensors)) + sum(written_bytes(op, tensors)) + added_to
    return Work(vector_operations=vector_operations(op), streamed_bytes=moved)


def _product(op: Op, tensors: Tensors) -> Work:
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
    return Work(products=(_product_of(gemm, dtype),), tilings=(tiling,))


def _attention(op: Op, tensors: Tensors) -> Work:
    query, key, value = (names_of(dims) for dims in op.rule.operands[:3])
    rows, length = query - key, (key & value) - query
    is_backward = op.phase is Phase.BACKWARD
    gemms = op.gemms
    scores = _scores(op, gemms)
    sides = {"near": 0.0, "far": 0.0, "other": 0.0}
    for dims, moved in zip(op.rule.operands, read_bytes(op, tensors), strict=True):
        sides[_side(dims, rows, length)] += moved
    accumulated = 0.0
    for dims, moved in zip(op.rule.results, written_bytes(op, tensors), strict=True):
        if (side := _side(dims, rows, length)) == "far":
            accumulated += moved
        else:
            sides[side] += moved
    dtype = _operand_dtype(op, tensors)
    width = (scores.k + _size(op, value - key)) * (2 if is_backward else 1)
    computed = (scores, *gemms) if is_backward else gemms
    work = Work(
        products=tuple(_product_of(gemm, dtype) for gemm in computed),
        vector_operations=float(attention_operations(op)) * scores.batch * scores.m * scores.n,
        streamed_bytes=sum(sides.values()) + accumulated,
    )
    if not (sides["near"] and sides["far"]):
        return work
    tiling = AttentionTiling(
        heads=scores.batch,
        queries=scores.m,
        keys=scores.n,
        query_width=width,
        key_width=width,
        near_bytes=sides["near"],
        far_bytes=sides["far"],
        accumulated_bytes=accumulated,
        element_bytes=dtype.size_bytes,
    )
    return replace(work, tilings=(tiling,), streamed_bytes=sides["other"])


def _scores(op: Op, gemms: tuple[Gemm, ...]) -> Gemm:
    """The product of query and key."""
    if op.phase is not Phase.BACKWARD:
        return gemms[0]
    to_query = gemms[0]
    return Gemm(to_query.batch, to_query.m, to_query.k, to_query.n)


def _side(dims: Dims, rows: frozenset[str], length: frozenset[str]) -> str:
    names = names_of(dims)
    if names & rows and not names & length:
        return "near"
    return "far" if names & length and not names & rows else "other"


def _size(op: Op, names: frozenset[str]) -> int:
    return math.prod(op.rule.size(name) for name in names)


def _operand_dtype(op: Op, tensors: Tensors) -> DType:
    """The element type that the product runs at: its wider operand's."""
    return max((tensors[tensor_id].dtype for tensor_id in op.inputs[:2]), key=lambda dtype: dtype.size_bytes)


def _product_of(gemm: Gemm, dtype: DType) -> Product:
    return Product(batch=gemm.batch, m=gemm.m, n=gemm.n, k=gemm.k, dtype=dtype.value)


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
