"""The exact method: partial schedules grow job by job, in passes each wider than the last, until the best is proven.

What a partial schedule is, and by which rules (1 to 7) one is dropped, stands in `partial_schedules.py`.

Extensions come first: every job that may be appended to every partial schedule, on one core and spread, without those
that rules 1, 2, 6 and 7 exclude. Then they are bounded cheaply from their parents; what survives is built and bounded
again. The bound of an extended schedule is the largest of

    the bound of its parent;
    for each row of weights, the time passed plus what is still to come of running and unstarted jobs
                                                                                    `_quick_bound`, `_weight_bound`
    the ends of started jobs plus the ways from there to the end                    `_path_bound`
    what must come after the cores that are held now are free again                 `_block_bound`

A pass goes level by level from the empty schedule to complete ones and keeps at most `width` partial schedules on each
level. If it finds a schedule that is short enough, the path to it is walked back and its jobs are given core numbers
(`_core_numbers`), since partial schedules only know when cores are free, in ascending order.

If nothing is dropped by rule 5, the better of what is found and the target is proven. Wider and wider passes give
better incumbents first and the proof last; the same input gives the same passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from phaze.schedule.list_scheduling import Placed, Step, give_cores, makespan, retime
from phaze.schedule.partial_schedules import PartialSchedules, SearchTables, empty_schedule, make_tables, undominated
from phaze.schedule.scheduling_problem import BoolArray, FloatArray, IntArray, ReducedProblem
from phaze.tolerances import NOTHING_LEFT, SHORTER_SCHEDULE

__all__ = ["Extensions", "SearchOutcome", "extend_schedules", "possible_extensions", "search_exact"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extensions:
    """Each extension appends one job to one partial schedule."""

    parent: IntArray  # the position of the partial schedule
    job: IntArray
    is_spread: BoolArray
    column: IntArray  # the core, as its place in the ascending order of free times
    start: FloatArray
    end: FloatArray

    @property
    def count(self) -> int:
        """Number of extensions."""
        return len(self.parent)

    def take(self, positions: IntArray | BoolArray) -> Extensions:
        """The extensions at these positions."""
        return Extensions(**{part.name: getattr(self, part.name)[positions] for part in fields(self)})


def possible_extensions(tables: SearchTables, schedules: PartialSchedules) -> Extensions:
    """Every job that may be appended to every partial schedule, on one core and spread, but for rules 1, 2, 6 and 7."""
    parent, job = np.nonzero(_eligible(tables, schedules).T)
    ready = schedules.end[tables.before[job], parent[:, None]].max(axis=1)
    earliest = np.where(tables.is_wait[job], ready, np.maximum(ready, schedules.clock[parent]))
    earliest = np.where(tables.reduced.is_link[job], np.maximum(ready, schedules.link_free[parent]), earliest)
    on_one_core = _one_core_extensions(tables, schedules, parent, job, earliest)
    spread = _spread_extensions(tables, schedules, parent, job, earliest)
    first_end = np.full(schedules.count, np.inf)
    for group in (on_one_core, spread):
        _lower(first_end, group.parent, group.end)
    extensions = Extensions(
        **{
            part.name: np.concatenate([getattr(on_one_core, part.name), getattr(spread, part.name)])
            for part in fields(Extensions)
        }
    )
    return extensions.take(extensions.start < first_end[extensions.parent])  # rule 1


def _eligible(tables: SearchTables, schedules: PartialSchedules) -> BoolArray:
    """[job, schedule]: whether everything that must go first has started; rules 6 and 7."""
    done = tables.goes_first.T @ schedules.started.astype(np.float32)
    eligible: BoolArray = ~schedules.started & (done == tables.first_count[:, None])
    if tables.is_wait.any():
        waits = eligible & tables.is_wait[:, None]
        is_first = waits & (np.cumsum(waits, axis=0) == 1)
        eligible = np.where(waits.any(axis=0), is_first, eligible)
    return eligible


def _one_core_extensions(
    tables: SearchTables, schedules: PartialSchedules, parent: IntArray, job: IntArray, earliest: FloatArray
) -> Extensions:
    """Each job on the core of its resource that is free first; on every different pair where jobs hold pairs."""
    if tables.is_matched:
        return _pair_extensions(tables, schedules, parent, job, earliest)
    start = earliest
    if tables.tensor_columns:
        uses_tensor = tables.reduced.uses_tensor[job]
        start = np.maximum(start, np.where(uses_tensor, schedules.tensor_free[0, parent], 0.0))
    if tables.vector_columns:
        uses_vector = tables.reduced.uses_vector[job]
        start = np.maximum(start, np.where(uses_vector, schedules.vector_free[0, parent], 0.0))
    return Extensions(
        parent=parent,
        job=job,
        is_spread=np.zeros(len(job), np.bool_),
        column=np.zeros(len(job), np.int64),
        start=start,
        end=start + tables.latency[job],
    )


def _pair_extensions(
    tables: SearchTables, schedules: PartialSchedules, parent: IntArray, job: IntArray, earliest: FloatArray
) -> Extensions:
    """One extension for every column that differs from the one before it; jobs off the cores take column 0."""
    uses_tensor, uses_vector = tables.reduced.uses_tensor[job], tables.reduced.uses_vector[job]
    tensor, vector = schedules.tensor_free[:, parent], schedules.vector_free[:, parent]
    start = np.maximum(earliest, np.where(uses_tensor, tensor, 0.0))
    start = np.maximum(start, np.where(uses_vector, vector, 0.0))
    is_new = np.ones(start.shape, np.bool_)
    is_new[1:] = ((tensor[1:] != tensor[:-1]) | (vector[1:] != vector[:-1])) & (uses_tensor | uses_vector)
    candidate, column = np.nonzero((is_new & np.isfinite(start)).T)
    start = start[column, candidate]
    return Extensions(
        parent=parent[candidate],
        job=job[candidate],
        is_spread=np.zeros(len(candidate), np.bool_),
        column=column,
        start=start,
        end=start + tables.latency[job[candidate]],
    )


def _spread_extensions(
    tables: SearchTables, schedules: PartialSchedules, parent: IntArray, job: IntArray, earliest: FloatArray
) -> Extensions:
    """Each job that can be spread, when all cores that it excludes others from are free; rule 2."""
    can_spread = np.isfinite(tables.spread[job])
    if tables.is_last.any():
        others_started: BoolArray = np.logical_and.reduce(schedules.started[~tables.is_last], axis=0)
        can_spread &= ~tables.is_last[job] | others_started[parent]
    parent, job, earliest = parent[can_spread], job[can_spread], earliest[can_spread]
    is_alone = tables.reduced.is_exclusive
    held_tensor, held_vector = schedules.held[:, parent]
    start = np.maximum(earliest, np.where(tables.reduced.uses_tensor[job] | is_alone, held_tensor, 0.0))
    start = np.maximum(start, np.where(tables.reduced.uses_vector[job] | is_alone, held_vector, 0.0))
    return Extensions(
        parent=parent,
        job=job,
        is_spread=np.ones(len(job), np.bool_),
        column=np.zeros(len(job), np.int64),
        start=start,
        end=start + tables.spread[job],
    )


def _lower(least: FloatArray, group: IntArray, values: FloatArray) -> None:
    """Set least[g] = min(least[g], values of group g) in place; groups are ascending."""
    if not len(group):
        return
    firsts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    groups = group[firsts]
    least[groups] = np.minimum(least[groups], np.minimum.reduceat(values, firsts))


def extend_schedules(
    tables: SearchTables, schedules: PartialSchedules, extensions: Extensions, target: float
) -> tuple[PartialSchedules, Extensions]:
    """The schedules that the extensions lead to, without those whose bound reaches the target (rule 3)."""
    extensions = extensions.take(_quick_bound(tables, schedules, extensions) < target)
    extended = _extended(tables, schedules, extensions)
    for bound in (_weight_bound, _path_bound, _block_bound):
        np.maximum(extended.bound, bound(tables, extended), out=extended.bound)
        kept = np.flatnonzero(extended.bound < target)
        if len(kept) < extended.count:
            extended, extensions = extended.take(kept), extensions.take(kept)
    return extended, extensions


def _clocks(tables: SearchTables, schedules: PartialSchedules, extensions: Extensions) -> tuple[FloatArray, FloatArray]:
    """The earliest next start on the cores, and on the link, after each extension.

    That is the start of the new job, or its end if it excludes all jobs of that side.
    """
    clock, link_free = schedules.clock[extensions.parent], schedules.link_free[extensions.parent]
    is_alone = extensions.is_spread & tables.reduced.is_exclusive
    is_wait, is_link = tables.is_wait[extensions.job], tables.reduced.is_link[extensions.job]
    return (
        np.where(is_wait, clock, np.maximum(clock, np.where(is_alone, extensions.end, extensions.start))),
        np.where(is_wait, link_free, np.maximum(link_free, np.where(is_link, extensions.end, extensions.start))),
    )


def _quick_bound(tables: SearchTables, schedules: PartialSchedules, extensions: Extensions) -> FloatArray:
    """A weaker form of the weight bound, from sums over the parent: each is computed once for all its extensions.

    Running jobs lose at most their rate times the time that passes.
    """
    parent, job = extensions.parent, extensions.job
    unstarted = tables.worth @ ~schedules.started
    left = np.maximum(schedules.end[:-1] - schedules.clock, 0.0)
    running, running_rate = tables.one_core @ left, tables.one_core @ (left > 0.0)
    clock, link_free = _clocks(tables, schedules, extensions)
    passed = clock - schedules.clock[parent]
    total = np.maximum(running[:, parent] - passed * running_rate[:, parent], 0.0)
    total += unstarted[:, parent] - tables.worth[:, job]
    total += np.maximum(extensions.end - clock, 0.0) * tables.one_core[:, job]
    total += _time_passed(tables, clock, link_free)
    way_to_end = extensions.end + tables.tail[job] - np.minimum(tables.latency, tables.spread)[job]
    bound: FloatArray = np.maximum(np.maximum(total.max(axis=0), way_to_end), schedules.bound[parent])
    return bound


def _time_passed(tables: SearchTables, clock: FloatArray, link_free: FloatArray) -> FloatArray:
    """[row, schedule]: the part of each row's weight that has been served until now."""
    passed = tables.clock_weight[:, None] * clock
    if tables.reduced.has_off_core:
        passed += tables.link_weight[:, None] * link_free
        passed += tables.path_weight[:, None] * np.minimum(clock, link_free)
    return passed


def _extended(tables: SearchTables, schedules: PartialSchedules, extensions: Extensions) -> PartialSchedules:
    """Append the extensions' jobs to copies of their parents."""
    copies = schedules.take(extensions.parent)
    position, job, end = np.arange(extensions.count), extensions.job, extensions.end
    copies.started[job, position] = True
    copies.end[job, position] = end
    clock, link_free = _clocks(tables, schedules, extensions)
    is_alone = extensions.is_spread & tables.reduced.is_exclusive
    holds = (tables.reduced.uses_tensor[job] | is_alone, tables.reduced.uses_vector[job] | is_alone)
    held = np.maximum(copies.held, np.where(np.stack(holds), end, 0.0))
    tensor_free, vector_free = _cores_after(tables, copies, extensions, holds, clock)
    return replace(
        copies,
        clock=clock,
        link_free=link_free,
        held=held,
        tensor_free=tensor_free,
        vector_free=vector_free,
        members=copies.members | tables.bits[:, job],
    )


def _cores_after(
    tables: SearchTables,
    copies: PartialSchedules,
    extensions: Extensions,
    holds: tuple[BoolArray, BoolArray],
    clock: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """The free times of the cores after the new jobs, in ascending order; pairs are sorted together.

    Free times in the past are lifted to the clock: no job starts before it, so they make no difference.
    """
    sides = []
    for free, is_held in zip((copies.tensor_free, copies.vector_free), holds, strict=True):
        if len(free):
            on_one_core = np.flatnonzero(is_held & ~extensions.is_spread)
            free[extensions.column[on_one_core], on_one_core] = extensions.end[on_one_core]
            spread = np.flatnonzero(is_held & extensions.is_spread)
            free[:, spread] = np.where(np.isinf(free[:, spread]), np.inf, extensions.end[spread])
            np.maximum(free, clock, out=free)
        sides.append(free)
    if not tables.is_matched:
        return np.sort(sides[0], axis=0), np.sort(sides[1], axis=0)
    # numpy sorts complex numbers by their real and then their imaginary part: a quick sort of pairs
    pairs = np.empty(sides[0].shape, np.complex128)
    pairs.real, pairs.imag = sides
    pairs.sort(axis=0)
    return pairs.real.copy(), pairs.imag.copy()


def _weight_bound(tables: SearchTables, schedules: PartialSchedules) -> FloatArray:
    """For each row of weights: the time passed, what is left of running jobs, and the worth of unstarted ones."""
    left = np.maximum(schedules.end[:-1] - schedules.clock, 0.0)
    total = tables.one_core @ left + tables.worth @ ~schedules.started
    total += _time_passed(tables, schedules.clock, schedules.link_free)
    bound: FloatArray = total.max(axis=0)
    return bound


def _path_bound(tables: SearchTables, schedules: PartialSchedules) -> FloatArray:
    """Ends plus ways to the end; unstarted jobs start at the clock, or when the link is free."""
    after = tables.tail - np.minimum(tables.latency, tables.spread)
    started = np.where(schedules.started, schedules.end[:-1] + after[:, None], 0.0).max(axis=0)
    off_core = tables.reduced.is_off_core[:, None]
    waiting = np.where(schedules.started | off_core, 0.0, tables.tail[:, None]).max(axis=0)
    bound: FloatArray = np.maximum(started, schedules.clock * (waiting > 0.0) + waiting)
    if tables.reduced.has_off_core:
        is_waiting_link = ~schedules.started & tables.reduced.is_link[:, None]
        linked = np.where(is_waiting_link, tables.tail[:, None], 0.0).max(axis=0)
        bound = np.maximum(bound, schedules.link_free * (linked > 0.0) + linked)
    return bound


def _block_bound(tables: SearchTables, schedules: PartialSchedules) -> FloatArray:
    """While cores are held until F no job is spread: what one-core latencies cannot bring in before F comes after it.

    Only exclusive spreading makes this true.
    """
    if not tables.reduced.is_exclusive or not schedules.count:
        return schedules.bound
    held_until = np.maximum(schedules.held.max(axis=0), schedules.clock)
    start = _one_core_starts(tables, schedules)
    is_late = ~schedules.started & (start >= held_until - NOTHING_LEFT)
    rows = tables.core_rows
    late = held_until + (tables.worth[rows] @ (is_late & ~tables.reduced.is_off_core[:, None])).max(axis=0)
    way = np.where(schedules.started, 0.0, np.minimum(start, held_until) + tables.tail[:, None]).max(axis=0)
    bound: FloatArray = np.maximum(late, way)
    return bound


def _one_core_starts(tables: SearchTables, schedules: PartialSchedules) -> FloatArray:
    """[job, schedule]: the earliest start of each unstarted job if no job is spread before it."""
    start, ended = np.empty(schedules.started.shape), np.empty(schedules.started.shape)
    for job in range(tables.count):
        is_link, is_off_core = tables.reduced.is_link[job], tables.reduced.is_off_core[job]
        earliest = schedules.link_free if is_link else schedules.clock * (not is_off_core)
        for before in tables.before[job][tables.before[job] < tables.count]:
            earliest = np.maximum(earliest, ended[before])
        start[job] = earliest
        ended[job] = np.where(schedules.started[job], schedules.end[job], earliest + tables.latency[job])
    return start


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
