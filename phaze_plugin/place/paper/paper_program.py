"""The paper's dynamic program over data, pipeline and tensor parallelism, for many accelerators in one call.

For each choice of recompute, each tp t and each number of stages S, let D_s(i) be the least bottleneck when layers i..
form exactly s stages (`bottlenecks`, `first_stages`):

    D_1(i) = load of the last stage i..;    D_s(i) = min over w of max(load(i, i+w), D_{s-1}(i+w+1))

over stages that fit at position s from the end. A stage with a tensor-parallel layer takes t devices, any other one.
With d pipelines of k devices, d*k <= devices, d <= microbatches:

    time = D_S(0) * (ceil(microbatches/d) + S - 1) + 4 (d-1)/d * parameters of the first stage / bandwidth

so that the first stage is chosen last (`_finish`). Where all layers are sliced or none is, k = t*S or S. Where only
some are, D has one more index: the number of stages that take one device.

What is skipped, without changing the answer: of all d with the same ceil(microbatches/d) only the least can win. And a
plan that beats a time U has at most the bottleneck U / (ceil(microbatches/d) + S - 1), which bounds how long its stages
are, and its S must have a bound below U (`Group.bound_s`). U starts a little above the least bound; if no plan beats
it, it is raised, the last time to infinity (`_search`).

The load and memory of every possible stage, as the paper counts them, are the program's input (`build_stages`). A stage
is a run of layers i..j = i+w; arrays are indexed [w, i, accelerator] and hold infinity where i+w is no layer. With f, b
the seconds of a layer, c(u,v) the bytes of an edge over the bandwidth, and S_f, S_b the sums over the stage:

    F(i,j)    = max(F(i,j-1), max over edges u->j, u<i, of c) + f_j         (F(i,i-1) = 0)
    B(i,j)    = max(B(i+1,j), max over edges i->v, v>j, of c) + b_i         (B(j+1,j) = 0)
    load      = F + B                      without recompute, and always for the last stage
    load      = F + max(S_f + S_b, B)      with recompute: the stage runs forward again while the gradient arrives
    memory(s) = k * parameters + activations + (s-1) * stash                for the s-th stage from the end

k is 3 with Adam and 2 without; the stash is all activations, or with recompute the tensors that enter the stage. On a
chain without skips F and B are a transfer plus a sum, as the paper states them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.paper.paper_problem import (
    BoolArray,
    FloatArray,
    Group,
    IntArray,
    PaperInstance,
    build_group,
    build_groups,
    paper_instance,
)
from phaze.tolerances import CLAIM_MARGIN

__all__ = ["PaperPlacement", "PaperResult", "Stages", "build_stages", "place_as_paper", "place_paper", "reconstruct"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """The stages that may matter to a group. An accelerator axis of length 1 stands for all.

    Attributes:
        load_s: of stages that are neither first nor last, per (w, i, accelerator), for w up to the largest window.
        positions: the largest position from the end at which such a stage fits, per (w, i, accelerator); 0 if nowhere.
        windows: per s, how many layers such a stage can have at most at position s from the end.
        first_load_s: of the first of several stages, per (w, accelerator).
        first_positions: the largest position at which it fits.
        last_load_s: of the last stage by its first layer, per (i, accelerator); infinite where it does not fit.
    """

    load_s: FloatArray
    positions: IntArray
    windows: IntArray
    first_load_s: FloatArray
    first_positions: IntArray
    last_load_s: FloatArray


def build_stages(instance: PaperInstance, group: Group, cap_s: FloatArray) -> Stages:
    """The stages of a group, up to the load that matters per (number of stages or more, accelerator)."""
    layers, count = group.forward_s.shape
    cap_inner = cap_s[3] if len(cap_s) > 3 else np.full(count, -1.0)
    load = np.empty((layers, layers, count))
    first, last = np.full((2, layers, count), np.inf)
    longest = reached = 0
    for w, (work, once, band) in enumerate(_bands(instance, group)):
        least = work.min(axis=0)
        if not (least <= cap_s[0]).any():
            break
        reached = w + 1
        first[w], last[layers - reached] = band[0], once[-1]
        if longest == w and (least <= cap_inner).any():
            load[w, : layers - w], load[w, layers - w :] = band, np.inf
            longest = reached
    positions, at_start, at_end = _positions(instance, group, longest, reached)
    return Stages(
        load_s=load[:longest],
        positions=positions,
        windows=_windows(load[:longest], cap_s),
        first_load_s=first[:reached],
        first_positions=at_start,
        last_load_s=np.where(at_end >= 1, last, np.inf),
    )


def _windows(load_s: FloatArray, cap_s: FloatArray) -> IntArray:
    """Per position s: a stage there that is not the first belongs to a plan of s+1 or more stages."""
    least = np.minimum.accumulate(load_s.min(axis=1)[::-1], axis=0)[::-1]
    windows = np.zeros(len(cap_s), dtype=np.int64)
    for position, cap in enumerate(cap_s[1:]):
        if cap.max() < 0:
            break
        windows[position] = (least <= cap).any(axis=1).sum()
    return windows


def _bands(instance: PaperInstance, group: Group) -> Iterator[tuple[FloatArray, FloatArray, FloatArray]]:
    """For w = 0, 1, ...: work without transfers, load as the last stage, load as another, per (i, accelerator)."""
    forward, backward = group.forward_s, group.backward_s
    sizes = group.edge_bytes / instance.bandwidth_bytes_per_s
    entering, leaving = (table[..., None] for table in _crossing(instance, sizes, np.maximum))
    skips = any(target > source + 1 for source, target in instance.edges)
    work = stage_forward = stage_backward = np.zeros_like(forward)
    for w in range(len(forward)):
        count = len(forward) - w
        stage_forward, stage_backward = stage_forward[:count], stage_backward[-count:]
        if skips or w == 0:
            stage_forward = np.maximum(stage_forward, entering[w, :count])
            stage_backward = np.maximum(stage_backward, leaving[w, :count])
        stage_forward = stage_forward + forward[w:]
        stage_backward = stage_backward + backward[:count]
        work = work[:count] + (forward[w:] + backward[w:])
        once = stage_forward + stage_backward
        yield work, once, stage_forward + np.maximum(work, stage_backward) if group.recompute else once


def _crossing(instance: PaperInstance, sizes: FloatArray, combine: np.ufunc) -> tuple[FloatArray, FloatArray]:
    """What enters (leaves) the last (first) layer of each stage from outside, per (w, i)."""
    layers = len(instance.layer_ids)
    entering, leaving = np.zeros((2, layers, layers))
    edges = np.array(instance.edges, dtype=np.int64).reshape(-1, 2)
    near = edges[:, 1] == edges[:, 0] + 1
    entering[0, edges[near, 1]] = leaving[0, edges[near, 0]] = sizes[near]
    for (source, target), size in zip(edges[~near].tolist(), sizes[~near].tolist(), strict=True):
        starts, ends = np.arange(source + 1, target + 1), np.arange(source, target)
        entering[target - starts, starts] = combine(entering[target - starts, starts], size)
        leaving[ends - source, source] = combine(leaving[ends - source, source], size)
    return entering, leaving


def _positions(
    instance: PaperInstance, group: Group, longest: int, reached: int
) -> tuple[IntArray, IntArray, IntArray]:
    """The largest position where a stage fits: inner ones per (w, i), first ones per w, last ones per i."""
    capacities, index = np.unique(group.capacity_bytes, return_inverse=True)
    table = _largest_positions(instance, group, capacities, reached)
    accelerators = slice(None) if len(capacities) == 1 else index
    layers = len(group.single_run)
    starts = np.arange(layers - reached, layers)
    at_end = np.zeros((layers, len(capacities)), dtype=np.int64)
    at_end[starts] = table[layers - 1 - starts, starts]
    return table[:longest, :, accelerators], table[:, 0, accelerators], at_end[:, accelerators]


def _largest_positions(instance: PaperInstance, group: Group, capacities: FloatArray, longest: int) -> IntArray:
    """Per (w, i, capacity), for stages of up to ``longest`` layers."""
    constant = _sums(group.held_bytes, longest)[..., None]
    if group.recompute:
        stash = np.cumsum(_crossing(instance, group.edge_bytes, np.add)[0][:longest], axis=0)[..., None]
    else:
        stash = _sums(group.activation_bytes, longest)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.floor((capacities - constant) / stash)
    most = instance.device_count - 1
    more = np.where(constant + most * stash <= capacities, most, np.minimum(more, most))
    positions = np.where(constant <= capacities, 1 + more, 0)
    layers = len(group.single_run)
    positions[np.add.outer(np.arange(longest), np.arange(layers)) >= layers] = instance.device_count
    return positions.astype(np.int64)


def _sums(values: FloatArray, longest: int) -> FloatArray:
    """Sums over every run of up to ``longest`` layers, per (w, i)."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.minimum(np.add.outer(np.arange(1, longest + 1), np.arange(len(values))), len(values))
    return np.asarray(before[ends] - before[:-1])


_ACCELERATORS_AT_ONCE = 256
"""Accelerators that one numpy call serves: more save calls, and make tables that leave the processor's caches."""

_ELEMENTS_PER_CALL = 8_000
"""Numbers that a narrower window of stage lengths must save to be worth a numpy call of its own."""

_TARGETS = (1.1, 1.3, 2.0, np.inf)
"""Targets to beat, in units of the least bound: a low one leaves little to look at, and one that is not met costs the
work again with the next."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaperResult:
    """The optimum for every accelerator; where nothing fits, the time is infinite and the rest is 0.

    Attributes:
        time_s: seconds per batch.
        recompute: whether the best plan recomputes.
        tp: devices that sliced layers are split over.
        dp: copies of the pipeline.
        stages: pipeline stages.
        single_stages: stages that take one device although tp is larger (only where some layers are not sliced).
        first_stage_layers: layers of the first stage.
    """

    time_s: FloatArray
    recompute: BoolArray
    tp: IntArray
    dp: IntArray
    stages: IntArray
    single_stages: IntArray
    first_stage_layers: IntArray

    @property
    def is_feasible(self) -> BoolArray:
        """Whether any plan fits, per accelerator."""
        return np.isfinite(self.time_s)


def place_paper(instance: PaperInstance) -> PaperResult:
    """The least time per batch on every accelerator of the instance."""
    accelerators = len(instance.memory_bytes)
    whole = {name: np.zeros(accelerators, dtype=np.int64) for name in PaperResult.__slots__}
    best = PaperResult(**{**whole, "time_s": np.full(accelerators, np.inf), "recompute": np.zeros(accelerators, bool)})
    for start in range(0, accelerators, _ACCELERATORS_AT_ONCE):
        _search(instance, build_groups(instance, slice(start, start + _ACCELERATORS_AT_ONCE)), best)
    return best


def _search(instance: PaperInstance, groups: list[Group], best: PaperResult) -> None:
    """Improve ``best`` by the plans of these groups, under targets that rise until they are met."""
    accelerator = groups[0].accelerator
    bound = np.minimum.reduce([group.bound_s.min(axis=0) for group in groups])
    for factor in _TARGETS:
        target = factor * bound
        for group in groups:
            _beat(instance, group, np.minimum(best.time_s[accelerator], target), best)
        unmet = (best.time_s[accelerator] > target) & np.isfinite(bound)
        if not unmet.any():
            return
        groups = [group.keep(unmet) for group in groups]
        accelerator, bound = accelerator[unmet], bound[unmet]


def _beat(instance: PaperInstance, group: Group, target_s: FloatArray, best: PaperResult) -> None:
    """Find the best plan of a group on every accelerator where it beats the target."""
    alive = _any(group.bound_s < target_s)
    if not alive.any():
        return
    group, target_s = group.keep(alive).refute(target_s[alive]), target_s[alive]
    alive = _any(group.bound_s < target_s)
    if not alive.any():
        return
    group, target_s = group.keep(alive), target_s[alive]
    stages = build_stages(instance, group, group.caps(target_s))
    if not len(stages.first_load_s):
        return
    counts = np.flatnonzero((group.bound_s < target_s).any(axis=1))
    if counts[0] == 1:
        _finish(instance, group, _only_stage(stages), 1, best)
    if counts[-1] > 1:
        table = bottlenecks(group, stages, int(counts[-1]) - 1)
        plans = first_stages(group, stages, table, int(counts[-1]))
        least = (plans.min(axis=(0, 1)) * group.slots[2 : counts[-1] + 1, None]).min(axis=1)
        for index in np.argsort(least, kind="stable").tolist():
            if least[index] >= best.time_s[group.accelerator].max():
                break
            _finish(instance, group, plans[:, :, index], index + 2, best)


def _any(matrix: BoolArray) -> BoolArray:
    """Whether some number of stages has it, per accelerator."""
    return np.asarray(matrix.any(axis=0))


def bottlenecks(group: Group, stages: Stages, limit: int) -> FloatArray:
    """D per (i, single stages, s-1, accelerator) for s up to ``limit`` and i > 0; infinite where impossible."""
    layers, count = stages.last_load_s.shape
    height = layers + max(len(stages.load_s), len(stages.first_load_s)) + 1
    table = np.full((height, group.single_limit + 1, max(limit, 1), count), np.inf)
    blocks = _blocks(stages.windows, limit, count)
    for start in range(layers - 1, 0, -1):
        table[start, int(group.single_run[start] >= layers - start), 0] = stages.last_load_s[start]
        for first, last in blocks:
            inner = slice(stages.windows[first]), start
            joined = _join(group, stages.load_s[inner], stages.positions[inner], table, start, (first, last))
            np.minimum.reduce(joined, axis=0, out=table[start, :, first - 1 : last])
    return table


def first_stages(group: Group, stages: Stages, table: FloatArray, limit: int) -> FloatArray:
    """Bottleneck per (w, single stages, S-2, accelerator) of plans of S = 2..limit stages, the first of w+1 layers."""
    return _join(group, stages.first_load_s, stages.first_positions, table, 0, (2, limit))


def _only_stage(stages: Stages) -> FloatArray:
    """The same for plans of one stage, without S: only the longest is possible."""
    only = np.full((len(stages.last_load_s), 1, stages.last_load_s.shape[1]), np.inf)
    only[-1, 0] = stages.last_load_s[0]
    return only


def _blocks(windows: IntArray, limit: int, accelerators: int) -> list[tuple[int, int]]:
    """Ranges of positions 2..limit that are worth a numpy call of their own, as long as there is a window."""
    blocks: list[tuple[int, int]] = []
    reach = [int(window) for window in windows[: limit + 1]]
    for position in range(2, limit + 1):
        if not reach[position]:
            break
        saved = (reach[blocks[-1][0]] - reach[position]) * (limit + 1 - position) * accelerators if blocks else 0
        if blocks and saved < _ELEMENTS_PER_CALL:
            blocks[-1] = (blocks[-1][0], position)
        else:
            blocks.append((position, position))
    return blocks


def _join(
    group: Group,
    load_s: FloatArray,
    positions: IntArray,
    table: FloatArray,
    start: int,
    position: tuple[int, int],
) -> FloatArray:
    """Bottleneck per (w, single stages, s, accelerator) when layers ``start``.. begin with a stage of w+1 layers.

    Loads and positions are those of that stage per (w, accelerator), s runs from the first to the last ``position``
    from the end, and ``table`` places what comes after it.
    """
    first, last = position
    after = table[start + 1 : start + 1 + len(load_s), :, first - 2 : last - 1]
    single = int(min(group.single_run[start], len(load_s)))
    if single:
        fewer = np.full_like(after[:single, :1], np.inf)
        after = np.concatenate([np.concatenate([fewer, after[:single, :-1]], axis=1), after[single:]])
    result = np.maximum(load_s[:, None, None], after)
    if positions.min(initial=last) < last:
        where = positions[:, None] < np.arange(first, last + 1)[:, None]
        np.copyto(result, np.inf, where=where[:, None])
    return result


def _finish(instance: PaperInstance, group: Group, bottleneck_s: FloatArray, stages: int, best: PaperResult) -> None:
    """Choose the first stage (w) and the number of pipelines for plans of so many stages; keep what is better.

    ``bottleneck_s`` is per (w, single stages, accelerator).
    """
    parameters_s = np.cumsum(group.parameter_bytes)[: len(bottleneck_s)] / instance.bandwidth_bytes_per_s
    least = bottleneck_s.min(axis=0)
    known = best.time_s[group.accelerator]
    for single in np.flatnonzero((least * group.slots[stages] < known).any(axis=1)).tolist():
        known = best.time_s[group.accelerator]
        better = np.flatnonzero(least[single] * group.slots[stages] < known)
        allowed = instance.device_count // (group.unit * (stages - single) + single) if single <= stages else 0
        if not len(better) or not allowed:
            continue
        slowest = (known[better] / np.maximum(least[single, better], np.finfo(float).tiny)).max() - stages + 1
        dp = _pipeline_counts(instance.micro_batches, allowed)
        per_pipeline = -(-instance.micro_batches // dp)
        dp, per_pipeline = dp[per_pipeline <= slowest], per_pipeline[per_pipeline <= slowest]
        times = bottleneck_s[:, single][:, None, better] * (per_pipeline + stages - 1.0)[:, None]
        times += np.multiply.outer(parameters_s, 4.0 * (dp - 1) / dp)[..., None]
        flat = times.reshape(-1, len(better))
        choice = flat.argmin(axis=0) if len(flat) else np.zeros(0, dtype=np.int64)
        time = flat[choice, np.arange(len(choice))]
        wins = np.flatnonzero(time < known[better[: len(time)]])
        improved = group.accelerator[better[wins]]
        first_stage, dp_index = np.divmod(choice[wins], max(len(dp), 1))
        best.time_s[improved], best.recompute[improved], best.tp[improved] = time[wins], group.recompute, group.tp
        best.first_stage_layers[improved], best.dp[improved] = first_stage + 1, dp[dp_index]
        best.stages[improved], best.single_stages[improved] = stages, single


def _pipeline_counts(micro_batches: int, most: int) -> IntArray:
    """The least d for each value of ceil(microbatches/d) with d up to ``most``, ascending."""
    counts = np.arange(1, min(micro_batches, most) + 1)
    per_pipeline = -(-micro_batches // counts)
    return np.asarray(counts[np.diff(per_pipeline, prepend=per_pipeline[0] + 1) != 0])


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPlacement:
    """One accelerator's plan: `stages` holds the ids of the layers, `stage_devices` the devices of each."""

    time_s: float
    recompute: bool
    tp: int
    dp: int
    stages: tuple[tuple[int | str, ...], ...]
    stage_devices: tuple[int, ...]


def reconstruct(instance: PaperInstance, result: PaperResult, accelerator: int = 0) -> PaperPlacement | None:
    """The stages of one accelerator's optimum, or None where nothing fits. Several optimal plans may exist."""
    if not result.is_feasible[accelerator]:
        return None
    chosen = {name: getattr(result, name)[accelerator].item() for name in PaperResult.__slots__}
    tp_index = instance.tp_degrees.index(chosen["tp"])
    group = build_group(instance, chosen["recompute"], tp_index, slice(accelerator, accelerator + 1))
    lengths = _stage_lengths(instance, group, chosen)
    starts = np.cumsum([0, *lengths]).tolist()
    return PaperPlacement(
        time_s=chosen["time_s"],
        recompute=chosen["recompute"],
        tp=chosen["tp"],
        dp=chosen["dp"],
        stages=tuple(instance.layer_ids[start:end] for start, end in pairwise(starts)),
        stage_devices=tuple(
            1 if group.single_run[start] >= length else group.unit
            for start, length in zip(starts, lengths, strict=False)
        ),
    )


def _stage_lengths(instance: PaperInstance, group: Group, chosen: dict[str, int]) -> list[int]:
    """How many layers each stage has, walking through D from the first stage on."""
    count, lengths = chosen["stages"], [chosen["first_stage_layers"]]
    if count == 1:
        return lengths
    target = np.array([chosen["time_s"] * (1 + CLAIM_MARGIN)])
    bounds = np.where(np.arange(len(group.slots))[:, None] == count, group.bound_s, np.inf)
    stages = build_stages(instance, group, replace(group, bound_s=bounds).caps(target))
    table = bottlenecks(group, stages, count - 1)
    start, single = lengths[0], chosen["single_stages"] - int(group.single_run[0] >= lengths[0])
    for position in range(count - 1, 1, -1):
        inner = slice(None), start
        joined = _join(group, stages.load_s[inner], stages.positions[inner], table, start, (position, position))
        lengths.append(int(joined[:, single, 0, 0].argmin()) + 1)
        single -= int(group.single_run[start] >= lengths[-1])
        start += lengths[-1]
    return [*lengths, len(group.single_run) - start]


def place_as_paper(problem: PlacementProblem) -> PaperPlacement | None:
    """The optimum as the paper counts it (`compatibility="paper"`), or None if nothing fits.

    Raises:
        GraphError: the layer graph branches; the paper's program places chains.
    """
    instance = paper_instance(problem)
    return reconstruct(instance, place_paper(instance), problem.accelerator)
