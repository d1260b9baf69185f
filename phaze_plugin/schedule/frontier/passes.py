"""Passes over all levels, each wider than the last, until the incumbent is proven or the work is spent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phaze.schedule.cores import Placed, makespan, retime
from phaze.schedule.frontier.advance import children
from phaze.schedule.frontier.cores import with_cores
from phaze.schedule.frontier.dominance import undominated
from phaze.schedule.frontier.states import Moves, States, first_state, moves_from
from phaze.schedule.frontier.tables import Tables, make_tables
from phaze.schedule.reduce import FloatArray, Reduced

__all__ = ["Outcome", "search_frontier"]

_FIRST_WIDTH = 60
_WIDER = 8
_EPSILON = 1e-10  # a schedule counts as better if it is shorter by more than this share


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best schedule known, a proven bound, and the number of moves that were looked at."""

    placed: tuple[Placed, ...]
    bound_s: float
    work: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    moves: tuple[Moves, ...]  # empty if no schedule shorter than the target was found
    last: int  # the place of the best last state
    bound: float
    work: int


def search_frontier(
    reduced: Reduced,
    incumbent: tuple[Placed, ...],
    *,
    gap: float,
    spare_s: float = 0.0,
    enough_s: float = 0.0,
    work: int,
) -> Outcome:
    """Improve the incumbent until its bound is within `gap` of it plus `spare_s`, or it takes at most `enough_s`.

    `work` limits the moves looked at.
    """
    unit_s = makespan(incumbent)
    tables = make_tables(reduced, unit_s)
    bound, best = float(tables.worth.sum(axis=1).max()), 1.0
    spent, width = 0, _FIRST_WIDTH
    while best * unit_s > enough_s and spent < work:
        target = best - max(gap * best + spare_s / unit_s, _EPSILON)
        if bound >= target - _EPSILON:
            break
        found = _run(tables, target, width, work - spent)
        spent += found.work
        bound = max(bound, min(found.bound, target))
        if found.moves:
            incumbent = _placed(tables, found)
            best = makespan(incumbent) / unit_s
        width *= _WIDER
    return Outcome(placed=incumbent, bound_s=min(bound, best) * unit_s, work=spent)


def _run(tables: Tables, target: float, width: int, most: int) -> _Pass:
    """One pass: level by level, at most `width` states on each, until `most` moves have been looked at."""
    states, history, dropped, work = first_state(tables), [], math.inf, 0
    for _ in range(tables.count):
        if work >= most:
            return _Pass(moves=(), last=-1, bound=min(dropped, float(states.bound.min())), work=work)
        moves = moves_from(tables, states)
        work += moves.count
        states, moves = children(tables, states, moves, target)
        kept = undominated(tables, states)
        if len(kept) > width:
            ranked = kept[np.argsort(_rank(tables, states)[kept], kind="stable")]
            kept = ranked[:width]
            dropped = min(dropped, float(states.bound[ranked[width:]].min()))
        states, moves = states.take(kept), moves.take(kept)
        if not states.count:
            return _Pass(moves=(), last=-1, bound=dropped, work=work)
        history.append(moves)
    ends = states.end.max(axis=0)
    last = int(ends.argmin())
    return _Pass(moves=tuple(history), last=last, bound=min(dropped, float(ends[last])), work=work)


def _rank(tables: Tables, states: States) -> FloatArray:
    """Which states to keep when there are too many: the least first."""
    return states.bound


def _placed(tables: Tables, found: _Pass) -> tuple[Placed, ...]:
    """Walk back from the best last state, give out the cores, and time the order anew in seconds."""
    chosen, at = [], found.last
    for moves in reversed(found.moves):
        chosen.append((int(moves.op[at]), bool(moves.is_spread[at]), int(moves.column[at])))
        at = int(moves.parent[at])
    return retime(tables.reduced, with_cores(tables, chosen[::-1]))
