"""What every step of the exact method reads: the problem in units of its incumbent's makespan, and tables made once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phaze.schedule.list_scheduling import tails
from phaze.schedule.makespan_bounds import rates
from phaze.schedule.reduced_problem import BoolArray, FloatArray, IntArray, ReducedProblem
from phaze.tolerances import EQUAL_RESULTS

__all__ = ["SearchTables", "make_tables"]

WORD = 64
"""Jobs whose bits fit one unsigned integer of a set of started jobs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchTables:
    """The reduced problem and everything that is computed from it once.

    Times are in units of `unit_s`. Rows are rows of weights of the bounds module; `before` is padded with `count`.
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
