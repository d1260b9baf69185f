"""The scheduling problem for CP-SAT: intervals, cumulative cores, and integers that keep the bound a bound.

Each op i has a start, an interval on one core of length l_i and, if that is of use, one spread of length s_i; exactly
one of the two is present.

 1. precedence:   end_i <= start_j for every edge
 2. tensor cores: cumulative with capacity T; an op on one core takes 1, spread it takes T
 3. vector cores: likewise with V; both ops appear on both sides; with exclusive spreading a spread op fills both
 4. links:        no two overlap
 5. pairs:        if there are both ops and cores are scarce, each op on one core chooses its core by number, and no two
                  intervals overlap on any core
 6. makespan:     at least every end; minimised
 7. redundant:    cores x (makespan - time spread) >= one-core latencies, for each kind of core; with exclusive
                  spreading also makespan - time spread >= one-core latencies on a chain, for heavy chains

CP-SAT counts in integers: times are rounded down to a unit. Shorter latencies cannot make the optimum longer, so the
integer bound times the unit is a bound in seconds; the order found is timed anew with the true latencies. Where all
latencies are decimals of at most nine digits the unit is exact; else it is 2^-36 of the incumbent. Intervals have no
end variable: with ortools 9.15, intervals of one op that share start and end but differ in length led to wrong proofs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze.schedule.bounds import heavy_chains
from phaze.schedule.cores import Placed, Step, give_cores, makespan, order_of_starts, retime
from phaze.schedule.reduce import FloatArray, Reduced

__all__ = ["CpSatOutcome", "solve_cp_sat"]

_DIGITS = 9
_FINE = 2.0**36


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSatOutcome:
    """The best schedule known, a proven bound, and CP-SAT's deterministic time."""

    placed: tuple[Placed, ...]
    bound_s: float
    work: float


@dataclass(slots=True)
class _Model:
    """The CP-SAT model and its variables, in the order of the ops."""

    cp: Any
    start: list[Any]
    end: list[Any]
    is_spread: list[Any]  # a literal, or False where the op cannot be spread
    one_core: list[Any]
    spread: list[Any]
    core_choice: list[dict[int, Any]]
    makespan: Any = None


def solve_cp_sat(
    reduced: Reduced,
    incumbent: tuple[Placed, ...],
    *,
    gap: float,
    work: float | None,
    seed: int = 0,
    workers: int = 1,
) -> CpSatOutcome:
    """Improve the incumbent to the relative `gap`, or until `work` units of deterministic time are spent.

    Several workers prove more, but which of equal schedules they find, and what they prove in a limit, may change from
    run to run.
    """
    from ortools.sat.python import cp_model

    upper_s = makespan(incumbent)
    unit_s = _unit(reduced, upper_s)
    model = _model(reduced, unit_s, incumbent)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed + 1  # with 0 the library spends minutes outside its deterministic time
    solver.parameters.relative_gap_limit = gap
    solver.parameters.presolve_inclusion_work_limit = 0  # can prove a wrong optimum: google/or-tools issue 5293
    if work is not None:
        solver.parameters.max_deterministic_time = work
    status = solver.solve(model.cp)
    spent = float(solver.response_proto.deterministic_time)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # the incumbent is within its horizon: only a limit ends so
        return CpSatOutcome(placed=incumbent, bound_s=solver.best_objective_bound * unit_s, work=spent)
    found = retime(reduced, _steps(reduced, model, solver))
    best = min(found, incumbent, key=makespan)
    bound = min(solver.best_objective_bound * unit_s, makespan(best))
    return CpSatOutcome(placed=best, bound_s=bound, work=spent)


def _unit(reduced: Reduced, upper_s: float) -> float:
    """The largest exact decimal unit of all times, or a fine share of the makespan."""
    times = np.concatenate([reduced.latency_s, reduced.spread_s[np.isfinite(reduced.spread_s)]])
    for digits in range(_DIGITS + 1):
        scaled = times * 10.0**digits
        if scaled.max() < _FINE and (np.abs(scaled - np.round(scaled)) <= 1e-9).all() and (np.round(scaled) >= 1).all():
            return 10.0**-digits
    return upper_s / _FINE


def _units(times: FloatArray, unit_s: float) -> list[int]:
    """Times in whole units, rounded down (but for the last digit of an exact decimal)."""
    return [int(np.floor(time / unit_s + 1e-9)) if np.isfinite(time) else -1 for time in times]


def _model(reduced: Reduced, unit_s: float, incumbent: tuple[Placed, ...]) -> _Model:
    from ortools.sat.python import cp_model

    cp = cp_model.CpModel()
    horizon = int(np.ceil(makespan(incumbent) / unit_s)) + reduced.count
    latency, spread = _units(reduced.latency_s, unit_s), _units(reduced.spread_s, unit_s)
    model = _Model(cp, [], [], [], [], [], [])
    for op in range(reduced.count):
        start, end = cp.new_int_var(0, horizon, f"start{op}"), cp.new_int_var(0, horizon, f"end{op}")
        can = bool(np.isfinite(reduced.spread_s[op]))
        chosen = cp.new_bool_var(f"spread{op}") if can else False
        model.start.append(start)
        model.end.append(end)
        model.is_spread.append(chosen)
        if can:
            cp.add(end == start + latency[op] + (spread[op] - latency[op]) * chosen)
            model.one_core.append(cp.new_optional_fixed_size_interval_var(start, latency[op], ~chosen, f"one{op}"))
            model.spread.append(cp.new_optional_fixed_size_interval_var(start, spread[op], chosen, f"all{op}"))
        else:
            cp.add(end == start + latency[op])
            model.one_core.append(cp.new_fixed_size_interval_var(start, latency[op], f"one{op}"))
            model.spread.append(None)
    _add_precedence(reduced, model)
    _add_cores(reduced, model)
    _add_links(reduced, model)
    _add_pairs(reduced, model, latency)
    _add_makespan(model, horizon)
    _add_redundant(reduced, model, latency, spread)
    _add_hint(model, incumbent, unit_s)
    return model


def _add_precedence(reduced: Reduced, model: _Model) -> None:
    for before, after in np.argwhere(reduced.is_edge):
        model.cp.add(model.end[before] <= model.start[after])


def _add_cores(reduced: Reduced, model: _Model) -> None:
    sides = ((reduced.uses_tensor, reduced.tensor_cores), (reduced.uses_vector, reduced.vector_cores))
    for uses, cores in sides:
        if not uses.any():
            continue
        entries = [(model.one_core[op], 1) for op in np.flatnonzero(uses)]
        for op, interval in enumerate(model.spread):
            if interval is not None and (uses[op] or reduced.is_exclusive):
                entries.append((interval, cores))
        model.cp.add_cumulative([entry[0] for entry in entries], [entry[1] for entry in entries], cores)


def _add_links(reduced: Reduced, model: _Model) -> None:
    model.cp.add_no_overlap([model.one_core[op] for op in np.flatnonzero(reduced.is_link)])


def _add_pairs(reduced: Reduced, model: _Model, latency: list[int]) -> None:
    model.core_choice.extend({} for _ in range(reduced.count))
    tensor, vector = reduced.useful_cores
    is_scarce = tensor < reduced.uses_tensor.sum() or vector < reduced.uses_vector.sum()
    if not (reduced.is_both.any() and is_scarce):
        return
    on_tensor: list[list[Any]] = [[] for _ in range(tensor)]
    on_vector: list[list[Any]] = [[] for _ in range(vector)]
    for op in np.flatnonzero(~reduced.is_off_core):
        cores = min([tensor] * bool(reduced.uses_tensor[op]) + [vector] * bool(reduced.uses_vector[op]))
        choice = {core: model.cp.new_bool_var(f"core{op}_{core}") for core in range(cores)}
        spread = [model.is_spread[op]] if model.spread[op] is not None else []
        model.cp.add_exactly_one([*choice.values(), *spread])
        model.core_choice[op] = choice
        for core, literal in choice.items():
            interval = model.cp.new_optional_fixed_size_interval_var(
                model.start[op], latency[op], literal, f"on{op}_{core}"
            )
            if reduced.uses_tensor[op]:
                on_tensor[core].append(interval)
            if reduced.uses_vector[op]:
                on_vector[core].append(interval)
    for intervals in (*on_tensor, *on_vector):
        model.cp.add_no_overlap(intervals)


def _add_makespan(model: _Model, horizon: int) -> None:
    model.makespan = model.cp.new_int_var(0, horizon, "makespan")
    model.cp.add_max_equality(model.makespan, model.end)
    model.cp.minimize(model.makespan)


def _add_redundant(reduced: Reduced, model: _Model, latency: list[int], spread: list[int]) -> None:
    can_spread = [interval is not None for interval in model.spread]

    def on_one_core(ops: Iterable[int]) -> Any:
        return sum(latency[op] * (1 - model.is_spread[op] if can_spread[op] else 1) for op in ops)

    def while_spread(ops: Iterable[int]) -> Any:
        return sum(spread[op] * model.is_spread[op] for op in ops if can_spread[op])

    sides = ((reduced.uses_tensor, reduced.tensor_cores), (reduced.uses_vector, reduced.vector_cores))
    for uses, cores in sides:
        excluding = range(reduced.count) if reduced.is_exclusive else np.flatnonzero(uses)
        if uses.any():
            model.cp.add(cores * model.makespan >= on_one_core(np.flatnonzero(uses)) + cores * while_spread(excluding))
    if reduced.is_exclusive:
        everything = while_spread(range(reduced.count))
        for chain in sorted(heavy_chains(reduced, reduced.latency_s, reduced.spread_s, reduced.tensor_cores)):
            model.cp.add(model.makespan >= everything + on_one_core(op for op in chain if not reduced.is_off_core[op]))


def _add_hint(model: _Model, incumbent: tuple[Placed, ...], unit_s: float) -> None:
    for placed in incumbent:
        model.cp.add_hint(model.start[placed.position], int(placed.start_s / unit_s))
        if model.spread[placed.position] is not None:
            model.cp.add_hint(model.is_spread[placed.position], placed.is_spread)


def _steps(reduced: Reduced, model: _Model, solver: Any) -> list[Step]:
    """The order of starts, with the core numbers that were chosen or any that are free."""
    start = [solver.value(variable) for variable in model.start]
    modes = zip(model.spread, model.is_spread, strict=True)
    spread = [interval is not None and bool(solver.value(chosen)) for interval, chosen in modes]
    order = order_of_starts(reduced, start)
    if not any(model.core_choice):
        return give_cores(reduced, [(op, spread[op]) for op in order])
    cores = [next((core for core, on in choice.items() if solver.value(on)), -1) for choice in model.core_choice]
    return [Step(op, spread[op], cores[op]) for op in order]
