"""Times and memory of every stage once a strategy is chosen: how passes and collectives are priced.

Passes (`build_stage_costs`). Let f be the forward, b the input part and w the weight part of backward and r the
recompute of a stage, each summed over its layers; x and y the seconds of receiving the activation and the gradient; g
the seconds of gathering parameters (ZeRO-3, in every pass) and h those of scattering gradients (ZeRO-2 and 3, in every
backward). Both are hidden behind the layers as far as these last:

    F = x + max(f, g)             B = max(y, r) + max(b + w, g + h)
    split backward (zero-bubble and V): B = max(y, r) + max(b, g),  W = max(w, h)

Where a V turns, two neighbouring stages are on one device, and x of the later and y of the earlier one are 0 there
(`StageCosts.saved_s`).

A calibration's overlap o says which part of what could be hidden is: each max(p, q) of a pass and its collectives is
then max(p, q) + (1 - o) min(p, q) (`_overlapped`), and of the reductions below the part o is exposed as far as it is
not hidden, and the part 1 - o as long as it takes.

Transfers (`_send_parts`). A tensor that tp devices hold whole is sent in tp parts, one by each, and gathered behind
(Narayanan et al., SC'21, section 4.1), where that is quicker than sending all of it tp times.

After the last backward. Gradients are reduced (`_reduction_s`): over all copies (ZeRO-0), within ZeRO's groups (ZeRO-1)
and the shards between groups, layer by layer and hidden behind the last backward as in `StageSpace.exposed`; tied
parameters come after the others. Then come the reduction of ties between stages (`_tie_s`), the update, and the gather
of updated parameters (ZeRO-1 and 2), or their broadcasts by owners (`Stack.owners_broadcast`). What each ZeRO stage
moves is in `zero_sharding.py`. Parameters of experts that are divided over ep devices have groups of their own
(`_DataAxis`); their collectives follow the others of the layer.

Parameters that are sharded over stages (`_stage_sharded_s`) are gathered before all passes, and their gradients are
scattered after them, where stages wait for each other as with ties; then each stage reduces and updates its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phaze.cost import Collective, price_works, update_work
from phaze.parallelism import Parallelism
from phaze.place.memory.device_memory import MemoryTable, build_memory_table
from phaze.place.model.network_prices import DataPrices, LinkPrices, Price
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import FloatArray, IntArray, StageSpace
from phaze.place.model.stage_sums import ParameterSums, StageSums
from phaze.place.model.zero_sharding import ZeroSharding

__all__ = ["StageCosts", "build_stage_costs", "update_s_per_parameter"]

_PROBE_PARAMETERS = 1 << 30
"""An update of so many parameters is priced for the seconds of one: enough that launching it does not count."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Every stage under one strategy, per (mode, stage) unless said otherwise.

    Attributes:
        received_s: x, per stage.
        returned_s: y, per stage.
        forward_s: F.
        backward_s: B, without the weights' part where that is split off.
        weight_s: W, or 0.
        exposed_s: reduction beyond the last B, or beyond the last W where that is split off.
        reduction_s: all of the reduction, per stage.
        tie_s: reduction between stages that share parameters, and gather and scatter of those that are sharded over
            stages, per stage.
        finish_s: update and gather, per stage.
        devices: how many devices one copy of the stage takes, per stage.
        memory: the items of memory.
        recompute_s: r.
    """

    received_s: FloatArray
    returned_s: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    weight_s: FloatArray
    exposed_s: FloatArray
    reduction_s: FloatArray
    tie_s: FloatArray
    finish_s: FloatArray
    devices: IntArray
    memory: MemoryTable
    recompute_s: FloatArray

    @property
    def saved_s(self) -> tuple[FloatArray, FloatArray]:
        """What forward, and backward, are shorter by where nothing is received for it, per stage and (mode, stage)."""
        return self.received_s, np.maximum(self.returned_s - self.recompute_s, 0.0)


def update_s_per_parameter(problem: PlacementProblem) -> float:
    """Seconds that updating one parameter takes on one device.

    States that are kept on the host are read and written over its link, both ways at once, while others are updated.
    """
    works = [update_work(problem.recipe, _PROBE_PARAMETERS, stack=problem.calibration.stack)]
    estimate = price_works(works, problem.cluster.accelerator, calibration=problem.calibration)
    update_s = float(estimate.spread_s[0, 0]) / _PROBE_PARAMETERS
    if not problem.offload.moves_states or problem.cluster.host is None:
        return update_s
    return max(update_s, problem.recipe.optimizer_bytes / problem.cluster.host.bandwidth_bytes_per_s)


def build_stage_costs(
    problem: PlacementProblem,
    space: StageSpace,
    sums: StageSums,
    network: LinkPrices,
    parallelism: Parallelism,
    *,
    update_s: float,
    mixes_tp: bool,
) -> StageCosts:
    """The stages of one strategy, priced for a pipeline of its depth, which decides which links are used.

    ``update_s`` are the seconds of updating one parameter. ``mixes_tp`` says whether stages without a sliced layer take
    a single device.
    """
    stages, overlap = parallelism.pp, problem.calibration.hidden_share
    splits_backward = parallelism.schedule.splits_backward
    stage_sharded_s = _stage_sharded_s(problem, sums, network, parallelism)
    whole_parameters = sums.all_stage_sharded_parameters if stages > 1 else 0.0
    sums = sums.sharded_over_stages(stages)
    received, returned = _transfers_s(sums, network, parallelism)
    devices = np.where(sums.is_sliced | (not mixes_tp), sums.tp, 1)
    sharding = ZeroSharding(
        problem.device_recipe, parallelism.zero, parallelism.shard_devices, parallelism.shard_groups
    )
    axes = [
        _DataAxis(problem, sums, parameters, network, part, part.divided, parallelism.device_count, devices)
        for parameters, part in zip(
            sums.kinds(problem.ep, problem.has_frozen), sharding.by_kind(problem.ep, problem.has_frozen), strict=True
        )
    ]
    gathered, scattered = (
        np.asarray(sum(seconds))
        for seconds in zip(*((axis.gathered_per_pass(), axis.scattered_per_backward()) for axis in axes), strict=True)
    )
    start = np.maximum(returned, sums.recompute_s)
    if splits_backward:
        backward = _overlapped(sums.backward_input_s, gathered, overlap)
    else:
        backward = _overlapped(sums.backward_input_s + sums.backward_weight_s, gathered + scattered, overlap)
    exposed, reduction = _reduction_s(problem, space, sums, axes, splits_backward)
    return StageCosts(
        received_s=received,
        returned_s=returned,
        forward_s=received + _overlapped(sums.forward_s, gathered, overlap),
        backward_s=start + backward,
        weight_s=_overlapped(sums.backward_weight_s, scattered, overlap) if splits_backward else np.zeros_like(start),
        exposed_s=exposed,
        reduction_s=reduction,
        tie_s=_tie_s(problem, sums, network, parallelism) + stage_sharded_s,
        finish_s=np.asarray(sum(axis.updated(update_s) for axis in axes)),
        devices=devices,
        memory=build_memory_table(problem, sums, sharding, whole_parameters, parallelism),
        recompute_s=sums.recompute_s,
    )


def _overlapped(layers_s: FloatArray, collectives_s: FloatArray, overlap: float) -> FloatArray:
    """A pass and the collectives behind it: the longer, and what of the shorter is not hidden."""
    return np.asarray(np.maximum(layers_s, collectives_s) + (1 - overlap) * np.minimum(layers_s, collectives_s))


def _send_parts(price: Price, gather: Price, tp: int, sizes: FloatArray, whole: FloatArray) -> FloatArray:
    """Seconds of sending everything, or of sending what is whole in parts and gathering it, whichever is less."""
    apart = _send(price, sizes - whole * (1 - 1 / tp)) + _send(gather, whole)
    return np.minimum(_send(price, sizes), apart)


def _send(price: Price, sizes: FloatArray) -> FloatArray:
    """Seconds of one message or collective of each size; nothing where there is nothing to send."""
    return np.where(sizes > 0, price.latency_s + price.s_per_byte * sizes, 0.0)


def _transfers_s(sums: StageSums, network: LinkPrices, parallelism: Parallelism) -> tuple[FloatArray, FloatArray]:
    """Seconds of receiving the activation and the gradient, per stage."""
    used, stride = parallelism.device_count, parallelism.replicas * sums.tp
    transfer = network.between_stages(Collective.POINT_TO_POINT, 2, parallelism.pp, stride, used)
    gather = network.collective(Collective.ALL_GATHER, sums.tp, 1, used)
    return (
        _send_parts(transfer, gather, sums.tp, sums.received_bytes, sums.received_whole_bytes),
        _send_parts(transfer, gather, sums.tp, sums.sent_bytes, sums.sent_whole_bytes),
    )


def _tie_s(problem: PlacementProblem, sums: StageSums, network: LinkPrices, parallelism: Parallelism) -> FloatArray:
    """Seconds of reducing the gradients of ties between stages, as many as can hold a part of each tie."""
    seconds = np.zeros(len(sums.parameters))
    size, stages, stride = problem.recipe.reduction_bytes, parallelism.pp, parallelism.replicas * sums.tp
    # In the shape of a V the first and the last stage are on one device: what only they share is added up there.
    free = problem.graph.ties_of_ends if parallelism.schedule.is_v_shaped else frozenset()
    for (name, members), parameters in zip(problem.graph.ties.items(), sums.split_ties, strict=True):
        if name in free:
            continue
        holders = min(len(set(members)), stages)
        price = network.between_stages(Collective.ALL_REDUCE, holders, stages, stride, parallelism.device_count)
        seconds += _send(price, size * parameters)
    return seconds


def _stage_sharded_s(
    problem: PlacementProblem, sums: StageSums, network: LinkPrices, parallelism: Parallelism
) -> float:
    """Seconds of gathering parameters that are sharded over stages, and of scattering their gradients."""
    recipe, stages = problem.recipe, parallelism.pp
    if stages == 1 or not sums.all_stage_sharded_parameters:
        return 0.0
    stride, used = parallelism.replicas * sums.tp, parallelism.device_count
    gather, scatter = (
        network.between_stages(kind, stages, stages, stride, used)
        for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    gathered, scattered = (
        np.array([bytes_each]) * sums.all_stage_sharded_parameters
        for bytes_each in (recipe.parameter_bytes, recipe.reduction_bytes)
    )
    return float(_send(gather, gathered)[0] + _send(scatter, scattered)[0])


def _reduction_s(
    problem: PlacementProblem, space: StageSpace, sums: StageSums, axes: Sequence[_DataAxis], splits_backward: bool
) -> tuple[FloatArray, FloatArray]:
    """What reductions exceed the last pass by, per (mode, stage), and all of them, per stage."""
    shape = sums.forward_s.shape
    exposed, whole = np.zeros(shape), np.zeros(shape[1])
    if not any(axis.is_reduced for axis in axes):
        return exposed, whole
    overlap_s = sums.layer_weight_s if splits_backward else sums.layer_backward_s
    part = problem.calibration.hidden_share
    for single in (False, True):
        chosen = (axes[0].devices < sums.tp) == single
        if not chosen.any():
            continue
        layers, tied = (
            np.asarray(sum(seconds)) for seconds in zip(*(axis.reduced_layers(single) for axis in axes), strict=True)
        )
        total = space.sums(layers)
        excess = space.exposed(layers, overlap_s) if problem.overlaps_reduction else total
        excess = part * excess + (1 - part) * total
        whole = np.where(chosen, total + tied, whole)
        exposed = np.where(chosen, excess + tied, exposed)
    return exposed, whole


@dataclass(frozen=True, slots=True)
class _DataAxis:
    """Collectives between devices that hold copies or shards of one kind of parameters of a stage.

    They are every ``stride``-th of those that run the same part of the stage, which lie tp devices apart; a stage on
    one device has its copies side by side.
    """

    problem: PlacementProblem
    sums: StageSums
    parameters: ParameterSums
    network: LinkPrices
    sharding: ZeroSharding
    stride: int
    used: int
    devices: IntArray

    def _prices(self, tp: int) -> DataPrices:
        """Prices of stages on so many devices."""
        sharding = self.sharding
        shard, groups = int(sharding.shard), int(sharding.groups)
        return self.network.data_prices(int(sharding.zero), shard, groups, self.stride * tp, self.used)

    def _by_stage(self, name: str) -> tuple[FloatArray, FloatArray]:
        """Latency and seconds per byte of one of the `DataPrices` on every stage."""
        wide, single = (getattr(self._prices(tp), name) for tp in (self.sums.tp, 1))
        is_single = self.devices < self.sums.tp
        return (
            np.where(is_single, single.latency_s, wide.latency_s),
            np.where(is_single, single.s_per_byte, wide.s_per_byte),
        )

    def _per_pass(self, name: str, bytes_each: float) -> FloatArray:
        """One collective for each layer of the stage; none where it has no bytes to move."""
        if not bytes_each:
            return np.zeros(len(self.devices))
        latency, rate = self._by_stage(name)
        return latency * self.parameters.layers + rate * (bytes_each * self.parameters.summed_parameters)

    def gathered_per_pass(self) -> FloatArray:
        """g of this kind, per stage."""
        return self._per_pass("gather", float(self.sharding.gathered_bytes_per_pass))

    def scattered_per_backward(self) -> FloatArray:
        """h of this kind, per stage."""
        return self._per_pass("scatter", float(self.sharding.scattered_bytes_per_backward))

    def updated(self, update_s: float) -> FloatArray:
        """The update, and one gather of what it updated, per stage, or a broadcast of each owner's tensors."""
        parameters = self.parameters.parameters
        latency, rate = self._by_stage("gather")
        sizes = self.sharding.gathered_bytes_per_batch * parameters
        gathered = np.where(sizes > 0, latency + rate * sizes + self._broadcasts_fill_s(), 0.0)
        update_s *= self.sharding.recipe.trains
        return np.asarray(parameters * (update_s / self.sharding.optimizer_shards) + gathered)

    def _broadcasts_fill_s(self) -> FloatArray:
        """What the broadcasts of all owners of tensors take beside their bytes, per stage."""
        wide, single = (self._prices(tp).fill_s for tp in (self.sums.tp, 1))
        owners = np.minimum(self.parameters.trained_tensors, float(self.sharding.shard))
        return np.asarray(owners * np.where(self.devices < self.sums.tp, single, wide))

    @property
    def is_reduced(self) -> bool:
        """Whether something is reduced after the last backward."""
        has_copies = int(self.sharding.shard) * int(self.sharding.groups) > 1
        return has_copies and float(self.sharding.reduced_bytes_per_batch) > 0

    def reduced_layers(self, single: bool) -> tuple[FloatArray, FloatArray]:
        """Reductions after the last backward per layer, and those of tied parameters per stage."""
        size = float(self.sharding.reduced_bytes_per_batch) * self.is_reduced
        price = self._prices(1 if single else self.sums.tp).reduction
        layers = _send(price, size * self.parameters.layer_parameters)
        tied = price.latency_s * self.parameters.tied_groups * (size > 0)
        return layers, tied + price.s_per_byte * size * self.parameters.tied_parameters
