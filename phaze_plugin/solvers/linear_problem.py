"""A linear problem that belongs to no solver: how it is built, and the answer that every solver gives to it.

    minimise    offset + c x
    subject to  row_lower <= A x <= row_upper
                lower <= x <= upper,   x_j integral where is_integer_j

Rows are stored sparse (row_starts, row_columns, row_values: compressed rows). Bounds may be infinite. The answer is a
status, a solution or none, a proven lower bound on the objective, and a report of what really ran.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phaze.errors import SolverError

__all__ = [
    "LinearProblem",
    "LinearResult",
    "LinearSolver",
    "ProblemBuilder",
    "SolveReport",
    "SolveStatus",
    "WorkLimits",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class SolveStatus(StrEnum):
    """How a solve ended. Only `REFUSED` means that the solver never tried."""

    OPTIMAL = "optimal"  # proven to the requested gap
    FEASIBLE = "feasible"  # a limit was reached with a solution in hand
    INFEASIBLE = "infeasible"
    UNBOUNDED = "unbounded"
    LIMIT = "limit"  # a limit was reached without any solution
    REFUSED = "refused"  # not importable, not licensed for this size, or not this solver's kind of problem


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimits:
    """How far a solve may go. The same limits and seed give the same answer, unless `wall_s` strikes.

    `work` is deterministic and roughly a second of one core per unit: CP-SAT's deterministic time, Gurobi's work
    units, and `NODES_PER_WORK` branch-and-bound nodes for HiGHS and SCIP, which have no finer clock.
    `relative_gap` is (objective - bound) / |objective|.
    """

    relative_gap: float = 0.0
    work: float | None = None
    wall_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.relative_gap < math.inf:
            raise ValueError(f"relative_gap is {self.relative_gap}; expected a number of at least 0, such as 0.01")
        for name, value in (("work", self.work), ("wall_s", self.wall_s)):
            if value is not None and not value > 0.0:
                raise ValueError(f"{name} is {value}; expected a positive number, or None for no limit")
        if not 0 <= self.seed < 2_000_000_000:
            raise ValueError(f"seed is {self.seed}; expected 0 to 1999999999")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearProblem:
    """Variables with bounds and integrality, sparse rows with two-sided bounds, an objective to minimise.

    `start` is an optional known solution, a hint that solvers may use. Arrays are read-only. Raises SolverError where
    arrays disagree in length, name a missing variable, or hold NaN or crossed bounds.
    """

    name: str
    lower: FloatArray
    upper: FloatArray
    is_integer: BoolArray
    objective: FloatArray
    row_starts: IntArray
    row_columns: IntArray
    row_values: FloatArray
    row_lower: FloatArray
    row_upper: FloatArray
    offset: float = 0.0
    start: FloatArray | None = None

    def __post_init__(self) -> None:
        for field_name in ("lower", "upper", "objective", "row_values", "row_lower", "row_upper", "start"):
            value = getattr(self, field_name)
            if value is not None:
                object.__setattr__(self, field_name, _frozen(value, np.float64))
        object.__setattr__(self, "is_integer", _frozen(self.is_integer, np.bool_))
        for field_name in ("row_starts", "row_columns"):
            object.__setattr__(self, field_name, _frozen(getattr(self, field_name), np.int64))
        _check_variables(self)
        _check_rows(self)

    @property
    def variable_count(self) -> int:
        """Number of variables."""
        return len(self.lower)

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return len(self.row_lower)

    @property
    def row_of_entry(self) -> IntArray:
        """The row index of every stored coefficient."""
        return np.repeat(np.arange(self.row_count), np.diff(self.row_starts))

    def row_activity(self, solution: FloatArray) -> FloatArray:
        """A x for a given x."""
        products = self.row_values * solution[self.row_columns]
        return np.bincount(self.row_of_entry, weights=products, minlength=self.row_count).astype(np.float64)

    def objective_at(self, solution: FloatArray) -> float:
        """The objective's value at a given x."""
        return float(self.objective @ solution + self.offset)

    def violation(self, solution: FloatArray) -> float:
        """The largest breach of a bound, a row or integrality, relative to the size of the row; 0 if x is feasible."""
        activity = self.row_activity(solution)
        scale = 1.0 + np.bincount(
            self.row_of_entry, weights=np.abs(self.row_values * solution[self.row_columns]), minlength=self.row_count
        )
        breaches = [
            np.maximum(self.lower - solution, solution - self.upper) / (1.0 + np.abs(solution)),
            np.maximum(self.row_lower - activity, activity - self.row_upper) / scale,
            np.abs(solution - np.round(solution))[self.is_integer],
        ]
        return max([0.0, *(float(array.max()) for array in breaches if array.size)])


def _frozen(values: ArrayLike, dtype: type[np.generic]) -> NDArray[np.generic]:
    array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


def _check_variables(problem: LinearProblem) -> None:
    count = len(problem.lower)
    for field_name in ("upper", "is_integer", "objective", "start"):
        value = getattr(problem, field_name)
        if value is not None and value.shape != (count,):
            raise SolverError(f"{problem.name}: {field_name} has shape {value.shape}; expected ({count},) as lower")
    if not (np.isfinite(problem.objective).all() and math.isfinite(problem.offset)):
        raise SolverError(f"{problem.name}: the objective holds NaN or infinity; leave such choices out of the problem")
    bad = np.flatnonzero(~(problem.lower <= problem.upper))
    if bad.size:
        j = int(bad[0])
        raise SolverError(
            f"{problem.name}: variable {j} has bounds [{problem.lower[j]}, {problem.upper[j]}]; expected lower <= upper"
        )


def _check_rows(problem: LinearProblem) -> None:
    rows, entries = len(problem.row_lower), len(problem.row_columns)
    if problem.row_upper.shape != (rows,) or problem.row_starts.shape != (rows + 1,):
        raise SolverError(f"{problem.name}: row_upper and row_starts must have {rows} and {rows + 1} entries")
    if problem.row_starts[0] != 0 or problem.row_starts[-1] != entries or (np.diff(problem.row_starts) < 0).any():
        raise SolverError(f"{problem.name}: row_starts must rise from 0 to the {entries} stored coefficients")
    if problem.row_values.shape != (entries,) or not np.isfinite(problem.row_values).all():
        raise SolverError(f"{problem.name}: row_values must be {entries} finite numbers")
    if entries and not (problem.row_columns.min() >= 0 and problem.row_columns.max() < problem.variable_count):
        raise SolverError(f"{problem.name}: a row names a variable outside 0..{problem.variable_count - 1}")
    bad = np.flatnonzero(~(problem.row_lower <= problem.row_upper))
    if bad.size:
        i = int(bad[0])
        raise SolverError(
            f"{problem.name}: row {i} is [{problem.row_lower[i]}, {problem.row_upper[i]}]; expected lower <= upper"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _VariableBlock:
    """Variables that were added together."""

    lower: FloatArray
    upper: FloatArray
    is_integer: BoolArray
    cost: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _RowBlock:
    """Rows that were added together; all have equally many terms."""

    columns: IntArray  # [row, term]
    values: FloatArray  # [row, term]
    lower: FloatArray
    upper: FloatArray


@dataclass(slots=True)
class ProblemBuilder:
    """Builds a `LinearProblem` from blocks of variables and rows, many at a time, given as numpy arrays."""

    name: str
    _variables: list[_VariableBlock] = field(default_factory=list)
    _rows: list[_RowBlock] = field(default_factory=list)
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
        self._variables.append(
            _VariableBlock(
                _repeated(lower, count), _repeated(upper, count), np.full(count, integer), _repeated(cost, count)
            )
        )
        first = self._variable_count
        self._variable_count += count
        return np.arange(first, first + count, dtype=np.int64)

    def binaries(self, count: int, *, cost: ArrayLike = 0.0) -> IntArray:
        """Add `count` variables that are 0 or 1, and return their indices."""
        return self.variables(count, upper=1.0, cost=cost, integer=True)

    def rows(
        self, columns: ArrayLike, values: ArrayLike = 1.0, *, lower: ArrayLike = -math.inf, upper: ArrayLike = math.inf
    ) -> None:
        """Add one row per line of `columns` (rows x terms, or one row given flat); values and bounds broadcast."""
        terms = np.atleast_2d(np.asarray(columns, np.int64))
        coefficients = np.broadcast_to(np.asarray(values, np.float64), terms.shape)
        self._rows.append(_RowBlock(terms, coefficients, _repeated(lower, len(terms)), _repeated(upper, len(terms))))

    def build(self, *, offset: float = 0.0, start: FloatArray | None = None) -> LinearProblem:
        """The finished problem; `offset` is added to the objective, `start` is a known solution."""
        row_lengths = [np.full(len(block.columns), block.columns.shape[1]) for block in self._rows]
        no_integers, no_flags = np.zeros(0, np.int64), np.zeros(0, np.bool_)  # so that empty problems concatenate too
        row_ends = np.cumsum(np.concatenate([no_integers, *row_lengths]))
        return LinearProblem(
            name=self.name,
            lower=_joined([block.lower for block in self._variables]),
            upper=_joined([block.upper for block in self._variables]),
            is_integer=np.concatenate([no_flags, *(block.is_integer for block in self._variables)]),
            objective=_joined([block.cost for block in self._variables]),
            row_starts=np.concatenate([[0], row_ends]).astype(np.int64),
            row_columns=np.concatenate([no_integers, *(block.columns.ravel() for block in self._rows)]),
            row_values=_joined([block.values.ravel() for block in self._rows]),
            row_lower=_joined([block.lower for block in self._rows]),
            row_upper=_joined([block.upper for block in self._rows]),
            offset=offset,
            start=start,
        )


def _repeated(values: ArrayLike, count: int) -> FloatArray:
    return np.broadcast_to(np.asarray(values, np.float64), (count,))


def _joined(parts: list[FloatArray]) -> FloatArray:
    return np.concatenate([np.zeros(0), *parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveReport:
    """What really ran: the solver, its work, and why solvers preferred to it did not run."""

    solver: str
    work: float = 0.0  # in the solver's own deterministic units: nodes, deterministic time, work units
    work_unit: str = ""
    message: str = ""
    fallbacks: tuple[str, ...] = ()  # "gurobi: 2,400 variables exceed ..." for every solver passed over

    def __str__(self) -> str:
        told = f"{self.solver}: {self.work:g} {self.work_unit}".rstrip()
        parts = [told, self.message, *(f"fell back from {reason}" for reason in self.fallbacks)]
        return "; ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearResult:
    """A solver's answer. `bound` is a proven lower bound on the objective (-inf if there is none)."""

    status: SolveStatus
    report: SolveReport
    solution: FloatArray | None = None
    objective: float = math.inf
    bound: float = -math.inf


@runtime_checkable
class LinearSolver(Protocol):
    """What a solver offers; plugins add objects of this shape."""

    @property
    def name(self) -> str:
        """The name users ask for."""
        ...

    def is_importable(self) -> bool:
        """Whether the library is installed, found without importing it."""
        ...

    def refusal(self, problem: LinearProblem) -> str | None:
        """Why this problem cannot go to this solver (licence, size, kind of variables), or None if it can."""
        ...

    def solve(self, problem: LinearProblem, limits: WorkLimits) -> LinearResult:
        """Solve; never raises on infeasible problems, limits or licences: these are statuses."""
        ...
