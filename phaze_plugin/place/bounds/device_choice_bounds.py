"""Lower bounds on interleaved pipelines from what each device can choose for its chunks, and how much that holds.

Every chunk has n or n+1 layers (`chunk_sizes`), and a known number of all chunks is longer. A choice of a device says
for each of its chunks whether it is longer and which recompute mode it has (`build_device_choices`). What a chunk takes
and holds is the least over all places in the model where it may begin; in a chain of equal blocks that is exact but at
the ends. Choices that do not fit the device are left out.

Let m be the microbatches per pipeline, S the devices, v the chunks of each, F, B and t = F + B the seconds of a stage,
X_r the sum of t over the chunks of device r, E a stage's exposed gradient reduction, R all of it, and z_r what follows
the reductions of device r (ties, update and gather). Stage (c, r) is chunk c of device r. A step takes at least, for
every device r and chunk c,

    (1)  t of all stages before (c, r) + m X_r - S (t of (0..c-1, r)) + E of (0, 0) + z_0
    (2)  F of (0, 0..r-1) + m X_r - S (B of (0..c-1, r)) + B of (c, 0..r-1) + S (B of (0..c-1, 0)) + E of (0, 0) + z_0
    (3)  the same to B of (c, 0..r-1), then E of (c, 0) + R of (0..c-1, 0) + z_0
    (4)  F of (0, 0..r-1) + m X_r - S (B of (0..c-1, r)) + E of (c, r) + R of (0..c-1, r) + z_r

All follow the first microbatch to device r, which never idles from then on. Path (1) reaches chunk c there and follows
the last microbatch back from it: before that chunk's first pass and after its last one the device runs S microbatches
of each earlier chunk. The others leave the device after the last backward of chunk c, when S backwards of each earlier
chunk are left. Paths (2) and (3) return to device 0 with the last microbatch; there path (2) runs what is left. Paths
(3) and (4) are those of reductions: those of chunk c and of all earlier chunks follow each other. Of path (1) the last
chunk and the mean over all chunks are used. `_path_weights` states the paths as weights of what chunks take. In the
shape of a V, where t has the weights' part too, path (4) of chunk 0 is the only one (`_v_path_weights`).

Suppose that a pipeline takes at most U (`DeviceChoices._within`). Then every device has a choice whose paths are no
longer than U; all other devices have such choices too, so that what they add to its paths is the least of these; and
the longer chunks of all choices add up to the known number, so that each device has as many as the others leave to it.
Where no choice is left to some device, no pipeline takes at most U. `DeviceChoices.bound_s` bisects for the largest U
that is ruled out.

A simulation only grows with the seconds of each stage. One in which every stage takes the least that some choice left
to its device gives it (`DeviceChoices.least_times`) is therefore a bound, too, as far as U. It sees how devices wait
for each other where they must recompute some chunks, which no path by itself does, and takes longer to compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from phaze.parallelism import Parallelism
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray, StageSpace
from phaze.place.search.candidate_stages import CandidateStages
from phaze.place.simulation.event_simulation import StageTimes
from phaze.place.simulation.pass_orders import stages_of_devices
from phaze.tolerances import BOUND_MARGIN, MEMORY_MARGIN

__all__ = ["DeviceChoices", "build_device_choices", "on_pipelines"]

_MOST_CHOICES = 40_000
"""The most choices of one device: three modes and two lengths of five chunks are 7,776. Where there are more, the
lengths and modes of the last chunks are merged into their least, which weakens the bound and nothing else."""

_ROUNDS = 3
"""How often choices are ruled out by paths and the paths made longer by that: a fourth round rarely finds more."""

_PRECISION = 1e-4
"""`DeviceChoices.bound_s` bisects until the bound is known up to this share: finer would cost time, and the gap that
people ask for is a hundred times larger."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceChoices:
    """What each device may choose, and what a choice adds to each path, per (path, device, choice).

    Attributes:
        on_path_s: what the device adds to the paths through it.
        before_s: what it adds to the paths through a later device.
        behind_s: what it adds to the paths through an earlier device.
        end_s: what the choice of device 0 adds after the last backward, per (path, choice).
        fits: whether the device can hold a choice, per (device, choice).
        longer: how many chunks of a choice are longer, per choice.
        merged_chunks: how many chunks of all devices may be longer or not, whatever is chosen.
        all_longer: how many chunks of the pipeline are longer.
        options: what each stage may take and hold.
        option: which option each chunk has in a choice, per (chunk, choice); -1 where all of them were merged.
        stages_of_devices: which stage each chunk of each device is, per (chunk, device).
    """

    on_path_s: FloatArray
    before_s: FloatArray
    behind_s: FloatArray
    end_s: FloatArray
    fits: BoolArray
    longer: IntArray
    merged_chunks: int
    all_longer: int
    options: _Options
    option: IntArray
    stages_of_devices: IntArray

    def bound_s(self, known_s: float, target_s: float) -> float:
        """A bound under every pipeline, from what is known already up to the target; infinite if nothing fits."""
        within = self._within(np.inf)
        if within is None:
            return np.inf
        low_s, high_s = known_s, target_s
        if not np.isfinite(high_s):
            high_s = 2 * max(known_s, float(self.on_path_s.max()))
            while within._within(high_s) is None:
                low_s, high_s = high_s, 2 * high_s
        left = within._within(high_s)
        if left is None:
            return high_s
        while high_s - low_s > _PRECISION * high_s:
            middle_s = (low_s + high_s) / 2
            fewer = left._within(middle_s)
            low_s, high_s = (middle_s, high_s) if fewer is None else (low_s, middle_s)
            left = fewer or left
        return low_s

    def is_refuted(self, target_s: float) -> bool:
        """Whether no pipeline takes less than the target."""
        return self._within(target_s) is None

    def least_times(self, target_s: float) -> StageTimes | None:
        """The least seconds of every stage in pipelines that may take at most the target; None if there is none."""
        within = self._within(target_s)
        if within is None:
            return None
        chunks, pp, count = len(self.option), len(self.fits), len(self.options.is_longer)
        least = np.zeros((len(self.options.seconds), 1, pp, chunks))
        for chunk, option in enumerate(within.option):
            is_left = np.stack([within.fits[:, (option == index) | (option < 0)].any(axis=1) for index in range(count)])
            seconds = self.options.seconds[:, self.stages_of_devices[chunk]]
            least[:, 0, :, chunk] = np.where(is_left.T, seconds, np.inf).min(axis=2)
        forward, backward, exposed, reduction, settle, weight = least
        nothing = np.zeros_like(forward)
        return StageTimes(
            forward_s=forward,
            backward_s=backward,
            weight_s=weight,
            exposed_s=exposed,
            reduction_s=reduction,
            tie_s=nothing,
            finish_s=settle,
        )

    def _within(self, target_s: float) -> DeviceChoices | None:
        """The choices of pipelines that may take at most the target, or None if there is no such pipeline."""
        limit_s = target_s * (1 + BOUND_MARGIN)
        is_allowed = self.fits
        for _ in range(_ROUNDS):
            if not is_allowed.any(axis=1).all():
                return None
            if limit_s < np.inf:
                is_allowed = is_allowed & (self._longest_s(is_allowed) <= limit_s)
            most = np.where(is_allowed, self.longer, -1).max(axis=1)
            least = np.where(is_allowed, self.longer, self.longer.max() + 1).min(axis=1)
            # What all other devices leave to each one at least and at most.
            needed = self.all_longer - self.merged_chunks - (most.sum() - most)
            spare = self.all_longer - (least.sum() - least)
            is_allowed = is_allowed & (self.longer >= needed[:, None]) & (self.longer <= spare[:, None])
        return self._keeping(is_allowed) if is_allowed.any(axis=1).all() else None

    def _keeping(self, is_allowed: BoolArray) -> DeviceChoices:
        """The same with only some of the choices; those that no device has left are dropped."""
        kept = np.flatnonzero(is_allowed.any(axis=0))
        return replace(
            self,
            on_path_s=self.on_path_s[..., kept],
            before_s=self.before_s[..., kept],
            behind_s=self.behind_s[..., kept],
            end_s=self.end_s[..., kept],
            fits=is_allowed[:, kept],
            longer=self.longer[kept],
            option=self.option[:, kept],
        )

    def _longest_s(self, is_allowed: BoolArray) -> FloatArray:
        """The longest path of each choice, if all other devices choose from what is allowed."""
        before_s, behind_s = (np.where(is_allowed, part, np.inf).min(axis=2) for part in (self.before_s, self.behind_s))
        end_s = np.where(is_allowed[0], self.end_s, np.inf).min(axis=1)
        elsewhere = _sums_before(before_s) + _sums_before(behind_s[:, ::-1])[:, ::-1] + end_s[:, None]
        return np.asarray((self.on_path_s + elsewhere[..., None]).max(axis=0))


def _sums_before(per_device: FloatArray) -> FloatArray:
    """Sums over all earlier devices, per (path, device)."""
    return np.concatenate([np.zeros((len(per_device), 1)), np.cumsum(per_device, axis=1)[:, :-1]], axis=1)


def build_device_choices(
    candidates: CandidateStages,
    parallelism: Parallelism,
    micro_batches: int,
    usable_bytes: float,
    flight: IntArray,
    space: StageSpace,
    is_on_pipeline: BoolArray,
) -> DeviceChoices:
    """The choices of every device.

    Args:
        candidates: the stages to choose from.
        parallelism: the strategy.
        micro_batches: m.
        usable_bytes: memory of one device.
        flight: microbatches in flight per (device, chunk).
        space: the stages that candidates index.
        is_on_pipeline: which candidates may be at each stage, per (stage, candidate).
    """
    pp, chunks = parallelism.pp, parallelism.chunks
    is_longer = space.take(candidates.stage).sizes > space.layers // parallelism.stages
    grid, is_v_shaped = stages_of_devices(parallelism.schedule, pp, chunks), parallelism.schedule.is_v_shaped
    options = _least_options(candidates, is_longer, is_on_pipeline, pp if is_v_shaped else None)
    weights = _v_path_weights(micro_batches) if is_v_shaped else _path_weights(pp, chunks, micro_batches)
    sums, held, scratch = np.zeros((*weights.shape[:2], pp, 1)), np.zeros((pp, 1)), np.zeros((pp, 1))
    longer, merged, option = np.zeros(1, dtype=np.int64), 0, np.zeros((0, 1), dtype=np.int64)
    for chunk in range(chunks):
        on_device = grid[chunk]
        more = np.einsum("abq,qdo->abdo", weights[:, :, chunk], options.seconds[:, on_device])
        more_held = options.held_bytes[on_device] + flight[:, chunk, None] * options.stashed_bytes[on_device]
        more_scratch, more_longer = options.scratch_bytes[on_device], options.is_longer
        more_option = np.arange(len(more_longer))
        if sums.shape[-1] * more.shape[-1] > _MOST_CHOICES:
            more, more_held, more_scratch = (
                part.min(axis=-1, keepdims=True) for part in (more, more_held, more_scratch)
            )
            more_longer, merged = np.zeros(1, dtype=np.int64), merged + pp
            more_option = np.full(1, -1)
        sums = (sums[..., :, None] + more[..., None, :]).reshape(*sums.shape[:-1], -1)
        held = (held[:, :, None] + more_held[:, None, :]).reshape(pp, -1)
        scratch = np.maximum(scratch[:, :, None], more_scratch[:, None, :]).reshape(pp, -1)
        longer = (longer[:, None] + more_longer).ravel()
        option = np.concatenate([np.repeat(option, len(more_option), axis=1), [np.tile(more_option, option.shape[1])]])
    on_path_s, before_s, behind_s, end_s = sums
    choices = DeviceChoices(
        on_path_s=on_path_s,
        before_s=before_s,
        behind_s=behind_s,
        end_s=end_s[:, 0],
        fits=held + scratch <= usable_bytes * (1 + MEMORY_MARGIN),
        longer=longer,
        merged_chunks=merged,
        all_longer=space.layers % parallelism.stages,
        options=options,
        option=option,
        stages_of_devices=grid,
    )
    return choices._keeping(choices.fits)


def _path_weights(pp: int, chunks: int, micro_batches: int) -> FloatArray:
    """How often a chunk's F, B, E, R, z and W stand in each path, per (role of the device, path, chunk, quantity).

    The roles are those of `DeviceChoices`: the path runs through the device, through a later one, through an earlier
    one, and what device 0 adds at the end.
    """
    forward, backward, exposed, reduction, settle = range(5)
    on_path, before, behind, end = range(4)
    weights = np.zeros((4, 2 + 3 * chunks, chunks, 6))
    weights[on_path, :, :, : backward + 1] = micro_batches
    last_reached = [np.arange(chunks) == chunks - 1, np.full(chunks, 1 / chunks)]  # c of path (1): the last, and any
    for path, reached in enumerate(last_reached):
        up_to = np.cumsum(reached[::-1])[::-1][:, None]
        earlier = up_to - reached[:, None]
        weights[on_path, path, :, : backward + 1] -= (pp - 1) * earlier
        weights[before, path, :, : backward + 1] = up_to
        weights[behind, path, :, : backward + 1] = earlier
        weights[end, path, 0, exposed] = 1
        weights[end, path, :, settle] = 1
    for chunk in range(chunks):
        running_on, returning, staying = 2 + chunk, 2 + chunks + chunk, 2 + 2 * chunks + chunk
        for path, role in ((running_on, end), (returning, end), (staying, on_path)):
            weights[before, path, 0, forward] = 1
            weights[on_path, path, :chunk, backward] -= pp
            weights[role, path, :, settle] = 1
        for path, role in ((returning, end), (staying, on_path)):
            weights[role, path, chunk, exposed] = 1
            weights[role, path, :chunk, reduction] = 1
        weights[end, running_on, :chunk, backward] = pp
        weights[end, running_on, 0, exposed] = 1
        weights[before, [running_on, returning], chunk, backward] = 1
    return weights


def _v_path_weights(micro_batches: int) -> FloatArray:
    """The same for pipelines in the shape of a V."""
    forward, backward, exposed, _, settle, weight = range(6)
    on_path, before = range(2)
    weights = np.zeros((4, 1, 2, 6))
    weights[on_path, 0][:, [forward, backward, weight]] = micro_batches
    weights[on_path, 0, 0, exposed] = 1
    weights[on_path, 0, :, settle] = 1
    weights[before, 0, 0, forward] = 1
    return weights


class _Options(NamedTuple):
    """The least of what each stage may take and hold, per (stage, option): an option is a length and a mode.

    Options that a stage does not have take no time and do not fit anywhere.

    Attributes:
        seconds: F, B, E, R, z and W, per (quantity, stage, option).
        held_bytes: parameters, gradients and optimizer state.
        stashed_bytes: per microbatch in flight.
        scratch_bytes: working set and buffers.
        is_longer: whether an option is a longer chunk, per option.
    """

    seconds: FloatArray
    held_bytes: FloatArray
    stashed_bytes: FloatArray
    scratch_bytes: FloatArray
    is_longer: IntArray


def _least_options(
    candidates: CandidateStages, is_longer: BoolArray, is_on_pipeline: BoolArray, turn: int | None
) -> _Options:
    """The options of every stage; ``turn`` is the first stage behind the turn of a V."""
    groups = [
        (longer, np.flatnonzero((is_longer == longer) & (candidates.mode == mode)))
        for longer in (False, True)
        for mode in np.unique(candidates.mode).tolist()
    ]
    groups = [(longer, members) for longer, members in groups if len(members)] or [(False, np.zeros(0, dtype=np.int64))]
    columns = np.stack(
        [
            candidates.forward_s,
            candidates.backward_s,
            candidates.exposed_s,
            candidates.reduction_s,
            candidates.tie_s + candidates.finish_s,
            candidates.weight_s,
            candidates.held_bytes,
            candidates.stashed_bytes,
            candidates.scratch_bytes,
        ]
    )
    by_stage = columns[:, None]
    if turn is not None:
        by_stage = np.repeat(by_stage, len(is_on_pipeline), axis=1)
        by_stage[0, turn] -= candidates.saved_s[0]
        by_stage[1, turn - 1] -= candidates.saved_s[1]
    least = np.stack(
        [
            np.where(is_on_pipeline[:, members], by_stage[..., members], np.inf).min(axis=2, initial=np.inf)
            for _, members in groups
        ],
        axis=2,
    )
    seconds = np.where(np.isfinite(least[:6]), least[:6], 0.0)
    held_bytes, stashed_bytes, scratch_bytes = least[6:]
    longer = np.array([int(longer) for longer, _ in groups])
    return _Options(seconds, held_bytes, stashed_bytes, scratch_bytes, longer)


def on_pipelines(candidates: CandidateStages, stages: int) -> BoolArray:
    """Per (stage, candidate): whether some pipeline from the first to the last state has the candidate there."""
    source, target, states = candidates.source, candidates.target, len(candidates.first) - 1
    reached = np.zeros((stages + 1, states), dtype=bool)
    leads_to_end = reached.copy()
    reached[0, 0] = leads_to_end[stages, -1] = True
    for stage in range(stages):
        reached[stage + 1, target[reached[stage, source]]] = True
        leads_to_end[stages - 1 - stage, source[leads_to_end[stages - stage, target]]] = True
    return reached[:-1, source] & leads_to_end[1:, target]
