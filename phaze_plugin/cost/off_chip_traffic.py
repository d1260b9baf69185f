"""Off-chip bytes of matrix products and of fused attention: those of the best tiling that fits the memory in between.

A product Y[M, N] = X[M, K] W[K, N] with X, W, Y bytes in total reads and writes, when the memory of S bytes holds

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
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phaze.cost.size_checks import check_amounts, check_sizes

__all__ = [
    "AttentionTiling",
    "ProductTiling",
    "Tiling",
]

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
        memory = memory_bytes[:, None]
        # Both forms are evaluated from either side: X along M with W along N, and the other way round.
        sides = (self.m, self.left_bytes), (self.n, self.right_bytes)
        forms = [
            form
            for (dim, operand_bytes), (second_dim, second_bytes) in (sides, sides[::-1])
            for form in (
                self._output_resident(memory, dim, second_dim, operand_bytes, second_bytes),
                self._operand_resident(memory, dim, operand_bytes, second_bytes),
            )
        ]
        least = np.minimum.reduce([form.min(axis=1) for form in forms])
        without_reuse = self.left_bytes * self.n + self.right_bytes * self.m
        moved: _Floats = np.minimum(least, without_reuse) + self.output_bytes
        return moved

    def _output_resident(
        self, memory: _Floats, dim: int, second_dim: int, operand_bytes: float, second_bytes: float
    ) -> _Floats:
        """A block of the result stays; block counts along ``dim`` are tried, and the least along ``second_dim`` follow.

        The operand along a dim is read once for every block along the second dim, and the other way round.
        """
        counts = _block_counts(dim)
        side = np.ceil(dim / counts)
        sliver = 2 * self.element_bytes
        room = np.floor((memory - sliver * side) / (_ACCUMULATOR_BYTES * side + sliver))
        return operand_bytes * _blocks(second_dim, room) + second_bytes * counts

    def _operand_resident(self, memory: _Floats, dim: int, resident_bytes: float, streamed_bytes: float) -> _Floats:
        """A block of the operand along ``dim`` stays; counts of blocks of K are tried, those of ``dim`` follow."""
        counts = _block_counts(self.k)
        depth = np.ceil(self.k / counts)
        sliver = 2 * self.element_bytes
        room = np.floor((memory - sliver * depth) / (self.element_bytes * depth + 2 * _ACCUMULATOR_BYTES))
        spilled = 2 * _ACCUMULATOR_BYTES * self.batch * float(self.m) * self.n * (counts - 1)
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


def _block_counts(size: int) -> _Floats:
    """Block counts to try along a dim, never more than its size."""
    powers = 2.0 ** np.arange(_LARGEST_COUNT_EXPONENT + 1)
    counts: _Floats = np.sort(np.concatenate((powers, 3 * powers)))
    return np.minimum(counts, np.float64(size))


def _blocks(size: int, room: _Floats) -> _Floats:
    """Blocks of ``room`` along a dim of ``size``; infinitely many where nothing fits."""
    fits = room >= 1
    counts: _Floats = np.where(fits, np.ceil(size / np.where(fits, room, 1.0)), np.inf)
    return counts
