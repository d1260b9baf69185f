"""Matrix products and fused attention as kernels run them: the bytes that they move off chip, the keys that are seen.

Off-chip bytes are those of the best tiling that fits the memory in between. A product Y[M, N] = X[M, K] W[K, N] with
X, W, Y bytes in total reads and writes, when the memory of S bytes holds

    a block of Y (m x n accumulators of 4 bytes)   X ceil(N/n) + W ceil(M/m) + Y                (`_output_resident`)
    a block of X (m x k elements)                  X + W ceil(M/m) + Y + spilled partial sums  (`_operand_resident`)
    a block of W (k x n elements)                  W + X ceil(N/n) + Y + spilled partial sums  (`_operand_resident`)

together with two slivers (one in use, one arriving) of each streamed operand. Spilled partial sums are written and
read, 4 bytes each, once for every block of K but one. A single element always fits: without reuse X N + W M + Y.

One block count per kind comes from a fixed set (powers of two and three times those), the other is then the least that
fits. For a given count each form grows with the shape and shrinks with S, so the least does too, and none is below the
compulsory X + W + Y.

Fused attention keeps its scores on the chip. Per head, a block of m queries stays (query, output accumulator, running
maximum and sum) while keys and values pass, c = ceil(queries/m) times: Q + O + (K + V) c; or a head's keys and values
stay while queries pass: Q + O + K + V. Backward the gradients of keys and values pass as well, and every pass but the
first reads the sums that the last one wrote: Q + O + dO + dQ + (K + V) c + (dK + dV)(2 c - 1).

Masks (`seen_gemms`). Fused kernels go over the square of scores in blocks and leave out those that a causal mask, a
sliding window or chunks hide altogether (Dao, arXiv:2307.08691, section 3.1.1; JAX's splash attention likewise); a
block that is seen in part is computed whole. With S queries that are the last of T positions, in units of blocks, the
query block at position p (the last one at T - 1) sees

    causal   p + 1
    window   of w positions: at most w + 1, the one that its first query still sees and its own
    chunk    of c positions: at most c

Queries that are a part of the sequence, because it is split over devices, are taken for the last part: that device
works longest. Where each of n devices has an early and a late part (attribute `balanced_over`), it sees 1/n of what all
queries see. A mask that is known as a tensor only is computed whole, as kernels that take one do.

A size that cannot be is a `CostError` that names the owner, the size and the value (`check_sizes`, `check_amounts`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phaze.errors import CostError, shown
from phaze.ir import Gemm, Op
from phaze.ir.op import attention_gemms
from phaze.ir.rule import names_of

__all__ = [
    "BALANCED_OVER",
    "LARGEST_SIZE",
    "AttentionTiling",
    "ProductTiling",
    "Tiling",
    "check_amounts",
    "check_sizes",
    "product_traffic_bytes",
    "seen_gemms",
]

LARGEST_SIZE = 2**60
"""Sizes up to this stay exact in 64-bit integers, and are far above any tensor's."""


def check_sizes(owner: str, **sizes: object) -> None:
    """Refuse a size that is not a whole number of at least 1."""
    for name, value in sizes.items():
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_whole or not 1 <= int(value) <= LARGEST_SIZE:  # type: ignore[call-overload]
            raise CostError(f"{owner}: {name} is {shown(value)}; expected a whole number of at least 1.")


def check_amounts(owner: str, *, may_be_zero: bool = False, **amounts: float) -> None:
    """Refuse an amount that is not finite or is negative, and zero unless it may be that."""
    for name, value in amounts.items():
        if not (value >= 0 if may_be_zero else value > 0) or not math.isfinite(value):
            expected = "at least 0" if may_be_zero else "above 0"
            raise CostError(f"{owner}: {name} is {shown(value)}; expected a finite number {expected}.")


BALANCED_OVER = "balanced_over"
"""The attribute of a causal attention that says over how many devices its queries are divided so that all see alike."""

BLOCK = 128
"""Positions in a block of scores: what FlashAttention-2 uses for queries and splash attention at least for both."""


def seen_blocks(op: Op) -> int | None:
    """Blocks of each head's scores that an attention op computes; None where it computes all scores."""
    query, key, value = (names_of(dims) for dims in op.rule.operands[:3])
    causal = op.attribute("causal")
    if not isinstance(causal, str):
        return None
    queries = math.prod(op.rule.size(name) for name in causal.split())
    keys = math.prod(op.rule.size(name) for name in (key & value) - query)
    balanced = op.attribute(BALANCED_OVER)
    devices = balanced if isinstance(balanced, int) else 1
    blocks = -(-_seen_blocks(-(-queries * devices // BLOCK), -(-keys // BLOCK), _span(op)) // devices)
    return blocks if blocks * BLOCK * BLOCK < queries * keys else None


def seen_gemms(op: Op) -> tuple[Gemm, ...]:
    """The matrix products of an attention op on what is seen: its blocks of queries, each with a block of keys.

    `Op.gemms` are those of the whole square.
    """
    blocks, causal = seen_blocks(op), op.attribute("causal")
    if blocks is None:
        return op.gemms
    query, key = (names_of(dims) for dims in op.rule.operands[:2])
    repeats = math.prod(op.rule.size(name) for name in query - key - frozenset(str(causal).split()))
    return attention_gemms(op, rows=repeats * blocks * BLOCK, keys=BLOCK)


def _span(op: Op) -> int | None:
    """The most blocks that a query block sees because of a window or chunk."""
    window, chunk = op.attribute("window"), op.attribute("chunk")
    spans = []
    if isinstance(window, int):
        spans.append(-(-window // BLOCK) + 1)
    if isinstance(chunk, int):
        spans.append(-(-chunk // BLOCK))
    return min(spans, default=None)


def _seen_blocks(queries: int, keys: int, span: int | None) -> int:
    """Blocks of scores that are not hidden, where the query blocks are the last ones of the key blocks."""
    beyond = max(0, queries - keys)  # queries without keys of their own see all
    rows = queries - beyond
    first = keys - rows + 1
    most = keys if span is None else min(span, keys)
    growing = max(0, min(rows, most - first + 1))  # rows that see fewer than the most
    return growing * first + growing * (growing - 1) // 2 + (rows - growing + beyond) * most


_Floats = NDArray[np.float64]
_ACCUMULATOR_BYTES = 4.0
"""Partial sums are kept in fp32."""
_LARGEST_COUNT_EXPONENT = 24
"""Block counts up to 3 * 2**24 are tried: more than any dim has blocks, in few enough candidates to price at once."""


class Tiling(Protocol):
    """Traffic to and from the memory outside, as a function of the memory in between."""

    @abstractmethod
    def traffic_bytes(self, memory_bytes: _Floats) -> _Floats:
        """Least bytes moved, for each size of the memory in between."""

    @property
    @abstractmethod
    def compulsory_bytes(self) -> float:
        """Bytes that move however large the memory is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTiling:
    """``batch`` products of (m, k) with (k, n).

    Bytes are those of operands and result as stored, over the whole batch (an image, not its unfolded copies); output
    bytes are 0 when the result stays on the chip. ``element_bytes`` is the size of one operand element on the chip.
    """

    batch: int
    m: int
    n: int
    k: int
    left_bytes: float
    right_bytes: float
    output_bytes: float
    element_bytes: float

    def __post_init__(self) -> None:
        """Check that sizes are sizes."""
        check_sizes("matrix product", batch=self.batch, m=self.m, n=self.n, k=self.k)
        operands = {name: getattr(self, name) for name in ("left_bytes", "right_bytes", "element_bytes")}
        check_amounts("matrix product", **operands)
        check_amounts("matrix product", may_be_zero=True, output_bytes=self.output_bytes)

    @property
    def compulsory_bytes(self) -> float:
        """Every operand and the result once."""
        return self.left_bytes + self.right_bytes + self.output_bytes

    def traffic_bytes(self, memory_bytes: _Floats) -> _Floats:
        """Least bytes moved, for each size of the memory in between."""
        moved: _Floats = product_traffic_bytes([self], memory_bytes)[0]
        return moved


def product_traffic_bytes(tilings: Sequence[ProductTiling], memory_bytes: _Floats) -> _Floats:
    """Least bytes moved by each of several products, for each size of the memory in between: [product, size]."""
    columns = np.array([[getattr(tiling, name) for name in _COLUMNS] for tiling in tilings], dtype=np.float64)
    # All terms are [product, size, block count]; a product's own numbers are the same for all sizes and counts.
    products = dict(zip(_COLUMNS, columns.T[:, :, None, None], strict=True))
    memory = memory_bytes[None, :, None]
    # Both forms are evaluated from either side: X along M with W along N, and the other way round.
    sides = (products["m"], products["left_bytes"]), (products["n"], products["right_bytes"])
    forms = [
        form.min(axis=2)
        for (dim, operand_bytes), (second_dim, second_bytes) in (sides, sides[::-1])
        for form in (
            _output_resident(products, memory, dim, second_dim, operand_bytes, second_bytes),
            _operand_resident(products, memory, dim, operand_bytes, second_bytes),
        )
    ]
    without_reuse = products["left_bytes"] * products["n"] + products["right_bytes"] * products["m"]
    moved: _Floats = np.minimum(np.minimum.reduce(forms), without_reuse[:, :, 0]) + products["output_bytes"][:, :, 0]
    return moved


_COLUMNS = ("batch", "m", "n", "k", "left_bytes", "right_bytes", "output_bytes", "element_bytes")
"""The numbers of a product that its traffic depends on."""


def _output_resident(
    products: Mapping[str, _Floats],
    memory: _Floats,
    dim: _Floats,
    second_dim: _Floats,
    operand_bytes: _Floats,
    second_bytes: _Floats,
) -> _Floats:
    """A block of the result stays; block counts along ``dim`` are tried, and the least along ``second_dim`` follow.

    The operand along a dim is read once for every block along the second dim, and the other way round.
    """
    counts = _block_counts(dim)
    side = np.ceil(dim / counts)
    sliver = 2 * products["element_bytes"]
    room = np.floor((memory - sliver * side) / (_ACCUMULATOR_BYTES * side + sliver))
    return operand_bytes * _blocks(second_dim, room) + second_bytes * counts


def _operand_resident(
    products: Mapping[str, _Floats], memory: _Floats, dim: _Floats, resident_bytes: _Floats, streamed_bytes: _Floats
) -> _Floats:
    """A block of the operand along ``dim`` stays; counts of blocks of K are tried, those of ``dim`` follow."""
    counts = _block_counts(products["k"])
    depth = np.ceil(products["k"] / counts)
    element_bytes = products["element_bytes"]
    room = np.floor((memory - 2 * element_bytes * depth) / (element_bytes * depth + 2 * _ACCUMULATOR_BYTES))
    results = products["batch"] * products["m"] * products["n"]
    spilled = 2 * _ACCUMULATOR_BYTES * results * (counts - 1)
    return resident_bytes + streamed_bytes * _blocks(dim, room) + spilled


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiling:
    """Attention of ``heads`` heads (batch included) whose scores never leave the chip.

    Queries and keys are positions of one head. A query position that stays has ``query_width`` elements (query, output
    and, backward, their gradients), a key position that passes ``key_width``. Bytes are those of everything stored,
    over all heads: ``query_bytes`` of what has query positions, ``key_bytes`` of what has key positions and is read,
    and ``accumulated_bytes`` of what has key positions and is summed over queries (gradients of keys and values).
    """

    heads: int
    queries: int
    keys: int
    query_width: int
    key_width: int
    query_bytes: float
    key_bytes: float
    accumulated_bytes: float = 0.0
    element_bytes: float

    def __post_init__(self) -> None:
        """Check that sizes are sizes."""
        sizes = {name: getattr(self, name) for name in ("heads", "queries", "keys", "query_width", "key_width")}
        check_sizes("attention", **sizes)
        moved = {name: getattr(self, name) for name in ("query_bytes", "key_bytes", "element_bytes")}
        check_amounts("attention", **moved)
        check_amounts("attention", may_be_zero=True, accumulated_bytes=self.accumulated_bytes)

    @property
    def compulsory_bytes(self) -> float:
        """Every operand and the result once."""
        return self.query_bytes + self.key_bytes + self.accumulated_bytes

    def traffic_bytes(self, memory_bytes: _Floats) -> _Floats:
        """Least bytes moved, for each size of the memory in between."""
        sliver = 2 * self.element_bytes * self.key_width
        per_query = self.query_width * _ACCUMULATOR_BYTES + 2 * _ACCUMULATOR_BYTES
        room = np.maximum(1.0, np.floor((memory_bytes - sliver) / per_query))
        passes = np.ceil(self.queries / room)
        passing = self.query_bytes + self.key_bytes * passes + self.accumulated_bytes * (2 * passes - 1)
        resident = self.keys * self.key_width * self.element_bytes + 2 * per_query
        moved: _Floats = np.where(memory_bytes >= resident, self.compulsory_bytes, passing)
        return moved


def _block_counts(size: _Floats) -> _Floats:
    """Block counts to try along dims of these sizes, never more than a dim's size."""
    powers = 2.0 ** np.arange(_LARGEST_COUNT_EXPONENT + 1)
    counts: _Floats = np.sort(np.concatenate((powers, 3 * powers)))
    return np.minimum(counts, size)


def _blocks(size: _Floats, room: _Floats) -> _Floats:
    """Blocks of ``room`` along dims of these sizes; infinitely many where nothing fits."""
    fits = room >= 1
    counts: _Floats = np.where(fits, np.ceil(size / np.where(fits, room, 1.0)), np.inf)
    return counts
