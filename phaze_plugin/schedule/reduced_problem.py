"""The scheduling problem as arrays, without what cannot matter, and cut into independent segments.

Ops that take no time only pass precedence on: they leave the problem, and their predecessors are tied to their
successors. Where every job of a set precedes every other job, nothing overlaps the cut: the two sides are independent
problems whose makespans add up. Cores beyond the number of jobs that could hold them at once are never used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phaze.schedule.scheduling_problem import Resource, SchedulingProblem, topological_order

__all__ = ["ReducedProblem", "reduce_problem", "segments"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReducedProblem:
    """Ops that take time, in topological order. `spread_s` is infinite where spreading is no use."""

    index: IntArray  # the job's index in the problem
    uses_tensor: BoolArray
    uses_vector: BoolArray
    is_link: BoolArray
    latency_s: FloatArray
    spread_s: FloatArray
    is_before: BoolArray  # [i, j]: i precedes j, directly or not
    tensor_cores: int
    vector_cores: int
    is_exclusive: bool

    @property
    def count(self) -> int:
        """Number of jobs."""
        return len(self.index)

    @property
    def is_both(self) -> BoolArray:
        """Ops that hold a pair of cores."""
        return self.uses_tensor & self.uses_vector

    @property
    def is_off_core(self) -> BoolArray:
        """Ops that hold no core: links, and waits that hold nothing."""
        return ~(self.uses_tensor | self.uses_vector)

    @property
    def has_off_core(self) -> bool:
        """Whether some job can run while all cores are taken."""
        return bool(self.is_off_core.any())

    @property
    def shortest_s(self) -> FloatArray:
        """The least time that each job can take."""
        return np.minimum(self.latency_s, self.spread_s)

    @property
    def is_edge(self) -> BoolArray:
        """[i, j]: i directly precedes j; edges that follow from others are left out."""
        through = self.is_before.astype(np.float32) @ self.is_before.astype(np.float32) > 0
        return self.is_before & ~through

    @property
    def useful_cores(self) -> tuple[int, int]:
        """Tensor and vector cores without those that no schedule needs; all pairs that both jobs could use are kept."""
        tensor = min(self.tensor_cores, int(self.uses_tensor.sum()))
        vector = min(self.vector_cores, int(self.uses_vector.sum()))
        if not self.is_both.any():
            return tensor, vector
        return max(tensor, min(self.tensor_cores, vector)), max(vector, min(self.vector_cores, tensor))

    def restricted(self, kept: IntArray) -> ReducedProblem:
        """The sub-problem of the jobs at positions `kept`."""
        return ReducedProblem(
            index=self.index[kept],
            uses_tensor=self.uses_tensor[kept],
            uses_vector=self.uses_vector[kept],
            is_link=self.is_link[kept],
            latency_s=self.latency_s[kept],
            spread_s=self.spread_s[kept],
            is_before=self.is_before[np.ix_(kept, kept)],
            tensor_cores=self.tensor_cores,
            vector_cores=self.vector_cores,
            is_exclusive=self.is_exclusive,
        )


def reduce_problem(problem: SchedulingProblem, takes_time: BoolArray | None = None) -> ReducedProblem:
    """The problem's jobs that take time (as their latencies say, or as told), with precedence through the others."""
    order = np.array(topological_order(problem), np.int64)
    all_resources = problem.resources
    resources = [all_resources[i] for i in order]
    whole = ReducedProblem(
        index=order,
        uses_tensor=np.array([resource.uses_tensor for resource in resources], np.bool_),
        uses_vector=np.array([resource.uses_vector for resource in resources], np.bool_),
        is_link=np.array([resource is Resource.LINK for resource in resources], np.bool_),
        latency_s=np.array([problem.jobs[i].latency_s for i in order], np.float64),
        spread_s=np.array(
            [problem.jobs[i].spread_s if problem.jobs[i].can_spread else np.inf for i in order], np.float64
        ),
        is_before=_closure(problem, order),
        tensor_cores=problem.tensor_cores,
        vector_cores=problem.vector_cores,
        is_exclusive=problem.intra_op_exclusive,
    )
    kept = whole.shortest_s > 0.0 if takes_time is None else takes_time[order]
    return whole.restricted(np.flatnonzero(kept))


def _closure(problem: SchedulingProblem, order: IntArray) -> BoolArray:
    """[i, j]: whether the job at place i of the order precedes the one at place j, directly or not."""
    position = {int(job): place for place, job in enumerate(order)}
    before, predecessors = np.zeros((len(order), len(order)), np.bool_), problem.predecessors
    for place, job in enumerate(order):
        for earlier in predecessors[job]:
            earlier_place = position[earlier]
            before[:, place] |= before[:, earlier_place]
            before[earlier_place, place] = True
    return before


def segments(reduced: ReducedProblem) -> tuple[ReducedProblem, ...]:
    """Independent sub-problems in order of time: all jobs of one precede all jobs of the next."""
    ancestors = reduced.is_before.sum(axis=0)
    order = np.argsort(ancestors, kind="stable")
    cuts = np.flatnonzero(ancestors[order] == np.arange(reduced.count))
    return tuple(reduced.restricted(np.sort(part)) for part in np.split(order, cuts[cuts > 0]) if part.size)
