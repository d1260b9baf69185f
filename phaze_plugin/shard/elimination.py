"""The least of a sum of cost tables over a few discrete variables, found exactly by eliminating one after the other.

    minimise    sum over tables t of  t[values of the variables in its scope]

To eliminate a variable, the tables that mention it are added up and replaced by one table: their least over its values
(Dechter, "Bucket elimination", Artificial Intelligence 113, 1999). What remains at the end is a table over the
variables that are kept, from which the values of all others follow backwards. The work is that of the tables in
between, whose sizes depend on how the scopes hang together and not on the number of variables: `plan_elimination`
chooses an order in which they stay small, greedily, and gives up where they do not.

A plan depends on scopes and sizes alone, so that it serves every set of costs. Infinite costs forbid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["EliminationPlan", "Minimum", "plan_elimination"]

FloatArray = NDArray[np.float64]

LARGEST_TABLE = 4_000_000
"""Entries of the largest table in between: 32 MB and some ten milliseconds, which is less than a solver takes."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One variable to eliminate: the tables to add, each with the shape in which it is added, and what remains.

    `rest` are the variables of the new table, in the order of its axes, which come after the eliminated variable's.
    """

    variable: int
    tables: tuple[tuple[int, tuple[int, ...]], ...]
    rest: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Minimum:
    """The least cost for all values of the kept variables, and what is needed to read off the other variables."""

    plan: EliminationPlan
    costs: FloatArray
    _best: Mapping[int, NDArray[np.intp]]

    def values(self, kept: Sequence[int] = ()) -> list[int]:
        """The value of every variable in a best answer, given those of the kept variables."""
        values = [0] * len(self.plan.sizes)
        for variable, value in zip(self.plan.kept, kept, strict=True):
            values[variable] = value
        for step in reversed(self.plan.steps):
            values[step.variable] = int(self._best[step.variable][tuple(values[variable] for variable in step.rest)])
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class EliminationPlan:
    """The order in which variables are eliminated, and how tables are added on the way.

    `axes` sorts the axes of each given table into the order of elimination, the kept variables last, so that tables of
    different scopes add up by broadcasting. `work` is the number of entries of all tables in between.
    """

    sizes: tuple[int, ...]
    kept: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    steps: tuple[_Step, ...]
    last: tuple[tuple[int, tuple[int, ...]], ...]
    work: int

    def minimise(self, tables: Sequence[FloatArray]) -> Minimum:
        """The least sum of the tables, each given over its scope as it was planned."""
        pool = [table.transpose(axes) for table, axes in zip(tables, self.axes, strict=True)]
        best = {}
        for step in self.steps:
            total = _sum(pool, step.tables)
            best[step.variable] = total.argmin(axis=0)
            pool.append(total.min(axis=0))
        costs = np.zeros(tuple(self.sizes[variable] for variable in self.kept))
        for index, shape in self.last:
            costs += pool[index].reshape(shape)
        return Minimum(self, costs, best)


def _sum(pool: Sequence[FloatArray], tables: Sequence[tuple[int, tuple[int, ...]]]) -> FloatArray:
    """The sum of tables of different scopes."""
    (first, shape), *others = tables
    total = pool[first].reshape(shape)
    for index, shape in others:
        total = total + pool[index].reshape(shape)
    return total


def plan_elimination(
    sizes: Sequence[int], scopes: Sequence[Sequence[int]], kept: Sequence[int] = (), largest: int = LARGEST_TABLE
) -> EliminationPlan | None:
    """An order in which variables of these sizes are eliminated from tables of these scopes.

    No scope names a variable twice; one that no scope names has its first value. None where some table in between would
    have more than `largest` entries.
    """
    order = _greedy_order(sizes, scopes, kept, largest)
    if order is None:
        return None
    rank = {variable: position for position, variable in enumerate((*order, *kept))}
    axes = tuple(tuple(int(axis) for axis in np.argsort([rank[variable] for variable in scope])) for scope in scopes)
    open_scopes = {
        index: tuple(scope[axis] for axis in sorted_axes)
        for index, (scope, sorted_axes) in enumerate(zip(scopes, axes, strict=True))
    }
    steps, work = list[_Step](), 0
    for variable in order:
        # The variable that is eliminated next is the first axis of every table that mentions it.
        mentioned = {index: scope for index, scope in open_scopes.items() if scope and scope[0] == variable}
        full = tuple(
            sorted({variable, *(other for scope in mentioned.values() for other in scope)}, key=rank.__getitem__)
        )
        steps.append(_Step(variable, _shapes(sizes, mentioned, full), full[1:]))
        work += math.prod(sizes[other] for other in full)
        for index in mentioned:
            del open_scopes[index]
        open_scopes[len(scopes) + len(steps) - 1] = full[1:]
    return EliminationPlan(
        sizes=tuple(sizes),
        kept=tuple(kept),
        axes=axes,
        steps=tuple(steps),
        last=_shapes(sizes, open_scopes, tuple(kept)),
        work=work,
    )


def _shapes(
    sizes: Sequence[int], scopes: Mapping[int, tuple[int, ...]], full: tuple[int, ...]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The shape in which each table is added to one over all of `full`: 1 along variables that it does not mention."""
    return tuple(
        (index, tuple(sizes[variable] if variable in scope else 1 for variable in full))
        for index, scope in scopes.items()
    )


def _greedy_order(
    sizes: Sequence[int], scopes: Sequence[Sequence[int]], kept: Sequence[int], largest: int
) -> list[int] | None:
    """Always the variable next whose table would be the smallest; the first one among equals."""
    neighbours: dict[int, set[int]] = {}
    for scope in scopes:
        for variable in scope:
            neighbours.setdefault(variable, set()).update(scope)
    entries = {
        variable: math.prod(sizes[other] for other in near)
        for variable, near in neighbours.items()
        if variable not in kept
    }
    order = []
    while entries:
        variable = min(entries, key=lambda candidate: (entries[candidate], candidate))
        if entries.pop(variable) > largest:
            return None
        order.append(variable)
        near = neighbours.pop(variable) - {variable}
        for other in near:
            neighbours[other] = (neighbours[other] | near) - {variable}
            if other in entries:
                entries[other] = math.prod(sizes[third] for third in neighbours[other])
    return order
