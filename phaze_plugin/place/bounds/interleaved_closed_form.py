"""Quick bounds under interleaved pipelines of a chain, for many degrees at once: `chunks.py` without its stages.

Chunks have n or n+1 layers each, so that layer l can only lie in a few of the K stages. With a_k the weight of a
second of stage k in the first kind of path of `chunks.py`, w_k that of its device, f_k its microbatches in flight and
p a price per byte, that module's bound is at least

    sum over layers of min over k of (min over modes of (a_k t_l + p w_k (f_k stash_l + working_l / (v (n+1))))
                                      + p w_k held_l) - p usable

(a device's largest working set is at least the mean over its chunks of that of their last layers; working_l is the
least of layer l and all behind it), a_k times the least transfer for each stage but the first, and the tail of the
first layer. Instead of what they recompute, all stages but the last may be charged what they get back, if that is more:
then no memory is priced. Without seconds, with equal weights, the same sum says whether the mean device can hold what
it must.
"""

from __future__ import annotations

import numpy as np

from phaze.parallelism import PipelineSchedule
from phaze.place.bounds.layer_table import LayerTable
from phaze.place.model.stage_space import FloatArray, IntArray
from phaze.place.search.parallelism_table import ParallelismTable
from phaze.place.simulation.pass_orders import in_flight

__all__ = ["interleaved_floors"]

_AT_ONCE = 2_000_000
_SLACK = 1e-10


def interleaved_floors(layer_table: LayerTable, strategies: ParallelismTable) -> FloatArray:
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
    tp = np.searchsorted(layer_table.widths, strategies.tp)
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
