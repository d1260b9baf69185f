"""Lower bounds on the step time of pipelines in which several chunks share a device's time and memory.

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

In the shape of a V, where t has the weights' part too, only this path is used, and all its means with weights of
devices that are equal, or all on one (`_v_path_weights`): a device begins behind the forwards before it, then runs all
its passes, and reduces its first chunk's gradients behind the last of them:

    (4)  F of the stages (0, 0)..(0, r-1) + m X_r + exposed reduction of (0, r) + finish of r             for all r

Means of paths (`InterleavedBounds`). A weighted mean of paths is a bound too, and it remains one after a price p per
byte by which devices exceed their memory is added:

    T >= min over pipelines of (sum over stages of what each adds to the mean and p * its bytes in flight) - p * usable

(of the scratch of its chunks a device needs the largest, which is at least their mean). The minimum is a shortest path
over states, computed once per position by `InterleavedBounds._least_rest` and looked up by `InterleavedBounds.extend`.
`InterleavedBounds._weights` chooses the means: path (1) with weights that fall by 1 - 1/(v m) per device towards
the first, and once more with all weight on the last device; paths (2) and (3) with equal weights. For each of the four,
several prices p are tried: what a recompute mode costs per byte that it frees.

What each device can choose for its chunks together is bounded in `device_choice_bounds.py`.

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

from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from phaze.parallelism import Parallelism
from phaze.place.bounds.device_choice_bounds import DeviceChoices, build_device_choices, on_pipelines
from phaze.place.bounds.layer_table import LayerTable
from phaze.place.bounds.stage_filling import LayerTerms
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray, StageSpace
from phaze.place.search.candidate_stages import CandidateStages
from phaze.place.search.parallelism_table import SCHEDULES, V_SCHEDULES, ParallelismTable
from phaze.place.simulation.pass_orders import in_flight, stages_of_devices
from phaze.tolerances import BOUND_MARGIN, GREEDY_MARGIN

__all__ = ["InterleavedBounds", "interleaved_closed_form_s"]

_STRATEGIES_AT_ONCE = 4_000
"""Strategies whose terms are worked out together: some hundred numbers each, so that they take a few megabytes."""

_NUMBERS_AT_ONCE = 2_000_000
"""How many numbers the largest array of the closed form may have: more strategies at once save calls of numpy, and cost
memory. Two million doubles are 16 MB, which many a processor's last cache holds."""

_KEPT_LAYER_STAGES = 1_024
"""For so many chains of layers and numbers of stages it is kept which layers can lie where: a search asks for each
number of stages of its few chains again and again."""

_MEANS = 4
"""How many weighted means of paths `InterleavedBounds` follows: two of path (1), one each of paths (2) and (3)."""


class _DeviceTotals(NamedTuple):
    """What partial pipelines remember of every device, per (pipeline, device).

    Attributes:
        through_s: X, seconds of one microbatch through the device's chunks.
        before_s: t of the first chunks of all devices before it.
        forward_before_s: F of the first chunks of all devices before it.
        finish_s: update and gather of its chunks.
        held_bytes: parameters, gradients and optimizer state of its chunks.
        scratch_bytes: the largest scratch of its chunks.
        stash_bytes: stash in flight of its chunks.
    """

    through_s: FloatArray
    before_s: FloatArray
    forward_before_s: FloatArray
    finish_s: FloatArray
    held_bytes: FloatArray
    scratch_bytes: FloatArray
    stash_bytes: FloatArray


_TOTALS = len(_DeviceTotals._fields)


class InterleavedBounds:
    """Bounds of partial interleaved pipelines under one strategy, as `StageBounds` wants them.

    The row of a partial pipeline holds the `_DeviceTotals` of every device, and behind them what the stages chosen so
    far have spent of each weighted mean of paths at each price.

    Attributes:
        candidates: the stages to choose from.
        through_s: t of every candidate, but for what `saved_s` says.
        is_v_shaped: whether stages go down the devices and come back.
        stages_of_devices: which stage each chunk of each device is, per (chunk, device).
        micro_batches: m, per pipeline.
        pp: S.
        stages: S v.
        usable_bytes: memory of one device.
        in_flight: microbatches in flight per (device, chunk).
    """

    def __init__(
        self,
        candidates: CandidateStages,
        parallelism: Parallelism,
        micro_batches: int,
        usable_bytes: float,
        prices_s_per_byte: tuple[float, ...],
        space: StageSpace,
    ) -> None:
        self.candidates, self.micro_batches, self.pp = candidates, micro_batches, parallelism.pp
        self.is_v_shaped, back_s = parallelism.schedule.is_v_shaped, candidates.backward_s + candidates.weight_s
        self.through_s = candidates.forward_s + back_s
        self.usable_bytes, self.stages = usable_bytes, parallelism.stages
        self.in_flight = in_flight(parallelism.schedule, parallelism.pp, micro_batches, parallelism.chunks)
        self.stages_of_devices = stages_of_devices(parallelism.schedule, parallelism.pp, parallelism.chunks)
        self._parallelism, self._space = parallelism, space
        # A stashed byte stands as often as microbatches are in flight, and what frees it is paid for every microbatch.
        self._prices = np.array([0.0, *prices_s_per_byte]) * (micro_batches / float(self.in_flight.mean()))
        self._features = np.stack(
            [
                candidates.forward_s,
                back_s,
                candidates.finish_s,
                candidates.exposed_s,
                candidates.reduction_s,
                candidates.held_bytes,
                candidates.stashed_bytes,
                candidates.scratch_bytes,
            ]
        )

    def saved_s(self, stage: int) -> FloatArray:
        """What F and B of every candidate are shorter by at a stage of the pipeline, where a V turns."""
        saved = np.zeros((2, len(self.through_s)))
        if self.is_v_shaped and stage == self.pp:
            saved[0] = self.candidates.saved_s[0]
        elif self.is_v_shaped and stage == self.pp - 1:
            saved[1] = self.candidates.saved_s[1]
        return saved

    def _features_at(self, stage: int) -> FloatArray:
        """Seconds and bytes of every candidate at a stage of the pipeline, per (feature, candidate)."""
        features = self._features
        if self.is_v_shaped and stage in (self.pp - 1, self.pp):
            features = features.copy()
            features[:2] -= self.saved_s(stage)
        return features

    @cached_property
    def choices(self) -> DeviceChoices:
        """What each device can choose for its chunks."""
        return self._choices_on(on_pipelines(self.candidates, self.stages))

    def _choices_on(self, is_on_pipeline: BoolArray) -> DeviceChoices:
        """The same where only some candidates may be at each stage, per (stage, candidate)."""
        return build_device_choices(
            self.candidates,
            self._parallelism,
            self.micro_batches,
            self.usable_bytes,
            self.in_flight,
            self._space,
            is_on_pipeline,
        )

    def bound_of_cut_s(self, pipeline: IntArray, known_s: float, target_s: float) -> float:
        """A bound under all pipelines with the boundaries of this one, whatever their modes."""
        candidates = self.candidates
        ends = candidates.source * len(candidates.first) + candidates.target
        return self._choices_on(ends == ends[pipeline][:, None]).bound_s(known_s, target_s)

    @property
    def has_one_mode(self) -> bool:
        """Whether every candidate has the same recompute mode."""
        return bool((self.candidates.mode == self.candidates.mode[:1]).all())

    @cached_property
    def _least_rest(self) -> FloatArray:
        """Per (stages chosen, mean and price, state): the least that the stages to come add to each mean."""
        candidates, states = self.candidates, len(self.candidates.first) - 1
        least = np.full((self.stages + 1, self._weights.shape[1], states), np.inf)
        least[self.stages, :, -1] = 0.0
        for position in range(self.stages - 1, -1, -1):
            spent = self._weights[position] @ self._features_at(position)
            spent += least[position + 1][:, candidates.target]
            least[position] = candidates.least_by_source(spent, states)
        return least

    @cached_property
    def _weights(self) -> FloatArray:
        """Per (stage, mean and price, feature): what a second or byte of the stage's candidate adds to the mean."""
        pp, chunks, micro_batches = self.pp, self.stages // self.pp, self.micro_batches
        if self.is_v_shaped:
            return self._priced(_v_path_weights(pp, micro_batches))
        falling = (1 - 1 / (chunks * micro_batches)) ** np.arange(pp - 1, -1, -1.0)
        only_last = (np.arange(pp) == pp - 1).astype(float)
        equal = np.full(pp, 1 / pp)
        forward, backward_2, backward_3 = _path_2_and_3_weights(pp, chunks, micro_batches)
        is_first_stage = (np.arange(self.stages) == 0).astype(float)
        is_on_first_device = (np.arange(self.stages) % pp == 0).astype(float)
        share, share_of_first_chunks = np.full(self.stages, 1 / pp), (np.arange(self.stages) < pp) / pp
        none = np.zeros(self.stages)
        means = []  # of each: the weights of devices; the weights of F, B, finish, exposed and all reduction per stage
        for device_weights in (falling / falling.sum(), only_last):
            through = _path_1_weights(pp, chunks, micro_batches, device_weights)
            seconds = np.stack([through, through, is_on_first_device, is_first_stage, none], axis=1)
            means.append((device_weights, seconds))
        means.append((equal, np.stack([forward, backward_2, share, share_of_first_chunks, none], axis=1)))
        means.append((equal, np.stack([forward, backward_3, share, none, share], axis=1)))
        return self._priced(means)

    def _priced(self, means: list[tuple[FloatArray, FloatArray]]) -> FloatArray:
        """The weights of means, given by those of devices and of seconds per stage, at every price of a byte."""
        chunks, columns = self.stages // self.pp, []
        assert len(means) == _MEANS
        device_of_stage, flight = np.empty((2, self.stages), dtype=np.int64)
        device_of_stage[self.stages_of_devices] = np.arange(self.pp)
        flight[self.stages_of_devices] = self.in_flight.T
        for device_weights, seconds in means:
            for price in self._prices:
                held = price * device_weights[device_of_stage]
                columns.append(np.column_stack([seconds, held, held * flight, held / chunks]))
        return np.stack(columns, axis=1)

    @property
    def root(self) -> FloatArray:
        """The row of an empty pipeline."""
        return np.zeros(_TOTALS * self.pp + self._weights.shape[1])

    def extend(
        self, row: FloatArray, position: int, options: IntArray, singles_needed: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rows with each option added to its device, and bounds; ``singles_needed`` is 0 with chunks."""
        del singles_needed
        candidates, pp = self.candidates, self.pp
        device, chunk = self._parallelism.schedule.place_of(pp, position)
        count, end = len(options), _TOTALS * pp
        features = self._features_at(position)[:, options]
        spent = row[end:, None] + self._weights[position] @ features
        forward_s, through_s = features[0], features[0] + features[1]
        rows = np.repeat(row[None, :end], count, axis=0).reshape(count, _TOTALS, pp)
        through, before, forward_before, finish, held, scratch, stash = _DeviceTotals(*rows.transpose(1, 0, 2))  # views
        if chunk == 0 and device + 1 < pp:
            before[:, device + 1] = before[:, device] + (0.0 if self.is_v_shaped else through_s)
            forward_before[:, device + 1] = forward_before[:, device] + forward_s
        through[:, device] += through_s
        finish[:, device] += candidates.finish_s[options]
        held[:, device] += candidates.held_bytes[options]
        scratch[:, device] = np.maximum(scratch[:, device], candidates.scratch_bytes[options])
        stash[:, device] += self.in_flight[device, chunk] * candidates.stashed_bytes[options]
        settled = (
            forward_before + finish if self.is_v_shaped else np.maximum(before + finish[:, :1], forward_before + finish)
        )
        by_device = self.micro_batches * through + settled
        refund = np.tile(self._prices, _MEANS)[:, None] * self.usable_bytes
        means = spent + self._least_rest[position + 1][:, candidates.target[options]] - refund
        bound = np.maximum(by_device.max(axis=1), means.max(axis=0) * (1 - BOUND_MARGIN))
        fits = held[:, device] + scratch[:, device] + stash[:, device] <= self.usable_bytes
        rows = np.concatenate([rows.reshape(count, -1), spent.T], axis=1)
        return rows, np.where(fits, bound, np.inf)

    def positions_of_busiest_device(self, pipeline: IntArray) -> set[int]:
        """Positions in the pipeline of the stages of the device that takes longest."""
        device = int(self.through_s[pipeline][self.stages_of_devices].sum(axis=0).argmax())
        return set(self.stages_of_devices[:, device].tolist())

    def count_pipelines(self) -> float:
        """How many pipelines there are, whether they fit or not."""
        states = len(self.candidates.first) - 1
        counts: FloatArray = np.zeros(states)
        counts[-1] = 1.0
        for _ in range(self.stages):
            ahead = counts[self.candidates.target]
            counts = np.bincount(self.candidates.source, ahead, minlength=states).astype(float)
        return float(counts[0])

    def fits(self, pipelines: IntArray) -> BoolArray:
        """Whether whole pipelines, as candidates per (pipeline, stage), fit their devices."""
        by_device = pipelines[:, self.stages_of_devices]
        candidates = self.candidates
        added = candidates.held_bytes[by_device] + self.in_flight.T * candidates.stashed_bytes[by_device]
        total = added.sum(axis=1) + candidates.scratch_bytes[by_device].max(axis=1)
        return np.asarray((total <= self.usable_bytes).all(axis=1))


def _v_path_weights(pp: int, micro_batches: int) -> list[tuple[FloatArray, FloatArray]]:
    """The means of path (4) over devices with equal weights, with all weight on the last, the first and the middle."""
    means = []
    places = np.arange(pp)
    for weights in (np.full(pp, 1 / pp), *((places == place).astype(float) for place in (pp - 1, 0, pp // 2))):
        by_stage = np.concatenate([weights, weights[::-1]])
        devices_after = np.concatenate([np.cumsum(weights[::-1])[::-1][1:], [0.0]])
        is_first_chunk = np.arange(2 * pp) < pp
        forward = micro_batches * by_stage + np.concatenate([devices_after, np.zeros(pp)])
        exposed = by_stage * is_first_chunk
        none = np.zeros(2 * pp)
        means.append((weights, np.stack([forward, micro_batches * by_stage, by_stage, exposed, none], axis=1)))
    return means


def _path_1_weights(pp: int, chunks: int, micro_batches: int, device_weights: FloatArray) -> FloatArray:
    """Per stage: the weight of its t in the mean of path (1) over devices with these weights, and over all chunks."""
    devices_after = np.concatenate([np.cumsum(device_weights[::-1])[::-1][1:], [0.0]])
    chunks_after = (chunks - 1 - np.arange(chunks)[:, None]) / chunks
    stays = device_weights * (micro_batches - pp * chunks_after)
    return np.asarray((chunks_after + devices_after / chunks + stays).ravel())


def _path_2_and_3_weights(pp: int, chunks: int, micro_batches: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Per stage, in means over all devices: the weight of its F in paths (2) and (3), of its B in (2), of it in (3)."""
    forward, backward_2, backward_3 = np.full((3, chunks, pp), float(micro_batches))
    forward[0] += pp - 1 - np.arange(pp)
    backward_3[:-1] -= pp
    backward_3[-1] -= 1
    return forward.ravel() / pp, backward_2.ravel() / pp, backward_3.ravel() / pp


def interleaved_closed_form_s(layer_table: LayerTable, strategies: ParallelismTable) -> FloatArray:
    """A bound under each interleaved strategy, of chains only; infinite where nothing fits."""
    bounds = np.zeros(len(strategies))
    by_stages = np.argsort(strategies.pp * strategies.chunks, kind="stable")
    for start in range(0, len(strategies), _STRATEGIES_AT_ONCE):
        block = by_stages[start : start + _STRATEGIES_AT_ONCE]
        bounds[block] = _block_closed_form_s(layer_table, strategies.take(block))
    return bounds


def _block_closed_form_s(layer_table: LayerTable, strategies: ParallelismTable) -> FloatArray:
    """The same for strategies whose terms are worked out together."""
    terms, kinds = layer_table.terms(strategies), tuple(layer_table.kind_of_layer.tolist())
    bounds = np.zeros(len(strategies))
    stages = strategies.pp * strategies.chunks
    for stage_count in np.unique(stages).tolist():
        pairs = _layer_stages(kinds, stage_count)
        numbers_each = max(len(pairs.stage) * len(layer_table.recompute_s), pairs.choices.size)
        at_once = max(1, _NUMBERS_AT_ONCE // numbers_each)
        members = np.flatnonzero(stages == stage_count)
        for start in range(0, len(members), at_once):
            part = members[start : start + at_once]
            bounds[part] = _closed_form_s(layer_table, strategies.take(part), terms.take(part), pairs)
    return bounds


class _LayerStages(NamedTuple):
    """The stages in which layers can lie, each pair of alike layers and a stage once.

    Layers are alike that are of one kind and have layers of the same kinds behind them.

    Attributes:
        stages: how many stages there are.
        layers: how many layers there are.
        kind: the kind of the layers of each pair.
        is_behind: whether a layer of each kind is one of them or stands behind them, per (pair, kind).
        stage: the stage of each pair.
        choices: of layers that are alike and can lie in the same stages: the pairs that they choose from.
        counts: how many layers have each of these choices.
    """

    stages: int
    layers: int
    kind: IntArray
    is_behind: BoolArray
    stage: IntArray
    choices: IntArray
    counts: IntArray

    def least_sum(self, per_pair: FloatArray) -> FloatArray:
        """The sum over all layers of the least of what they choose from, per strategy."""
        return np.asarray(self.counts @ per_pair[self.choices].min(axis=1))


@lru_cache(maxsize=_KEPT_LAYER_STAGES)
def _layer_stages(kinds: tuple[int, ...], stages: int) -> _LayerStages:
    """The pairs of a chain of layers of these kinds and so many stages of nearly equal length."""
    kind_of_layer, layers = np.array(kinds), len(kinds)
    first, last = _possible_stages(layers, stages)
    place = np.minimum(first[:, None] + np.arange(int((last - first).max()) + 1), last[:, None])
    is_kind = kind_of_layer[:, None] == np.arange(int(kind_of_layer.max()) + 1)
    is_behind = np.logical_or.accumulate(is_kind[::-1])[::-1]
    # Kinds only drop out from layer to layer, so that their number says which are left.
    alike = kind_of_layer * is_kind.shape[1] + is_behind.sum(axis=1) - 1
    pair, pair_of_place = np.unique(alike[:, None] * stages + place, return_inverse=True)
    choices, counts = np.unique(pair_of_place.reshape(place.shape), axis=0, return_counts=True)
    alike_layers, stage = np.divmod(pair, stages)
    distinct, example = np.unique(alike, return_index=True)
    layer = example[np.searchsorted(distinct, alike_layers)]
    return _LayerStages(stages, layers, kind_of_layer[layer], is_behind[layer], stage, choices, counts)


def _possible_stages(layers: int, stages: int) -> tuple[IntArray, IntArray]:
    """Per layer: the first and the last stage in which it can lie."""
    least, extra = divmod(layers, stages)
    stage, layer = np.arange(stages), np.arange(layers)
    earliest = stage * least + np.maximum(0, extra - (stages - stage))
    latest_end = (stage + 1) * least + np.minimum(stage + 1, extra)
    return np.searchsorted(latest_end, layer, side="right"), np.searchsorted(earliest, layer, side="right") - 1


def _closed_form_s(
    layer_table: LayerTable, strategies: ParallelismTable, terms: LayerTerms, pairs: _LayerStages
) -> FloatArray:
    """Bounds of strategies with equally many stages. Axes: mode, pair of alike layers and a stage, strategy."""
    tp_index = np.searchsorted(layer_table.tp_degrees, strategies.tp)
    held, through = terms.held_bytes[pairs.kind], (terms.through_s + terms.weight_s)[pairs.kind]
    layers_per_device = strategies.chunks * -(-pairs.layers // pairs.stages)
    again, stash = (table[:, pairs.kind] for table in (terms.again_s, terms.stash_bytes))
    device_weight, second_weight, flight = _stage_weights(strategies, pairs.stages)
    kept = flight[pairs.stage] * stash + _least_behind(terms.working_bytes, pairs) / layers_per_device
    usable = layer_table.problem.usable_bytes * (1 + GREEDY_MARGIN)
    needed = pairs.least_sum(kept.min(axis=0) + held)
    bounds = np.where(needed > usable * strategies.pp, np.inf, 0.0)
    is_v_shaped, turn = np.isin(strategies.schedule, V_SCHEDULES), pairs.stages // 2
    # In the shape of a V, the mean over devices of the first microbatch's way down to them.
    down = np.where(is_v_shaped, np.maximum(1 - (pairs.stage[:, None] + 1) / strategies.pp, 0.0), 0.0)
    first_s = down * terms.run_s[pairs.kind]
    seconds = second_weight[pairs.stage] * (through + again) + first_s
    tail = np.where(is_v_shaped, 0.0, terms.finish_s[0] + terms.reduced_s[0])
    at_turn = is_v_shaped * terms.cut_s
    received = tail + terms.cut_s * second_weight[1:].sum(axis=0) - at_turn * second_weight[turn]
    given_back = terms.cut_s * second_weight[:-1].sum(axis=0) - at_turn * second_weight[turn - 1]
    least_through = pairs.least_sum(second_weight[pairs.stage] * through + first_s)
    bounds = np.maximum(bounds, received + given_back + least_through)
    for prices in layer_table.prices:
        price = prices[tp_index] * strategies.micro_batches / flight.mean(axis=0)
        priced_weight = price * device_weight[pairs.stage]
        spent = (seconds + priced_weight * kept).min(axis=0) + priced_weight * held
        bounds = np.maximum(bounds, received + pairs.least_sum(spent) - price * usable)
    return np.asarray(bounds * (1 - GREEDY_MARGIN))


def _least_behind(working_bytes: FloatArray, pairs: _LayerStages) -> FloatArray:
    """The least working set of the layers of each pair and all behind them, per (mode, pair, strategy)."""
    distinct, which = np.unique(pairs.is_behind, axis=0, return_inverse=True)
    least = np.stack([working_bytes[:, is_behind].min(axis=1) for is_behind in distinct], axis=1)
    return np.asarray(least[:, which.ravel()])


def _stage_weights(strategies: ParallelismTable, stages: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Per (stage, strategy): w of its device, a of its seconds, and its microbatches in flight.

    These are the falling weights of `InterleavedBounds._weights` and `_path_1_weights`, with geometric sums in
    closed form; in the shape of a V those of `_v_path_weights` that are equal.
    """
    chunks, pp, micro_batches = strategies.chunks, strategies.pp, strategies.micro_batches
    chunk, device = np.divmod(np.arange(stages)[:, None], pp)
    is_v_shaped = np.isin(strategies.schedule, V_SCHEDULES)
    fall = 1 - 1 / (chunks * micro_batches)
    whole = 1 - fall**pp
    device_weight = fall ** (pp - 1 - device) * (1 - fall) / whole
    devices_after = (1 - fall ** (pp - 1 - device)) / whole
    chunks_after = (chunks - 1 - chunk) / chunks
    second_weight = chunks_after + devices_after / chunks + device_weight * (micro_batches - pp * chunks_after)
    device_weight = np.where(is_v_shaped, 1 / pp, device_weight)
    second_weight = np.where(is_v_shaped, micro_batches / pp, second_weight)
    flight = np.empty((stages, len(chunks)))
    # The third group shows all later ones.
    keys = np.stack([strategies.schedule, pp, np.minimum(micro_batches, 3 * pp), chunks])
    distinct, which = np.unique(keys, axis=1, return_inverse=True)
    for index, (kind, *key) in enumerate(distinct.T.tolist()):
        grid = stages_of_devices(SCHEDULES[kind], key[0], key[2])
        flight[np.ix_(grid.ravel(), which.ravel() == index)] = in_flight(SCHEDULES[kind], *key).T.reshape(-1, 1)
    return device_weight, second_weight, flight
