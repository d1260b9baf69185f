"""The problem that every scheduling method takes: the operators of one layer on the cores of one accelerator.

An operator (or a group of fused ones) is a `Job`. It holds a `Resource` while it runs, and has a latency on one core
and a latency when it is spread over all cores of its resource. A method chooses start times, cores, and one core or
spread, and minimises the makespan under these rules (the paper's program, with links added):

 1. a job starts when all its predecessors have ended, those of no latency included;
 2. a core runs one job at a time; a job that holds both takes a matched pair, tensor core c with vector core c;
 3. with `intra_op_exclusive` a spread job runs alone on the cores; without it a spread tensor job excludes tensor and
    both jobs, a spread vector job excludes vector and both jobs, and a spread both job excludes everything;
 4. `none` jobs hold nothing; `link` jobs (collectives) hold no core, run one at a time, and rule 3 leaves them alone.

Jobs that run at the same time share one memory: the layer's time is the larger of the makespan and `memory_s`, its
off-chip bytes over the bandwidth. `Compatibility.PAPER` leaves that out and treats links as vector jobs.

Methods that search take a `ReducedProblem`: the same as arrays, without what cannot matter (`reduce_problem`), and cut
into independent parts (`segments`). Ops that take no time only pass precedence on: they leave the problem, and their
predecessors are tied to their successors. Where every job of a set precedes every other job, nothing overlaps the cut:
the two sides are independent problems whose makespans add up. Cores beyond the number of jobs that could hold them at
once are never used.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from phaze.errors import ScheduleError

__all__ = [
    "Compatibility",
    "Job",
    "ReducedProblem",
    "Resource",
    "SchedulingProblem",
    "infeasibility",
    "reduce_problem",
    "segments",
]


class Resource(StrEnum):
    """What a job holds while it runs."""

    TENSOR = "tensor"
    VECTOR = "vector"
    BOTH = "both"
    NONE = "none"
    LINK = "link"

    @property
    def uses_tensor(self) -> bool:
        """Whether the job holds tensor cores."""
        return self in (Resource.TENSOR, Resource.BOTH)

    @property
    def uses_vector(self) -> bool:
        """Whether the job holds vector cores."""
        return self in (Resource.VECTOR, Resource.BOTH)


class Compatibility(StrEnum):
    """Whose counting applies."""

    PHAZE = "phaze"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class Job:
    """One operator; `spread_s` is its time on all cores of its kind (infinite: it cannot be spread).

    An infinite `latency_s` says that the job cannot run on this accelerator. The energies are those on one core and
    spread. `binding` says for people what decides the spread time. Raises ScheduleError on negative or NaN.
    """

    name: str
    resource: Resource
    latency_s: float
    spread_s: float = math.inf
    energy_j: float = 0.0
    spread_energy_j: float = 0.0
    binding: str = ""

    def __post_init__(self) -> None:
        for field_name in ("latency_s", "spread_s", "energy_j", "spread_energy_j"):
            value = getattr(self, field_name)
            if not value >= 0.0:
                raise ScheduleError(
                    f"op {self.name!r} has {field_name} {value}; expected a number of at least 0 "
                    "(infinity if the op cannot run). Check the cost estimate of this op."
                )

    @property
    def can_spread(self) -> bool:
        """Whether spreading is possible and quicker than one core; a slower spread is never of use."""
        return self.resource not in (Resource.NONE, Resource.LINK) and self.spread_s < self.latency_s

    @property
    def shortest_s(self) -> float:
        """The least time the job can take."""
        return self.spread_s if self.can_spread else self.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingProblem:
    """Ops, precedence edges (pairs of job indices), and the cores they run on.

    `predecessors` are the direct ones of each job, ascending and without repeats; they follow from the edges.

    Raises ScheduleError on cyclic precedence, unknown indices, repeated names, negative core counts or memory time.
    """

    jobs: tuple[Job, ...]
    edges: tuple[tuple[int, int], ...]
    tensor_cores: int
    vector_cores: int
    intra_op_exclusive: bool = True
    memory_s: float = 0.0
    compatibility: Compatibility = Compatibility.PHAZE
    name: str = "layer"
    predecessors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _order: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for kind, cores in (("tensor", self.tensor_cores), ("vector", self.vector_cores)):
            if cores < 0:
                raise ScheduleError(f"{self.name}: {cores} {kind} cores; expected 0 or more")
        if not 0.0 <= self.memory_s < math.inf:
            raise ScheduleError(f"{self.name}: memory_s is {self.memory_s}; expected a finite number of at least 0")
        names = [job.name for job in self.jobs]
        if len(set(names)) != len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ScheduleError(f"{self.name}: two ops are called {repeated!r}; names must differ")
        for edge in self.edges:
            if not all(0 <= end < len(self.jobs) for end in edge):
                raise ScheduleError(f"{self.name}: edge {edge} names an op outside 0..{len(self.jobs) - 1}")
        object.__setattr__(self, "predecessors", self._direct_predecessors())
        object.__setattr__(self, "_order", _sorted_by_precedence(self))

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The kind each job counts as: with the paper's counting, links are vector jobs."""
        paper = self.compatibility is Compatibility.PAPER
        return tuple(Resource.VECTOR if paper and job.resource is Resource.LINK else job.resource for job in self.jobs)

    @property
    def floor_s(self) -> float:
        """The least time that memory allows: off-chip bytes over bandwidth; 0 with the paper's counting."""
        return 0.0 if self.compatibility is Compatibility.PAPER else self.memory_s

    def _direct_predecessors(self) -> tuple[tuple[int, ...], ...]:
        direct: list[set[int]] = [set() for _ in self.jobs]
        for before, after in self.edges:
            direct[after].add(before)
        return tuple(tuple(sorted(group)) for group in direct)

    def key(self) -> str:
        """A digest of everything that the optimum depends on; names and energies do not count."""
        numbers = np.array([(job.latency_s, job.spread_s) for job in self.jobs], np.float64).tobytes()
        shape = (
            tuple(resource.value for resource in self.resources),
            tuple(sorted(set(self.edges))),
            (self.tensor_cores, self.vector_cores, self.intra_op_exclusive, self.floor_s),
        )
        return hashlib.sha256(repr(shape).encode() + numbers).hexdigest()


def topological_order(problem: SchedulingProblem) -> tuple[int, ...]:
    """Job indices, predecessors first, smallest index first among the ready."""
    return problem._order


def _sorted_by_precedence(problem: SchedulingProblem) -> tuple[int, ...]:
    """The order of `topological_order`; ScheduleError names a cycle's jobs."""
    predecessors = problem.predecessors
    waiting = [len(group) for group in predecessors]
    successors: list[list[int]] = [[] for _ in problem.jobs]
    for after, group in enumerate(predecessors):
        for before in group:
            successors[before].append(after)
    ready = sorted((i for i, count in enumerate(waiting) if count == 0), reverse=True)
    order: list[int] = []
    while ready:
        job = ready.pop()
        order.append(job)
        for after in successors[job]:
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)
                ready.sort(reverse=True)
    if len(order) < len(problem.jobs):
        stuck = [problem.jobs[i].name for i, count in enumerate(waiting) if count > 0]
        raise ScheduleError(
            f"{problem.name}: the precedence is cyclic among {_listed(stuck)}; remove an edge of the cycle"
        )
    return tuple(order)


def infeasibility(problem: SchedulingProblem) -> str | None:
    """Why no schedule exists, naming the job, or None: a job that cannot run here, or cores that are not there."""
    for job, resource in zip(problem.jobs, problem.resources, strict=True):
        if math.isinf(job.latency_s):
            return f"op {job.name!r} cannot run on this accelerator (infinite latency)"
        if resource.uses_tensor and problem.tensor_cores == 0:
            return f"op {job.name!r} needs a tensor core and there is none"
        if resource.uses_vector and problem.vector_cores == 0:
            return f"op {job.name!r} needs a vector core and there is none"
    return None


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


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
