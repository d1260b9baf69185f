"""The best stages of one strategy: branch and bound over candidate stages, simulating the pipelines that survive.

Pipelines are extended stage by stage, the most promising first (`best_stages`). A pipeline is dropped if its bound
proves it slower than the best simulated time, or than a given cutoff; complete pipelines are simulated together. Work
is counted in nodes (extended pipelines), never in seconds: the same input gives the same answer. If nodes run out, the
answer says how low the unexplored bounds were.

The bounds of interleaved pipelines are too loose to lead the search to good pipelines quickly. For them `warm_starts`
builds one by a dynamic program that evens out the stages, and improves it by local changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.bounds.partial_pipeline_bounds import StageBounds
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.candidate_stages import CandidateStages
from phaze.tolerances import CLAIM_MARGIN, EQUAL_SEARCH_TIMES

__all__ = ["Pipeline", "SingleDeviceStages", "StageSearch", "StageSearchAnswer", "best_stages", "warm_starts"]

Pipeline = tuple[int, ...]
"""The stages of a pipeline, or its first ones, as indices of candidate stages."""

_SIMULATED_AT_ONCE = 32
"""How many complete pipelines wait to be simulated together. A batch costs hardly more than one pipeline; but a time
that is known earlier prunes more. The first pipeline of a search does not wait."""

_IMPROVEMENTS = 8
"""How many local changes a warm start gets at most. Each costs one batch of estimates; the changes end
earlier where none helps."""

_PROMISING = 1.1
"""A warm start up to this much slower than the cutoff is worth local changes; of a slower one, estimates
would be spent with little hope."""

_CLOSE = 1.01
"""A warm start whose estimate is within this factor of the cutoff is worth a simulation, since an estimate
may err a little in either direction."""

_OVERFULL_PENALTY = 100
"""By how many times its seconds a stage is penalised if it needs twice its share of a device's memory: so much that any
pipeline which keeps to the shares is preferred, yet one that exceeds them least is found where none does."""


@dataclass(frozen=True, slots=True)
class SingleDeviceStages:
    """How many stages of a pipeline take a single device although tp is larger.

    Attributes:
        least: so many must, or the devices do not suffice.
        exact: exactly so many must, because no device may idle; None where any number from the least on is allowed.
    """

    least: int = 0
    exact: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSearch:
    """What is searched.

    Attributes:
        candidates: stages to choose from.
        bounds: bounds under the pipelines that they make.
        simulated: seconds per batch of pipelines given as candidates per (pipeline, stage).
        estimated: the same in a few microbatches, extended to all; near the simulated seconds, but no bound.
        stages: how many to choose.
        last_state: the state in which every layer is placed.
        singles: how many stages take a single device.
    """

    candidates: CandidateStages
    bounds: StageBounds
    simulated: Callable[[IntArray], FloatArray]
    estimated: Callable[[IntArray], FloatArray]
    stages: int
    last_state: int
    singles: SingleDeviceStages = SingleDeviceStages()

    def root_bound(self) -> float:
        """A bound under every pipeline: the least over all first stages."""
        candidates = self.candidates
        options = np.arange(candidates.first[0], candidates.first[1])
        if not len(options):
            return math.inf
        singles_needed = np.maximum(self.singles.least - candidates.is_single[options], 0)
        _, bounds = self.bounds.extend(self.bounds.root, 0, options, singles_needed)
        return float(bounds.min())


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSearchAnswer:
    """The best pipeline found.

    Attributes:
        time_s: its simulated seconds; infinite if none beats the cutoff.
        pipeline: its stages.
        bound_s: nothing else is faster than the smaller of this and `time_s`.
        nodes: pipelines that were extended.
        simulated: pipelines that were simulated.
    """

    time_s: float
    pipeline: Pipeline
    bound_s: float
    nodes: int
    simulated: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Incumbent:
    """The best pipeline so far, those that wait to be simulated, and the least bound that was given up.

    Attributes:
        time_s: simulated seconds of the best pipeline.
        cutoff_s: only faster pipelines are of interest.
        gap: how much faster than the answer another pipeline may be.
        pipeline: the best one.
        waiting: complete pipelines with their bounds.
        simulated: how many were simulated.
        open_s: the least bound of pipelines that were dropped without being slower than the best one.
    """

    time_s: float
    cutoff_s: float
    gap: float
    pipeline: Pipeline = ()
    waiting: list[tuple[float, Pipeline]] = field(default_factory=list)
    simulated: int = 0
    open_s: float = math.inf

    @property
    def limit_s(self) -> float:
        """What a bound must stay below."""
        return min(self.time_s, self.cutoff_s) * (1 - max(self.gap, EQUAL_SEARCH_TIMES))

    def rejects(self, bound_s: float) -> bool:
        """Whether a bound is too high to go on from; it is remembered, since the gap may have decided."""
        if bound_s < self.limit_s:
            return False
        self.open_s = min(self.open_s, bound_s)
        return True


class _Node(NamedTuple):
    """The first stages of a pipeline: their bound, where they end, single-device stages needed, and the bounds' row."""

    bound_s: float
    state: int
    singles_needed: int
    row: FloatArray
    pipeline: Pipeline


def best_stages(
    search: StageSearch,
    cutoff_s: float,
    node_limit: int,
    known_pipelines: tuple[Pipeline, ...] = (),
    gap: float = 0.0,
) -> StageSearchAnswer:
    """The fastest pipeline below the cutoff, but for the gap; pipelines that are already known are simulated first."""
    best = _Incumbent(
        time_s=math.inf, cutoff_s=cutoff_s, gap=gap, waiting=[(0.0, pipeline) for pipeline in known_pipelines]
    )
    _simulate_waiting(search, best)
    stack = [_Node(-math.inf, 0, search.singles.least, search.bounds.root, ())]
    nodes = 0
    while stack:
        node = stack.pop()
        if best.rejects(node.bound_s):
            continue
        if len(node.pipeline) == search.stages:
            best.waiting.append((node.bound_s, node.pipeline))
            if len(best.waiting) >= (_SIMULATED_AT_ONCE if best.simulated else 1):
                _simulate_waiting(search, best)
            continue
        if nodes >= node_limit:
            best.open_s = min(best.open_s, node.bound_s)
            continue
        nodes += 1
        stack += _children(search, node, best)
    _simulate_waiting(search, best)
    is_proven = best.open_s >= min(best.time_s, cutoff_s) * (1 - EQUAL_SEARCH_TIMES)
    return StageSearchAnswer(
        time_s=best.time_s,
        pipeline=best.pipeline,
        bound_s=best.time_s if is_proven else max(best.open_s, 0.0),
        nodes=nodes,
        simulated=best.simulated,
    )


def _children(search: StageSearch, node: _Node, best: _Incumbent) -> list[_Node]:
    """The pipeline with one more stage each, the most promising last."""
    candidates, pipeline = search.candidates, node.pipeline
    options = np.arange(candidates.first[node.state], candidates.first[node.state + 1])
    if not len(options):
        return []
    singles_needed = np.maximum(node.singles_needed - candidates.is_single[options], 0)
    rows, bound = search.bounds.extend(node.row, len(pipeline), options, singles_needed)
    if len(pipeline) + 1 == search.stages:
        ends = (candidates.target[options] == search.last_state) & (singles_needed == 0)
        bound = np.where(ends, bound, np.inf)
    exact = search.singles.exact
    if exact is not None:
        singles = candidates.is_single[list(pipeline)].sum() + candidates.is_single[options]
        stages_left = search.stages - len(pipeline) - 1
        bound = np.where((singles <= exact) & (singles + stages_left >= exact), bound, np.inf)
    is_kept = bound < best.limit_s
    if best.gap:
        best.rejects(float(bound[~is_kept].min(initial=math.inf)))
    kept = np.flatnonzero(is_kept)
    kept = kept[np.argsort(-bound[kept], kind="stable")]
    return [
        _Node(
            bound_s=float(bound[index]),
            state=int(candidates.target[options[index]]),
            singles_needed=int(singles_needed[index]),
            row=rows[index],
            pipeline=(*pipeline, int(options[index])),
        )
        for index in kept
    ]


def _simulate_waiting(search: StageSearch, best: _Incumbent) -> None:
    """Simulate the pipelines that wait and keep the fastest."""
    waiting = [pipeline for bound, pipeline in best.waiting if not best.rejects(bound)]
    best.waiting = []
    if not waiting:
        return
    times = search.simulated(np.array(waiting))
    best.simulated += len(waiting)
    index = int(np.argmin(times))
    if times[index] < best.time_s:
        best.time_s, best.pipeline = float(times[index]), waiting[index]


def warm_starts(search: StageSearch, bounds: InterleavedBounds, cutoff_s: float) -> tuple[Pipeline, ...]:
    """A good interleaved pipeline, if one is found: shares of the work as even as they come.

    If it comes near the cutoff, boundaries and modes of the busiest device's stages are changed one at a time as long
    as that helps. Times are estimates; what stays clearly above the cutoff is not worth a simulation.
    """
    states = search.last_state + 1
    even = [_even_pipeline(bounds, states, saves_memory) for saves_memory in (False, True)]
    starts = [pipeline for pipeline in even if pipeline is not None and bounds.fits(pipeline[None])[0]]
    if not starts:
        return ()
    times = search.estimated(np.array(starts))
    best, time_s = starts[int(times.argmin())], float(times.min())
    by_ends = _candidates_by_ends(search.candidates)
    for _ in range(_IMPROVEMENTS if time_s < _PROMISING * cutoff_s else 0):
        positions = bounds.positions_of_busiest_device(best)
        neighbours = _neighbours(search.candidates, best, by_ends, positions)
        neighbours = neighbours[bounds.fits(neighbours)] if len(neighbours) else neighbours
        if not len(neighbours):
            break
        times = search.estimated(neighbours)
        if times.min() >= time_s * (1 - CLAIM_MARGIN):
            break
        best, time_s = neighbours[int(times.argmin())], float(times.min())
    return (tuple(best.tolist()),) if time_s < _CLOSE * cutoff_s else ()


def _even_pipeline(bounds: InterleavedBounds, states: int, saves_memory: bool) -> IntArray | None:
    """Candidates of a pipeline whose largest stage is as short as it can be.

    Stages of later devices count as longer, by as much as `InterleavedBounds` weighs them. If memory is saved, stages
    that exceed their share of a device's memory are penalised.
    """
    candidates = bounds.candidates
    memory_share = bounds.usable_bytes * bounds.pp / bounds.stages
    fall = 1 - bounds.pp / (bounds.stages * bounds.micro_batches)

    def cost(position: int, options: IntArray) -> FloatArray:
        seconds = bounds.through_s[options] / fall ** (position % bounds.pp)
        if not saves_memory:
            return np.asarray(seconds)
        excess = np.maximum(bounds.chunk_bytes(position, options) / memory_share - 1, 0.0)
        return np.asarray(seconds * (1 + excess * _OVERFULL_PENALTY))

    all_candidates = np.arange(len(candidates.mode))
    least = np.full((bounds.stages + 1, states), np.inf)
    least[bounds.stages, -1] = 0.0
    for position in range(bounds.stages - 1, -1, -1):
        largest = np.maximum(cost(position, all_candidates), least[position + 1][candidates.target])
        least[position] = candidates.least_by_source(largest, states)
    if not np.isfinite(least[0, 0]):
        return None
    pipeline, state = [], 0
    for position in range(bounds.stages):
        options = np.arange(candidates.first[state], candidates.first[state + 1])
        largest = np.maximum(cost(position, options), least[position + 1][candidates.target[options]])
        chosen = options[int(np.argmin(largest))]
        pipeline.append(int(chosen))
        state = int(candidates.target[chosen])
    return np.array(pipeline)


def _candidates_by_ends(candidates: CandidateStages) -> dict[tuple[int, int], list[int]]:
    """Candidates by their source and target."""
    by_ends: dict[tuple[int, int], list[int]] = {}
    for index, ends in enumerate(zip(candidates.source.tolist(), candidates.target.tolist(), strict=True)):
        by_ends.setdefault(ends, []).append(index)
    return by_ends


def _neighbours(
    candidates: CandidateStages, pipeline: IntArray, by_ends: dict[tuple[int, int], list[int]], positions: set[int]
) -> IntArray:
    """Pipelines that differ at some positions in one boundary by one state, or in the mode of one stage."""
    neighbours: list[list[int]] = []
    stages = pipeline.tolist()
    for position, stage in enumerate(stages):
        if position not in positions and position + 1 not in positions:
            continue
        source, target = int(candidates.source[stage]), int(candidates.target[stage])
        neighbours += [
            [*stages[:position], other_mode, *stages[position + 1 :]]
            for other_mode in by_ends[source, target]
            if other_mode != stage
        ]
        if position + 1 == len(stages):
            break
        end = int(candidates.target[stages[position + 1]])
        for boundary in (target - 1, target + 1):
            for left in by_ends.get((source, boundary), ()):
                neighbours += [
                    [*stages[:position], left, right, *stages[position + 2 :]]
                    for right in by_ends.get((boundary, end), ())
                ]
    return np.array(neighbours, dtype=np.int64).reshape(-1, len(stages))
