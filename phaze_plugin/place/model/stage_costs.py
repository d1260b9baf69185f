"""Times and memory of every stage once width, pipelines and ZeRO stage are chosen.

With sums over the stage's layers: f forward, b the input and w the weight part of backward, r recompute; x and y the
seconds of receiving the activation and the gradient; g gathering parameters (ZeRO-3, once per pass) and h scattering
gradients (ZeRO-2 and 3, once per microbatch), both hidden behind the layers as far as these last:

    F = x + max(f, g)             B = max(y, r) + max(b + w, g + h)
    split backward (zero-bubble): B = max(y, r) + max(b, g),  W = max(w, h)

A calibration's overlap o says which part of what could be hidden is: each max(p, q) of a pass and its collectives is
then max(p, q) + (1 - o) min(p, q), and the reductions below are o times exposed, 1 - o times as long as they take.

A tensor that t devices hold whole is sent in t parts, one by each, and gathered behind (Narayanan et al., SC'21,
section 4.1), where that is quicker than sending all of it t times.

After the last backward: reduction over pipelines (ZeRO-0: all-reduce, ZeRO-1: reduce-scatter, per layer and hidden
behind the last backward as in `StageSpace.exposed`; tied parameters come after the others), then, with ties, the
reduction between stages, the update (over d from ZeRO-1 on) and the gather of updated parameters (ZeRO-1 and 2).

Parameters that are spread over stages are gathered before and their gradients scattered behind all passes, where stages
wait for each other as with ties; then each stage has its part of them to reduce and to update.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phaze.cost import Collective, price_works, update_work
from phaze.place.memory.device_memory import MemoryTable, build_memory_table
from phaze.place.model.network_prices import Network, Price
from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import FloatArray, IntArray, StageSpace
from phaze.place.model.stage_sums import StageSums
from phaze.place.model.zero_sharding import ZeroSharding

__all__ = ["StageCosts", "build_stage_costs", "update_s_per_parameter"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Every stage of one (width, pipelines, ZeRO stage), per (mode, stage) unless said otherwise.

    Attributes:
        received_s: x, per stage.
        returned_s: y, per stage.
        forward_s: F.
        backward_s: B, without the weights' part where that is split off.
        weight_s: W, or 0.
        exposed_s: reduction beyond the last B, or beyond the last W where that is split off.
        reduction_s: all of the reduction, per stage.
        tie_s: reduction between stages that share parameters, gather and scatter of spread ones, per stage.
        finish_s: update and gather, per stage.
        devices: how many devices one copy of the stage takes, per stage.
        memory: the items of memory.
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


def update_s_per_parameter(problem: PlacementProblem) -> float:
    """Seconds that updating one parameter takes on one device."""
    probe = 1 << 30
    works = [update_work(problem.recipe, probe, stack=problem.calibration.stack)]
    estimate = price_works(works, problem.cluster.accelerator, calibration=problem.calibration)
    return float(estimate.spread_s[0, 0]) / probe


def build_stage_costs(
    problem: PlacementProblem,
    space: StageSpace,
    table: StageSums,
    network: Network,
    *,
    dp: int,
    zero: int,
    stages: int,
    update_s: float,
    mixes_tp: bool,
    splits_backward: bool,
) -> StageCosts:
    """The stages of one choice, priced for pipelines of ``stages`` devices: these decide which links are used."""
    used = dp * table.tp * stages
    spread_s = _spread_s(problem, table, network, dp, stages, used)
    whole_parameters = table.all_stage_sharded_parameters if stages > 1 else 0.0
    table = table.sharded_over_stages(stages)
    transfer = network.between_stages(Collective.POINT_TO_POINT, 2, stages, dp * table.tp, used)
    gather = network.collective(Collective.ALL_GATHER, table.tp, 1, used)
    received = _send_parts(transfer, gather, table.tp, table.received_bytes, table.received_whole_bytes)
    returned = _send_parts(transfer, gather, table.tp, table.sent_bytes, table.sent_whole_bytes)
    devices = np.where(table.is_sliced | (not mixes_tp), table.tp, 1)
    sharding = ZeroSharding(problem.recipe, zero, dp)
    axis = _DataAxis(problem, table, network, dp, used, devices)
    gathered = axis.per_pass(Collective.ALL_GATHER, float(sharding.gathered_bytes_per_pass))
    scattered = axis.per_pass(Collective.REDUCE_SCATTER, float(sharding.scattered_bytes_per_backward))
    start = np.maximum(returned, table.recompute_s)
    overlap = problem.calibration.overlap
    if splits_backward:
        backward = _together(table.backward_input_s, gathered, overlap)
    else:
        backward = _together(table.backward_input_s + table.backward_weight_s, gathered + scattered, overlap)
    exposed, reduction = axis.reduction(space, sharding, splits_backward)
    finish = table.parameters * (update_s / sharding.optimizer_shards)
    finish = finish + axis.once(Collective.ALL_GATHER, sharding.gathered_bytes_per_batch * table.parameters)
    return StageCosts(
        received_s=received,
        returned_s=returned,
        forward_s=received + _together(table.forward_s, gathered, overlap),
        backward_s=start + backward,
        weight_s=_together(table.backward_weight_s, scattered, overlap) if splits_backward else np.zeros_like(start),
        exposed_s=exposed,
        reduction_s=reduction,
        tie_s=_tie_s(problem, table, network, dp, stages, used) + spread_s,
        finish_s=finish,
        devices=devices,
        memory=build_memory_table(problem, table, dp, zero, whole_parameters),
    )


def _together(run: FloatArray, moved: FloatArray, overlap: float) -> FloatArray:
    """A pass and the collectives behind it: the longer, and what of the shorter is not hidden."""
    return np.asarray(np.maximum(run, moved) + (1 - overlap) * np.minimum(run, moved))


def _send_parts(price: Price, gather: Price, tp: int, sizes: FloatArray, whole: FloatArray) -> FloatArray:
    """Sending everything, or of what is whole one part by each device and gathering it behind."""
    apart = _send(price, sizes - whole * (1 - 1 / tp)) + _send(gather, whole)
    return np.minimum(_send(price, sizes), apart)


def _send(price: Price, sizes: FloatArray) -> FloatArray:
    return np.where(sizes > 0, price.latency_s + price.s_per_byte * sizes, 0.0)


def _tie_s(
    problem: PlacementProblem, table: StageSums, network: Network, dp: int, stages: int, used: int
) -> FloatArray:
    """Seconds of reducing shared gradients between stages, as many as a tie can be spread over."""
    seconds = np.zeros(len(table.parameters))
    size = problem.recipe.reduction_bytes
    for members, parameters in zip(problem.graph.ties.values(), table.split_ties, strict=True):
        holders = min(len(set(members)), stages)
        price = network.between_stages(Collective.ALL_REDUCE, holders, stages, dp * table.tp, used)
        seconds += _send(price, size * parameters)
    return seconds


def _spread_s(problem: PlacementProblem, table: StageSums, network: Network, dp: int, stages: int, used: int) -> float:
    """Seconds of gathering what is spread over stages, and of scattering its gradients."""
    recipe, stride = problem.recipe, dp * table.tp
    if stages == 1 or not table.all_stage_sharded_parameters:
        return 0.0
    gather, scatter = (
        network.between_stages(kind, stages, stages, stride, used)
        for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    sizes = np.array([recipe.parameter_bytes, recipe.reduction_bytes]) * table.all_stage_sharded_parameters
    return float(_send(gather, sizes[:1])[0] + _send(scatter, sizes[1:])[0])


@dataclass(frozen=True, slots=True)
class _DataAxis:
    """Collectives between the copies of a stage; a stage on one device has its copies side by side."""

    problem: PlacementProblem
    table: StageSums
    network: Network
    dp: int
    used: int
    devices: IntArray

    def _by_stage(self, collective: Collective) -> tuple[FloatArray, FloatArray]:
        """Latency and seconds per byte of every stage."""
        wide, single = (
            self.network.collective(collective, self.dp, stride, self.used) for stride in (self.table.tp, 1)
        )
        is_single = self.devices < self.table.tp
        return (
            np.where(is_single, single.latency_s, wide.latency_s),
            np.where(is_single, single.s_per_byte, wide.s_per_byte),
        )

    def per_pass(self, collective: Collective, bytes_each: float) -> FloatArray:
        """One collective for each layer of the stage; none where it has no bytes to move."""
        if not bytes_each:
            return np.zeros(len(self.devices))
        latency, rate = self._by_stage(collective)
        return latency * self.table.parameter_layers + rate * (bytes_each * self.table.summed_parameters)

    def once(self, collective: Collective, sizes: FloatArray) -> FloatArray:
        """One collective for the whole stage."""
        latency, rate = self._by_stage(collective)
        return np.where(sizes > 0, latency + rate * sizes, 0.0)

    def reduction(
        self, space: StageSpace, sharding: ZeroSharding, splits_backward: bool
    ) -> tuple[FloatArray, FloatArray]:
        """What exceeds the last pass per (mode, stage), and the whole reduction per stage."""
        shape = self.table.forward_s.shape
        collective, size = Collective.ALL_REDUCE, float(sharding.all_reduced_bytes_per_batch)
        if not size:
            collective, size = Collective.REDUCE_SCATTER, float(sharding.scattered_bytes_per_batch)
        if self.dp == 1 or not size:
            return np.zeros(shape), np.zeros(shape[1])
        overlap = self.table.layer_weight_s if splits_backward else self.table.layer_backward_s
        exposed, whole = np.zeros(shape), np.zeros(shape[1])
        for single in (False, True):
            chosen = (self.devices < self.table.tp) == single
            if not chosen.any():
                continue
            price = self.network.collective(collective, self.dp, 1 if single else self.table.tp, self.used)
            layers = _send(price, size * self.table.layer_parameters)
            tied = price.latency_s * self.table.tied_groups + price.s_per_byte * size * self.table.tied_parameters
            total = space.sums(layers)
            whole = np.where(chosen, total + tied, whole)
            excess = space.exposed(layers, overlap) if self.problem.overlaps_reduction else total
            part = self.problem.calibration.overlap
            excess = part * excess + (1 - part) * total
            exposed = np.where(chosen, excess + tied, exposed)
        return exposed, whole
