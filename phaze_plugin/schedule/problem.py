"""The operators of one layer on the cores of one accelerator: the problem that every scheduling method takes.

Each op has a kind, a latency on one core and a latency when spread over all cores of its kind. A method chooses start
times, cores, and one core or spread, and minimises the makespan under these rules (the paper's ILP, with links added):

 1. an op starts when all its predecessors have ended, zero-cost ones included;
 2. a core runs one op at a time; a `both` op takes a matched pair, tensor core c with vector core c;
 3. with `intra_op_exclusive` a spread op runs alone on the cores; without it a spread tensor op excludes tensor and
    both ops, a spread vector op vector and both ops, a spread both op everything;
 4. `none` ops hold nothing; `link` ops (collectives) hold no core, run one at a time, and are not excluded by rule 3.

Concurrent ops share one memory: the layer's time is the larger of the makespan and `memory_s`, its off-chip bytes over
bandwidth. `Compatibility.PAPER` leaves that out and treats links as vector ops.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from phaze.errors import ScheduleError

__all__ = ["Compatibility", "Op", "OpKind", "Problem", "infeasibility"]


class OpKind(StrEnum):
    """What an op holds while it runs."""

    TENSOR = "tensor"
    VECTOR = "vector"
    BOTH = "both"
    NONE = "none"
    LINK = "link"

    @property
    def uses_tensor(self) -> bool:
        """Whether the op holds tensor cores."""
        return self in (OpKind.TENSOR, OpKind.BOTH)

    @property
    def uses_vector(self) -> bool:
        """Whether the op holds vector cores."""
        return self in (OpKind.VECTOR, OpKind.BOTH)


class Compatibility(StrEnum):
    """Whose counting applies."""

    PHAZE = "phaze"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator; `spread_s` is its time on all cores of its kind (infinite: it cannot be spread).

    An infinite `latency_s` says that the op cannot run on this accelerator. The energies are those on one core and
    spread. Raises ScheduleError on negative or NaN.
    """

    name: str
    kind: OpKind
    latency_s: float
    spread_s: float = math.inf
    energy_j: float = 0.0
    spread_energy_j: float = 0.0

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
        return self.kind not in (OpKind.NONE, OpKind.LINK) and self.spread_s < self.latency_s

    @property
    def shortest_s(self) -> float:
        """The least time the op can take."""
        return self.spread_s if self.can_spread else self.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Ops, precedence edges (pairs of op indices), and the cores they run on.

    Raises ScheduleError on cyclic precedence, unknown indices, repeated names, negative core counts or memory time.
    """

    ops: tuple[Op, ...]
    edges: tuple[tuple[int, int], ...]
    tensor_cores: int
    vector_cores: int
    intra_op_exclusive: bool = True
    memory_s: float = 0.0
    compatibility: Compatibility = Compatibility.PHAZE
    name: str = "layer"

    def __post_init__(self) -> None:
        for kind, cores in (("tensor", self.tensor_cores), ("vector", self.vector_cores)):
            if cores < 0:
                raise ScheduleError(f"{self.name}: {cores} {kind} cores; expected 0 or more")
        if not 0.0 <= self.memory_s < math.inf:
            raise ScheduleError(f"{self.name}: memory_s is {self.memory_s}; expected a finite number of at least 0")
        names = [op.name for op in self.ops]
        if len(set(names)) != len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ScheduleError(f"{self.name}: two ops are called {repeated!r}; names must differ")
        for edge in self.edges:
            if not all(0 <= end < len(self.ops) for end in edge):
                raise ScheduleError(f"{self.name}: edge {edge} names an op outside 0..{len(self.ops) - 1}")
        topological_order(self)

    @property
    def kinds(self) -> tuple[OpKind, ...]:
        """The kind each op counts as: with the paper's counting, links are vector ops."""
        paper = self.compatibility is Compatibility.PAPER
        return tuple(OpKind.VECTOR if paper and op.kind is OpKind.LINK else op.kind for op in self.ops)

    @property
    def floor_s(self) -> float:
        """The least time that memory allows: off-chip bytes over bandwidth; 0 with the paper's counting."""
        return 0.0 if self.compatibility is Compatibility.PAPER else self.memory_s

    @property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each op its direct predecessors, ascending and without repeats."""
        found: list[set[int]] = [set() for _ in self.ops]
        for before, after in self.edges:
            found[after].add(before)
        return tuple(tuple(sorted(group)) for group in found)

    def key(self) -> str:
        """A digest of everything that the optimum depends on; names and energies do not count."""
        numbers = np.array([(op.latency_s, op.spread_s) for op in self.ops], np.float64).tobytes()
        shape = (
            tuple(kind.value for kind in self.kinds),
            tuple(sorted(set(self.edges))),
            (self.tensor_cores, self.vector_cores, self.intra_op_exclusive, self.floor_s),
        )
        return hashlib.sha256(repr(shape).encode() + numbers).hexdigest()


def topological_order(problem: Problem) -> tuple[int, ...]:
    """Op indices, predecessors first, smallest index first among the ready; ScheduleError names a cycle's ops."""
    waiting = [len(group) for group in problem.predecessors]
    successors: list[list[int]] = [[] for _ in problem.ops]
    for after, group in enumerate(problem.predecessors):
        for before in group:
            successors[before].append(after)
    ready = sorted((i for i, count in enumerate(waiting) if count == 0), reverse=True)
    order: list[int] = []
    while ready:
        op = ready.pop()
        order.append(op)
        for after in successors[op]:
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)
                ready.sort(reverse=True)
    if len(order) < len(problem.ops):
        stuck = [problem.ops[i].name for i, count in enumerate(waiting) if count > 0]
        raise ScheduleError(
            f"{problem.name}: the precedence is cyclic among {_listed(stuck)}; remove an edge of the cycle"
        )
    return tuple(order)


def infeasibility(problem: Problem) -> str | None:
    """Why no schedule exists, naming the op, or None: an op that cannot run here, or cores that are not there."""
    for op, kind in zip(problem.ops, problem.kinds, strict=True):
        if math.isinf(op.latency_s):
            return f"op {op.name!r} cannot run on this accelerator (infinite latency)"
        if kind.uses_tensor and problem.tensor_cores == 0:
            return f"op {op.name!r} needs a tensor core and there is none"
        if kind.uses_vector and problem.vector_cores == 0:
            return f"op {op.name!r} needs a vector core and there is none"
    return None


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
