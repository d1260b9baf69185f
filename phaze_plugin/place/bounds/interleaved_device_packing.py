"""A bound under interleaved pipelines from one device at a time: its chunks, each whole, must fit its memory together.

Means over devices (`chunks.py`) mix recompute modes in any proportion; a device of few chunks cannot. With t = F + B of
a stage, m rounds and S devices of v chunks, the first kind of path there says for device r

    T >= least t of the stages (0, 0)..(0, r-1) + m X_r + least exposed reduction of (0, 0) + least finish of device 0

where X_r is the least sum of t over one candidate for each chunk of r, such that held bytes, stash in flight and the
mean of their scratch fit. A stage's candidates are all that lie on some pipeline; nothing makes them go together.
"""

from __future__ import annotations

import numpy as np

from phaze.parallelism import Parallelism
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray
from phaze.place.search.candidate_stages import Candidates

__all__ = ["slowest_device_s"]


def slowest_device_s(
    candidates: Candidates, parallelism: Parallelism, rounds: int, states: int, usable_bytes: float, flight: IntArray
) -> float:
    """The bound; infinite where some device can hold no choice of chunks, or where there is no pipeline at all."""
    devices, chunks = parallelism.pp, parallelism.chunks
    through = candidates.forward_s + candidates.backward_s
    at = [np.flatnonzero(row) for row in _on_pipelines(candidates, parallelism.stages, states)]
    if not all(len(row) for row in at):
        return np.inf
    before = np.cumsum([0.0, *(float(through[row].min()) for row in at[: devices - 1])])
    finish = sum(float(candidates.finish_s[at[chunk * devices]].min()) for chunk in range(chunks))
    tail = float(candidates.exposed_s[at[0]].min()) + finish
    fixed = candidates.held_bytes + candidates.scratch_bytes / chunks
    bound = 0.0
    for device in range(devices):
        seconds, held = np.zeros(1), np.zeros(1)
        for chunk in range(chunks):
            own = at[chunk * devices + device]
            size = fixed[own] + flight[device, chunk] * candidates.stashed_bytes[own]
            seconds, held = _joined(seconds, held, through[own], size, usable_bytes * (1 + 1e-9))
            if not len(seconds):
                return np.inf
        bound = max(bound, before[device] + rounds * float(seconds[0]) + tail)
    return bound * (1 - 1e-11)


def _on_pipelines(candidates: Candidates, stages: int, states: int) -> BoolArray:
    """Per (stage, candidate): whether some pipeline from the first to the last state has the candidate there."""
    source, target = candidates.source, candidates.target
    reached = np.zeros((stages + 1, states), dtype=bool)
    leads = reached.copy()
    reached[0, 0] = leads[stages, -1] = True
    for stage in range(stages):
        reached[stage + 1, target[reached[stage, source]]] = True
        leads[stages - 1 - stage, source[leads[stages - stage, target]]] = True
    return reached[:-1, source] & leads[1:, target]


def _joined(
    seconds: FloatArray, held: FloatArray, more_s: FloatArray, more_bytes: FloatArray, usable_bytes: float
) -> tuple[FloatArray, FloatArray]:
    """All sums of one of each that fit and that no other beats in both, the shortest first."""
    seconds, held = np.add.outer(seconds, more_s).ravel(), np.add.outer(held, more_bytes).ravel()
    order = np.lexsort((held, seconds))
    order = order[held[order] <= usable_bytes]
    lighter = np.minimum.accumulate(held[order])
    kept = order[np.concatenate([[True], lighter[1:] < lighter[:-1]])] if len(order) else order
    return seconds[kept], held[kept]
