"""Build a linear problem from blocks of variables and rows, many at a time, as numpy arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from phaze.solvers.problem import BoolArray, FloatArray, IntArray, LinearProblem

__all__ = ["ProblemBuilder"]


@dataclass(slots=True)
class ProblemBuilder:
    """Collects variables and rows, many at a time, into a `LinearProblem`."""

    name: str
    _columns: list[tuple[FloatArray, FloatArray, BoolArray, FloatArray]] = field(default_factory=list)
    _rows: list[tuple[IntArray, FloatArray, FloatArray, FloatArray]] = field(default_factory=list)
    _variable_count: int = 0

    def variables(
        self,
        count: int,
        *,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = math.inf,
        cost: ArrayLike = 0.0,
        integer: bool = False,
    ) -> IntArray:
        """Add `count` variables and return their indices; bounds and costs are numbers or arrays of that length."""
        self._columns.append(
            (
                np.broadcast_to(np.asarray(lower, np.float64), (count,)),
                np.broadcast_to(np.asarray(upper, np.float64), (count,)),
                np.full(count, integer),
                np.broadcast_to(np.asarray(cost, np.float64), (count,)),
            )
        )
        first = self._variable_count
        self._variable_count += count
        return np.arange(first, first + count, dtype=np.int64)

    def binaries(self, count: int, *, cost: ArrayLike = 0.0) -> IntArray:
        """Add `count` variables that are 0 or 1."""
        return self.variables(count, upper=1.0, cost=cost, integer=True)

    def rows(
        self, columns: ArrayLike, values: ArrayLike = 1.0, *, lower: ArrayLike = -math.inf, upper: ArrayLike = math.inf
    ) -> None:
        """Add one row per line of `columns` (rows x terms, or one row given flat); values and bounds broadcast."""
        terms = np.atleast_2d(np.asarray(columns, np.int64))
        self._rows.append(
            (
                terms,
                np.broadcast_to(np.asarray(values, np.float64), terms.shape),
                np.broadcast_to(np.asarray(lower, np.float64), (len(terms),)),
                np.broadcast_to(np.asarray(upper, np.float64), (len(terms),)),
            )
        )

    def build(self, *, offset: float = 0.0, start: FloatArray | None = None) -> LinearProblem:
        """The finished problem."""
        lengths = [np.full(len(terms), terms.shape[1]) for terms, *_ in self._rows]
        return LinearProblem(
            name=self.name,
            lower=_joined([column[0] for column in self._columns]),
            upper=_joined([column[1] for column in self._columns]),
            is_integer=np.concatenate([np.zeros(0, np.bool_), *(column[2] for column in self._columns)]),
            objective=_joined([column[3] for column in self._columns]),
            row_starts=np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths]))]).astype(
                np.int64
            ),
            row_columns=np.concatenate([np.zeros(0, np.int64), *(terms.ravel() for terms, *_ in self._rows)]),
            row_values=_joined([row[1].ravel() for row in self._rows]),
            row_lower=_joined([row[2] for row in self._rows]),
            row_upper=_joined([row[3] for row in self._rows]),
            offset=offset,
            start=start,
        )


def _joined(parts: list[FloatArray]) -> FloatArray:
    return np.concatenate([np.zeros(0), *parts])
