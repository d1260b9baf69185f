"""The best stages of one strategy by branch and bound over candidate stages, and the plans that searches find, by kind.

Pipelines are extended stage by stage, the most promising first (`best_stages`). A pipeline is dropped if its bound
proves it slower than the best simulated time, or than a given cutoff; complete pipelines are simulated together. Work
is counted in nodes (extended pipelines), never in seconds: the same input gives the same answer. If nodes run out, the
answer says how low the unexplored bounds were.

Of interleaved pipelines a good one is known before (`interleaved_starts.py`).

A `FoundPlan` is a pipeline that some search simulated. People compare plans by kind (`PlanKind`): with and without a
pipeline, each schedule, with and without ZeRO and recompute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.bounds.path_bounds import StageBounds
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.candidate_stages import CandidateStages
from phaze.place.simulation.event_simulation import StageTimes
from phaze.profile.layer_profile import RecomputeMode
from phaze.tolerances import BOUND_MARGIN, EQUAL_SEARCH_TIMES

__all__ = [
    "FoundPlan",
    "Pipeline",
    "PlanKind",
    "SingleDeviceStages",
    "StageSearch",
    "StageSearchAnswer",
    "best_by_kind",
    "best_stages",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A simulated pipeline: its strategy, and the (index in the stage space, mode) of each of its stages."""

    time_s: float
    parallelism: Parallelism
    stages: tuple[tuple[int, int], ...]


class PlanKind(StrEnum):
    """Kinds of plans that people compare; a plan is of several kinds."""

    NO_PIPELINE = "no pipeline"
    PIPELINE = "a pipeline"
    GPIPE = "schedule gpipe"
    ONE_F_ONE_B = "schedule 1f1b"
    INTERLEAVED = "schedule interleaved-1f1b"
    ZERO_BUBBLE = "schedule zero-bubble"
    EAGER = "schedule eager-1f1b"
    ZERO_BUBBLE_V = "schedule zb-v"
    DUAL_PIPE_V = "schedule dualpipe-v"
    NO_ZERO = "no ZeRO"
    ZERO = "ZeRO"
    ZERO_OVER_ALL = "ZeRO over all devices"
    NO_RECOMPUTE = "no recompute"
    FULL_RECOMPUTE = "full recompute"


def best_by_kind(plans: Iterable[FoundPlan], modes: Sequence[RecomputeMode]) -> dict[PlanKind, FoundPlan]:
    """Of plans in order of their time, the first of each kind."""
    best: dict[PlanKind, FoundPlan] = {}
    for plan in plans:
        for kind in _kinds(plan, modes):
            best.setdefault(kind, plan)
    return best


def _kinds(plan: FoundPlan, modes: Sequence[RecomputeMode]) -> list[PlanKind]:
    """What kinds a plan is of; ``modes`` are those that its stages index."""
    schedule = plan.parallelism.schedule
    kinds = [PlanKind.ZERO if plan.parallelism.zero else PlanKind.NO_ZERO]
    if plan.parallelism.zero and plan.parallelism.shard_groups == 1:
        kinds.append(PlanKind.ZERO_OVER_ALL)
    if schedule is PipelineSchedule.NONE:
        kinds.append(PlanKind.NO_PIPELINE)
    else:
        kinds += [PlanKind.PIPELINE, PlanKind(f"schedule {schedule}")]
    used = {modes[mode] for _, mode in plan.stages}
    if used == {RecomputeMode.NONE}:
        kinds.append(PlanKind.NO_RECOMPUTE)
    elif used == {RecomputeMode.FULL}:
        kinds.append(PlanKind.FULL_RECOMPUTE)
    return kinds


Pipeline = tuple[int, ...]
"""The stages of a pipeline, or its first ones, as indices of candidate stages."""

_SIMULATED_AT_ONCE = 32
"""How many complete pipelines wait to be simulated together. A batch costs hardly more than one pipeline; but a time
that is known earlier prunes more. The first pipeline of a search does not wait."""


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
        timed: seconds per batch of pipelines given as the times of their stages, where stages have times.
    """

    candidates: CandidateStages
    bounds: StageBounds
    simulated: Callable[[IntArray], FloatArray]
    estimated: Callable[[IntArray], FloatArray]
    stages: int
    last_state: int
    singles: SingleDeviceStages = SingleDeviceStages()
    timed: Callable[[StageTimes], FloatArray] | None = None

    def root_bound(self, known_s: float = 0.0, target_s: float = math.inf) -> float:
        """A bound under every pipeline, where it lies between what is known already and the target."""
        candidates = self.candidates
        if isinstance(self.bounds, InterleavedBounds):
            return self.bounds.choices.bound_s(known_s, target_s)
        options = np.arange(candidates.first[0], candidates.first[1])
        if not len(options):
            return math.inf
        singles_needed = np.maximum(self.singles.least - candidates.is_single[options], 0)
        _, bounds = self.bounds.extend(self.bounds.root, 0, options, singles_needed)
        return float(bounds.min())

    def simulated_bound(self, target_s: float) -> float:
        """A bound up to the target under every interleaved pipeline: all stages at their least, simulated."""
        assert isinstance(self.bounds, InterleavedBounds)
        assert self.timed is not None
        times = self.bounds.choices.least_times(target_s)
        return target_s if times is None else min(target_s, float(self.timed(times)[0]) * (1 - BOUND_MARGIN))


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
    bound_s: float = -math.inf,
) -> StageSearchAnswer:
    """The fastest pipeline below the cutoff, but for the gap; pipelines that are already known are simulated first.

    ``bound_s`` is a bound under every pipeline, if one is known.
    """
    best = _Incumbent(
        time_s=math.inf, cutoff_s=cutoff_s, gap=gap, waiting=[(0.0, pipeline) for pipeline in known_pipelines]
    )
    _simulate_waiting(search, best)
    stack = [_Node(bound_s, 0, search.singles.least, search.bounds.root, ())]
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
    # In single precision bounds that differ by rounding are equal: then the stage that works least is looked at first.
    busy_s = candidates.busy_s.astype(np.float32)
    kept = kept[np.lexsort((-busy_s[options[kept]], -bound[kept].astype(np.float32)))]
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
    """Simulate the pipelines that wait and keep the fastest; of those as fast, the one whose stages work least."""
    waiting = [pipeline for bound, pipeline in best.waiting if not best.rejects(bound)]
    best.waiting = []
    if not waiting:
        return
    times = search.simulated(np.array(waiting))
    best.simulated += len(waiting)
    least_s = float(times.min())
    if least_s < best.time_s * (1 - EQUAL_SEARCH_TIMES):
        fastest = np.flatnonzero(times <= least_s * (1 + EQUAL_SEARCH_TIMES))
        busy_s = search.candidates.busy_s[np.array(waiting)[fastest]].sum(axis=1)
        best.time_s, best.pipeline = least_s, waiting[fastest[int(np.argmin(busy_s.astype(np.float32)))]]
