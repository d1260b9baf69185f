"""Which dp and which groups of ZeRO's shards a strategy may have, and what many strategies of each move at least.

The dp x cp devices that run the same layers may be divided into groups of `shard` devices (`zero_sharding.py`). Unless
a question names them, these sizes are offered (`offered_shards`): all devices, every power of two, and as many as fill
a level of the network beside tp. Between these a group only moves more bytes over the same links, or holds more states.
What a search proves, it proves over the sizes that were offered.

A row of a table may stand for several values of dp and of shard (`DataDegrees`). Bounds then take the states of the
largest groups, and of the collectives within groups what the smallest send (`DataDegrees.shares`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from phaze.parallelism import ALL_DEVICES, ZERO_STAGES
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray
from phaze.place.model.zero_sharding import ZeroSharding

__all__ = [
    "DataDegrees",
    "DataShares",
    "distinct_columns",
    "every_shard",
    "listed_shards",
    "offered_shards",
    "shard_ranges",
]

_KEPT_SIZES = 1_024
"""So many lists of sizes are kept: one for each tp and ep on each cluster, which are asked for with every row."""


class DataShares(NamedTuple):
    """What one kind of parameters (dense ones, or those of experts) holds and moves at least, per strategy.

    Attributes:
        sharding: what ZeRO holds, with the largest groups.
        within: which part of a tensor a device sends at least in a gather or scatter within its group.
        reduced: which part of a gradient it sends at least after the last backward.
    """

    sharding: ZeroSharding
    within: FloatArray
    reduced: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataDegrees:
    """dp and ZeRO of many strategies, of which each may stand for several.

    Attributes:
        zero: ZeRO stage, one for all or one each.
        dp: copies of the pipeline; of several values the largest.
        least_dp: the smallest of them.
        shard: devices that ZeRO divides states over; of several values the largest.
        least_shard: the smallest of them.
    """

    zero: int | IntArray
    dp: IntArray
    least_dp: IntArray
    shard: IntArray
    least_shard: IntArray

    @property
    def is_wide(self) -> BoolArray:
        """Whether a row stands for several strategies."""
        return np.asarray((self.least_dp < self.dp) | (self.least_shard < self.shard))

    def sharding(self, problem: PlacementProblem) -> tuple[ZeroSharding, ...]:
        """What ZeRO holds with the largest groups: of dense parameters, of experts where ep divides them, of frozen."""
        groups = self.dp * problem.cp // self.shard
        sharding = ZeroSharding(problem.device_recipe, self.zero, self.shard, groups)
        return sharding.by_kind(problem.ep, problem.has_frozen)

    def shares(self, problem: PlacementProblem) -> tuple[DataShares, ...]:
        """What is held and moved at least, for each kind of parameters."""
        return tuple(
            DataShares(
                sharding,
                1 - 1 / np.maximum(self.least_shard // sharding.divided, 1),
                sharding.least_reduced_share(self.least_dp * problem.cp // sharding.divided),
            )
            for sharding in self.sharding(problem)
        )


def offered_shards(problem: PlacementProblem, tp: int) -> tuple[int, ...]:
    """Sizes of groups that may be chosen beside all devices (or only these, where the choices name no "all")."""
    if problem.choices.shard is not None:
        values = frozenset(int(value) for value in problem.choices.shard if value != ALL_DEVICES)
    elif problem.capabilities.allows_shard_groups:
        cluster = problem.cluster
        values = _natural_shards(cluster.device_count // tp, tuple(level.size for level in cluster.levels), tp)
    else:
        return ()
    return _beside_experts(values, problem.ep)


@lru_cache(maxsize=_KEPT_SIZES)
def _natural_shards(most: int, level_sizes: tuple[int, ...], tp: int) -> frozenset[int]:
    """Every power of two up to ``most``, and as many devices as fill a level of the network beside tp."""
    blocks = accumulate(level_sizes, mul)
    powers = (1 << power for power in range(1, most.bit_length()))
    return frozenset([*powers, *(block // tp for block in blocks if block % tp == 0)])


@lru_cache(maxsize=_KEPT_SIZES)
def _beside_experts(sizes: frozenset[int], ep: int) -> tuple[int, ...]:
    """The sizes of groups that divide ep or that ep divides, the smallest first."""
    return tuple(sorted(size for size in sizes if size > 1 and (size % ep == 0 or ep % size == 0)))


def every_shard(problem: PlacementProblem, tp: int, zero: int, dp: IntArray) -> tuple[IntArray, IntArray]:
    """Every group that each dp may have, as indices into ``dp`` and sizes; ZeRO-0 shards nothing and has one group."""
    has_all, sizes, is_listed = _groups(problem, tp, zero, dp)
    size_index, row = np.nonzero(is_listed)
    if not has_all:
        return row, sizes[size_index]
    every_row = np.arange(len(dp))
    return np.concatenate([every_row, row]), np.concatenate([dp * problem.cp, sizes[size_index]])


def shard_ranges(problem: PlacementProblem, tp: int, zero: int, dp: IntArray) -> tuple[IntArray, IntArray]:
    """The smallest and the largest of `every_shard` for each dp; 0 where there is none."""
    distinct, which = np.unique(dp, return_inverse=True)  # every depth of the pipeline has the same ones
    has_all, sizes, is_listed = _groups(problem, tp, zero, distinct)
    every = distinct * problem.cp if has_all else np.zeros_like(distinct)
    largest = np.where(is_listed, sizes[:, None], 0).max(axis=0, initial=0)
    largest = np.maximum(largest, every)
    # Where no group is listed, all devices are the only one, or there is none.
    least = np.where(is_listed, sizes[:, None], largest).min(axis=0, initial=np.iinfo(dp.dtype).max)
    return np.minimum(least, largest)[which], largest[which]


def _groups(problem: PlacementProblem, tp: int, zero: int, dp: IntArray) -> tuple[bool, IntArray, BoolArray]:
    """Whether all devices are a group that each dp may have, further sizes, and whether each dp may have each of them.

    The last is per (size, dp).
    """
    replicas, offers_all = dp * problem.cp, _offers_all(problem)
    sizes = np.array(offered_shards(problem, tp) if zero else (), dtype=dp.dtype)
    runs_groups = np.array([_runs_groups(problem, size, zero) for size in sizes.tolist()], dtype=bool)
    is_listed = replicas % sizes[:, None] == 0
    is_listed &= (replicas > sizes[:, None]) | (not offers_all)
    is_listed &= (replicas == sizes[:, None]) | runs_groups[:, None]
    return not zero or offers_all, sizes, is_listed


def listed_shards(
    problem: PlacementProblem, tp: int, dp: int, least: int, largest: int, zero: int | None = None
) -> list[int]:
    """The sizes of groups in a range, both ends included, that one dp may have; ZeRO-0 has none to choose from.

    Without a ZeRO stage they are the sizes that any stage may have.
    """
    replicas = dp * problem.cp
    stages = ZERO_STAGES[1:] if zero is None else (zero,)
    sizes = {
        size
        for size in offered_shards(problem, tp)
        if replicas % size == 0 and (size == replicas or any(_runs_groups(problem, size, stage) for stage in stages))
    }
    sizes |= {replicas} if _offers_all(problem) else set()
    return sorted(size for size in sizes if least <= size <= min(largest, replicas))


def _runs_groups(problem: PlacementProblem, size: int, zero: int) -> bool:
    """Whether groups of this size may be chosen: sizes that were asked for of a target without groups are priced."""
    if problem.choices.shard is not None and not problem.capabilities.allows_shard_groups:
        return True
    return problem.capabilities.runs_groups(size, zero=zero, cp=problem.cp, ep=problem.ep)


def _offers_all(problem: PlacementProblem) -> bool:
    return problem.choices.shard is None or ALL_DEVICES in problem.choices.shard


def distinct_columns(columns: IntArray) -> tuple[IntArray, IntArray]:
    """Of columns of small counts: one of each that differs from all others, and for each column which of these it is.

    Every column is read as the digits of one number, which is sorted many times sooner than the column itself.
    """
    digits = [int(row.max()) + 1 for row in columns]
    if math.prod(digits) > np.iinfo(np.int64).max:
        _, first, which = np.unique(columns, axis=1, return_index=True, return_inverse=True)
    else:
        numbers = np.ravel_multi_index(tuple(columns), tuple(digits))
        _, first, which = np.unique(numbers, return_index=True, return_inverse=True)
    return first, which.ravel()
