"""Lower bounds on the step time of interleaved pipelines, where several chunks share a device's time and memory.

Every chunk has the same number of layers, give or take one (`chunk_sizes`). Let F and B be the forward and backward
seconds of a stage and t = F + B. A pipeline has m microbatches and S devices of v chunks. Stage (c, r) is chunk c of
device r, X_r is the sum of t over the chunks of device r, and R is a stage's gradient reduction over data-parallel
copies.

Paths through the simulation. A step takes at least the length of each of these paths:

    (1)  t of all stages before (c, r) + m X_r - S (t of the chunks of r before c)
         + exposed reduction of (0, 0) + finish of device 0                                               for all c, r
    (2)  F of the stages (0, 0)..(0, r-1) + m X_r + exposed reduction of (0, r) + finish of r             for all r
    (3)  F of the stages (0, 0)..(0, r-1) + m X_r - S (B of the chunks of r before the last)
         - B of its last chunk + R of all its chunks + finish of r                                        for all r

Path (1) follows the first microbatch to the stage, stays on its device, which never idles, and follows the last
microbatch back; before the stage's first pass and after its last one the device runs S microbatches of each earlier
chunk. Path (3) holds because the reductions of a device follow each other, and the first one does not begin before the
last backward of its last chunk does. `_path_1_weights` and `_path_2_and_3_weights` state them as weights of seconds.

Means of paths (`InterleavedBounds`). A weighted mean of paths is a bound too, and it remains one after a price p per
byte by which devices exceed their memory is added:

    T >= min over pipelines of (sum over stages of what each adds to the mean and p * its bytes in flight) - p * usable

(of the scratch of its chunks a device needs the largest, which is at least their mean). The minimum is a shortest path
over states, computed once per position by `InterleavedBounds.__init__` and looked up by `InterleavedBounds.extend`.
`InterleavedBounds._weigh_paths` chooses the means: path (1) with weights that fall by 1 - 1/(v m) per device towards
the first, and once more with all weight on the last device; paths (2) and (3) with equal weights. For each of the four,
several prices p are tried: what a recompute mode costs per byte that it frees.

One device by itself (`slowest_device_s`). Means over devices mix recompute modes in any proportion; a device of few
chunks cannot. Path (1) of chunk 0 says for device r

    T >= least t of the stages (0, 0)..(0, r-1) + m X_r + least exposed reduction of (0, 0) + least finish of device 0

where X_r is the least sum of t over one candidate for each chunk of r, such that held bytes, stash in flight and the
mean of their scratch fit together. A stage's candidates are all that lie on some pipeline; nothing makes them match.

Closed form for many strategies at once, on chains (`interleaved_closed_form_s`). Since chunks have n or n+1 layers,
layer l can only lie in a few of the K stages. With a_k the weight of a second of stage k in the mean of path (1), w_k
the weight of its device and f_k its microbatches in flight, the mean of path (1) is at least

    sum over layers of min over k of (min over modes of (a_k t_l + p w_k (f_k stash_l + working_l / (v (n+1))))
                                      + p w_k held_l) - p usable

plus a_k times the least transfer for each stage but the first, plus the tail of the first layer. Here working_l is the
least working set of layer l and all layers behind it: a device's largest working set is at least the mean over its
chunks of that of their last layers. Instead of what they recompute, all stages but the last may be charged what they
get back, if that is more; then no memory is priced. Without seconds and with equal weights, the same sum says whether
the mean device can hold what it must.
"""

from __future__ import annotations

import numpy as np

from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place.bounds.layer_table import LayerTable
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray
from phaze.place.search.candidate_stages import CandidateStages
from phaze.place.search.parallelism_table import ParallelismTable
from phaze.place.simulation.pass_orders import in_flight

__all__ = ["InterleavedBounds", "interleaved_closed_form_s", "slowest_device_s"]


class InterleavedBounds:
    """What each device has so far, in seconds and in bytes.

    A row holds, per device, seconds per microbatch, t and F before it in the first chunks, finishing seconds, held
    bytes, the largest scratch and the stash; and last what the shortest paths have spent.
    """

    def __init__(
        self,
        candidates: CandidateStages,
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
        self._weights = self._weigh_paths(parallelism)
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

    def _weigh_paths(self, parallelism: Parallelism) -> FloatArray:
        """Per (stage, mean and price, feature): what a second or byte of the stage's candidate adds."""
        devices, chunks, rounds = self.devices, parallelism.chunks, self.rounds
        fall = (1 - 1 / (chunks * rounds)) ** np.arange(devices - 1, -1, -1.0)
        end = (np.arange(devices) == devices - 1).astype(float)
        even = np.full(devices, 1 / devices)
        forward, settled, reduced = _path_2_and_3_weights(parallelism, rounds)
        first = (np.arange(self.stages) == 0).astype(float)
        on_first = (np.arange(self.stages) % devices == 0).astype(float)
        share, starts = np.full(self.stages, 1 / devices), (np.arange(self.stages) < devices) / devices
        none = np.zeros(self.stages)
        means = []
        for weights in (fall / fall.sum(), end):
            through = _path_1_weights(parallelism, rounds, weights)
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


def _path_1_weights(parallelism: Parallelism, rounds: int, weights: FloatArray) -> FloatArray:
    """Per stage: the weight of its t in paths of the first kind, with these weights of their devices."""
    devices, chunks = parallelism.pp, parallelism.chunks
    after = np.concatenate([np.cumsum(weights[::-1])[::-1][1:], [0.0]])
    later = (chunks - 1 - np.arange(chunks)[:, None]) / chunks
    return np.asarray((later + after / chunks + weights * (rounds - devices * later)).ravel())


def _path_2_and_3_weights(parallelism: Parallelism, rounds: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Per stage: the weights of its F in paths of the second and third kind, and of its B in either."""
    devices, chunks = parallelism.pp, parallelism.chunks
    forward, settled, reduced = np.full((3, chunks, devices), float(rounds))
    forward[0] += devices - 1 - np.arange(devices)
    reduced[:-1] -= devices
    reduced[-1] -= 1
    return forward.ravel() / devices, settled.ravel() / devices, reduced.ravel() / devices


def slowest_device_s(
    candidates: CandidateStages,
    parallelism: Parallelism,
    rounds: int,
    states: int,
    usable_bytes: float,
    flight: IntArray,
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


def _on_pipelines(candidates: CandidateStages, stages: int, states: int) -> BoolArray:
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


_AT_ONCE = 2_000_000
_SLACK = 1e-10


def interleaved_closed_form_s(layer_table: LayerTable, strategies: ParallelismTable) -> FloatArray:
    """A bound under each interleaved choice; infinite where nothing fits."""
    layers = layer_table.forward_s.shape[1]
    floors = np.zeros(len(strategies))
    stages = strategies.pp * strategies.chunks
    for count in np.unique(stages).tolist():
        first, last = _positions(layers, count)
        at_once = max(1, _AT_ONCE // (layers * int((last - first).max() + 1) * len(layer_table.recompute_s)))
        members = np.flatnonzero(stages == count)
        for start in range(0, len(members), at_once):
            part = members[start : start + at_once]
            floors[part] = _floors(layer_table, strategies.take(part), count, first, last)
    return floors


def _positions(layers: int, stages: int) -> tuple[IntArray, IntArray]:
    """Per layer: the first and the last stage in which it can lie."""
    least, extra = divmod(layers, stages)
    stage, layer = np.arange(stages), np.arange(layers)
    earliest = stage * least + np.maximum(0, extra - (stages - stage))
    latest_end = (stage + 1) * least + np.minimum(stage + 1, extra)
    return np.searchsorted(latest_end, layer, side="right"), np.searchsorted(earliest, layer, side="right") - 1


def _floors(
    layer_table: LayerTable, strategies: ParallelismTable, stages: int, first: IntArray, last: IntArray
) -> FloatArray:
    """The bounds of choices with the same number of stages. Axes: mode, layer, place among its stages, choice."""
    layers = len(first)
    tp = np.searchsorted(layer_table.tp_degrees, strategies.tp)
    terms = layer_table.terms(strategies)
    held, through = terms.held_bytes[:, None], terms.through_s[:, None]
    mean = strategies.chunks * -(-layers // stages)
    again, stash, working = (
        table[:, :, None] for table in (terms.again_s, terms.stash_bytes, _least_behind(terms.working_bytes))
    )
    device, returned, flight = _weights(strategies, stages)
    place = np.minimum(first[:, None] + np.arange(int((last - first).max()) + 1), last[:, None])
    flight_at, device_at, returned_at = flight[place], device[place], returned[place]
    kept = flight_at * stash + working / mean
    usable = layer_table.problem.usable_bytes * (1 + _SLACK)
    needed = (kept.min(axis=0) + held).min(axis=1).sum(axis=0)
    bounds = np.where(needed > usable * strategies.pp, np.inf, 0.0)
    seconds = returned_at * (through + again)
    tail = terms.finish_s[0] + terms.reduced_s[0]
    received = tail + terms.cut_s * returned[1:].sum(axis=0)
    given_back = terms.cut_s * returned[:-1].sum(axis=0)
    bounds = np.maximum(bounds, received + given_back + (returned_at * through).min(axis=1).sum(axis=0))
    for prices in layer_table.prices:
        price = prices[tp] * strategies.rounds / flight.mean(axis=0)
        spent = (seconds + price * device_at * kept).min(axis=0) + price * device_at * held
        bounds = np.maximum(bounds, received + spent.min(axis=1).sum(axis=0) - price * usable)
    return np.asarray(bounds * (1 - _SLACK))


def _least_behind(per_layer: FloatArray) -> FloatArray:
    """The least of each layer and all behind it, per (mode, layer, choice)."""
    return np.asarray(np.minimum.accumulate(per_layer[:, ::-1], axis=1)[:, ::-1])


def _weights(strategies: ParallelismTable, stages: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Per (stage, choice): the weight of its device, of its seconds, and its microbatches in flight."""
    chunks, devices, rounds = strategies.chunks, strategies.pp, strategies.rounds
    chunk, device = np.divmod(np.arange(stages)[:, None], devices)
    fall = 1 - 1 / (chunks * rounds)
    whole = 1 - fall**devices
    weight = fall ** (devices - 1 - device) * (1 - fall) / whole
    after = (1 - fall ** (devices - 1 - device)) / whole
    later = (chunks - 1 - chunk) / chunks
    returned = later + after / chunks + weight * (rounds - devices * later)
    flight = np.empty((stages, len(chunks)))
    keys = np.stack([devices, np.minimum(rounds, 3 * devices), chunks])
    distinct, which = np.unique(keys, axis=1, return_inverse=True)
    for index, key in enumerate(distinct.T.tolist()):
        counts = in_flight(PipelineSchedule.INTERLEAVED, *key)
        flight[:, which.ravel() == index] = counts.T.reshape(-1, 1)
    return weight, returned, flight
