"""Drop states that another state with the same started ops is nowhere later than."""

from __future__ import annotations

import numpy as np

from phaze.schedule.frontier.states import States
from phaze.schedule.frontier.tables import Tables
from phaze.schedule.reduce import FloatArray, IntArray

__all__ = ["undominated"]

_COMPARED = 24  # neighbours in the order of lateness that each state is compared with
_EPSILON = 1e-13  # in units of the incumbent


def undominated(tables: Tables, states: States) -> IntArray:
    """The places of the states to keep, in a fixed order."""
    late = _lateness(tables, states)
    order = np.lexsort((np.where(np.isinf(late), 0.0, late).sum(axis=0), *states.members))
    members, late = states.members[:, order], late.T[order]
    is_first = np.ones(states.count, np.bool_)
    is_first[1:] = (members[:, 1:] != members[:, :-1]).any(axis=0)
    group = np.cumsum(is_first)
    is_dead = np.zeros(states.count, np.bool_)
    for distance in range(1, min(_COMPARED, states.count - 1) + 1):
        pairs = np.flatnonzero(group[distance:] == group[:-distance])
        if not pairs.size:
            break
        pairs = pairs[~is_dead[pairs + distance]]
        is_worse = (late[pairs] <= late[pairs + distance] + _EPSILON).all(axis=1)
        is_dead[pairs[is_worse] + distance] = True
    return order[~is_dead]


def _lateness(tables: Tables, states: States) -> FloatArray:
    """Everything that can delay what is still to come; ends before the next possible start are lifted to it."""
    unstarted = (~states.started).astype(np.float32)
    is_open = states.started & (tables.edges @ unstarted > 0.0)
    next_start = np.where(tables.leads_to_links[:, None], states.link_free, np.minimum(states.clock, states.link_free))
    next_start = np.where(tables.leads_to_cores[:, None], states.clock, next_start)
    has_link = (~states.started[tables.reduced.is_link]).any(axis=0)
    return np.concatenate(
        [
            np.where(is_open, np.maximum(states.end[:-1], next_start), 0.0),
            np.maximum(states.held, states.clock),
            states.tensor_free,
            states.vector_free,
            states.clock[None],
            np.where(has_link, states.link_free, 0.0)[None],
            states.end.max(axis=0)[None],
        ]
    )
