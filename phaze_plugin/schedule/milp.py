"""The paper's integer program, on any linear solver.

Times are in units of the incumbent, whose makespan is the horizon 1. For each op i: start t_i, spread y_i, core x_ic
(c a core of its kind; a both op's c is a pair). For each pair of ops that may exclude each other, o_ij = 1 says that i
ends before j starts. With duration d_i = l_i - (l_i - s_i) y_i:

 1. precedence:        t_i + d_i <= t_j                        for every edge
 2. makespan:          t_i + d_i <= z                          for every op; minimise z
 3. one place:         y_i + sum_c x_ic = 1
 4. order:             t_i + d_i <= t_j + (1 - o_ij)           for every pair in both directions
 5. same core:         o_ij + o_ji >= x_ic + x_jc - 1          if both hold core c of one kind
 6. spread excludes:   o_ij + o_ji >= y_i                      if i, spread, excludes j (and likewise for j)
 7. links:             o_ij + o_ji >= 1                        for two links
 8. symmetry:          x_ic = 0 for c > the op's rank          k-th op of a kind on cores 0..k, if no both ops
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phaze.schedule.cores import Placed, Step, makespan, order_of_starts, retime
from phaze.schedule.reduce import BoolArray, FloatArray, IntArray, Reduced
from phaze.schedule.result import relative_gap
from phaze.solvers import (
    BUILT_IN_SOLVERS,
    LinearProblem,
    LinearSolver,
    ProblemBuilder,
    SolveReport,
    SolveStatus,
    WorkLimits,
    solve_linear,
)

__all__ = ["TOLERANCE", "MilpOutcome", "solve_milp"]

TOLERANCE = 1e-5
"""Linear solvers prove optima up to rounding: a relative gap up to this, under the status optimal, counts as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpOutcome:
    """The best schedule known, a proven bound, and the solver's report."""

    placed: tuple[Placed, ...]
    bound_s: float
    report: SolveReport


@dataclass(slots=True)
class _Variables:
    builder: ProblemBuilder
    start: IntArray
    spread: IntArray
    makespan: IntArray
    core: list[IntArray]  # for each op its core choices
    latency: FloatArray
    saved: FloatArray  # latency - spread, 0 where the op cannot be spread


def solve_milp(
    reduced: Reduced,
    incumbent: tuple[Placed, ...],
    *,
    limits: WorkLimits,
    solver: str = "highs",
    solvers: tuple[LinearSolver, ...] = BUILT_IN_SOLVERS,
) -> MilpOutcome:
    """Improve the incumbent with the linear solver of that name."""
    unit_s = makespan(incumbent)
    problem, variables = _problem(reduced, unit_s)
    result = solve_linear(problem, limits, solver=solver, solvers=solvers)
    best = incumbent
    if result.solution is not None:
        found = retime(reduced, _steps(reduced, variables, result.solution))
        best = min(found, incumbent, key=makespan)
    bound = min(max(result.bound, 0.0) * unit_s, makespan(best))
    if result.status is SolveStatus.OPTIMAL and relative_gap(makespan(best), bound) <= TOLERANCE:
        bound = makespan(best)  # the solver's proof, up to its own tolerance
    return MilpOutcome(placed=best, bound_s=bound, report=result.report)


def _problem(reduced: Reduced, unit_s: float) -> tuple[LinearProblem, _Variables]:
    builder = ProblemBuilder("schedule")
    can_spread = np.isfinite(reduced.spread_s)
    tensor, vector = reduced.useful_cores
    latency = reduced.latency_s / unit_s
    start = builder.variables(reduced.count, upper=1.0)
    spread = builder.variables(reduced.count, upper=can_spread.astype(float), integer=True)
    last = builder.variables(1, upper=1.0, cost=1.0)
    counts = np.minimum(np.where(reduced.uses_tensor, tensor, np.inf), np.where(reduced.uses_vector, vector, np.inf))
    core = [builder.binaries(int(count) if np.isfinite(count) else 0) for count in counts]
    saved = latency - np.where(can_spread, reduced.spread_s / unit_s, latency)
    variables = _Variables(builder, start, spread, last, core, latency, saved)
    _add_precedence(reduced, variables)
    _add_makespan(variables)
    _add_one_place(variables)
    _add_orders(reduced, variables)
    _add_symmetry(reduced, variables)
    return builder.build(), variables


def _add_precedence(reduced: Reduced, at: _Variables) -> None:
    before, after = np.argwhere(reduced.is_edge).T
    columns = np.stack([at.start[before], at.spread[before], at.start[after]], axis=1)
    values = np.stack([np.ones(len(before)), -at.saved[before], -np.ones(len(before))], axis=1)
    at.builder.rows(columns.reshape(-1, 3), values.reshape(-1, 3), upper=-at.latency[before])


def _add_makespan(at: _Variables) -> None:
    columns = np.stack([at.start, at.spread, np.repeat(at.makespan, len(at.start))], axis=1)
    values = np.stack([np.ones(len(at.start)), -at.saved, -np.ones(len(at.start))], axis=1)
    at.builder.rows(columns, values, upper=-at.latency)


def _add_one_place(at: _Variables) -> None:
    for spread, cores in zip(at.spread, at.core, strict=True):
        if len(cores):
            at.builder.rows(np.append(cores, spread), 1.0, lower=1.0, upper=1.0)


def _add_orders(reduced: Reduced, at: _Variables) -> None:
    is_ordered = reduced.is_before | reduced.is_before.T
    can_spread = np.isfinite(reduced.spread_s)
    for first in range(reduced.count):
        for second in range(first + 1, reduced.count):
            shares = _shared(reduced, first, second)
            excludes = _excludes(reduced, first, second, can_spread)
            both_links = bool(reduced.is_link[first] and reduced.is_link[second])
            if is_ordered[first, second] or not (shares or any(excludes) or both_links):
                continue
            order = at.builder.binaries(2)
            for a, b, o in ((first, second, order[0]), (second, first, order[1])):
                at.builder.rows(
                    [at.start[a], at.spread[a], at.start[b], o],
                    [1.0, -at.saved[a], -1.0, 1.0],
                    upper=1.0 - at.latency[a],
                )
            at.builder.rows(order, 1.0, lower=float(both_links), upper=1.0)
            if shares:
                common = min(len(at.core[first]), len(at.core[second]))
                pairs = [[*order, at.core[first][c], at.core[second][c]] for c in range(common)]
                at.builder.rows(pairs, [1.0, 1.0, -1.0, -1.0], lower=-1.0)
            for op, excluded in zip((first, second), excludes, strict=True):
                if excluded:
                    at.builder.rows([*order, at.spread[op]], [1.0, 1.0, -1.0], lower=0.0)


def _shared(reduced: Reduced, first: int, second: int) -> bool:
    """Whether two ops can meet on one core."""
    return bool(
        (reduced.uses_tensor[first] and reduced.uses_tensor[second])
        or (reduced.uses_vector[first] and reduced.uses_vector[second])
    )


def _excludes(reduced: Reduced, first: int, second: int, can_spread: BoolArray) -> tuple[bool, bool]:
    """Whether the first op, spread, excludes the second, and the other way round."""
    on_cores = not (reduced.is_off_core[first] or reduced.is_off_core[second])
    meet = on_cores and (reduced.is_exclusive or _shared(reduced, first, second))
    return bool(meet and can_spread[first]), bool(meet and can_spread[second])


def _add_symmetry(reduced: Reduced, at: _Variables) -> None:
    if reduced.is_both.any():
        return
    rank = {True: 0, False: 0}
    for op, cores in enumerate(at.core):
        unused = cores[rank[bool(reduced.uses_tensor[op])] + 1 :]
        if len(unused):
            at.builder.rows(unused, 1.0, upper=0.0)
        rank[bool(reduced.uses_tensor[op])] += 1


def _steps(reduced: Reduced, at: _Variables, solution: FloatArray) -> list[Step]:
    """The order of starts with the cores that were chosen."""
    spread = solution[at.spread] > 0.5
    order = order_of_starts(reduced, solution[at.start].tolist())
    chosen = [int(solution[cores].argmax()) if len(cores) else -1 for cores in at.core]
    return [Step(op, bool(spread[op]), -1 if spread[op] else chosen[op]) for op in order]
