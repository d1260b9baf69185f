"""Cycles that a matrix product takes on systolic arrays of R rows and C columns, in the best of three dataflows.

One product Y[M, N] = X[M, K] W[K, N] on one array takes, as SCALE-Sim counts it (the tests compare with its runs):

    weight-stationary  Sr = K, Sc = N, T = M     (2R + C + T - 2) * ceil(Sr/R) * ceil(Sc/C) - 1
    input-stationary   Sr = K, Sc = M, T = N     (2R + C + T - 2) * ceil(Sr/R) * ceil(Sc/C) - 1
    output-stationary  Sr = M, Sc = N, T = K     (R + C + T - 2) * ceil(Sr/R) * ceil(Sc/C) - 1

Pricing departs from it in three documented steps.

1. Back-to-back tiles overlap: the next tile's stationary operand is loaded (or the last one's result drained) in R
   cycles while T cycles are streamed. The first fill is exposed, max(T, R) cycles remain for every tile but the last,
   and T for that one. (SCALE-Sim numbers cycles from 0; the -1 is not taken over.)
2. On P arrays, units of work are dealt out whole, u to the busiest array. The streamed dim is cut into s pieces of t
   and the contracted dim into p, whose partial sums cost one more pass of the streamed rows for their reduction
   ([p > 1], 0 or 1). With q tiles on the busiest array:

       weight-stationary  2R + C - 2 + (q - 1) max(t, R) + t + [p > 1] u t
                          t = ceil(M/s), u = ceil(B ceil(N/C) s p / P), q = u ceil(K/(R p))
       input-stationary   the same with M and N exchanged
       output-stationary  R + C - 2 + (u - 1) max(t, R) + t + [p > 1] u R
                          t = ceil(K/p), u = ceil(B ceil(M/R) ceil(N/C) p / P)

3. The best dataflow and the best powers of two s, p with s p <= P are taken.

`array_grid` lists the candidates (s, p) of step 3; `_streamed` and `_stationary_output` evaluate the formulas of step 2
without their first fill, which `product_cycles` adds before it takes the least.

Every candidate grows with B, M, N, K and shrinks with P, and more arrays only add candidates, so the least one obeys
the laws of the cost model by construction; no candidate has fewer than B M N K / (R C P) cycles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "ArrayGrid",
    "Cycles",
    "array_grid",
    "product_cycles",
]

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayGrid:
    """Distinct (rows, cols, arrays) triples with their candidate splits, flattened.

    ``rows`` and ``cols`` are R and C of each triple, and ``first`` says where its candidates begin in the flat arrays.
    Those hold, for each candidate, R, C and P, the pieces s and p, and 1 where p > 1.
    """

    rows: _Floats
    cols: _Floats
    first: NDArray[np.int64]
    flat_rows: _Floats
    flat_cols: _Floats
    flat_arrays: _Floats
    stream_pieces: _Floats
    contracted_pieces: _Floats
    is_reduced: _Floats


Size = int | _Floats
"""A size of one product, or of several as a column: results then have a row for each product."""


@dataclass(frozen=True, slots=True, eq=False)
class Cycles:
    """Cycles per triple: in total, and what would remain if arrays filled and drained in no time."""

    total: _Floats
    without_fill: _Floats

    def __add__(self, later: Cycles) -> Cycles:
        """Both, one after the other."""
        return Cycles(self.total + later.total, self.without_fill + later.without_fill)


def array_grid(rows: ArrayLike, cols: ArrayLike, arrays: ArrayLike) -> ArrayGrid:
    """All candidate splits of distinct (rows, cols, arrays) triples."""
    row, col, count = (np.asarray(value, dtype=np.int64) for value in (rows, cols, arrays))
    depth = np.array([int(value).bit_length() - 1 for value in count], dtype=np.int64)
    candidates = (depth + 1) * (depth + 2) // 2
    first = np.concatenate(([0], np.cumsum(candidates)[:-1])).astype(np.int64)
    triple = np.repeat(np.arange(len(row)), candidates)
    # Exponents of (s, p), in order of their sum, so that a triple with fewer arrays uses a prefix of the list.
    pieces = [(stream, total - stream) for total in range(int(depth.max(initial=0)) + 1) for stream in range(total + 1)]
    chosen = 2.0 ** np.array(pieces, dtype=np.float64)[np.arange(len(triple)) - first[triple]]
    return ArrayGrid(
        rows=row.astype(np.float64),
        cols=col.astype(np.float64),
        first=first,
        flat_rows=row[triple].astype(np.float64),
        flat_cols=col[triple].astype(np.float64),
        flat_arrays=count[triple].astype(np.float64),
        stream_pieces=chosen[:, 0].copy(),
        contracted_pieces=chosen[:, 1].copy(),
        is_reduced=(chosen[:, 1] > 1).astype(np.float64),
    )


def product_cycles(grid: ArrayGrid, batch: Size, m: Size, n: Size, k: Size) -> Cycles:
    """Least cycles of ``batch`` products of (m, k) with (k, n), spread over all arrays of each triple.

    With columns of sizes, [product, 1], the cycles are [product, triple].
    """
    blocks = np.ceil(k / (grid.flat_rows * grid.contracted_pieces))
    weight = _streamed(grid, batch, stream=m, across=n, blocks=blocks)
    inputs = _streamed(grid, batch, stream=n, across=m, blocks=blocks)
    output = _stationary_output(grid, batch, m, n, k)
    twice = 2 * grid.rows + grid.cols - 2
    once = grid.rows + grid.cols - 2
    total = np.minimum(twice + np.minimum(weight.total, inputs.total), once + output.total)
    bare = np.minimum(np.minimum(weight.without_fill, inputs.without_fill), output.without_fill)
    return Cycles(total, bare)


def _streamed(grid: ArrayGrid, batch: Size, *, stream: Size, across: Size, blocks: _Floats) -> Cycles:
    """Weight- or input-stationary work without its first fill."""
    length = np.ceil(stream / grid.stream_pieces)
    units = np.ceil(across / grid.flat_cols)
    units *= batch * grid.stream_pieces * grid.contracted_pieces
    units /= grid.flat_arrays
    np.ceil(units, out=units)
    reduction = grid.is_reduced * length
    bare = units * (blocks * length + reduction)
    slack = np.maximum(grid.flat_rows - length, 0.0)
    total = bare + (units * blocks - 1) * slack
    return _least(total, bare, grid.first)


def _stationary_output(grid: ArrayGrid, batch: Size, m: Size, n: Size, k: Size) -> Cycles:
    """Output-stationary work without its first fill; its only pieces are those of the contracted dim."""
    whole = np.flatnonzero(grid.stream_pieces == 1)
    rows, pieces = grid.flat_rows[whole], grid.contracted_pieces[whole]
    first = np.searchsorted(whole, grid.first)
    length = np.ceil(k / pieces)
    tiles = batch * np.ceil(m / rows) * np.ceil(n / grid.flat_cols[whole])
    units = np.ceil(tiles * pieces / grid.flat_arrays[whole])
    reduction = grid.is_reduced[whole] * rows
    bare = units * (length + reduction)
    total = bare + (units - 1) * np.maximum(rows - length, 0.0)
    return _least(total, bare, first)


def _least(total: _Floats, bare: _Floats, first: NDArray[np.int64]) -> Cycles:
    """The least over the candidates of each triple, which begin at ``first``."""
    return Cycles(np.minimum.reduceat(total, first, axis=-1), np.minimum.reduceat(bare, first, axis=-1))
