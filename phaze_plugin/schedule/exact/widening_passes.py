"""The exact method's search: passes over all levels, each wider than the last, until the incumbent is proven.

A pass goes level by level from the empty schedule to complete ones and keeps at most `width` partial schedules on each
level. If it finds a schedule that is short enough, the path to it is walked back and its jobs are given core numbers
(`_core_numbers`), since partial schedules only know when cores are free, in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phaze.schedule.core_timeline import Placed, Step, give_cores, makespan, retime
from phaze.schedule.exact.expansion import Extensions, extend_schedules, possible_extensions
from phaze.schedule.exact.partial_schedules import PartialSchedules, empty_schedule, undominated
from phaze.schedule.exact.search_tables import SearchTables, make_tables
from phaze.schedule.reduced_problem import ReducedProblem
from phaze.tolerances import SHORTER_SCHEDULE

__all__ = ["SearchOutcome", "search_exact"]

_FIRST_WIDTH = 60
"""Partial schedules on each level of the first pass: so few that it takes milliseconds and often suffices."""

_WIDER = 8
"""How many times wider each pass is than the one before: the passes before the last cost little in comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """The best schedule known, a proven bound, and the number of extensions that were looked at."""

    placed: tuple[Placed, ...]
    bound_s: float
    work: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """What one pass found; times are in units of the incumbent's makespan."""

    levels: tuple[Extensions, ...]  # the extensions kept on each level; empty if nothing below the target was found
    last: int  # the position of the best schedule on the last level
    bound: float
    work: int


@dataclass(frozen=True, slots=True)
class _Appended:
    """One job of the path to a complete schedule: how it was appended, and on which column of sorted cores."""

    job: int
    is_spread: bool
    column: int


def search_exact(
    reduced: ReducedProblem,
    incumbent: tuple[Placed, ...],
    *,
    gap: float,
    spare_s: float = 0.0,
    enough_s: float = 0.0,
    work: int,
) -> SearchOutcome:
    """Improve the incumbent until its bound is within `gap` of it plus `spare_s`, or it takes at most `enough_s`.

    `work` limits the number of extensions looked at.
    """
    unit_s = makespan(incumbent)
    tables = make_tables(reduced, unit_s)
    bound, best = float(tables.worth.sum(axis=1).max()), 1.0
    spent, width = 0, _FIRST_WIDTH
    while best * unit_s > enough_s and spent < work:
        target = best - max(gap * best + spare_s / unit_s, SHORTER_SCHEDULE)
        if bound >= target - SHORTER_SCHEDULE:
            break
        outcome = _run_pass(tables, target, width, work - spent)
        spent += outcome.work
        bound = max(bound, min(outcome.bound, target))
        if outcome.levels:
            incumbent = _placed(tables, outcome)
            best = makespan(incumbent) / unit_s
        width *= _WIDER
    return SearchOutcome(placed=incumbent, bound_s=min(bound, best) * unit_s, work=spent)


def _run_pass(tables: SearchTables, target: float, width: int, work_limit: int) -> _Pass:
    """One pass: level by level, at most `width` schedules on each, until `work_limit` extensions were looked at."""
    schedules, levels, work = empty_schedule(tables), [], 0
    dropped_bound = math.inf  # the least bound of what was dropped because the level was too wide (rule 5)
    for _ in range(tables.count):
        if work >= work_limit:
            return _Pass(levels=(), last=-1, bound=min(dropped_bound, float(schedules.bound.min())), work=work)
        extensions = possible_extensions(tables, schedules)
        work += extensions.count
        schedules, extensions = extend_schedules(tables, schedules, extensions, target)
        kept = undominated(tables, schedules)
        if len(kept) > width:
            ranked = kept[np.argsort(schedules.bound[kept], kind="stable")]
            kept = ranked[:width]
            dropped_bound = min(dropped_bound, float(schedules.bound[ranked[width:]].min()))
        schedules, extensions = schedules.take(kept), extensions.take(kept)
        if not schedules.count:
            return _Pass(levels=(), last=-1, bound=dropped_bound, work=work)
        levels.append(extensions)
    return _finished(schedules, levels, dropped_bound, work)


def _finished(schedules: PartialSchedules, levels: list[Extensions], dropped_bound: float, work: int) -> _Pass:
    """The result of a pass that reached complete schedules: the shortest of them."""
    makespans = schedules.end.max(axis=0)
    last = int(makespans.argmin())
    return _Pass(levels=tuple(levels), last=last, bound=min(dropped_bound, float(makespans[last])), work=work)


def _placed(tables: SearchTables, outcome: _Pass) -> tuple[Placed, ...]:
    """Walk back from the best complete schedule, give out the cores, and time the order anew in seconds."""
    path, position = [], outcome.last
    for level in reversed(outcome.levels):
        path.append(_Appended(int(level.job[position]), bool(level.is_spread[position]), int(level.column[position])))
        position = int(level.parent[position])
    return retime(tables.reduced, _core_numbers(tables, path[::-1]))


def _core_numbers(tables: SearchTables, path: Sequence[_Appended]) -> list[Step]:
    """The jobs of a path with core numbers."""
    if tables.is_matched:
        return _matched_core_numbers(tables, path)
    return give_cores(tables.reduced, [(appended.job, appended.is_spread) for appended in path])


def _matched_core_numbers(tables: SearchTables, path: Sequence[_Appended]) -> list[Step]:
    """Follow the sorted columns of partial schedules with the same arithmetic, remembering which core each one is."""
    reduced = tables.reduced
    tensor_cores, vector_cores = reduced.useful_cores
    tensor = [0.0 if core < tensor_cores else math.inf for core in range(tables.tensor_columns)]
    vector = [0.0 if core < vector_cores else math.inf for core in range(tables.tensor_columns)]
    order, clock, link_free = list(range(len(tensor))), 0.0, 0.0
    ended, steps = [0.0] * (tables.count + 1), []
    for appended in path:
        job, is_spread = appended.job, appended.is_spread
        is_alone = is_spread and reduced.is_exclusive
        holds_tensor = bool(reduced.uses_tensor[job]) or is_alone
        holds_vector = bool(reduced.uses_vector[job]) or is_alone
        chosen = -1 if is_spread or reduced.is_off_core[job] else order[appended.column]
        cores = [core for core in range(len(tensor)) if is_spread or core == chosen]
        free = [tensor[core] for core in cores if holds_tensor and tensor[core] < math.inf]
        free += [vector[core] for core in cores if holds_vector and vector[core] < math.inf]
        ready = max(ended[before] for before in (*tables.before[job], tables.count))
        if reduced.is_off_core[job]:
            start = max(ready, link_free) if reduced.is_link[job] else ready
        else:
            start = max(clock, ready, *free)
        ended[job] = start + float((tables.spread if is_spread else tables.latency)[job])
        if not tables.is_wait[job]:
            clock = max(clock, ended[job] if is_alone else start)
            link_free = max(link_free, ended[job] if reduced.is_link[job] else start)
        for core in cores:
            tensor[core] = ended[job] if holds_tensor and tensor[core] < math.inf else tensor[core]
            vector[core] = ended[job] if holds_vector and vector[core] < math.inf else vector[core]
        tensor, vector = [max(free_at, clock) for free_at in tensor], [max(free_at, clock) for free_at in vector]
        order.sort(key=lambda core: (tensor[core], vector[core]))
        steps.append(Step(job, is_spread, chosen))
    return steps
