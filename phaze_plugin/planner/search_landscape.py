"""The strategies that a search met, as a plan keeps them: what was simulated, and what its bound ruled out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from phaze.parallelism import Parallelism
from phaze.place import PreparedProblem
from phaze.place.simulation.placement import memory_of_devices
from phaze.plan.plan import Landscape
from phaze.planner.strategy_search import Answer, Candidate

__all__ = ["landscape"]

_MOST_SIMULATED = 40
"""Simulated strategies of one microbatch size and tp that are listed: the memory of each takes its prices."""

_MOST_BOUNDED = 600
"""Strategies in all that are listed by their bound: enough to see where they lie, in a file of some hundred KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Met:
    """One strategy that the search met, with the columns of `Landscape`."""

    dp: int
    cp: int
    ep: int
    shard: int
    tp: int
    pp: int
    chunks: int
    zero: int
    micro_batch_size: int
    schedule: str
    state: str
    seconds: float
    memory_bytes: float


def landscape(answer: Answer) -> Landscape:
    """Every simulated strategy, and the most promising of those that were only bounded."""
    simulated = [met for candidate in answer.candidates for met in _simulated(candidate)]
    known = {_degrees(met) for met in simulated}
    bounded = [
        met
        for candidate in answer.candidates
        for met in _bounded(candidate, answer.placement.time_s)
        if _degrees(met) not in known
    ]
    searches = [candidate.result.search for candidate in answer.candidates if candidate.result.search is not None]
    only_bounded = sum(search.bounded_count for search in searches)
    listed = [*sorted(simulated, key=_order), *sorted(bounded, key=_order)[:_MOST_BOUNDED]]
    columns = {field.name: tuple(getattr(met, field.name) for met in listed) for field in fields(_Met)}
    return Landscape(met=max(len(simulated) + only_bounded, len(listed)), **columns)


def _degrees(met: _Met) -> tuple[object, ...]:
    axes = (met.dp, met.cp, met.ep, met.shard, met.tp, met.pp)
    return (*axes, met.chunks, met.zero, met.micro_batch_size, met.schedule)


def _order(met: _Met) -> tuple[object, ...]:
    return (met.seconds, *_degrees(met))


def _simulated(candidate: Candidate) -> Iterator[_Met]:
    """The strategies of one microbatch size and tp whose best stages were found, and their memory."""
    search = candidate.result.search
    if search is None:
        return
    prepared = PreparedProblem.of(candidate.problem)
    for plan in search.solved[:_MOST_SIMULATED]:
        memories = memory_of_devices(prepared, plan.parallelism, plan.stages)
        fullest_bytes = max(memory.total_bytes + memory.reserved_bytes for memory in memories)
        yield _met(candidate, plan.parallelism, "simulated", plan.time_s, fullest_bytes)


def _bounded(candidate: Candidate, best_s: float) -> Iterator[_Met]:
    """The most promising strategies of one microbatch size and tp that have only a bound."""
    search = candidate.result.search
    if search is None:
        return
    table = search.bounded
    finite = np.flatnonzero(np.isfinite(table.bound_s))
    for index in finite[np.argsort(table.bound_s[finite], kind="stable")][:_MOST_BOUNDED].tolist():
        bound_s = float(table.bound_s[index])
        state = "open" if bound_s < best_s else "pruned"
        yield _met(
            candidate,
            table.parallelism(index, candidate.problem),
            state,
            bound_s,
            float(table.least_bytes[index]),
        )


def _met(candidate: Candidate, parallelism: Parallelism, state: str, seconds: float, memory_bytes: float) -> _Met:
    return _Met(
        dp=parallelism.dp,
        cp=parallelism.cp,
        ep=parallelism.ep,
        shard=parallelism.shard_devices if parallelism.zero else 1,
        tp=parallelism.tp,
        pp=parallelism.pp,
        chunks=parallelism.chunks,
        zero=parallelism.zero,
        micro_batch_size=candidate.slices.micro_batch_size,
        schedule=parallelism.schedule.value,
        state=state,
        seconds=seconds,
        memory_bytes=memory_bytes,
    )
