"""One bound under many interleaved strategies at once, from what devices can choose for their chunks.

On many devices a thousand strategies may differ in dp and in the groups of ZeRO alone, and in hardly anything that
takes time. A strategy made of the least of each (`LeastPrices` for what moves, the largest groups for what is held) is
nowhere slower or larger than any of them: what `device_choice_bounds.py` proves for it holds for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from phaze.cost import Collective
from phaze.parallelism import ALL_DEVICES
from phaze.place.bounds.interleaved_bounds import InterleavedBounds
from phaze.place.model.network_prices import DataPrices, Price
from phaze.place.model.stage_space import IntArray
from phaze.place.search.parallelism_table import ParallelismTable
from phaze.place.search.prepared_problem import PreparedProblem

__all__ = ["ALIKE", "LeastPrices", "are_refuted", "refute_together"]

ALIKE = ("tp", "schedule", "chunks", "pp", "micro_batches", "zero")
"""What strategies that are bounded together have in common."""

_LEAST_TOGETHER = 3
"""Fewer strategies are bounded one by one: a bound for all of them is lower, and takes as long as one of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastPrices:
    """Prices that no strategy of several falls below, however many devices it takes and however they lie.

    Attributes:
        data: of the collectives between copies and shards.
        least_s_per_byte: on the fastest links.
        between_s_per_byte: between stages, on the fastest links that reach so far.
    """

    data: DataPrices
    least_s_per_byte: float
    between_s_per_byte: float

    def collective(self, collective: Collective, size: int, stride: int, used: int) -> Price:
        """Each device sends at least all parts but its own."""
        del collective, stride, used
        return Price(0.0, (1 - 1 / size) * self.least_s_per_byte)

    def data_prices(self, zero: int, shard: int, groups: int, stride: int, used: int) -> DataPrices:
        """The least of each, whatever the groups."""
        del zero, shard, groups, stride, used
        return self.data

    def between_stages(self, collective: Collective, members: int, stages: int, stride: int, used: int) -> Price:
        """Whole tensors cross a link between stages; of collectives over more of them, all parts but one's own."""
        del stride, used
        if stages == 1:
            return Price()
        if collective is Collective.POINT_TO_POINT:
            return Price(0.0, self.between_s_per_byte)
        return self.collective(collective, members, 1, stages)


def refute_together(
    prepared: PreparedProblem, strategies: ParallelismTable, index: IntArray, target_s: float, most: float = math.inf
) -> None:
    """Give the target as bound to those of some interleaved strategies that provably do not beat it.

    Strategies that differ in dp and ZeRO's groups alone are first refuted all together, then by halves; ``most`` is
    how many bounds are worth asking for.
    """
    index = index[strategies.chunks[index] > 1]
    key = np.stack([getattr(strategies, name)[index] for name in ALIKE])
    order = np.lexsort((strategies.shard[index], strategies.dp[index], *key))
    is_new = np.any(np.diff(key[:, order], axis=1) != 0, axis=0)
    groups = np.split(index[order], np.flatnonzero(is_new) + 1)
    asked = 0
    while groups and asked < most:
        group = groups.pop()
        if len(group) < _LEAST_TOGETHER:
            continue
        asked += 1
        if are_refuted(prepared, strategies.take(group), target_s):
            strategies.bound_s[group] = target_s
        else:
            groups += np.array_split(group, 2)


def are_refuted(prepared: PreparedProblem, rows: ParallelismTable, target_s: float) -> bool:
    """Whether none of some strategies beats the target, which differ in dp and ZeRO's groups alone."""
    largest = int(rows.dp.argmax())
    parallelism = replace(rows.parallelism(largest, prepared.problem), shard=ALL_DEVICES)
    row = replace(
        rows.take(np.array([largest])),
        least_dp=rows.dp.min(keepdims=True),
        least_shard=rows.shard.min(keepdims=True),
        shard=rows.shard.max(keepdims=True),
    )
    candidates = prepared.candidates(parallelism, target_s, prices=_least_prices(prepared, row))
    bounds = prepared.bounds(candidates, parallelism, 0)
    assert isinstance(bounds, InterleavedBounds)
    return bounds.choices.is_refuted(target_s)


def _least_prices(prepared: PreparedProblem, row: ParallelismTable) -> LeastPrices:
    """The prices of one row: of dense parameters and divided experts the lower ones."""
    problem, network = prepared.problem, prepared.network
    kinds = [
        prepared.layer_table.data_prices(row, experts) for experts in ([False, True] if problem.ep > 1 else [False])
    ]
    gather, scatter, reduction = np.min(kinds, axis=0)[:3, 0].tolist()
    used = row.tp * row.least_dp * problem.cp * row.pp
    return LeastPrices(
        data=DataPrices(Price(0.0, gather), Price(0.0, scatter), Price(0.0, reduction)),
        least_s_per_byte=network.least_s_per_byte,
        between_s_per_byte=max(network.least_s_per_byte, float(network.least_s_per_byte_between(used)[0])),
    )
