"""The interleaved pipeline that needs least memory, for given degrees.

A device adds up what its chunks hold and stash and takes the largest of their scratch. Branch and bound over pipelines
as for time (`splits.py`), with bytes for seconds: under a pipeline of which the first stages are chosen, every device
ends with at least what it has and what the leanest rest, chosen for that device alone, adds to it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phaze.hardware.field_checks import LARGEST_BYTES
from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.candidate_stages import Candidates
from phaze.place.search.prepared_problem import PreparedProblem
from phaze.place.search.stage_branch_and_bound import SplitSearch, best_split
from phaze.place.simulation.pass_orders import in_flight

__all__ = ["least_chunks"]

_NODES = 500


def least_chunks(
    prepared: PreparedProblem, parallelism: Parallelism, limit_bytes: float
) -> tuple[float, tuple[tuple[int, int], ...]]:
    """The least peak below the limit that is found, with the (stage, mode) of each stage; infinite if there is none.

    The effort is limited: where chunks differ much and there are many, the peak may not be the very least.
    """
    roomy = replace(prepared.problem.cluster.accelerator, hbm_bytes=LARGEST_BYTES)
    candidates = prepared.with_cluster(replace(prepared.problem.cluster, accelerator=roomy)).candidates(
        parallelism, np.inf
    )
    bounds = _ChunkBytes(
        candidates,
        parallelism,
        parallelism.micro_batches_per_pipeline(prepared.problem.micro_batches),
        prepared.space.states,
    )
    search = SplitSearch(
        candidates=candidates,
        bounds=bounds,
        simulated=bounds.peaks,
        estimated=bounds.peaks,
        stages=parallelism.stages,
        full=prepared.space.states - 1,
    )
    answer = best_split(search, limit_bytes, _NODES)
    return answer.time_s, tuple((int(candidates.stage[pick]), int(candidates.mode[pick])) for pick in answer.picks)


class _ChunkBytes:
    """A row holds, per device, what it adds up and its largest scratch."""

    def __init__(self, candidates: Candidates, parallelism: Parallelism, rounds: int, states: int) -> None:
        self._candidates, self._devices = candidates, parallelism.pp
        flight = in_flight(PipelineSchedule.INTERLEAVED, parallelism.pp, rounds, parallelism.chunks)
        self._flight = flight.T.ravel()
        self._least_scratch = float(candidates.scratch_bytes.min(initial=np.inf))
        self._tables = np.full((parallelism.stages + 1, parallelism.pp, states), np.inf)
        self._tables[-1, :, -1] = 0.0
        for position in range(parallelism.stages - 1, -1, -1):
            added = self._tables[position + 1][:, candidates.target]
            added[position % parallelism.pp] += self.added(position, np.arange(len(candidates.mode)))
            self._tables[position] = candidates.least_by_source(added, states)

    def added(self, position: int, picks: IntArray) -> FloatArray:
        """What candidates at one position add to their device."""
        candidates = self._candidates
        return np.asarray(candidates.held_bytes[picks] + self._flight[position] * candidates.stashed_bytes[picks])

    def peaks(self, picks: IntArray) -> FloatArray:
        """Bytes of the fullest device of pipelines, given as candidates per (pipeline, stage)."""
        by_device = picks.reshape(len(picks), -1, self._devices)
        candidates, flight = self._candidates, self._flight.reshape(-1, self._devices)
        added = candidates.held_bytes[by_device] + flight * candidates.stashed_bytes[by_device]
        return np.asarray((added.sum(axis=1) + candidates.scratch_bytes[by_device].max(axis=1)).max(axis=1))

    @property
    def root(self) -> FloatArray:
        """Empty devices."""
        return np.concatenate([np.zeros(self._devices), np.full(self._devices, self._least_scratch)])

    def extend(
        self, row: FloatArray, position: int, picks: IntArray, needed: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows with the picks added to their device, and bounds under the peak."""
        del needed
        device = position % self._devices
        rows = np.repeat(row[None], len(picks), axis=0)
        rows[:, device] += self.added(position, picks)
        scratch = rows[:, self._devices + device]
        np.maximum(scratch, self._candidates.scratch_bytes[picks], out=scratch)
        rest = self._tables[position + 1][:, self._candidates.target[picks]].T
        return rows, (rows[:, : self._devices] + rows[:, self._devices :] + rest).max(axis=1)
