"""Partial schedules of the exact method: the rules that drop most of them, the tables they read, and dominance.

The exact method is a dynamic program over sets of started jobs, bounded from below and above, many at a time
(`exact_search.py`).

Level k holds partial schedules with k started jobs. Jobs are appended in the order of their starts, links among them; a
job starts as soon as its predecessors, its cores or the link, and the start before it allow, on one core or spread. Any
schedule, taken in the order of its starts, is reached with no job later. Let V be the least makespan that a partial
schedule can be completed to. From a level the next one is made for all partial schedules at once, and a partial
schedule is dropped when

 1. another job could end before its new job starts (Giffler and Thompson, 1960): `possible_extensions`. In every
    completion that other job starts later, as all do; put where it could have been, it disturbs none and is the first
    of them to start. So V is no larger where it is appended instead, and of these jobs the one that ends first is not
    dropped itself.
 2. its new job is spread, exclusive and without successors, while jobs with successors wait and no job is off the
    cores: `_spread_extensions`. Nothing overlaps the new job: cut it out, shift all that follows to the left, and run
    it last.
 3. its lower bound reaches the target, incumbent x (1 - gap): `extend_schedules`. The bounds are the weights of
    `makespan_bounds.py` with the part of running jobs still to come (`_quick_bound`, `_weight_bound`); the ways to the
    end (`_path_bound`); and, while one-core jobs hold cores until time F, no job is spread before F: jobs that one-core
    latencies cannot bring in before F do all their work after it (`_block_bound`).
 4. another partial schedule has started the same jobs and is nowhere later, in clocks, cores, and ends that successors
    wait for: `undominated`. What completes the one completes the other, no later.
 5. the level is wider than allowed: `_run_pass`. The least bound of what is dropped for this reason stays as the proven
    bound.
 6. its new job is not the one that holds neither cores nor link and could start: `_eligible`. When that one starts is
    settled, and it delays nothing: it is appended first.
 7. its new job overtakes one that is alike, has no other predecessors and as many successors or more: `_leaders` and
    `_eligible`. The two can change places in any schedule.

Rules 1 and 4 leave, of the partial schedules of a level with the least V, at least one. Rules 2 and 7 narrow the
schedules looked for, by what has started alone. The best schedule left is as short: any best schedule can be brought
into the narrowed form by letting jobs with successors change places, then running jobs without successors last, then
letting these change places, and no step undoes an earlier one. To order jobs that start together would halve the work,
but the partial schedule that it relies on may itself have been dropped by rule 4.

`SearchTables` are what every step reads: the problem in units of its incumbent's makespan, and tables made once. A
partial schedule knows which jobs have started and when they end; the clock, before which no job on cores starts any
more; the same for links; until when any tensor or vector core is held; and, where cores are scarce, when each core is
free. Thousands of partial schedules of one level are kept together (`PartialSchedules`): the last axis of every array
counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from phaze.schedule.list_scheduling import tails
from phaze.schedule.makespan_bounds import rates
from phaze.schedule.scheduling_problem import BoolArray, FloatArray, IntArray, ReducedProblem
from phaze.tolerances import EQUAL_RESULTS, EQUAL_STATES

__all__ = ["PartialSchedules", "SearchTables", "empty_schedule", "make_tables", "undominated"]

WORD = 64
"""Jobs whose bits fit one unsigned integer of a set of started jobs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchTables:
    """The reduced problem and everything that is computed from it once.

    Times are in units of `unit_s`. Rows are rows of weights of `makespan_bounds.py`; `before` is padded with `count`.
    """

    reduced: ReducedProblem
    unit_s: float
    latency: FloatArray
    spread: FloatArray
    tail: FloatArray
    before: IntArray  # [job, k]: direct predecessors
    edges: NDArray[np.float32]  # [job, successor]: direct precedence
    goes_first: NDArray[np.float32]  # [job, later]: the later job starts after this one has started; edges and rule 7
    first_count: NDArray[np.float32]  # how many jobs go first
    clock_weight: FloatArray  # [row]: the weight of each row that counts from the clock of the cores,
    link_weight: FloatArray  # from the link's next free time,
    path_weight: FloatArray  # and from the earlier of both
    one_core: (
        FloatArray  # [row, job]: rate on one core, without the weight of links; 0 for waits (they ignore the clock)
    )
    worth: FloatArray  # [row, job]: what an unstarted job adds to the bound
    bits: NDArray[np.uint64]  # [word, job]: the job's bit in the set of started jobs
    tensor_columns: int  # cores to tell apart; 0 where there is one for every job
    vector_columns: int
    is_matched: bool  # columns are pairs: both jobs are present and cores are scarce
    is_last: BoolArray  # exclusive jobs without successors, which may be spread at the end
    is_wait: BoolArray  # jobs that hold neither a core nor the link
    leads_to_cores: BoolArray  # jobs all of whose successors are on cores
    leads_to_links: BoolArray  # jobs all of whose successors are links

    @property
    def count(self) -> int:
        """Number of jobs."""
        return self.reduced.count

    @property
    def core_rows(self) -> BoolArray:
        """Rows whose whole weight lies on the cores."""
        return self.clock_weight >= 1.0 - EQUAL_RESULTS  # weights such as three thirds add up to just below 1


def make_tables(reduced: ReducedProblem, unit_s: float) -> SearchTables:
    """SearchTables for a problem whose incumbent takes `unit_s`."""
    weights = rates(reduced)
    is_edge = reduced.is_edge
    count = reduced.count
    before = np.full((count, max(1, int(is_edge.sum(axis=0).max()))), count)
    for job in range(count):
        direct = np.flatnonzero(is_edge[:, job])
        before[job, : len(direct)] = direct
    bits = np.zeros((-(-count // WORD), count), np.uint64)
    bits[np.arange(count) // WORD, np.arange(count)] = np.uint64(1) << (
        np.arange(count, dtype=np.uint64) % np.uint64(WORD)
    )
    tensor, vector = _columns(reduced)
    goes_first = is_edge | _leaders(reduced)
    is_wait = reduced.is_off_core & ~reduced.is_link
    may_be_last = np.full(count, reduced.is_exclusive and not reduced.has_off_core)
    return SearchTables(
        reduced=reduced,
        unit_s=unit_s,
        latency=reduced.latency_s / unit_s,
        spread=reduced.spread_s / unit_s,
        tail=tails(reduced) / unit_s,
        before=before,
        edges=is_edge.astype(np.float32),
        goes_first=goes_first.astype(np.float32),
        first_count=goes_first.sum(axis=0).astype(np.float32),
        clock_weight=weights.core_weight + (0.0 if reduced.has_off_core else weights.path_weight),
        link_weight=weights.link_weight,
        path_weight=weights.path_weight if reduced.has_off_core else np.zeros(len(weights.weights)),
        one_core=np.where(is_wait, 0.0, weights.one_core - weights.link_weight[:, None] * reduced.is_link),
        worth=weights.worth_s / unit_s,
        bits=bits,
        tensor_columns=tensor,
        vector_columns=vector,
        is_matched=bool(reduced.is_both.any()) and tensor + vector > 0,
        is_last=may_be_last & _leads_only_to(is_edge, np.zeros(count, np.bool_)),
        is_wait=is_wait,
        leads_to_cores=_leads_only_to(is_edge, ~reduced.is_off_core),
        leads_to_links=_leads_only_to(is_edge, reduced.is_link),
    )


def _leads_only_to(is_edge: BoolArray, group: BoolArray) -> BoolArray:
    """Ops none of whose successors is outside the group."""
    leads_elsewhere: BoolArray = np.logical_or.reduce(is_edge & ~group, axis=1)
    return ~leads_elsewhere


def _leaders(reduced: ReducedProblem) -> BoolArray:
    """[i, j]: alike jobs of which i has no more predecessors and no fewer successors, so that i may go first.

    In any schedule where j starts before i the two can change places, with their cores and modes. Of jobs with the same
    predecessors and successors the first in order leads.
    """
    before, alike = reduced.is_before, np.ones((reduced.count, reduced.count), np.bool_)
    for column in (reduced.uses_tensor, reduced.uses_vector, reduced.is_link, reduced.latency_s, reduced.spread_s):
        alike &= column[:, None] == column[None, :]
    extra_before = before.T.astype(np.float32) @ ~before  # [i, j]: how many precede i and not j
    extra_after = before.astype(np.float32) @ ~before.T  # [i, j]: how many succeed i and not j
    may_lead = alike & (extra_before == 0) & (extra_after.T == 0) & ~(before | before.T)
    np.fill_diagonal(may_lead, False)
    ties = may_lead & may_lead.T
    leads: BoolArray = may_lead & ~np.tril(ties)
    return leads


def _columns(reduced: ReducedProblem) -> tuple[int, int]:
    """How many cores of each kind must be told apart."""
    tensor, vector = reduced.useful_cores
    tensor_needed, vector_needed = int(reduced.uses_tensor.sum()), int(reduced.uses_vector.sum())
    is_scarce = (tensor < tensor_needed or not reduced.is_exclusive, vector < vector_needed or not reduced.is_exclusive)
    if reduced.is_both.any() and any(is_scarce):
        return max(tensor, vector), max(tensor, vector)
    return tensor * is_scarce[0], vector * is_scarce[1]


_COMPARED = 24
"""With how many neighbours, in the order of lateness, each partial schedule is compared.

More comparisons drop more partial schedules and take longer; the search stays exact with any number.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialSchedules:
    """Partial schedules with equally many started jobs; the last axis of every array counts them."""

    started: BoolArray  # [job, schedule]
    end: FloatArray  # [job + 1, schedule]; the last row stays 0 and stands for "no predecessor"
    clock: FloatArray  # no job on cores starts earlier: the last start, or the end of a job that runs alone
    link_free: FloatArray  # no link starts earlier: the last start, or the end of the last link
    held: FloatArray  # [2, schedule]: until when some tensor core, some vector core is held
    tensor_free: FloatArray  # [column, schedule], ascending
    vector_free: FloatArray
    members: NDArray[np.uint64]  # [word, schedule]: the set of started jobs as bits
    bound: FloatArray  # a lower bound on the makespan of every completion

    @property
    def count(self) -> int:
        """Number of partial schedules."""
        return len(self.clock)

    def take(self, positions: IntArray) -> PartialSchedules:
        """The partial schedules at these positions."""
        return PartialSchedules(**{part.name: getattr(self, part.name)[..., positions] for part in fields(self)})


def empty_schedule(tables: SearchTables) -> PartialSchedules:
    """The one partial schedule in which nothing has started.

    Where columns are pairs, a column beyond the cores of one resource is never free for that resource.
    """
    tensor, vector = np.zeros((tables.tensor_columns, 1)), np.zeros((tables.vector_columns, 1))
    if tables.is_matched:
        tensor_cores, vector_cores = tables.reduced.useful_cores
        tensor[tensor_cores:], vector[vector_cores:] = np.inf, np.inf
    return PartialSchedules(
        started=np.zeros((tables.count, 1), np.bool_),
        end=np.zeros((tables.count + 1, 1)),
        clock=np.zeros(1),
        link_free=np.zeros(1),
        held=np.zeros((2, 1)),
        tensor_free=tensor,
        vector_free=vector,
        members=np.zeros((len(tables.bits), 1), np.uint64),
        bound=np.zeros(1),
    )


def undominated(tables: SearchTables, schedules: PartialSchedules) -> IntArray:
    """The positions of the partial schedules to keep, in a fixed order (rule 4 of the exact method).

    A partial schedule is dropped if another one has started the same jobs and is nowhere later.
    """
    lateness = _lateness(tables, schedules)
    total = np.where(np.isinf(lateness), 0.0, lateness).sum(axis=0)
    order = np.lexsort((total, *schedules.members))
    members, lateness = schedules.members[:, order], lateness.T[order]
    is_first = np.ones(schedules.count, np.bool_)
    is_first[1:] = (members[:, 1:] != members[:, :-1]).any(axis=0)
    group = np.cumsum(is_first)
    is_dominated = np.zeros(schedules.count, np.bool_)
    for distance in range(1, min(_COMPARED, schedules.count - 1) + 1):
        pairs = np.flatnonzero(group[distance:] == group[:-distance])
        if not pairs.size:
            break
        pairs = pairs[~is_dominated[pairs + distance]]
        is_worse = (lateness[pairs] <= lateness[pairs + distance] + EQUAL_STATES).all(axis=1)
        is_dominated[pairs[is_worse] + distance] = True
    return order[~is_dominated]


def _lateness(tables: SearchTables, schedules: PartialSchedules) -> FloatArray:
    """[quantity, schedule]: everything that can delay the jobs still to come.

    The end of a job counts only while a successor waits for it, and an end that lies before the next possible start of
    such a successor is lifted to that start: it delays nothing.
    """
    unstarted = (~schedules.started).astype(np.float32)
    is_awaited = schedules.started & (tables.edges @ unstarted > 0.0)
    clock, link_free = schedules.clock, schedules.link_free
    next_start = np.where(tables.leads_to_links[:, None], link_free, np.minimum(clock, link_free))
    next_start = np.where(tables.leads_to_cores[:, None], clock, next_start)
    has_link = (~schedules.started[tables.reduced.is_link]).any(axis=0)
    return np.concatenate(
        [
            np.where(is_awaited, np.maximum(schedules.end[:-1], next_start), 0.0),
            np.maximum(schedules.held, clock),
            schedules.tensor_free,
            schedules.vector_free,
            clock[None],
            np.where(has_link, link_free, 0.0)[None],
            schedules.end.max(axis=0)[None],
        ]
    )
