"""Partial schedules as arrays, one column per state, and the moves that append one op to each.

A state knows which ops have started and when they end, the clock (no op on cores starts earlier any more), the same
for links, until when any tensor or vector core is held, and, where cores are scarce, when each core is free.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from phaze.schedule.frontier.tables import Tables
from phaze.schedule.reduce import BoolArray, FloatArray, IntArray

__all__ = ["Moves", "States", "first_state", "moves_from"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class States:
    """The last axis of every array is the state."""

    started: BoolArray  # [op, state]
    end: FloatArray  # [op + 1, state]; the last row stays 0
    clock: FloatArray  # no op on cores starts earlier: the last start, or the end of an op that runs alone
    link_free: FloatArray  # no link starts earlier: the last start, or the end of the last link
    held: FloatArray  # [2, state]: until when some tensor core, some vector core is held
    tensor_free: FloatArray  # [column, state], ascending
    vector_free: FloatArray
    members: NDArray[np.uint64]  # [word, state]
    bound: FloatArray

    @property
    def count(self) -> int:
        """Number of states."""
        return len(self.clock)

    def take(self, at: IntArray) -> States:
        """The states at these columns."""
        return States(**{part.name: getattr(self, part.name)[..., at] for part in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """One op appended to one state each."""

    parent: IntArray
    op: IntArray
    is_spread: BoolArray
    column: IntArray
    start: FloatArray
    end: FloatArray

    @property
    def count(self) -> int:
        """Number of moves."""
        return len(self.parent)

    def take(self, at: IntArray | BoolArray) -> Moves:
        """The moves at these places."""
        return Moves(**{part.name: getattr(self, part.name)[at] for part in fields(self)})


def first_state(tables: Tables) -> States:
    """Nothing has started; columns of one kind beyond the other's cores are never free for that other kind."""
    tensor, vector = np.zeros((tables.tensor_columns, 1)), np.zeros((tables.vector_columns, 1))
    if tables.is_matched:
        cores = tables.reduced.useful_cores
        tensor[cores[0] :], vector[cores[1] :] = np.inf, np.inf
    return States(
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


def moves_from(tables: Tables, states: States) -> Moves:
    """Every op that may be appended to every state, on one core and spread, but for rules 1, 2, 6 and 7."""
    parent, op = np.nonzero(_eligible(tables, states).T)
    ready = states.end[tables.before[op], parent[:, None]].max(axis=1)
    base = np.where(tables.is_wait[op], ready, np.maximum(ready, states.clock[parent]))
    base = np.where(tables.reduced.is_link[op], np.maximum(ready, states.link_free[parent]), base)
    single = _one_core_moves(tables, states, parent, op, base)
    spread = _spread_moves(tables, states, parent, op, base)
    earliest = np.full(states.count, np.inf)
    for moves in (single, spread):
        _lower(earliest, moves.parent, moves.end)
    moves = Moves(
        **{
            part.name: np.concatenate([getattr(single, part.name), getattr(spread, part.name)])
            for part in fields(Moves)
        }
    )
    return moves.take(moves.start < earliest[moves.parent])


def _eligible(tables: Tables, states: States) -> BoolArray:
    """[op, state]: what must go first has started; rules 6 and 7."""
    done = tables.goes_first.T @ states.started.astype(np.float32)
    eligible: BoolArray = ~states.started & (done == tables.first_count[:, None])
    if tables.is_wait.any():
        waits = eligible & tables.is_wait[:, None]
        is_first = waits & (np.cumsum(waits, axis=0) == 1)
        eligible = np.where(waits.any(axis=0), is_first, eligible)
    return eligible


def _one_core_moves(tables: Tables, states: States, parent: IntArray, op: IntArray, base: FloatArray) -> Moves:
    uses_tensor, uses_vector = tables.reduced.uses_tensor[op], tables.reduced.uses_vector[op]
    column = np.zeros(len(op), np.int64)
    if tables.is_matched:
        return _pair_moves(tables, states, parent, op, base)
    start = base
    if tables.tensor_columns:
        start = np.maximum(start, np.where(uses_tensor, states.tensor_free[0, parent], 0.0))
    if tables.vector_columns:
        start = np.maximum(start, np.where(uses_vector, states.vector_free[0, parent], 0.0))
    return Moves(
        parent=parent,
        op=op,
        is_spread=np.zeros(len(op), np.bool_),
        column=column,
        start=start,
        end=start + tables.latency[op],
    )


def _pair_moves(tables: Tables, states: States, parent: IntArray, op: IntArray, base: FloatArray) -> Moves:
    """One move for every different column; ops off the cores take column 0."""
    uses_tensor, uses_vector = tables.reduced.uses_tensor[op], tables.reduced.uses_vector[op]
    tensor, vector = states.tensor_free[:, parent], states.vector_free[:, parent]
    start = np.maximum(base, np.where(uses_tensor, tensor, 0.0))
    start = np.maximum(start, np.where(uses_vector, vector, 0.0))
    is_new = np.ones(start.shape, np.bool_)
    is_new[1:] = ((tensor[1:] != tensor[:-1]) | (vector[1:] != vector[:-1])) & (uses_tensor | uses_vector)
    which, column = np.nonzero((is_new & np.isfinite(start)).T)
    start = start[column, which]
    return Moves(
        parent=parent[which],
        op=op[which],
        is_spread=np.zeros(len(which), np.bool_),
        column=column,
        start=start,
        end=start + tables.latency[op[which]],
    )


def _spread_moves(tables: Tables, states: States, parent: IntArray, op: IntArray, base: FloatArray) -> Moves:
    can = np.isfinite(tables.spread[op])
    if tables.is_last.any():
        others_started: BoolArray = np.logical_and.reduce(states.started[~tables.is_last], axis=0)
        can &= ~tables.is_last[op] | others_started[parent]
    parent, op, base = parent[can], op[can], base[can]
    everything = tables.reduced.is_exclusive
    start = np.maximum(base, np.where(tables.reduced.uses_tensor[op] | everything, states.held[0, parent], 0.0))
    start = np.maximum(start, np.where(tables.reduced.uses_vector[op] | everything, states.held[1, parent], 0.0))
    return Moves(
        parent=parent,
        op=op,
        is_spread=np.ones(len(op), np.bool_),
        column=np.zeros(len(op), np.int64),
        start=start,
        end=start + tables.spread[op],
    )


def _lower(least: FloatArray, group: IntArray, values: FloatArray) -> None:
    """least[g] = min(least[g], values of group g); groups are ascending."""
    if not len(group):
        return
    firsts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    at = group[firsts]
    least[at] = np.minimum(least[at], np.minimum.reduceat(values, firsts))
