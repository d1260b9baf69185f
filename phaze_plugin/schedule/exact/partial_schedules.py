"""Partial schedules of the exact method as arrays, and which of them another one makes useless (dominance).

A partial schedule knows which jobs have started and when they end; the clock, before which no job on cores starts any
more; the same for links; until when any tensor or vector core is held; and, where cores are scarce, when each core is
free. Thousands of partial schedules of one level are kept together: the last axis of every array counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from phaze.schedule.exact.search_tables import SearchTables
from phaze.schedule.reduced_problem import BoolArray, FloatArray, IntArray
from phaze.tolerances import EQUAL_STATES

__all__ = ["PartialSchedules", "empty_schedule", "undominated"]

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
