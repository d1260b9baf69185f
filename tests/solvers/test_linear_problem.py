"""The neutral linear problem refuses what contradicts itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phaze.errors import SolverError
from phaze.solvers import ProblemBuilder


def test_builder_lays_out_blocks_in_order() -> None:
    builder = ProblemBuilder("blocks")
    x = builder.variables(2, lower=[0.0, 1.0], upper=4.0, cost=1.0)
    y = builder.binaries(1)
    builder.rows([[x[0], y[0]], [x[1], y[0]]], [1.0, -4.0], upper=[0.0, 1.0])
    problem = builder.build()
    assert (problem.variable_count, problem.row_count) == (3, 2)
    assert problem.row_activity(np.array([4.0, 2.0, 1.0])).tolist() == [0.0, -2.0]
    assert problem.violation(np.array([4.0, 2.0, 1.0])) == 0.0
    assert problem.violation(np.array([4.0, 2.0, 0.0])) > 0.1
    assert problem.violation(np.array([4.0, 2.0, 0.5])) == 0.5
    assert problem.objective_at(np.array([4.0, 2.0, 1.0])) == 6.0


def test_arrays_are_read_only() -> None:
    builder = ProblemBuilder("frozen")
    builder.binaries(1)
    with pytest.raises(ValueError, match="read-only"):
        builder.build().lower[0] = 3.0


def test_crossed_bounds_are_refused() -> None:
    builder = ProblemBuilder("crossed")
    builder.variables(2, lower=[0.0, 3.0], upper=2.0)
    with pytest.raises(SolverError, match=r"crossed: variable 1 has bounds \[3.0, 2.0\]"):
        builder.build()


def test_crossed_rows_are_refused() -> None:
    builder = ProblemBuilder("crossed")
    builder.rows(builder.binaries(2), 1.0, lower=3.0, upper=2.0)
    with pytest.raises(SolverError, match="row 0"):
        builder.build()


@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_costs_that_are_no_numbers_are_refused(cost: float) -> None:
    builder = ProblemBuilder("costs")
    builder.binaries(1, cost=cost)
    with pytest.raises(SolverError, match="NaN or infinity"):
        builder.build()


def test_rows_may_not_name_missing_variables() -> None:
    builder = ProblemBuilder("missing")
    builder.binaries(2)
    builder.rows([0, 2], 1.0, upper=1.0)
    with pytest.raises(SolverError, match=r"outside 0\.\.1"):
        builder.build()
