"""Give core numbers to a path through the frontier, whose states only know when cores are free, sorted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phaze.schedule.cores import Step, give_cores
from phaze.schedule.frontier.tables import Tables

__all__ = ["with_cores"]


def with_cores(tables: Tables, chosen: Sequence[tuple[int, bool, int]]) -> list[Step]:
    """Steps with core numbers for (op, is spread, column) in the order of the path."""
    if tables.is_matched:
        return _matched(tables, chosen)
    return give_cores(tables.reduced, [(op, is_spread) for op, is_spread, _ in chosen])


def _matched(tables: Tables, chosen: Sequence[tuple[int, bool, int]]) -> list[Step]:
    """Follow the sorted columns of the states with the same arithmetic, remembering which core each one is."""
    reduced = tables.reduced
    tensor_cores, vector_cores = reduced.useful_cores
    tensor = [0.0 if core < tensor_cores else math.inf for core in range(tables.tensor_columns)]
    vector = [0.0 if core < vector_cores else math.inf for core in range(tables.tensor_columns)]
    order, clock, link_free = list(range(len(tensor))), 0.0, 0.0
    ended, steps = [0.0] * (tables.count + 1), []
    for op, is_spread, column in chosen:
        everything = is_spread and reduced.is_exclusive
        holds_tensor, holds_vector = (
            bool(reduced.uses_tensor[op]) or everything,
            bool(reduced.uses_vector[op]) or everything,
        )
        core = -1 if is_spread or reduced.is_off_core[op] else order[column]
        cores = [at for at in range(len(tensor)) if is_spread or at == core]
        free = [tensor[at] for at in cores if holds_tensor and tensor[at] < math.inf]
        free += [vector[at] for at in cores if holds_vector and vector[at] < math.inf]
        ready = max(ended[before] for before in (*tables.before[op], tables.count))
        if reduced.is_off_core[op]:
            start = max(ready, link_free) if reduced.is_link[op] else ready
        else:
            start = max(clock, ready, *free)
        ended[op] = start + float((tables.spread if is_spread else tables.latency)[op])
        if not tables.is_wait[op]:
            clock = max(clock, ended[op] if everything else start)
            link_free = max(link_free, ended[op] if reduced.is_link[op] else start)
        for at in cores:
            tensor[at] = ended[op] if holds_tensor and tensor[at] < math.inf else tensor[at]
            vector[at] = ended[op] if holds_vector and vector[at] < math.inf else vector[at]
        tensor, vector = [max(at, clock) for at in tensor], [max(at, clock) for at in vector]
        order.sort(key=lambda at: (tensor[at], vector[at]))
        steps.append(Step(op, is_spread, core))
    return steps
