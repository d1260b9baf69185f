"""Load and memory of every possible stage, as the paper counts them: the input of its dynamic program.

A stage is a run of layers i..j = i+w; arrays are indexed [w, i, accelerator] and hold infinity where i+w is no layer.
With f, b the seconds of a layer, c(u,v) the bytes of an edge over the bandwidth, and S_f, S_b the sums over the stage:

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
from dataclasses import dataclass

import numpy as np

from phaze.place.paper.paper_bounds import Group
from phaze.place.paper.paper_problem import FloatArray, IntArray, PaperInstance

__all__ = ["Stages", "build_stages"]


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
