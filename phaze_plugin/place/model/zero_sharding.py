"""ZeRO: what each stage of it holds, moves and buffers, and which dp and groups of shards a strategy may have.

Bytes are per trained parameter on each of the devices that copy it (`ZeroSharding`). The dp x cp devices that run
the same layers form `groups` groups of `shard` devices, neighbours on the network. Within a group states are divided,
between groups they are copied (hybrid sharding; one group of all is plain ZeRO):

    ZeRO stage                             0            1                2                3
    optimizer state (and master copy)      whole        1/shard          1/shard          1/shard
    gradients                              whole        whole            1/shard          1/shard
    parameters                             whole        whole            whole            1/shard
    every forward and every backward       -            -                -                all-gather of parameters
    every backward                         -            -                reduce-scatter   reduce-scatter of gradients
    once, after the last backward          all-reduce   reduce-scatter   -                -
    and then between groups                -            all-reduce of the 1/shard of gradients that a device has
    update of the parameters               all          1/shard          1/shard          1/shard
    once, after the update                 -            all-gather       all-gather       -
    buffers while layers run (shard > 1)   -            -                one gradient     and two gathered layers

(Rajbhandari et al., arXiv:1910.02054; groups: Zhang et al., arXiv:2205.00119.) All but the all-reduces run within a
group. Every row is a property of `ZeroSharding`. The three ``*_shards`` and `held_bytes_per_parameter` answer the first
three rows and the update, ``*_per_pass`` and ``*_per_backward`` the next two, ``*_per_batch`` the collectives that run
once, and the two ``*_buffer_bytes`` the last row. Collectives are given by the whole tensor that they work on, as
`Network.collective` prices them.

Experts that are divided over ep of these devices (neighbours, too) have fewer copies: dp x cp / ep devices hold the
same experts. As in Megatron-LM, each group of `shard` devices still holds one copy of all states: those of an expert
are divided over the shard / ep devices of the group that have it, and if ep is larger, they are not divided
(`ZeroSharding.of_experts`). One of shard and ep divides the other.

Parameters that are frozen are held, and with ZeRO-3 sharded and gathered, like the others; they have no gradients, no
optimizer states and no update (`ZeroSharding.of_frozen`).

Unless a question names them, these sizes of groups are offered (`offered_shards`): all devices, every power of two, and
as many as fill a level of the network beside tp. Between these a group only moves more bytes over the same links, or
holds more states. What a search proves, it proves over the sizes that were offered.

A row of a table may stand for several values of dp and of shard (`DataDegrees`). Bounds then take the states of the
largest groups, and of the collectives within groups what the smallest send (`DataDegrees.shares`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from phaze.hardware import PrecisionRecipe
from phaze.parallelism import ALL_DEVICES, ZERO_STAGES
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray

__all__ = [
    "DataDegrees",
    "DataShares",
    "ZeroSharding",
    "distinct_columns",
    "every_shard",
    "listed_shards",
    "offered_shards",
    "shard_ranges",
]

_GATHERED_LAYERS = 2
"""ZeRO-3 keeps two gathered layers: the one that runs, and the next one, which arrives meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class ZeroSharding:
    """One ZeRO stage over groups of devices. All may be arrays; all properties are then computed elementwise.

    Attributes:
        recipe: bytes per parameter of each item when nothing is sharded.
        zero: ZeRO stage, 0 to 3.
        shard: devices of a group, which the sharded items are divided over.
        groups: how many groups have copies of the same parameters.
        divided: over how many devices experts are divided, of whose parameters this is; 1 for others.
    """

    recipe: PrecisionRecipe
    zero: int | IntArray
    shard: int | IntArray
    groups: int | IntArray = 1
    divided: int = 1

    def of_experts(self, ep: int) -> ZeroSharding:
        """The same of the parameters of experts that are divided over ``ep`` of the devices."""
        shard = np.maximum(np.asarray(self.shard) // ep, 1)
        groups = np.asarray(self.shard) * np.asarray(self.groups) // (ep * shard)
        return ZeroSharding(self.recipe, self.zero, shard, groups, ep)

    def of_frozen(self) -> ZeroSharding:
        """The same of parameters that are frozen."""
        return replace(self, recipe=self.recipe.of_frozen)

    def by_kind(self, ep: int, has_frozen: bool = False) -> tuple[ZeroSharding, ...]:
        """This one, of dense parameters, and that of experts where these are divided over ``ep`` > 1 devices.

        Where parameters are frozen, the same of those follow.
        """
        trained = (self,) if ep == 1 else (self, self.of_experts(ep))
        return (*trained, *(kind.of_frozen() for kind in trained)) if has_frozen else trained

    @property
    def optimizer_shards(self) -> IntArray:
        """Devices that optimizer state, master copy and the update are divided over."""
        return self._shards_from(1)

    @property
    def gradient_shards(self) -> IntArray:
        """Devices that accumulated gradients are divided over."""
        return self._shards_from(2)

    @property
    def parameter_shards(self) -> IntArray:
        """Devices that the parameters themselves are divided over."""
        return self._shards_from(3)

    def _shards_from(self, least_zero: int) -> IntArray:
        return np.where(np.asarray(self.zero) >= least_zero, self.shard, 1)

    @property
    def held_copy_bytes_per_parameter(self) -> FloatArray:
        """Bytes that the copy of one parameter that passes read takes on a device, whether it is trained or frozen."""
        is_cast = (np.asarray(self.zero) == 3) & self.recipe.casts_gathered_weights
        return np.asarray(np.where(is_cast, 0.0, self.recipe.parameter_bytes) / self.parameter_shards)

    @property
    def held_bytes_per_parameter(self) -> FloatArray:
        """Bytes that one trained parameter takes on a device: optimizer state, gradient and parameter together."""
        recipe = self.recipe
        return np.asarray(
            recipe.optimizer_bytes / self.optimizer_shards
            + recipe.gradient_bytes / self.gradient_shards
            + self.held_copy_bytes_per_parameter
        )

    @property
    def gathered_bytes_per_pass(self) -> FloatArray:
        """Bytes of one parameter that are gathered in every forward and again in every backward."""
        return np.where(np.asarray(self.zero) == 3, self.recipe.parameter_bytes, 0.0)

    @property
    def scattered_bytes_per_backward(self) -> FloatArray:
        """Bytes of one parameter's gradient that are reduce-scattered in every backward."""
        return np.where(np.asarray(self.zero) >= 2, self.recipe.reduction_bytes, 0.0)

    @property
    def reduced_bytes_per_batch(self) -> FloatArray:
        """Bytes of one parameter's gradient that are reduced after the last backward, within groups or between them."""
        is_reduced = (np.asarray(self.zero) < 2) | (np.asarray(self.groups) > 1)
        return np.where(is_reduced, self.recipe.reduction_bytes, 0.0)

    @property
    def gathered_bytes_per_batch(self) -> FloatArray:
        """Bytes of one parameter that are gathered after the update."""
        zero = np.asarray(self.zero)
        return np.where((zero == 1) | (zero == 2), self.recipe.parameter_bytes * self.recipe.trains, 0.0)

    @property
    def scatter_buffer_bytes(self) -> FloatArray:
        """Buffer per parameter of a stage's largest layer for the gradient that is being reduce-scattered."""
        return np.where(self._is_sharded & (np.asarray(self.zero) >= 2), self.recipe.reduction_bytes, 0.0)

    @property
    def gather_buffer_bytes(self) -> FloatArray:
        """Buffer per parameter of a stage's largest layer for gathered parameters."""
        gathered = _GATHERED_LAYERS * self.recipe.parameter_bytes
        return np.where(self._is_sharded & (np.asarray(self.zero) == 3), gathered, 0.0)

    @property
    def buffer_bytes(self) -> FloatArray:
        """Both buffers per parameter of a stage's largest layer."""
        return np.asarray(self.scatter_buffer_bytes + self.gather_buffer_bytes)

    @property
    def _is_sharded(self) -> BoolArray:
        return np.asarray(self.shard) > 1

    def least_reduced_share(self, replicas: IntArray) -> FloatArray:
        """Which part of a gradient each device sends at least after the last backward.

        Of groups that are no larger than these, over so many devices or more: a reduce-scatter over s devices sends
        1 - 1/s of the tensor, an all-reduce over n twice 1 - 1/n; with groups of s among n devices that is
        1 + 1/s - 2/n for ZeRO-1, and 2/s - 2/n from ZeRO-2 on.
        """
        zero, one_group = np.asarray(self.zero), 1 - 1 / np.asarray(replicas)
        between = 2 / np.asarray(self.shard) - 2 / np.asarray(replicas)
        later = np.where(zero == 1, np.maximum(one_group, 1 + between / 2 - 1 / np.asarray(replicas)), between)
        return np.maximum(np.where(zero == 0, 2 * one_group, later), 0.0)


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
