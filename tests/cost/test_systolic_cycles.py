import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.scale_sim import scale_sim_cycles

from phaze.cost.systolic_cycles import array_grid, product_cycles

RUNS = Path(__file__).parents[1] / "data" / "scalesim_gemm.csv"
"""Compute cycles that SCALE-Sim 3.0 reports for products on one array."""

SIZES = st.integers(1, 3000)


def test_the_closed_forms_equal_every_run_of_scale_sim() -> None:
    with RUNS.open() as file:
        rows = list(csv.DictReader(file))
    equal = [
        scale_sim_cycles(row["dataflow"], **{name: int(row[name]) for name in ("m", "n", "k", "rows", "cols")})
        == int(row["compute_cycles"])
        for row in rows
    ]
    assert (len(equal), all(equal)) == (75, True)


def by_hand(batch: int, m: int, n: int, k: int, rows: int, cols: int, arrays: int) -> int:
    """The formulas of the module, one candidate at a time, in whole numbers."""
    up = lambda a, b: -(-a // b)  # noqa: E731
    best = math.inf
    powers = [2**i for i in range(13)]
    for pieces in powers:
        for split in powers:
            if pieces * split > arrays:
                continue
            blocks, reduced = up(k, rows * split), int(split > 1)
            for stream, across in ((m, n), (n, m)):
                length = up(stream, pieces)
                units = up(batch * up(across, cols) * pieces * split, arrays)
                work = (units * blocks - 1) * max(length, rows) + length + reduced * units * length
                best = min(best, 2 * rows + cols - 2 + work)
            if pieces == 1:
                length, units = up(k, split), up(batch * up(m, rows) * up(n, cols) * split, arrays)
                work = (units - 1) * max(length, rows) + length + reduced * units * rows
                best = min(best, rows + cols - 2 + work)
    return int(best)


@given(st.integers(1, 50), SIZES, SIZES, SIZES, st.integers(1, 256), st.integers(1, 256), st.integers(1, 4096))
def test_spread_cycles_are_the_least_over_every_candidate(
    batch: int, m: int, n: int, k: int, rows: int, cols: int, arrays: int
) -> None:
    cycles = product_cycles(array_grid([rows], [cols], [arrays]), batch, m, n, k)
    assert cycles.total.tolist() == [by_hand(batch, m, n, k, rows, cols, arrays)]
    assert cycles.without_fill[0] <= cycles.total[0]
    assert cycles.without_fill[0] * rows * cols * arrays >= batch * m * n * k


@pytest.mark.parametrize("k", [1, 10, 100])
def test_a_single_tile_costs_what_scale_sim_counts(k: int) -> None:
    """One more than SCALE-Sim's number, which is that of the last cycle, counted from 0."""
    cycles = product_cycles(array_grid([16], [16], [1]), 1, 16, 16, k).total[0]
    assert cycles == scale_sim_cycles("os", m=16, n=16, k=k, rows=16, cols=16) + 1


def test_different_arrays_in_one_grid_do_not_disturb_each_other() -> None:
    triples = [(128, 128, 8), (16, 16, 432), (1, 16, 2), (2, 256, 1)]
    together = product_cycles(array_grid(*zip(*triples, strict=True)), 3, 100, 200, 300).total
    alone = [product_cycles(array_grid([r], [c], [p]), 3, 100, 200, 300).total[0] for r, c, p in triples]
    np.testing.assert_array_equal(together, alone)


@given(SIZES, SIZES, SIZES, st.integers(1, 256), st.integers(1, 256))
def test_overlap_never_costs_cycles_against_scale_sim(m: int, n: int, k: int, rows: int, cols: int) -> None:
    apart = [scale_sim_cycles(flow, m=m, n=n, k=k, rows=rows, cols=cols) for flow in ("ws", "is", "os")]
    assert product_cycles(array_grid([rows], [cols], [1]), 1, m, n, k).total[0] <= min(apart) + 1
