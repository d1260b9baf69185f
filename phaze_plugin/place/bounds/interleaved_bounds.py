"""Interleaved pipelines: bounds where chunks of one device share its time and memory.

Every chunk has the same number of layers, give or take one (`degrees.chunk_sizes`). With t = F + B of a stage, m
rounds, S devices of v chunks, X_r the t of device r, (c, r) the c-th stage on it, and R its reduction over pipelines:

    T >= t of all stages before (c, r) + m X_r - S (t of the chunks of r before c)
         + exposed reduction of (0, 0) + finish of 0                                                      for all c, r
    T >= F of the stages (0, 0)..(0, r-1) + m X_r + exposed reduction of (0, r) + finish of r             for all r
    T >= F of the stages (0, 0)..(0, r-1) + m X_r - S (B of the chunks of r before the last)
         - B of its last chunk + R of all its chunks + finish of r                                        for all r

First: the first microbatch on its way to the stage, the device never idle, the last microbatch on its way back; before
the stage's first pass and after its last one the device runs S microbatches of each earlier chunk. Third: reductions of
a device follow each other, the first one not before the last backward of its last chunk begins. Any weighted mean of
these is a bound too, and so it remains after adding a price p per byte by which devices exceed their memory:

    T >= min over pipelines of (sum over stages of what each adds to the mean and p * its bytes in flight) - p * usable

(of its chunks' scratch, a device needs the largest, which is at least their mean).
The minimum is a shortest path over states. The first kind is weighted by u_r / v, u_r falling by 1 - 1/(v m) per device
towards the first, and once more with all weight on the last device; the others by 1/S. For each, several p are tried:
what a recompute mode costs per byte that it frees. `chunk_packing.py` adds a bound from each device by itself.
"""

from __future__ import annotations

import numpy as np

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.bounds.interleaved_device_packing import slowest_device_s
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray
from phaze.place.search.candidate_stages import Candidates
from phaze.place.simulation.pass_orders import in_flight

__all__ = ["InterleavedBounds"]


class InterleavedBounds:
    """What each device has so far, in seconds and in bytes.

    A row holds, per device, seconds per microbatch, t and F before it in the first chunks, finishing seconds, held
    bytes, the largest scratch and the stash; and last what the shortest paths have spent.
    """

    def __init__(
        self,
        candidates: Candidates,
        parallelism: Parallelism,
        rounds: int,
        states: int,
        usable_bytes: float,
        prices: tuple[float, ...],
    ) -> None:
        self.candidates, self.rounds, self.devices = candidates, rounds, parallelism.pp
        self.through = candidates.forward_s + candidates.backward_s
        self.usable, self.stages = usable_bytes, parallelism.stages
        self.flight = in_flight(PipelineSchedule.INTERLEAVED, parallelism.pp, rounds, parallelism.chunks)
        self._prices = np.array([0.0, *prices]) * (rounds / float(self.flight.mean()))
        self._weights = self._weigh(parallelism)
        self._least_s = slowest_device_s(candidates, parallelism, rounds, states, usable_bytes, self.flight)
        self._features = np.stack(
            [
                candidates.forward_s,
                candidates.backward_s,
                candidates.finish_s,
                candidates.exposed_s,
                candidates.reduction_s,
                candidates.held_bytes,
                candidates.stashed_bytes,
                candidates.scratch_bytes,
            ]
        )
        self._tables = np.full((self.stages + 1, self._weights.shape[1], states), np.inf)
        self._tables[self.stages, :, -1] = 0.0
        for position in range(self.stages - 1, -1, -1):
            spent = self._weights[position] @ self._features
            spent += self._tables[position + 1][:, candidates.target]
            self._tables[position] = candidates.least_by_source(spent, states)

    def is_over(self, states: int) -> bool:
        """Whether no pipeline fits: some device, or the mean over devices, needs too much in every one."""
        candidates, devices = self.candidates, self.devices
        least = np.full((devices + 1, states), np.inf)
        least[:, -1] = 0.0
        for position in range(self.stages - 1, -1, -1):
            chunk, device = divmod(position, devices)
            own = candidates.held_bytes + self.flight[device, chunk] * candidates.stashed_bytes
            own = own + candidates.scratch_bytes / (self.stages // devices)
            counts = np.zeros((devices + 1, 1))
            counts[device], counts[devices] = 1.0, 1 / devices
            least = candidates.least_by_source(counts * own + least[:, candidates.target], states)
        return bool((least[:, 0] > self.usable * (1 + 1e-9)).any())

    def _weigh(self, parallelism: Parallelism) -> FloatArray:
        """Per (stage, mean and price, feature): what a second or byte of the stage's candidate adds."""
        devices, chunks, rounds = self.devices, parallelism.chunks, self.rounds
        fall = (1 - 1 / (chunks * rounds)) ** np.arange(devices - 1, -1, -1.0)
        end = (np.arange(devices) == devices - 1).astype(float)
        even = np.full(devices, 1 / devices)
        forward, settled, reduced = _staying(parallelism, rounds)
        first = (np.arange(self.stages) == 0).astype(float)
        on_first = (np.arange(self.stages) % devices == 0).astype(float)
        share, starts = np.full(self.stages, 1 / devices), (np.arange(self.stages) < devices) / devices
        none = np.zeros(self.stages)
        means = []
        for weights in (fall / fall.sum(), end):
            through = _returning(parallelism, rounds, weights)
            means.append((weights, np.stack([through, through, on_first, first, none], axis=1)))
        means.append((even, np.stack([forward, settled, share, starts, none], axis=1)))
        means.append((even, np.stack([forward, reduced, share, none, share], axis=1)))
        columns = []
        for weights, seconds in means:
            for price in self._prices:
                held = price * np.tile(weights, chunks)
                columns.append(np.column_stack([seconds, held, held * self.flight.T.ravel(), held / chunks]))
        return np.stack(columns, axis=1)

    def bytes_of(self, position: int, picks: IntArray) -> FloatArray:
        """Held bytes and stash in flight of candidates at one position."""
        chunk, device = divmod(position, self.devices)
        candidates = self.candidates
        stashed = self.flight[device, chunk] * candidates.stashed_bytes[picks]
        return np.asarray(candidates.held_bytes[picks] + stashed)

    @property
    def root(self) -> FloatArray:
        """Empty devices."""
        return np.zeros(7 * self.devices + self._weights.shape[1])

    def extend(
        self, row: FloatArray, position: int, picks: IntArray, needed: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows with the pick's stage added to its device."""
        del needed
        candidates, devices = self.candidates, self.devices
        chunk, device = divmod(position, devices)
        spent = row[7 * devices :, None] + self._weights[position] @ self._features[:, picks]
        rows = np.repeat(row[None, : 7 * devices], len(picks), axis=0).reshape(len(picks), 7, devices)
        if chunk == 0 and device + 1 < devices:
            rows[:, 1, device + 1] = rows[:, 1, device] + self.through[picks]
            rows[:, 2, device + 1] = rows[:, 2, device] + candidates.forward_s[picks]
        rows[:, 0, device] += self.through[picks]
        rows[:, 3, device] += candidates.finish_s[picks]
        rows[:, 4, device] += candidates.held_bytes[picks]
        rows[:, 5, device] = np.maximum(rows[:, 5, device], candidates.scratch_bytes[picks])
        rows[:, 6, device] += self.flight[device, chunk] * candidates.stashed_bytes[picks]
        own = self.rounds * rows[:, 0] + np.maximum(rows[:, 1] + rows[:, 3, :1], rows[:, 2] + rows[:, 3])
        paid = np.tile(self._prices, 4)[:, None] * self.usable
        paths = spent + self._tables[position + 1][:, candidates.target[picks]] - paid
        bound = np.maximum(np.maximum(own.max(axis=1), self._least_s), paths.max(axis=0) * (1 - 1e-11))
        fits = rows[:, 4, device] + rows[:, 5, device] + rows[:, 6, device] <= self.usable
        rows = np.concatenate([rows.reshape(len(picks), -1), spent.T], axis=1)
        return rows, np.where(fits, bound, np.inf)

    def busiest(self, picks: IntArray) -> set[int]:
        """The places in a pipeline of the stages of the device that takes longest."""
        device = int(self.through[picks].reshape(-1, self.devices).sum(axis=0).argmax())
        return set(range(device, self.stages, self.devices))

    def count_pipelines(self, states: int) -> float:
        """How many pipelines there are, whether they fit or not."""
        counts: FloatArray = np.zeros(states)
        counts[-1] = 1.0
        for _ in range(self.stages):
            ahead = counts[self.candidates.target]
            counts = np.bincount(self.candidates.source, ahead, minlength=states).astype(float)
        return float(counts[0])

    def fits(self, picks: IntArray) -> BoolArray:
        """Whether whole pipelines, as candidates per (pipeline, stage), fit their devices."""
        by_device = picks.reshape(len(picks), -1, self.devices)
        candidates = self.candidates
        added = candidates.held_bytes[by_device] + self.flight.T * candidates.stashed_bytes[by_device]
        total = added.sum(axis=1) + candidates.scratch_bytes[by_device].max(axis=1)
        return np.asarray((total <= self.usable).all(axis=1))


def _returning(parallelism: Parallelism, rounds: int, weights: FloatArray) -> FloatArray:
    """Per stage: the weight of its t in paths of the first kind, with these weights of their devices."""
    devices, chunks = parallelism.pp, parallelism.chunks
    after = np.concatenate([np.cumsum(weights[::-1])[::-1][1:], [0.0]])
    later = (chunks - 1 - np.arange(chunks)[:, None]) / chunks
    return np.asarray((later + after / chunks + weights * (rounds - devices * later)).ravel())


def _staying(parallelism: Parallelism, rounds: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Per stage: the weights of its F in paths of the second and third kind, and of its B in either."""
    devices, chunks = parallelism.pp, parallelism.chunks
    forward, settled, reduced = np.full((3, chunks, devices), float(rounds))
    forward[0] += devices - 1 - np.arange(devices)
    reduced[:-1] -= devices
    reduced[-1] -= 1
    return forward.ravel() / devices, settled.ravel() / devices, reduced.ravel() / devices
