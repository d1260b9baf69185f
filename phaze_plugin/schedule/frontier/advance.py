"""Make the children of moves: first bound them cheaply from their parents, then build and bound the survivors.

A child's bound is the largest of: its parent's; for each row of weights, the time passed plus what is still to come of
running and unstarted ops; the ends of started ops plus the ways from there to the end; and the block bound, rule 3.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phaze.schedule.frontier.states import Moves, States
from phaze.schedule.frontier.tables import Tables
from phaze.schedule.reduce import BoolArray, FloatArray

__all__ = ["children"]


def children(tables: Tables, states: States, moves: Moves, target: float) -> tuple[States, Moves]:
    """The states that moves lead to, without those whose bound reaches the target."""
    moves = moves.take(_quick_bound(tables, states, moves) < target)
    grown = _grown(tables, states, moves)
    for bound in (_weight_bound, _path_bound, _block_bound):
        np.maximum(grown.bound, bound(tables, grown), out=grown.bound)
        kept = np.flatnonzero(grown.bound < target)
        if len(kept) < grown.count:
            grown, moves = grown.take(kept), moves.take(kept)
    return grown, moves


def _clocks(tables: Tables, states: States, moves: Moves) -> tuple[FloatArray, FloatArray]:
    """No op on cores, no link starts before these: the new op's start, or its end if it excludes all of them."""
    clock, link_free = states.clock[moves.parent], states.link_free[moves.parent]
    alone = moves.is_spread & tables.reduced.is_exclusive
    is_wait, is_link = tables.is_wait[moves.op], tables.reduced.is_link[moves.op]
    return (
        np.where(is_wait, clock, np.maximum(clock, np.where(alone, moves.end, moves.start))),
        np.where(is_wait, link_free, np.maximum(link_free, np.where(is_link, moves.end, moves.start))),
    )


def _quick_bound(tables: Tables, states: States, moves: Moves) -> FloatArray:
    """From sums over the parent: running ops lose at most their rate times the time that passes."""
    unstarted = tables.worth @ ~states.started
    left = np.maximum(states.end[:-1] - states.clock, 0.0)
    running, running_rate = tables.one_core @ left, tables.one_core @ (left > 0.0)
    clock, link_free = _clocks(tables, states, moves)
    passed = clock - states.clock[moves.parent]
    total = np.maximum(running[:, moves.parent] - passed * running_rate[:, moves.parent], 0.0)
    total += unstarted[:, moves.parent] - tables.worth[:, moves.op]
    total += np.maximum(moves.end - clock, 0.0) * tables.one_core[:, moves.op]
    total += _time_passed(tables, clock, link_free)
    own_way = moves.end + tables.tail[moves.op] - np.minimum(tables.latency, tables.spread)[moves.op]
    bound: FloatArray = np.maximum(np.maximum(total.max(axis=0), own_way), states.bound[moves.parent])
    return bound


def _time_passed(tables: Tables, clock: FloatArray, link_free: FloatArray) -> FloatArray:
    """The part of each row's weight that has been served: [row, state]."""
    passed = tables.clock_weight[:, None] * clock
    if tables.reduced.has_off_core:
        passed += tables.link_weight[:, None] * link_free
        passed += tables.path_weight[:, None] * np.minimum(clock, link_free)
    return passed


def _grown(tables: Tables, states: States, moves: Moves) -> States:
    """Append the moves to copies of their parents."""
    parents = states.take(moves.parent)
    here, op, end = np.arange(moves.count), moves.op, moves.end
    parents.started[op, here] = True
    parents.end[op, here] = end
    clock, link_free = _clocks(tables, states, moves)
    everything = moves.is_spread & tables.reduced.is_exclusive
    holds = (tables.reduced.uses_tensor[op] | everything, tables.reduced.uses_vector[op] | everything)
    held = np.maximum(parents.held, np.where(np.stack(holds), end, 0.0))
    tensor, vector = _cores_after(tables, parents, moves, holds, clock)
    return replace(
        parents,
        clock=clock,
        link_free=link_free,
        held=held,
        tensor_free=tensor,
        vector_free=vector,
        members=parents.members | tables.bits[:, op],
    )


def _cores_after(
    tables: Tables, parents: States, moves: Moves, holds: tuple[BoolArray, BoolArray], clock: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Free times of the cores, those in the past lifted to the clock, sorted; pairs are sorted together."""
    sides = []
    for free, is_held in zip((parents.tensor_free, parents.vector_free), holds, strict=True):
        if len(free):
            one = np.flatnonzero(is_held & ~moves.is_spread)
            free[moves.column[one], one] = moves.end[one]
            spread = np.flatnonzero(is_held & moves.is_spread)
            free[:, spread] = np.where(np.isinf(free[:, spread]), np.inf, moves.end[spread])
            np.maximum(free, clock, out=free)
        sides.append(free)
    if not tables.is_matched:
        return np.sort(sides[0], axis=0), np.sort(sides[1], axis=0)
    pairs = np.empty(sides[0].shape, np.complex128)
    pairs.real, pairs.imag = sides
    pairs.sort(axis=0)
    return pairs.real.copy(), pairs.imag.copy()


def _weight_bound(tables: Tables, states: States) -> FloatArray:
    left = np.maximum(states.end[:-1] - states.clock, 0.0)
    total = tables.one_core @ left + tables.worth @ ~states.started
    total += _time_passed(tables, states.clock, states.link_free)
    bound: FloatArray = total.max(axis=0)
    return bound


def _path_bound(tables: Tables, states: States) -> FloatArray:
    """Ends plus ways to the end; unstarted ops start at the clock, or when the link is free."""
    after = tables.tail - np.minimum(tables.latency, tables.spread)
    started = np.where(states.started, states.end[:-1] + after[:, None], 0.0).max(axis=0)
    off_core = tables.reduced.is_off_core[:, None]
    waiting = np.where(states.started | off_core, 0.0, tables.tail[:, None]).max(axis=0)
    bound: FloatArray = np.maximum(started, states.clock * (waiting > 0.0) + waiting)
    if tables.reduced.has_off_core:
        linked = np.where(states.started | ~tables.reduced.is_link[:, None], 0.0, tables.tail[:, None]).max(axis=0)
        bound = np.maximum(bound, states.link_free * (linked > 0.0) + linked)
    return bound


def _block_bound(tables: Tables, states: States) -> FloatArray:
    """While cores are held until F no op is spread: what one-core latencies cannot bring in before F comes after it."""
    if not tables.reduced.is_exclusive or not states.count:
        return states.bound
    held_until = np.maximum(states.held.max(axis=0), states.clock)
    start, ended = np.empty(states.started.shape), np.empty(states.started.shape)
    for op in range(tables.count):
        earliest = (
            states.link_free if tables.reduced.is_link[op] else states.clock * (not tables.reduced.is_off_core[op])
        )
        for before in tables.before[op][tables.before[op] < tables.count]:
            earliest = np.maximum(earliest, ended[before])
        start[op] = earliest
        ended[op] = np.where(states.started[op], states.end[op], earliest + tables.latency[op])
    is_late = ~states.started & (start >= held_until - 1e-12)
    rows = tables.core_rows
    late = held_until + (tables.worth[rows] @ (is_late & ~tables.reduced.is_off_core[:, None])).max(axis=0)
    way = np.where(states.started, 0.0, np.minimum(start, held_until) + tables.tail[:, None]).max(axis=0)
    bound: FloatArray = np.maximum(late, way)
    return bound
