"""The scheduling problem as a constraint program for CP-SAT: intervals, cumulative cores, and integer times.

Variables (`_add_jobs`): each job i has a start, an end, and a choice y_i whether it is spread; an interval on one core
of length l_i and, if spreading is of use, an interval spread over all cores of length s_i; y_i says which is present.
The objective is the makespan, which is minimised. Constraints:

 1. precedence:   end_i <= start_j for every edge                                                  `_add_precedence`
 2. tensor cores: cumulative with capacity T; a job on one core takes 1, a spread job takes T             `_add_cores`
 3. vector cores: likewise with V; jobs that hold both appear on both sides; with exclusive spreading a
                  spread job fills both sides                                                             `_add_cores`
 4. links:        no two overlap                                                                          `_add_links`
 5. pairs:        if some jobs hold both and cores are scarce, each job on one core chooses its core by
                  number, and no two intervals overlap on any core                                        `_add_pairs`
 6. makespan:     at least every end                                                                   `_add_makespan`
 7. redundant:    cores x (makespan - time spread) >= one-core latencies, for tensor and for vector cores; with
                  exclusive spreading also makespan - time spread >= one-core latencies on a chain, for heavy
                  chains                                                                      `_add_redundant_bounds`

CP-SAT counts in integers: times are rounded down to a unit (`_unit`). Shorter latencies cannot make the optimum longer,
so the integer bound times the unit is a bound in seconds; the order found is timed anew with the true latencies. Where
all latencies are decimals of at most nine digits the unit is exact; else it is 2^-36 of the incumbent. Intervals have
no end variable: with ortools 9.15, intervals of one job that share start and end but differ in length led to wrong
proofs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from phaze.schedule.list_scheduling import Placed, Step, give_cores, makespan, order_of_starts, retime
from phaze.schedule.makespan_bounds import heavy_chains
from phaze.schedule.scheduling_problem import BoolArray, FloatArray, ReducedProblem
from phaze.tolerances import WHOLE_NUMBER

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

__all__ = ["CpSatOutcome", "solve_cp_sat"]

_DIGITS = 9
"""Decimal digits up to which times count as exact decimals: instances that people write have fewer."""

_FINE = 2.0**36
"""Units in the makespan of the incumbent where times are no exact decimals.

More would make the bound tighter by less than a billionth, and bring sums of times near the 64 bits of CP-SAT.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSatOutcome:
    """The best schedule known, a proven bound, and CP-SAT's deterministic time."""

    placed: tuple[Placed, ...]
    bound_s: float
    work: float


@dataclass(slots=True)
class _Model:
    """The CP-SAT model with times in whole units, and its variables in the order of the jobs."""

    cp: cp_model.CpModel
    latency: list[int]
    spread_latency: list[int]
    horizon: int  # no time is later
    makespan: cp_model.IntVar = field(init=False)
    start: list[cp_model.IntVar] = field(default_factory=list)
    end: list[cp_model.IntVar] = field(default_factory=list)
    is_spread: list[cp_model.IntVar | None] = field(default_factory=list)  # None where the job cannot be spread
    one_core: list[cp_model.IntervalVar] = field(default_factory=list)
    spread: list[cp_model.IntervalVar | None] = field(default_factory=list)
    core_choice: list[dict[int, cp_model.IntVar]] = field(default_factory=list)  # empty where no number is chosen


def solve_cp_sat(
    reduced: ReducedProblem,
    incumbent: tuple[Placed, ...],
    *,
    gap: float,
    work: float | None,
    workers: int = 1,
) -> CpSatOutcome:
    """Improve the incumbent to the relative `gap`, or until `work` units of deterministic time are spent.

    Several workers prove more, but which of equal schedules they find, and what they prove in a limit, may change from
    run to run.
    """
    from ortools.sat.python import cp_model

    unit_s = _unit(reduced, makespan(incumbent))
    model = _model(reduced, unit_s, incumbent)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 1  # with 0 the library spends minutes outside its deterministic time
    solver.parameters.relative_gap_limit = gap
    solver.parameters.presolve_inclusion_work_limit = 0  # can prove a wrong optimum: google/or-tools issue 5293
    if work is not None:
        solver.parameters.max_deterministic_time = work
    status = solver.solve(model.cp)
    spent = float(solver.response_proto.deterministic_time)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # the incumbent is within its horizon: only a limit ends so
        return CpSatOutcome(placed=incumbent, bound_s=solver.best_objective_bound * unit_s, work=spent)
    improved = retime(reduced, _steps(reduced, model, solver))
    best = min(improved, incumbent, key=makespan)
    bound_s = min(solver.best_objective_bound * unit_s, makespan(best))
    return CpSatOutcome(placed=best, bound_s=bound_s, work=spent)


def _unit(reduced: ReducedProblem, upper_s: float) -> float:
    """The largest exact decimal unit of all times, or a fine share of the makespan."""
    times = np.concatenate([reduced.latency_s, reduced.spread_s[np.isfinite(reduced.spread_s)]])
    for digits in range(_DIGITS + 1):
        scaled = times * 10.0**digits
        whole = np.round(scaled)
        if scaled.max() < _FINE and (np.abs(scaled - whole) <= WHOLE_NUMBER).all() and (whole >= 1).all():
            return 10.0**-digits
    return upper_s / _FINE


def _in_units(times: FloatArray, unit_s: float) -> list[int]:
    """Times in whole units, rounded down (but for the last digit of an exact decimal); -1 for infinite ones."""
    return [int(np.floor(time / unit_s + WHOLE_NUMBER)) if np.isfinite(time) else -1 for time in times]


def _model(reduced: ReducedProblem, unit_s: float, incumbent: tuple[Placed, ...]) -> _Model:
    """The whole model: variables, constraints, objective, and the incumbent as a hint."""
    from ortools.sat.python import cp_model

    cp = cp_model.CpModel()
    horizon = int(np.ceil(makespan(incumbent) / unit_s)) + reduced.count
    latency, spread_latency = _in_units(reduced.latency_s, unit_s), _in_units(reduced.spread_s, unit_s)
    model = _Model(cp, latency, spread_latency, horizon)
    _add_jobs(reduced, model)
    _add_precedence(reduced, model)
    _add_cores(reduced, model)
    _add_links(reduced, model)
    _add_pairs(reduced, model)
    _add_makespan(model)
    _add_redundant_bounds(reduced, model)
    _add_hint(model, incumbent, unit_s)
    return model


def _add_jobs(reduced: ReducedProblem, model: _Model) -> None:
    """The variables and intervals of every job."""
    cp, horizon = model.cp, model.horizon
    for job in range(reduced.count):
        latency, spread_latency = model.latency[job], model.spread_latency[job]
        start, end = cp.new_int_var(0, horizon, f"start{job}"), cp.new_int_var(0, horizon, f"end{job}")
        model.start.append(start)
        model.end.append(end)
        if np.isfinite(reduced.spread_s[job]):
            is_spread = cp.new_bool_var(f"spread{job}")
            cp.add(end == start + latency + (spread_latency - latency) * is_spread)
            model.is_spread.append(is_spread)
            model.one_core.append(cp.new_optional_fixed_size_interval_var(start, latency, ~is_spread, f"one{job}"))
            model.spread.append(cp.new_optional_fixed_size_interval_var(start, spread_latency, is_spread, f"all{job}"))
        else:
            cp.add(end == start + latency)
            model.is_spread.append(None)
            model.one_core.append(cp.new_fixed_size_interval_var(start, latency, f"one{job}"))
            model.spread.append(None)


def _add_precedence(reduced: ReducedProblem, model: _Model) -> None:
    """Constraint 1."""
    for before, after in np.argwhere(reduced.is_edge):
        model.cp.add(model.end[before] <= model.start[after])


def _sides(reduced: ReducedProblem) -> tuple[tuple[BoolArray, int], tuple[BoolArray, int]]:
    """For tensor and for vector cores: which jobs hold them, and how many there are."""
    return (reduced.uses_tensor, reduced.tensor_cores), (reduced.uses_vector, reduced.vector_cores)


def _add_cores(reduced: ReducedProblem, model: _Model) -> None:
    """Constraints 2 and 3."""
    for uses, cores in _sides(reduced):
        if not uses.any():
            continue
        intervals = [model.one_core[job] for job in np.flatnonzero(uses)]
        demands = [1] * len(intervals)
        for job, interval in enumerate(model.spread):
            if interval is not None and (uses[job] or reduced.is_exclusive):
                intervals.append(interval)
                demands.append(cores)
        model.cp.add_cumulative(intervals, demands, cores)


def _add_links(reduced: ReducedProblem, model: _Model) -> None:
    """Constraint 4."""
    model.cp.add_no_overlap([model.one_core[job] for job in np.flatnonzero(reduced.is_link)])


def _add_pairs(reduced: ReducedProblem, model: _Model) -> None:
    """Constraint 5; without it any free core serves, and numbers are given afterwards."""
    model.core_choice.extend({} for _ in range(reduced.count))
    tensor, vector = reduced.useful_cores
    is_scarce = tensor < reduced.uses_tensor.sum() or vector < reduced.uses_vector.sum()
    if not (reduced.is_both.any() and is_scarce):
        return
    on_tensor: list[list[cp_model.IntervalVar]] = [[] for _ in range(tensor)]
    on_vector: list[list[cp_model.IntervalVar]] = [[] for _ in range(vector)]
    for job in np.flatnonzero(~reduced.is_off_core):
        cores = min([tensor] * bool(reduced.uses_tensor[job]) + [vector] * bool(reduced.uses_vector[job]))
        choice = {core: model.cp.new_bool_var(f"core{job}_{core}") for core in range(cores)}
        is_spread = model.is_spread[job]
        model.cp.add_exactly_one([*choice.values(), *([] if is_spread is None else [is_spread])])
        model.core_choice[job] = choice
        for core, is_here in choice.items():
            interval = model.cp.new_optional_fixed_size_interval_var(
                model.start[job], model.latency[job], is_here, f"on{job}_{core}"
            )
            if reduced.uses_tensor[job]:
                on_tensor[core].append(interval)
            if reduced.uses_vector[job]:
                on_vector[core].append(interval)
    for intervals in (*on_tensor, *on_vector):
        model.cp.add_no_overlap(intervals)


def _add_makespan(model: _Model) -> None:
    """Constraint 6 and the objective."""
    model.makespan = model.cp.new_int_var(0, model.horizon, "makespan")
    model.cp.add_max_equality(model.makespan, model.end)
    model.cp.minimize(model.makespan)


def _add_redundant_bounds(reduced: ReducedProblem, model: _Model) -> None:
    """Constraint 7."""

    def on_one_core(jobs: Iterable[int]) -> cp_model.LinearExpr | int:
        chosen = ((model.latency[job], model.is_spread[job]) for job in jobs)
        return sum(latency * (1 if is_spread is None else 1 - is_spread) for latency, is_spread in chosen)

    def while_spread(jobs: Iterable[int]) -> cp_model.LinearExpr | int:
        chosen = ((model.spread_latency[job], model.is_spread[job]) for job in jobs)
        return sum(latency * is_spread for latency, is_spread in chosen if is_spread is not None)

    for uses, cores in _sides(reduced):
        excluding = range(reduced.count) if reduced.is_exclusive else np.flatnonzero(uses)
        if uses.any():
            model.cp.add(cores * model.makespan >= on_one_core(np.flatnonzero(uses)) + cores * while_spread(excluding))
    if reduced.is_exclusive:
        all_spread = while_spread(range(reduced.count))
        for chain in sorted(heavy_chains(reduced, reduced.latency_s, reduced.spread_s, reduced.tensor_cores)):
            on_cores = (job for job in chain if not reduced.is_off_core[job])
            model.cp.add(model.makespan >= all_spread + on_one_core(on_cores))


def _add_hint(model: _Model, incumbent: tuple[Placed, ...], unit_s: float) -> None:
    """Tell CP-SAT the incumbent, as a solution to start from."""
    for placed in incumbent:
        model.cp.add_hint(model.start[placed.position], int(placed.start_s / unit_s))
        is_spread = model.is_spread[placed.position]
        if is_spread is not None:
            model.cp.add_hint(is_spread, placed.is_spread)


def _steps(reduced: ReducedProblem, model: _Model, solver: cp_model.CpSolver) -> Sequence[Step]:
    """The order of starts, with the core numbers that were chosen or any that are free."""
    start = [solver.value(variable) for variable in model.start]
    spread = [chosen is not None and bool(solver.value(chosen)) for chosen in model.is_spread]
    order = order_of_starts(reduced, start)
    if not any(model.core_choice):
        return give_cores(reduced, [(job, spread[job]) for job in order])
    cores = [next((core for core, on in choice.items() if solver.value(on)), -1) for choice in model.core_choice]
    return [Step(job, spread[job], cores[job]) for job in order]
