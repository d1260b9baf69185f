"""The candidate stages of one strategy: which stages may be used with which recompute mode, sorted by their start.

A candidate is a stage with a recompute mode. `build_candidates` drops it where it fits nowhere, where the target wants
even stages and it is not one, and where another mode of the same stage is nowhere slower and always fits (`_dominated`,
`_dominated_chunks`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phaze.parallelism import Parallelism
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_costs import StageCosts
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray, StageSpace
from phaze.place.model.stage_sums import StageSums
from phaze.place.simulation.event_simulation import StageTimes
from phaze.place.simulation.pass_orders import in_flight, stages_of_devices

__all__ = ["CandidateStages", "build_candidates"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidateStages:
    """Candidate stages as parallel arrays, one entry per candidate, sorted by source.

    Attributes:
        mode: index of the recompute mode.
        stage: index into the stage space.
        source: state before the stage.
        target: state after it.
        first: per state, the first candidate that starts there; one more entry for the end.
        forward_s: F.
        backward_s: B, without weights where they are split off.
        weight_s: W, or 0.
        exposed_s: reduction beyond the last pass.
        reduction_s: all of the reduction.
        tie_s: reduction between stages.
        finish_s: update and gather.
        is_single: whether the stage takes one device although tp is larger.
        held_bytes: parameters, gradients and optimizer state.
        scratch_bytes: working set and buffers.
        stashed_bytes: per microbatch in flight.
        saved_s: what forward and backward are shorter by where nothing is received for them.
        most_in_flight: how many microbatches fit when the device has no other stage.
    """

    mode: IntArray
    stage: IntArray
    source: IntArray
    target: IntArray
    first: IntArray
    forward_s: FloatArray
    backward_s: FloatArray
    weight_s: FloatArray
    exposed_s: FloatArray
    reduction_s: FloatArray
    tie_s: FloatArray
    finish_s: FloatArray
    is_single: BoolArray
    held_bytes: FloatArray
    scratch_bytes: FloatArray
    stashed_bytes: FloatArray
    saved_s: tuple[FloatArray, FloatArray]
    most_in_flight: FloatArray

    @property
    def tail_s(self) -> FloatArray:
        """What follows the last pass of a stage at least."""
        return self.exposed_s + self.tie_s + self.finish_s

    @property
    def busy_s(self) -> FloatArray:
        """What the passes of a stage take for one microbatch."""
        return self.forward_s + self.backward_s + self.weight_s

    def least_by_source(self, values: FloatArray, states: int) -> FloatArray:
        """The least of ``values`` (..., candidate) among the candidates that start in each state."""
        least = np.full((*values.shape[:-1], states), np.inf)
        starts = np.flatnonzero(np.diff(self.first))
        if len(starts):
            least[..., starts] = np.minimum.reduceat(values, self.first[starts], axis=-1)
        return least

    def times(self, pipelines: IntArray, parallelism: Parallelism) -> StageTimes:
        """Durations of pipelines, given as candidates per (pipeline, stage)."""
        schedule, pp = parallelism.schedule, parallelism.pp
        by_device = pipelines[:, stages_of_devices(schedule, pp, parallelism.chunks).T]
        names = ("forward_s", "backward_s", "weight_s", "exposed_s", "reduction_s", "tie_s", "finish_s")
        times = StageTimes(**{name: getattr(self, name)[by_device] for name in names})
        if schedule.is_v_shaped:  # nothing is sent between the stages where the V turns
            forward_s, backward_s = self.saved_s
            times.forward_s[:, -1, 1] -= forward_s[pipelines[:, pp]]
            times.backward_s[:, -1, 0] -= backward_s[pipelines[:, pp - 1]]
        return times

    def stages_and_modes(self, pipeline: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The (index in the stage space, recompute mode) of each stage of a pipeline."""
        return tuple((int(self.stage[candidate]), int(self.mode[candidate])) for candidate in pipeline)


def build_candidates(
    problem: PlacementProblem,
    space: StageSpace,
    sums: StageSums,
    costs: StageCosts,
    parallelism: Parallelism,
    listed: IntArray,
    *,
    keeps_all_modes: bool = False,
) -> CandidateStages:
    """The candidates of one strategy; ``listed`` are the stages of the space that ``costs`` describes.

    ``keeps_all_modes`` is for those who look for little memory: to them no mode is dominated by a quicker one.
    """
    forward, backward = costs.forward_s, costs.backward_s
    weight, exposed = costs.weight_s, costs.exposed_s
    held, scratch, stash = costs.memory.held_bytes, costs.memory.scratch_bytes, costs.memory.stashed_bytes
    room = problem.usable_bytes - held - scratch
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(room >= 0, np.where(stash > 0, np.floor(room / stash), np.inf), -1.0)
    times = (forward, backward, weight, exposed)
    if keeps_all_modes:
        dominated = np.zeros(forward.shape, dtype=bool)
    elif parallelism.chunks > 1:
        dominated = _dominated_chunks(problem, parallelism, costs, times)
    else:
        dominated = _dominated(problem, parallelism, most, times)
    keep = (most >= 1) & ~dominated & ~_repeated((*times, stash, scratch))
    if not problem.capabilities.allows_uneven_stages:
        keep &= sums.body_layers[listed] * parallelism.stages == sums.body_layers.max()
    stage, mode = np.nonzero(keep.T)
    kept = (mode, stage)
    source = space.source[listed[stage]]
    return CandidateStages(
        mode=mode,
        stage=listed[stage],
        source=source,
        target=space.target[listed[stage]],
        first=np.searchsorted(source, np.arange(space.states + 1)),
        forward_s=forward[kept],
        backward_s=backward[kept],
        weight_s=weight[kept],
        exposed_s=exposed[kept],
        reduction_s=costs.reduction_s[stage],
        tie_s=costs.tie_s[stage],
        finish_s=costs.finish_s[stage],
        is_single=costs.devices[stage] < parallelism.tp,
        held_bytes=held[stage],
        scratch_bytes=scratch[kept],
        stashed_bytes=stash[kept],
        saved_s=(costs.saved_s[0][stage], costs.saved_s[1][kept]),
        most_in_flight=most[kept],
    )


def _repeated(numbers: tuple[FloatArray, ...]) -> BoolArray:
    """Per (mode, stage): whether an earlier mode has the same numbers, because there is nothing more to recompute."""
    repeated = np.zeros(numbers[0].shape, dtype=bool)
    for mode in range(1, len(repeated)):
        for earlier in range(mode):
            repeated[mode] |= np.all([values[earlier] == values[mode] for values in numbers], axis=0)
    return repeated


def _dominated(
    problem: PlacementProblem, parallelism: Parallelism, most_in_flight: FloatArray, times: tuple[FloatArray, ...]
) -> BoolArray:
    """Per (mode, stage): whether another mode is nowhere slower, and fits with the most microbatches in flight."""
    dominated = np.zeros(most_in_flight.shape, dtype=bool)
    micro_batches = parallelism.micro_batches_per_pipeline(problem.micro_batches)
    most_needed = int(in_flight(parallelism.schedule, parallelism.pp, micro_batches).max()) if parallelism.pp > 1 else 1
    for mode in range(len(most_in_flight)):
        for other in range(len(most_in_flight)):
            if mode != other:
                never_slower = np.all([seconds[other] <= seconds[mode] for seconds in times], axis=0)
                is_equal = np.all([seconds[other] == seconds[mode] for seconds in times], axis=0)
                wins = never_slower & (most_in_flight[other] >= most_needed) & (~is_equal | (other < mode))
                dominated[mode] |= wins & ~dominated[other]
    return dominated


def _dominated_chunks(
    problem: PlacementProblem, parallelism: Parallelism, costs: StageCosts, times: tuple[FloatArray, ...]
) -> BoolArray:
    """Per (mode, stage): whether it has another mode than one with which no stage is slower and all devices fit.

    Chunks share the memory of their device: a mode that does not fit for all chunks of a device may yet be needed.
    """
    dominated = np.zeros(times[0].shape, dtype=bool)
    micro_batches = parallelism.micro_batches_per_pipeline(problem.micro_batches)
    most_needed = int(in_flight(parallelism.schedule, parallelism.pp, micro_batches, parallelism.chunks).max())
    memory = costs.memory
    each = (memory.held_bytes + most_needed * memory.stashed_bytes).max(axis=1, initial=0.0)
    device_bytes = parallelism.chunks * each + memory.scratch_bytes.max(axis=1, initial=0.0)
    for mode in np.flatnonzero(device_bytes <= problem.usable_bytes).tolist():
        if all((seconds[mode] <= seconds).all() for seconds in times):
            dominated[np.arange(len(dominated)) != mode] = True
            break
    return dominated
