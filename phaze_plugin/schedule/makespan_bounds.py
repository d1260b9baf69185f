"""Lower bounds on the makespan in closed form, without a solver, for one accelerator or thousands at once.

Let l_i be a job's time on one core and s_i its time spread over all cores. Give each job a rate u_i (worth per second
while it runs on one core) and a rate v_i (while it is spread). If at no instant of any schedule the rates of the
running jobs add up to more than 1, then every schedule lasts at least

    sum over i of z_i,    z_i = min(u_i l_i, v_i s_i).

Weights that add up to 1 build such rates (T and V are the numbers of tensor and vector cores), in `_rates`:

 1. work:  w_tensor / T on jobs that hold tensor cores, w_vector / V on jobs that hold vector cores (both: the sum). A
    spread job fills all cores of its resource, and with exclusive spreading all cores: then v_i has the whole weight of
    rules 1 and 2.
 2. chains (exclusive spreading only):  w_chain is divided over chains of the precedence (`_fill`). Of a chain at most
    one job runs at a time, and while a spread job runs no job of rules 1 and 2 does. u_i rises by the share of the
    chains through i.
 3. links:  w_link on link jobs, which run one at a time.
 4. paths:  w_path is divided over chains, counting every job (`_fill` with `grows_spread`): u_i and v_i both rise.

`_fill` divides greedily: the chain whose unsaturated jobs (u_i l_i < v_i s_i) last longest gets share until one of them
is saturated; `heavy_chains` finds the chains that can matter. Within half a percent this is the optimum of the linear
program. If on every antichain the s_i/l_i add up to at most 1, all z_i = s_i: spreading everything is optimal
(`spreading_is_best`). So it is on chips of many small cores, without links that something could hide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from phaze.schedule.scheduling_problem import (
    BoolArray,
    FloatArray,
    IntArray,
    ReducedProblem,
    SchedulingProblem,
    reduce_problem,
    segments,
)
from phaze.tolerances import NOTHING_LEFT

__all__ = ["Rates", "best_bound_s", "lower_bounds", "rates", "spreading_is_best"]

_TENSOR, _VECTOR, _CHAIN, _LINK, _PATH = range(5)
"""The columns of a row of weights: w_tensor, w_vector, w_chain, w_link, w_path."""

_EXCLUSIVE = np.array(
    [
        (0, 0, 1, 0, 0),
        (1, 0, 0, 0, 0),
        (0, 1, 0, 0, 0),
        (1 / 2, 0, 1 / 2, 0, 0),
        (1 / 4, 0, 3 / 4, 0, 0),
        (0, 1 / 4, 3 / 4, 0, 0),
        (1 / 3, 0, 2 / 3, 0, 0),
        (3 / 4, 0, 1 / 4, 0, 0),
        (0, 1 / 2, 1 / 2, 0, 0),
        (1 / 4, 1 / 4, 1 / 2, 0, 0),
        (1 / 2, 1 / 2, 0, 0, 0),
    ]
)
"""Rows of weights for exclusive spreading: chains and each resource alone, then mixtures of them.

More rows give tighter bounds and take longer.
"""

_BATCH_ROWS = 6
"""How many of these rows serve for thousands of accelerators at once: the first ones seldom fail to be the best."""

_SHARED = np.array(
    [
        (1, 0, 0, 0, 0),
        (0, 1, 0, 0, 0),
        (0, 0, 0, 0, 1),
        (1 / 2, 0, 0, 0, 1 / 2),
        (0, 1 / 2, 0, 0, 1 / 2),
        (1 / 3, 1 / 3, 0, 0, 1 / 3),
    ]
)
"""Rows of weights where a spread job excludes only jobs of its own resource."""

_OFF_CORE = np.array(
    [
        (0, 0, 0, 1, 0),
        (0, 0, 0, 0, 1),
        (0, 0, 1 / 3, 0, 2 / 3),
        (0, 0, 2 / 3, 0, 1 / 3),
        (1 / 2, 0, 0, 0, 1 / 2),
        (0, 0, 1 / 2, 1 / 2, 0),
    ]
)
"""Rows that are added where some job holds no core."""

_SHARED_OFF_CORE_ROWS = 2
"""How many of these rows are added without exclusive spreading, where chains (rule 2) have no weight."""

_BLOCK = 512
"""Accelerators that are bounded together: so many that numpy's calls cost little, so few that a cache holds them."""

_TYPICAL = 4
"""Accelerators of a batch, from few to many cores, whose heaviest chains serve for all: finding chains is slow."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """Rows of valid weights (see the module's docstring) and the rates that follow from them."""

    weights: FloatArray  # [row, column]: see the columns above
    one_core: FloatArray  # u [row, job]
    worth_s: FloatArray  # z [row, job]

    @property
    def core_weight(self) -> FloatArray:
        """For each row the weight that lies on the cores: on work and on chains."""
        weight: FloatArray = self.weights[:, _TENSOR : _CHAIN + 1].sum(axis=1)
        return weight

    @property
    def link_weight(self) -> FloatArray:
        """For each row the weight that lies on the link."""
        return self.weights[:, _LINK]

    @property
    def path_weight(self) -> FloatArray:
        """For each row the weight that lies on paths, which count every job."""
        return self.weights[:, _PATH]

    @property
    def bounds_s(self) -> FloatArray:
        """The bound of each row."""
        bounds: FloatArray = self.worth_s.sum(axis=1)
        return bounds


def rates(reduced: ReducedProblem) -> Rates:
    """Every row of weights for one problem."""
    return _rates_of_rows(reduced, weight_rows(reduced), _own_chains(reduced))


def spreading_is_best(reduced: ReducedProblem) -> bool:
    """Whether no schedule is shorter than all jobs one after another, each spread, as far as chains prove it.

    Jobs are dealt out to chains of the precedence, each to the first one that it can extend. An antichain has at most
    one job of each, so that its s_i/l_i add up to no more than the largest of each chain do. With exclusive spreading
    u_i = s_i/l_i and v_i = 1 are then valid rates.
    """
    if not reduced.is_exclusive or np.isinf(reduced.spread_s).any():
        return False
    if reduced.count == 1:
        return True
    ends, largest = list[int](), list[float]()
    for job, share in enumerate((reduced.spread_s / reduced.latency_s).tolist()):
        before = reduced.is_before[:, job]
        chain = next((number for number, end in enumerate(ends) if before[end]), -1)
        if chain < 0:
            ends.append(job)
            largest.append(share)
        else:
            ends[chain], largest[chain] = job, max(largest[chain], share)
    return math.fsum(largest) <= 1.0


def best_bound_s(reduced: ReducedProblem, enough_s: float) -> float:
    """The best bound of all rows of weights for one problem, or that of the first row where it reaches `enough_s`."""
    weights, chains = weight_rows(reduced), _own_chains(reduced)
    first_s = float(_rates_of_rows(reduced, weights[:1], chains).bounds_s[0])
    if first_s >= enough_s * (1.0 - NOTHING_LEFT):
        return first_s
    return max(first_s, float(_rates_of_rows(reduced, weights[1:], chains).bounds_s.max()))


def _own_chains(reduced: ReducedProblem) -> BoolArray:
    """The chains that matter for one problem."""
    heavy = heavy_chains(reduced, reduced.latency_s, reduced.spread_s, reduced.tensor_cores)
    return _chain_rows(heavy, reduced.count)


def _rates_of_rows(reduced: ReducedProblem, weights: FloatArray, chains: BoolArray) -> Rates:
    """Several rows of weights for one problem: its one accelerator stands once for each row."""
    shape = (len(weights), reduced.count)
    times = (np.broadcast_to(reduced.latency_s, shape), np.broadcast_to(reduced.spread_s, shape))
    cores = (np.full(len(weights), reduced.tensor_cores), np.full(len(weights), reduced.vector_cores))
    one_core, worth = _rates(reduced, weights, *times, *cores, chains)
    return Rates(weights=weights, one_core=one_core, worth_s=worth)


def weight_rows(reduced: ReducedProblem, *, is_batch: bool = False) -> FloatArray:
    """The weights that can matter for this kind of problem; for a batch only those that seldom fail."""
    rows = [(_EXCLUSIVE[:_BATCH_ROWS] if is_batch else _EXCLUSIVE) if reduced.is_exclusive else _SHARED]
    if reduced.has_off_core:
        rows.append(_OFF_CORE if reduced.is_exclusive else _OFF_CORE[:_SHARED_OFF_CORE_ROWS])
    return np.concatenate(rows).astype(np.float64)


def lower_bounds(
    template: SchedulingProblem,
    *,
    latency_s: ArrayLike,
    spread_s: ArrayLike,
    tensor_cores: ArrayLike,
    vector_cores: ArrayLike,
    memory_s: ArrayLike = 0.0,
    is_tight: bool = True,
) -> FloatArray:
    """Lower bounds on one layer's time on many accelerators.

    `latency_s` and `spread_s` are [accelerator, job], core counts and `memory_s` [accelerator]; jobs, kinds, precedence
    and rules are the template's. Infinite where a job cannot run. Ops of no latency on any accelerator only pass
    precedence on; on others a zero is merely a very short job. Without `is_tight` only work and the longest path count,
    some twenty times faster.
    """
    latency, spread = np.atleast_2d(np.asarray(latency_s, np.float64)), np.atleast_2d(np.asarray(spread_s, np.float64))
    cores = [np.broadcast_to(np.asarray(count, np.int64), (len(latency),)) for count in (tensor_cores, vector_cores)]
    takes_time: BoolArray = np.atleast_1d((np.minimum(latency, spread) > 0.0).any(axis=0))
    whole = reduce_problem(template, takes_time=takes_time)
    cannot = np.isinf(latency[:, whole.index]).any(axis=1)
    cannot |= (cores[0] == 0) & whole.uses_tensor.any() | (cores[1] == 0) & whole.uses_vector.any()
    floor = 0.0 if template.floor_s == 0.0 and np.ndim(memory_s) == 0 else memory_s
    bound = np.zeros(len(latency))
    usable = np.flatnonzero(~cannot)
    for part in segments(whole):
        one_core_s, spread_over_s = latency[usable][:, part.index], spread[usable][:, part.index]
        spread_over_s = np.where(part.is_off_core | (spread_over_s >= one_core_s), np.inf, spread_over_s)
        bounds_of = _segment_bounds if is_tight else _work_and_path
        bound[usable] += bounds_of(part, one_core_s, spread_over_s, cores[0][usable], cores[1][usable])
    bound[cannot] = np.inf
    return np.maximum(bound, floor)


def _segment_bounds(
    part: ReducedProblem, latency: FloatArray, spread: FloatArray, tensor: IntArray, vector: IntArray
) -> FloatArray:
    """One segment on many accelerators, in blocks that fit a processor's cache; a lone job needs no weights."""
    if part.count == 1 or not len(latency):
        alone: FloatArray = np.minimum(latency, spread).sum(axis=1)
        return alone
    typical = np.unique(np.linspace(0, len(latency) - 1, _TYPICAL).astype(int))
    chosen = np.argsort(tensor * vector, kind="stable")[typical]
    heavy: set[tuple[int, ...]] = set()
    for accelerator in chosen:
        heavy |= heavy_chains(part, latency[accelerator], spread[accelerator], int(tensor[accelerator]))
    chains, one_by_one = _chain_rows(heavy, part.count), np.minimum(latency, spread).sum(axis=1)
    bound = np.zeros(len(latency))
    for first in range(0, len(latency), _BLOCK):
        block = np.arange(first, min(first + _BLOCK, len(latency)))
        for weights in weight_rows(part, is_batch=True):
            _, worth = _rates(part, weights, latency[block], spread[block], tensor[block], vector[block], chains)
            bound[block] = np.maximum(bound[block], worth.sum(axis=1))
            # where the jobs one after another take no longer than the bound, no other row can raise it
            block = block[bound[block] < one_by_one[block] * (1.0 - NOTHING_LEFT)]
    return bound


def _work_and_path(
    part: ReducedProblem, latency: FloatArray, spread: FloatArray, tensor: IntArray, vector: IntArray
) -> FloatArray:
    """The quick bounds: of work, on each resource and on both, and the longest path of shortest times."""
    none = np.zeros((0, part.count), np.bool_)
    rows = [row for row in weight_rows(part) if row[_CHAIN] == row[_PATH] == 0.0]
    worth = [_rates(part, row, latency, spread, tensor, vector, none)[1].sum(axis=1) for row in rows]
    ended = np.minimum(latency, spread).T.copy()
    for job in range(part.count):
        before = np.flatnonzero(part.is_edge[:, job])
        if before.size:
            ended[job] += ended[before].max(axis=0)
    bound: FloatArray = np.max([*worth, ended.max(axis=0)], axis=0)
    return bound


def _rates(
    part: ReducedProblem,
    weights: FloatArray,
    latency: FloatArray,
    spread: FloatArray,
    tensor: IntArray,
    vector: IntArray,
    chains: BoolArray,
) -> tuple[FloatArray, FloatArray]:
    """u and z on many accelerators, [accelerator, job], for one row of weights or for one of each accelerator."""
    w_tensor, w_vector, w_chain, w_link, w_path = np.broadcast_to(weights, (len(latency), 5)).T[:, :, None]
    one_core = w_tensor / np.maximum(tensor, 1)[:, None] * part.uses_tensor
    one_core = one_core + w_vector / np.maximum(vector, 1)[:, None] * part.uses_vector + w_link * part.is_link
    if part.is_exclusive:
        spreading = np.broadcast_to(w_tensor + w_vector + w_chain, latency.shape).copy()
    else:
        spreading = w_tensor * part.uses_tensor + w_vector * part.uses_vector
    on_cores = chains & ~part.is_off_core
    for total, usable, grows_spread in ((w_chain, on_cores, False), (w_path, chains, True)):
        rows = np.flatnonzero(total[:, 0] > 0.0)
        if rows.size:
            filled = (one_core[rows], spreading[rows])
            _fill(*filled, latency[rows], spread[rows], total[rows, 0], usable, grows_spread=grows_spread)
            one_core[rows], spreading[rows] = filled
    cannot = np.isinf(spread)
    return one_core, np.minimum(one_core * latency, np.where(cannot, np.inf, np.where(cannot, 0.0, spread) * spreading))


def _fill(
    one_core: FloatArray,
    spreading: FloatArray,
    latency: FloatArray,
    spread: FloatArray,
    total: FloatArray,
    chains: BoolArray,
    *,
    grows_spread: bool,
) -> None:
    """Divide the `total` of each row over chains, raising `one_core` (and `spreading`) of this row in place."""
    spread_s = np.where(np.isinf(spread), 0.0, spread)
    ratio = spread_s / np.where(latency > 0.0, latency, 1.0)
    missing = np.where(np.isinf(spread), np.inf, spreading * ratio - one_core)
    if grows_spread:  # saturation comes later: (u + d) l = (v + d) s
        missing /= np.maximum(1.0 - ratio, NOTHING_LEFT)
    weights, chain_rows = chains.T.astype(np.float64), chains.astype(np.float64)
    after_s = spread_s if grows_spread else np.zeros_like(latency)
    # accelerators whose weight is all given leave the arrays, and `active` says which ones are left
    active, left, given = np.arange(len(latency)), total.copy(), np.zeros_like(latency)
    while active.size:
        is_open = missing > NOTHING_LEFT
        rate = np.where(is_open, latency, after_s) @ weights
        pick = rate.argmax(axis=1)
        share = np.where(chains[pick] & is_open, missing, np.inf).min(axis=1)
        np.minimum(share, left, out=share)
        share[rate[np.arange(len(active)), pick] <= 0.0] = 0.0
        added = share[:, None] * chain_rows[pick]
        given[active] += added
        missing -= added
        left -= share
        goes_on = (share > 0.0) & (left > NOTHING_LEFT)
        if not goes_on.all():
            active, left, missing = active[goes_on], left[goes_on], missing[goes_on]
            latency, after_s = latency[goes_on], after_s[goes_on]
    one_core += given
    if grows_spread:
        spreading += given


def heavy_chains(
    reduced: ReducedProblem, latency: FloatArray, spread: FloatArray, tensor_cores: int
) -> set[tuple[int, ...]]:
    """Chains that matter for one accelerator: again and again the heaviest, until its jobs have the rate they need.

    What counts is every job, tensor jobs, vector jobs, or every job while half of the weight lies on the tensor cores.
    """
    after = [np.flatnonzero(row).tolist() for row in reduced.is_edge]
    heavy: set[tuple[int, ...]] = set()
    everything, needed = np.ones(reduced.count, np.bool_), np.minimum(spread / np.where(latency > 0, latency, 1.0), 1.0)
    halved = needed - 0.5 * reduced.uses_tensor / max(tensor_cores, 1)
    cases = ((everything, needed), (reduced.uses_tensor, needed), (reduced.uses_vector, needed), (everything, halved))
    for kept, wanted in cases:
        weight, missing = np.where(kept, latency, 0.0).tolist(), wanted.tolist()
        left = 1.0
        while left > NOTHING_LEFT:
            chain = _heaviest([w if m > NOTHING_LEFT else 0.0 for w, m in zip(weight, missing, strict=True)], after)
            open_ = [job for job in chain if missing[job] > NOTHING_LEFT and weight[job] > 0.0]
            if not open_:
                break
            heavy.add(tuple(chain))
            share = min(left, *(missing[job] for job in open_))
            left -= share
            for job in chain:
                missing[job] -= share
    return heavy


def _heaviest(weight: list[float], after: list[list[int]]) -> list[int]:
    """The heaviest chain, extended to the end of the precedence."""
    total, step = list(weight), [-1] * len(weight)
    for job in range(len(weight) - 1, -1, -1):
        if later := after[job]:
            step[job] = later[0] if len(later) == 1 else max(later, key=total.__getitem__)
            total[job] += total[step[job]]
    job = max(range(len(weight)), key=total.__getitem__)
    chain = []
    while job >= 0:
        chain.append(job)
        job = step[job]
    return chain


def _chain_rows(chains: set[tuple[int, ...]], count: int) -> BoolArray:
    """[chain, job], in a fixed order."""
    rows = np.zeros((len(chains), count), np.bool_)
    for row, chain in enumerate(sorted(chains)):
        rows[row, list(chain)] = True
    return rows
