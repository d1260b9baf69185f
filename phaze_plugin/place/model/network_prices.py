"""Prices of the messages and collectives of a plan, as latency plus bytes over bandwidth.

Devices are laid out with tensor parallelism innermost (stride 1), then the cp parts of a sequence (stride tp), then the
copies (stride cp * tp), then the stages (stride dp * cp * tp). ZeRO's groups are neighbours among the dp * cp devices
at stride tp, and so are the devices that experts are divided over. Prices depend on the strategy and on how many
devices the plan uses, never on how many more the cluster has: a plan costs the same on a larger cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from phaze.cost import Calibration, Collective, broadcast_fill_s, price_collective
from phaze.hardware import Cluster, InterconnectLevel
from phaze.hardware.accelerator import EnergyModel, energy_model
from phaze.place.model.stage_space import FloatArray, IntArray

__all__ = ["DataPrices", "LinkPrices", "Network", "Price"]

_PROBE_BYTES = float(1 << 30)
"""The size at which a collective is priced for its seconds per byte; bulk prices are linear, so that any will do."""


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a message: ``latency_s`` (if there is one at all) plus bytes times ``s_per_byte``."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0

    def then(self, other: Price) -> Price:
        """The price of one message behind another."""
        return Price(self.latency_s + other.latency_s, self.s_per_byte + other.s_per_byte)

    def on_part(self, share: float) -> Price:
        """The price of the same on a part of the tensor."""
        return Price(self.latency_s, self.s_per_byte * share)


class DataPrices(NamedTuple):
    """Prices of the collectives between devices that hold copies or shards of the same parameters.

    Attributes:
        gather: of parameters within a group, by their whole size.
        scatter: of gradients within a group, likewise.
        reduction: of gradients after the last backward, likewise: an all-reduce over all of them (ZeRO-0), or a
            reduce-scatter within groups (ZeRO-1 only) and an all-reduce of the shards between them.
        fill_s: seconds before the first bytes of a broadcast within a group are at its last device.
    """

    gather: Price
    scatter: Price
    reduction: Price
    fill_s: float = 0.0


class LinkPrices(Protocol):
    """What stages are priced with: the links of a cluster (`Network`), or what nothing on them falls below."""

    def collective(self, collective: Collective, size: int, stride: int, used: int) -> Price:
        """The price of a collective over ``size`` devices at ``stride``, in a plan on ``used`` devices."""

    def data_prices(self, zero: int, shard: int, groups: int, stride: int, used: int) -> DataPrices:
        """Prices over ``groups`` groups of ``shard`` neighbours at ``stride``, in a plan on ``used`` devices."""

    def between_stages(self, collective: Collective, members: int, stages: int, stride: int, used: int) -> Price:
        """The price between ``members`` of the stages at ``stride``."""


@dataclass(frozen=True, slots=True)
class Network:
    """A cluster's prices; each is asked for once. They are the same for whatever accelerator its devices are.

    The three dictionaries are the prices so far: of collectives by their axis, of those between stages by the links
    that they use, and of those over groups that bounds ask for.
    """

    cluster: Cluster
    calibration: Calibration
    energy: EnergyModel = field(default_factory=energy_model)
    known: dict[tuple[Collective, int, int, int], Price] = field(default_factory=dict)
    links: dict[tuple[Collective, InterconnectLevel, bool], Price] = field(default_factory=dict)
    rates: dict[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict)

    @property
    def joined(self) -> int:
        """Devices that the levels could join."""
        return max(self.cluster.device_count, math.prod(level.size for level in self.cluster.levels))

    @property
    def least_s_per_byte(self) -> float:
        """Seconds per byte on the fastest links: of a torus, on all of its dimensions together."""
        cluster = self.cluster
        rates = self._rates()
        torus = sum(rate for rate, level in zip(rates, cluster.levels, strict=True) if level.links.is_row)
        return 1.0 / max(*rates, torus) if rates else 0.0

    def least_s_per_byte_between(self, used: IntArray) -> FloatArray:
        """Seconds per byte between stages of plans on so many devices at least: on the fastest links that reach so far.

        Nothing is claimed of a torus, where links between stages depend on how they lie.
        """
        cluster = self.cluster
        if not cluster.levels or any(level.links.is_row for level in cluster.levels):
            return np.zeros(len(used))
        each = [1.0 / rate for rate in self._rates()]
        least_from = np.minimum.accumulate(each[::-1])[::-1]
        return np.asarray(least_from[np.minimum(self.depths(used), len(each) - 1)])

    def _rates(self) -> list[float]:
        """Bytes a second that links of each level reach: of measured ones, under the protocol of large tensors."""
        cluster, links = self.cluster, self.calibration.links
        rates = []
        for level, is_inner in zip(cluster.levels, cluster.inner_levels, strict=True):
            share = self.calibration.link if is_inner else self.calibration.network
            if is_inner and links is not None and links.hold_for(level):
                share *= links.bulk.share
            rates.append(level.rate_bytes_per_s * share)
        return rates

    def depths(self, used: IntArray) -> IntArray:
        """`depth` of each number of devices."""
        blocks = np.cumprod([1, *(level.size for level in self.cluster.levels)])[1:]
        return np.asarray((blocks < used[:, None]).sum(axis=1))

    def depth(self, used: int) -> int:
        """How many levels are too small for ``used`` devices: plans of equal depth have equal prices."""
        blocks, block = [], 1
        for level in self.cluster.levels:
            block *= level.size
            blocks.append(block)
        return sum(block < used for block in blocks)

    def collective(self, collective: Collective, size: int, stride: int, used: int) -> Price:
        """The price of a collective over ``size`` devices at ``stride``, in a plan on ``used`` devices."""
        if size == 1:
            return Price()
        key = (collective, size, stride, self.depth(used))
        if key not in self.known:
            part = self._part(used)
            sizes, calibration = [0.0, _PROBE_BYTES], self.calibration
            latency, probe = price_collective(
                collective, sizes, part, size, stride, calibration=calibration, energy=self.energy, is_bulk=True
            ).seconds.tolist()
            self.known[key] = Price(latency, (probe - latency) / _PROBE_BYTES)
        return self.known[key]

    def data_prices(self, zero: int, shard: int, groups: int, stride: int, used: int) -> DataPrices:
        """Prices over ``groups`` groups of ``shard`` neighbours at ``stride``, in a plan on ``used`` devices."""
        gather = self.collective(Collective.ALL_GATHER, shard, stride, used)
        scatter = self.collective(Collective.REDUCE_SCATTER, shard, stride, used)
        broadcasts = zero == 1 and self.calibration.stack.owners_broadcast
        if zero == 0 or broadcasts:
            fill_s = broadcast_fill_s(self._part(used), shard, stride) if broadcasts else 0.0
            every = self.collective(Collective.ALL_REDUCE, shard * groups, stride, used)
            return DataPrices(gather, scatter, every, fill_s)
        between = self.collective(Collective.ALL_REDUCE, groups, stride * shard, used).on_part(1 / shard)
        return DataPrices(gather, scatter, scatter.then(between) if zero == 1 else between)

    def _part(self, used: int) -> Cluster:
        """A cluster of just the used devices.

        Plans with stages on single devices count tp devices for each stage; where these are more than there are, the
        outermost level is thought larger.
        """
        levels = self.cluster.levels
        if used > self.joined:
            levels = (*levels[:-1], replace(levels[-1], size=levels[-1].size * used))
        return Cluster(self.cluster.accelerator, used, levels)

    def between_stages(self, collective: Collective, members: int, stages: int, stride: int, used: int) -> Price:
        """The price between ``members`` of the stages at ``stride``, on those of their links that reach farthest."""
        if stages == 1:
            return Price()
        key = (collective, members, -stages, self.depth(used) * self.joined * 2 + min(stride, self.joined))
        if key in self.known:
            return self.known[key]
        farthest = self._part(used).axis_spans(stages, stride)[-1]
        level = InterconnectLevel(members, farthest.level.bandwidth_bytes_per_s, farthest.level.latency_s)
        link = (collective, level, farthest.is_inner)
        if link not in self.links:
            share = self.calibration if farthest.is_inner else self.calibration.between_nodes
            alone = Network(Cluster(self.cluster.accelerator, members, (level,)), share, self.energy)
            self.links[link] = alone.collective(collective, members, 1, members)
        self.known[key] = self.links[link]
        return self.known[key]
