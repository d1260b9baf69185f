"""Lower bounds on interleaved pipelines from what each device can choose for its chunks, and how much that holds.

Every chunk has n or n+1 layers (`chunk_sizes`), and a known number of all chunks is longer. A choice of a device says
for each of its chunks whether it is longer and which recompute mode it has (`build_device_choices`). What a chunk takes
and holds is the least over all places in the model where it may begin; in a chain of equal blocks that is exact but at
the ends. Choices that do not fit the device are left out.

Let m be the microbatches per pipeline, S the devices, F, B and t = F + B the seconds of a stage, X_r the sum of t over
the chunks of device r, and R a stage's gradient reduction. A step takes at least, for every device r
(`DeviceChoices._lengths_s`),

    (1)  t of all stages before (c, r) + m X_r - S (t of the chunks of r before c)
         + exposed reduction of (0, 0) + ties and finish of device 0                              for all chunks c
    (2)  F of the stages (0, 0)..(0, r-1) + m X_r + exposed reduction of (0, r) + ties and finish of device r
    (3)  F of the stages (0, 0)..(0, r-1) + m X_r - S (B of the chunks of r before the last)
         - B of its last chunk + R of all its chunks + ties and finish of device r

Path (1) follows the first microbatch to the stage, stays on its device, which never idles, and follows the last
microbatch back; before the stage's first pass and after its last one the device runs S microbatches of each earlier
chunk. A mean of these paths over chunks is a bound too: the paths of the first chunk, of the last one and the mean over
all chunks are used. Path (3) holds because the reductions of a device follow each other, and the first one does not
begin before the last backward of its last chunk does.

Suppose that a pipeline takes at most U (`DeviceChoices._within`). Then every device has a choice whose paths are no
longer than U; all other devices have such choices too, so that what they add to its paths is the least of these; and
the longer chunks of all choices add up to the known number, so that each device has as many as the others leave to it.
Where no choice is left to some device, no pipeline takes at most U. `DeviceChoices.bound_s` bisects for the largest U
that is ruled out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from phaze.parallelism import Parallelism
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray, StageSpace
from phaze.place.search.candidate_stages import CandidateStages
from phaze.tolerances import BOUND_MARGIN, MEMORY_MARGIN

__all__ = ["DeviceChoices", "build_device_choices", "on_pipelines"]

_MOST_CHOICES = 40_000
"""The most choices of one device: three modes and two lengths of five chunks are 7,776. Where there are more, the
lengths and modes of the last chunks are merged into their least, which weakens the bound and nothing else."""

_ROUNDS = 3
"""How often choices are ruled out by paths and the paths made longer by that: a fourth round rarely finds more."""

_BISECTIONS = 14
"""How often `DeviceChoices.bound_s` halves the interval between what is ruled out and the target: fourteen leave less
than a ten-thousandth of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceChoices:
    """What each device may choose, per (device, choice) unless said otherwise; infinite where a choice does not fit.

    Attributes:
        stay_s: m X.
        up_to_s: t of the chunks up to c: for c the first chunk, the last one, and in the mean over all chunks.
        earlier_s: likewise, t of the chunks before c.
        leave_s: the longer of paths (2) and (3), without what comes before the device.
        first_forward_s: F of the first chunk.
        longer: how many chunks are longer.
        merged_chunks: how many chunks of all devices may be longer or not, whatever is chosen; a number.
        all_longer: how many chunks of the pipeline are longer, a number.
        tail_s: what path (1) has after the last backward, per choice of device 0.
    """

    stay_s: FloatArray
    up_to_s: FloatArray
    earlier_s: FloatArray
    leave_s: FloatArray
    first_forward_s: FloatArray
    longer: IntArray
    merged_chunks: int
    all_longer: int
    tail_s: FloatArray

    def bound_s(self, known_s: float, target_s: float) -> float:
        """A bound under every pipeline, from what is known already up to the target; infinite if nothing fits."""
        within = self._within(np.inf)
        if within is None:
            return np.inf
        low_s, high_s = known_s, target_s
        if not np.isfinite(high_s):
            high_s = 2 * max(known_s, float(np.where(np.isfinite(within.stay_s), within.stay_s, 0.0).max()))
            while within._within(high_s) is None:
                low_s, high_s = high_s, 2 * high_s
        left = within._within(high_s)
        if left is None:
            return high_s
        for _ in range(_BISECTIONS):
            middle_s = (low_s + high_s) / 2
            fewer = left._within(middle_s)
            low_s, high_s = (middle_s, high_s) if fewer is None else (low_s, middle_s)
            left = fewer or left
        return low_s

    def is_refuted(self, target_s: float) -> bool:
        """Whether no pipeline takes less than the target."""
        return self._within(target_s) is None

    def _within(self, target_s: float) -> DeviceChoices | None:
        """The choices of pipelines that may take at most the target, or None if there is no such pipeline."""
        limit_s = target_s * (1 + BOUND_MARGIN)
        is_allowed = np.isfinite(self.stay_s)
        for _ in range(_ROUNDS):
            is_allowed &= self._lengths_s(is_allowed) <= limit_s
            if not is_allowed.any(axis=1).all():
                return None
            most = np.where(is_allowed, self.longer, -1).max(axis=1)
            least = np.where(is_allowed, self.longer, self.longer.max() + 1).min(axis=1)
            # What all other devices leave to each one at least and at most.
            needed = self.all_longer - self.merged_chunks - (most.sum() - most)
            spare = self.all_longer - (least.sum() - least)
            is_allowed &= (self.longer >= needed[:, None]) & (self.longer <= spare[:, None])
            if not is_allowed.any(axis=1).all():
                return None
        return self._keeping(is_allowed)

    def _keeping(self, is_allowed: BoolArray) -> DeviceChoices:
        """The same with only some of the choices; those that no device has left are dropped."""
        kept = np.flatnonzero(is_allowed.any(axis=0))
        return replace(
            self,
            stay_s=np.where(is_allowed, self.stay_s, np.inf)[:, kept],
            up_to_s=self.up_to_s[:, :, kept],
            earlier_s=self.earlier_s[:, :, kept],
            leave_s=self.leave_s[:, kept],
            first_forward_s=self.first_forward_s[:, kept],
            longer=self.longer[:, kept],
            tail_s=self.tail_s[kept],
        )

    def _lengths_s(self, is_allowed: BoolArray) -> FloatArray:
        """The longest path of each choice, if all other devices choose from what is allowed."""
        longest = self.leave_s + _before(_least(self.first_forward_s, is_allowed))[:, None]
        devices = len(self.stay_s)
        tail_s = float(_least(self.tail_s[None], is_allowed[:1])[0])
        for up_to_s, earlier_s in zip(self.up_to_s, self.earlier_s, strict=True):
            least_earlier = _least(earlier_s, is_allowed)
            elsewhere = _before(_least(up_to_s, is_allowed)) + _before(least_earlier[::-1])[::-1] + tail_s
            length = self.stay_s + elsewhere[:, None]
            np.maximum(longest, length - (devices - 1) * earlier_s, out=longest)
        return longest


def _least(seconds: FloatArray, is_allowed: BoolArray) -> FloatArray:
    """Per device: the least of the choices that are allowed."""
    return np.asarray(np.where(is_allowed, seconds, np.inf).min(axis=1))


def _before(per_device: FloatArray) -> FloatArray:
    """Sums over all earlier devices."""
    return np.concatenate([[0.0], np.cumsum(per_device)[:-1]])


class _Options(NamedTuple):
    """The least of what each stage may take and hold, per (stage, option): an option is a length and a mode."""

    forward_s: FloatArray
    backward_s: FloatArray
    exposed_s: FloatArray
    reduction_s: FloatArray
    settle_s: FloatArray
    held_bytes: FloatArray
    stashed_bytes: FloatArray
    scratch_bytes: FloatArray


def build_device_choices(
    candidates: CandidateStages,
    parallelism: Parallelism,
    micro_batches: int,
    usable_bytes: float,
    flight: IntArray,
    space: StageSpace,
) -> DeviceChoices:
    """The choices of every device.

    Args:
        candidates: the stages to choose from.
        parallelism: the strategy.
        micro_batches: m.
        usable_bytes: memory of one device.
        flight: microbatches in flight per (device, chunk).
        space: the stages that candidates index.
    """
    pp, chunks = parallelism.pp, parallelism.chunks
    is_longer = space.take(candidates.stage).sizes > space.layers // parallelism.stages
    options, option_is_longer = _least_options(candidates, is_longer, parallelism.stages)
    by_chunk = [_chunk_sums(options, chunk, pp, chunks, micro_batches, flight[:, chunk]) for chunk in range(chunks)]
    sums, scratch = by_chunk[0]
    first_forward_s, tail_s = options.forward_s[:pp], options.exposed_s[0] + options.settle_s[0]
    longer, merged = np.broadcast_to(option_is_longer, scratch.shape), 0
    for more, more_scratch in by_chunk[1:]:
        added = option_is_longer
        if sums.shape[2] * more.shape[2] > _MOST_CHOICES:
            more, more_scratch = more.min(axis=2, keepdims=True), more_scratch.min(axis=1, keepdims=True)
            added, merged = np.zeros(1, dtype=np.int64), merged + 1
        sums = (sums[..., :, None] + more[..., None, :]).reshape(*sums.shape[:2], -1)
        scratch = np.maximum(scratch[..., :, None], more_scratch[..., None, :]).reshape(pp, -1)
        first_forward_s = np.repeat(first_forward_s, len(added), axis=1)
        tail_s = (tail_s[:, None] + more[3, 0]).ravel()
        longer = (longer[..., :, None] + added).reshape(pp, -1)
    stay_s, leave_2_s, leave_3_s, _, held_bytes, *before_s = sums
    fits = held_bytes + scratch <= usable_bytes * (1 + MEMORY_MARGIN)
    return DeviceChoices(
        stay_s=np.where(fits, stay_s, np.inf),
        up_to_s=np.stack(before_s[: len(before_s) // 2]),
        earlier_s=np.stack(before_s[len(before_s) // 2 :]),
        leave_s=np.maximum(leave_2_s, leave_3_s),
        first_forward_s=first_forward_s,
        longer=longer,
        merged_chunks=merged * pp,
        all_longer=space.layers % parallelism.stages,
        tail_s=tail_s,
    )


def _chunk_sums(
    options: _Options, chunk: int, pp: int, chunks: int, micro_batches: int, flight: IntArray
) -> tuple[FloatArray, FloatArray]:
    """What one chunk adds to a choice of its device, per (quantity, device, option), and its scratch.

    The quantities are those that `build_device_choices` unpacks: path (1) on the device, paths (2) and (3) from the
    device on, what follows the reductions, what is held, and what other devices add to path (1).
    """
    chunk_options = _Options(*(values[chunk * pp : (chunk + 1) * pp] for values in options))
    through_s, settle_s = chunk_options.forward_s + chunk_options.backward_s, chunk_options.settle_s
    stay_s = micro_batches * through_s
    # An option that a stage does not have is infinite, of which nothing can be taken away.
    through_s, backward_s = (np.where(np.isfinite(stay_s), part, 0.0) for part in (through_s, chunk_options.backward_s))
    hidden_s = backward_s * (1 if chunk == chunks - 1 else pp)
    leave_2_s = stay_s + settle_s + (chunk_options.exposed_s if chunk == 0 else 0.0)
    leave_3_s = stay_s - hidden_s + chunk_options.reduction_s + settle_s
    held_bytes = chunk_options.held_bytes + flight[:, None] * chunk_options.stashed_bytes
    # Up to c and before c: for c the first chunk, the last one, and in the mean over all.
    weights = [chunk == 0, 1, (chunks - chunk) / chunks, 0, chunk < chunks - 1, (chunks - 1 - chunk) / chunks]
    before_s = [weight * through_s for weight in weights]
    return np.stack([stay_s, leave_2_s, leave_3_s, settle_s, held_bytes, *before_s]), chunk_options.scratch_bytes


def _least_options(candidates: CandidateStages, is_longer: BoolArray, stages: int) -> tuple[_Options, IntArray]:
    """The options of every stage, infinite where it has none, and whether each option is a longer chunk."""
    groups = [
        (longer, np.flatnonzero((is_longer == longer) & (candidates.mode == mode)))
        for longer in (False, True)
        for mode in np.unique(candidates.mode).tolist()
    ]
    groups = [(longer, members) for longer, members in groups if len(members)] or [(False, np.zeros(0, dtype=np.int64))]
    is_on_pipeline = on_pipelines(candidates, stages)
    columns = (
        candidates.forward_s,
        candidates.backward_s,
        candidates.exposed_s,
        candidates.reduction_s,
        candidates.tie_s + candidates.finish_s,
        candidates.held_bytes,
        candidates.stashed_bytes,
        candidates.scratch_bytes,
    )
    least = [
        [
            np.where(is_on_pipeline[:, members], column[members], np.inf).min(axis=1, initial=np.inf)
            for _, members in groups
        ]
        for column in columns
    ]
    return _Options(*(np.array(values).T for values in least)), np.array([int(longer) for longer, _ in groups])


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
