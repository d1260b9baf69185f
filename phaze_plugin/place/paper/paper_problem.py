"""A placement problem as the paper's program reads it, for many accelerators at once, and bounds on its plans.

`paper_instance` converts a problem of the default mode, leaving out what the paper does not count.

Layers form a chain in which extra edges may skip ahead: the paper's program walks through a stage layer by layer and
refuses graphs in which two neighbours are not joined. Times carry an accelerator axis; sizes do not, because slicing a
layer does not depend on the chip.

A `Group` is one choice of recompute and one tp. Its arrays have the layer first and the accelerator last, so that one
numpy call serves all accelerators.

Before any stage is built, each number of stages S gets a bound under the time of its plans (`_time_bounds`). If the
first stage has j layers, the bottleneck V is at least their work plus a transfer, at least the longest layer, and at
least the other layers' work and transfers over S-1. With recompute all but the last stage run forward twice, and the
last one's forward is part of its load: the others' work with two forwards over S-1+q, q the largest part that forward
has in one layer's time, and only received activations are certain to be paid. With P_j the parameters of the first
stage over the bandwidth and r(d) = 4(d-1)/d,

    time >= V (S-1) + min over d of V m/d + r(d) P_j

which is linear in 1/d, so that d = 1 or the largest d decides. Past the first j whose work alone exceeds the even share
nothing improves. Where S stages cannot hold the model the bound is infinite: filled from the end, each stage as full
as its position allows, layers need the fewest stages (`_fewest_stages`; what recomputing stages stash is left out).
Given a target, `Group.refute` fills stages by time in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phaze.errors import GraphError, PlacementError
from phaze.place.model.placement_problem import PlacementProblem
from phaze.profile.layer_profile import RecomputeMode
from phaze.tolerances import BOUND_MARGIN

__all__ = [
    "BoolArray",
    "FloatArray",
    "Group",
    "IntArray",
    "PaperInstance",
    "build_group",
    "build_groups",
    "paper_instance",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaperInstance:
    """What the paper's program places.

    Attributes:
        layer_ids: names of the layers, in the order of the chain.
        tp_degrees: the values of tp that were profiled.
        forward_s: seconds of one forward per (tp, accelerator, layer).
        backward_s: seconds of one backward, recompute not included.
        parameter_bytes: per (tp, layer).
        activation_bytes: all activations of one microbatch per (tp, layer).
        is_tensor_parallel: whether the layer is sliced at that tp, per (tp, layer).
        edges: pairs of positions in the chain.
        edge_bytes: what crosses each edge, per (tp, edge).
        memory_bytes: capacity of one device, per accelerator.
        bandwidth_bytes_per_s: of every link.
        device_count: devices at hand.
        micro_batches: microbatches in one batch, over all pipelines.
        recompute: the choices of activation recomputation to try; the better one wins.
        uses_adam: whether the optimizer keeps a third copy of the parameters.

    Raises:
        PlacementError: a count is below 1, or a size, time or bandwidth is negative, zero where it must not be, or NaN.
        GraphError: there is no layer, an edge goes backward, or the graph branches.
    """

    layer_ids: tuple[int | str, ...]
    tp_degrees: tuple[int, ...]
    forward_s: FloatArray
    backward_s: FloatArray
    parameter_bytes: FloatArray
    activation_bytes: FloatArray
    is_tensor_parallel: BoolArray
    edges: tuple[tuple[int, int], ...]
    edge_bytes: FloatArray
    memory_bytes: FloatArray
    bandwidth_bytes_per_s: float
    device_count: int
    micro_batches: int
    recompute: tuple[bool, ...] = (False,)
    uses_adam: bool = True

    def __post_init__(self) -> None:
        """Check shapes, signs and the chain."""
        if not self.layer_ids:
            raise GraphError("the layer graph is empty; expected at least one layer.")
        self._check_counts()
        degrees, accelerators, layers = len(self.tp_degrees), len(self.memory_bytes), len(self.layer_ids)
        for field, shape in (
            ("forward_s", (degrees, accelerators, layers)),
            ("backward_s", (degrees, accelerators, layers)),
            ("parameter_bytes", (degrees, layers)),
            ("activation_bytes", (degrees, layers)),
            ("edge_bytes", (degrees, len(self.edges))),
        ):
            _check_array(field, np.asarray(getattr(self, field)), shape)
        if self.is_tensor_parallel.shape != (degrees, layers):
            raise PlacementError(f"is_tensor_parallel has shape {self.is_tensor_parallel.shape}.")
        self._check_chain()

    def _check_counts(self) -> None:
        """Check counts, the values of tp, the bandwidth and the memory."""
        for field in ("device_count", "micro_batches"):
            if (count := getattr(self, field)) < 1:
                raise PlacementError(f"{field} is {count}; expected at least 1.")
        if not self.tp_degrees or min(self.tp_degrees) < 1 or len(set(self.tp_degrees)) < len(self.tp_degrees):
            raise PlacementError(f"tp_degrees is {self.tp_degrees}; expected distinct whole numbers of at least 1.")
        if not self.bandwidth_bytes_per_s > 0:
            raise PlacementError(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s}; expected a number above 0.")
        if not (np.asarray(self.memory_bytes) > 0).all():
            raise PlacementError(f"memory_bytes is {self.memory_bytes}; expected numbers above 0.")
        if not self.recompute:
            raise PlacementError("recompute is empty; expected False, True or both.")

    def _check_chain(self) -> None:
        """Check that edges lead forward and that neighbours are joined."""
        present = set(self.edges)
        if len(present) < len(self.edges):
            raise GraphError("two edges join the same layers; add their bytes up into one.")
        for source, target in self.edges:
            if not 0 <= source < target < len(self.layer_ids):
                raise GraphError(f"edge {source} -> {target} is not between two layers in the order of the chain.")
        for position in range(len(self.layer_ids) - 1):
            if (position, position + 1) not in present:
                raise GraphError(
                    f"the layer graph branches: {self.layer_ids[position]!r} and {self.layer_ids[position + 1]!r} are "
                    "neighbours without an edge. The paper's program places chains; use the default mode."
                )


def _check_array(field: str, values: FloatArray, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise PlacementError(f"{field} has shape {values.shape}; expected {shape}.")
    wrong = ~(values >= 0) | np.isinf(values)
    if wrong.any():
        raise PlacementError(f"{field} holds {values[wrong][0]}; expected finite numbers of at least 0.")


def paper_instance(problem: PlacementProblem) -> PaperInstance:
    """The problem as the paper's program reads it, for every accelerator that was profiled.

    Schedules, ZeRO, ties, margins and latencies are left out; the outermost links serve for all transfers.

    Raises:
        PlacementError: no profile without recompute, or no links to send over.
    """
    if RecomputeMode.NONE not in problem.choices.recompute:
        raise PlacementError("the paper's program needs profiles without recompute; add recompute mode none.")
    layers, tp_degrees = range(len(problem.graph.layers)), problem.tp_degrees
    rows = [[problem.profile(layer, tp, RecomputeMode.NONE) for layer in layers] for tp in tp_degrees]
    pairs = sorted({(flow.producer, consumer) for flow in problem.graph.flows for consumer in flow.consumers})
    sizes = np.zeros((len(tp_degrees), len(pairs)))
    for flow in problem.graph.flows:
        for consumer in flow.consumers:
            for index, profiles in enumerate(rows):
                sizes[index, pairs.index((flow.producer, consumer))] += (
                    profiles[flow.producer].outputs[flow.output].size_bytes
                )
    levels, accelerator = problem.cluster.levels, problem.cluster.accelerator
    forward, backward_input, weight = (
        np.array([[getattr(profile, name).value for profile in profiles] for profiles in rows]).transpose(0, 2, 1)
        for name in ("forward_s", "backward_input_s", "backward_weight_s")
    )
    return PaperInstance(
        layer_ids=tuple(layer.name for layer in problem.graph.layers),
        tp_degrees=tp_degrees,
        forward_s=forward,
        backward_s=backward_input + weight,
        parameter_bytes=np.array(
            [[sum(profile.parameter_bytes.values()) for profile in profiles] for profiles in rows]
        ),
        activation_bytes=np.array([[profile.stashed_bytes for profile in profiles] for profiles in rows]),
        is_tensor_parallel=np.array([[profile.is_tensor_parallel for profile in profiles] for profiles in rows]),
        edges=tuple(pairs),
        edge_bytes=sizes,
        memory_bytes=np.full(forward.shape[1], float(accelerator.hbm_bytes)),
        bandwidth_bytes_per_s=levels[-1].bandwidth_bytes_per_s if levels else 1.0,
        device_count=problem.cluster.device_count,
        micro_batches=problem.micro_batches,
        recompute=(False, True) if RecomputeMode.FULL in problem.choices.recompute else (False,),
        uses_adam=problem.recipe.state_bytes > 0,
    )


_LARGEST_TARGET_S = 1e300
"""Stands for an infinite target, so that its quotient with an infinite count is not NaN."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """One choice of recompute and one tp on some accelerators.

    Attributes:
        recompute: whether all stages but the last recompute.
        tp: devices that sliced layers are split over.
        unit: devices of a stage that holds a sliced layer: tp, or 1 if no layer is sliced.
        single_run: how many layers from i on are not sliced, where some layers are and some are not: a stage within
            such a run takes one device. Zeros otherwise.
        forward_s: seconds per (layer, accelerator).
        backward_s: the same, of backward.
        parameter_bytes: per layer.
        activation_bytes: per layer.
        held_bytes: per layer, parameters as often as the optimizer needs them, and activations.
        edge_bytes: per edge.
        transfer_s: the least that any boundary between stages costs in one direction.
        accelerator: indices into the instance's accelerators.
        capacity_bytes: per accelerator.
        slots: per S, ceil(microbatches/d) + S - 1 with the largest d; infinite where devices do not suffice.
        bound_s: per (S, accelerator), a bound under the time of every plan of S stages.
    """

    recompute: bool
    tp: int
    unit: int
    single_run: IntArray
    forward_s: FloatArray
    backward_s: FloatArray
    parameter_bytes: FloatArray
    activation_bytes: FloatArray
    held_bytes: FloatArray
    edge_bytes: FloatArray
    transfer_s: float
    accelerator: IntArray
    capacity_bytes: FloatArray
    slots: FloatArray
    bound_s: FloatArray

    @property
    def single_limit(self) -> int:
        """How many stages can take one device although tp is larger."""
        return int((self.single_run > 0).sum())

    def keep(self, alive: BoolArray) -> Group:
        """The same on fewer accelerators."""
        if alive.all():
            return self
        names = ("forward_s", "backward_s", "accelerator", "capacity_bytes", "bound_s")
        return replace(self, **{name: getattr(self, name)[..., alive] for name in names})

    def caps(self, target_s: FloatArray) -> FloatArray:
        """Per (S, accelerator): the largest bottleneck of a plan of S or more stages that beats the target, or -1."""
        slots = np.where(self.bound_s < target_s, self.slots[:, None], np.inf)
        least = np.minimum.accumulate(slots[::-1], axis=0)[::-1]
        return np.where(np.isfinite(least), np.minimum(target_s, _LARGEST_TARGET_S) / least, -1.0)

    def refute(self, target_s: FloatArray) -> Group:
        """Raise to infinity the bounds of stage counts that cannot beat the target, by filling stages from the end.

        With one least transfer per stage, a stage below the cap stays below it after losing a layer, so that filling
        each stage as far as the cap allows needs the fewest stages.
        """
        stages, lane = np.nonzero((self.bound_s < target_s)[2:])
        stages += 2
        once = (self.forward_s + self.backward_s)[:, lane]
        again = once + self.forward_s[:, lane] if self.recompute else once
        cap_s = target_s[lane] / self.slots[stages] * (1 + BOUND_MARGIN)
        cap_s -= 0.0 if self.recompute else self.transfer_s * (1 - BOUND_MARGIN)
        used = np.ones(len(lane), dtype=np.int64)
        load = np.zeros(len(lane))
        for layer in range(len(once) - 1, -1, -1):
            load += np.where(used == 1, once[layer], again[layer]) if self.recompute else once[layer]
            over = load > cap_s
            used += over
            np.copyto(load, again[layer], where=over)
        bound = self.bound_s.copy()
        bound[stages[used > stages], lane[used > stages]] = np.inf
        return replace(self, bound_s=bound)


def build_groups(instance: PaperInstance, part: slice) -> list[Group]:
    """All groups on some accelerators, the one with the lowest bound first."""
    groups = [
        build_group(instance, recompute, index, part)
        for recompute in dict.fromkeys(instance.recompute)
        for index in range(len(instance.tp_degrees))
    ]
    return sorted(groups, key=lambda group: float(group.bound_s.min(axis=0).mean()))


def build_group(instance: PaperInstance, recompute: bool, index: int, part: slice) -> Group:
    """The group of one recompute choice and one tp (by index)."""
    sliced = instance.is_tensor_parallel[index]
    unit = instance.tp_degrees[index] if sliced.any() else 1
    runs = _single_runs(sliced)
    stages = np.arange(min(instance.device_count, len(sliced)) + 1)
    singles = np.minimum(stages, (runs > 0).sum())
    devices = np.maximum(unit * (stages - singles) + singles, 1)
    dp = np.minimum(instance.device_count // devices, instance.micro_batches)
    per_pipeline = -(-instance.micro_batches // np.maximum(dp, 1))
    parameters, activations = instance.parameter_bytes[index], instance.activation_bytes[index]
    held = (3.0 if instance.uses_adam else 2.0) * parameters + activations
    capacity = instance.memory_bytes[part]
    capacities, which = np.unique(capacity, return_inverse=True)
    stash = np.zeros_like(activations) if recompute else activations
    fewest = np.array([_fewest_stages(held.tolist(), stash.tolist(), size) for size in capacities.tolist()])[which]
    impossible = (stages[:, None] < fewest) | (dp < 1)[:, None]
    group = Group(
        recompute=recompute,
        tp=instance.tp_degrees[index],
        unit=unit,
        single_run=runs,
        forward_s=np.ascontiguousarray(instance.forward_s[index, part].T),
        backward_s=np.ascontiguousarray(instance.backward_s[index, part].T),
        parameter_bytes=parameters,
        activation_bytes=activations,
        held_bytes=held,
        edge_bytes=instance.edge_bytes[index],
        transfer_s=_least_transfer_s(instance, index),
        accelerator=np.arange(len(instance.memory_bytes))[part],
        capacity_bytes=capacity,
        slots=np.where(dp > 0, per_pipeline + stages - 1.0, np.inf),
        bound_s=np.where(impossible, np.inf, 0.0),
    )
    bound = _time_bounds(instance, group, np.maximum(dp, 1)) * (1 - BOUND_MARGIN)
    return replace(group, bound_s=np.maximum(group.bound_s, bound))


def _fewest_stages(held: list[float], stash: list[float], capacity: float) -> int:
    """How many stages hold the layers at least; more than there are layers if no number does."""
    used, full, stashed = 1, 0.0, 0.0
    limit = capacity * (1 + BOUND_MARGIN)
    for layer in range(len(held) - 1, -1, -1):
        full, stashed = full + held[layer], stashed + stash[layer]
        if full + (used - 1) * stashed > limit:
            used, full, stashed = used + 1, held[layer], stash[layer]
            if full + (used - 1) * stashed > limit:
                return len(held) + 1
    return used


def _least_transfer_s(instance: PaperInstance, index: int) -> float:
    """What the cheapest boundary at one tp costs; 0 where a single layer has none."""
    edges = np.array(instance.edges, dtype=np.int64).reshape(-1, 2)
    sizes = instance.edge_bytes[index, edges[:, 1] == edges[:, 0] + 1]
    return float(sizes.min()) / instance.bandwidth_bytes_per_s if len(sizes) else 0.0


def _single_runs(sliced: BoolArray) -> IntArray:
    """`Group.single_run`: how many layers from each on are not sliced, where some are and some are not."""
    runs = np.zeros(len(sliced) + 1, dtype=np.int64)
    if sliced.any() and not sliced.all():
        for layer in range(len(sliced) - 1, -1, -1):
            runs[layer] = 0 if sliced[layer] else runs[layer + 1] + 1
    return runs[:-1]


def _time_bounds(instance: PaperInstance, group: Group, dp: IntArray) -> FloatArray:
    """The bound per (S, accelerator), without the test of memory."""
    once = group.forward_s + group.backward_s
    again = once + group.forward_s if group.recompute else once
    transfer = group.transfer_s
    first, total = np.cumsum(again, axis=0), again.sum(axis=0)
    limit, layers = len(group.slots) - 1, len(once)
    shares = (first / np.maximum(total, np.finfo(float).tiny)).min(axis=1)
    lengths = np.minimum(np.searchsorted(shares, 1 / np.arange(1, limit + 1)) + 1, layers)
    lengths[0] = 1
    starts = np.cumsum(lengths) - lengths
    stages = np.repeat(np.arange(1, limit + 1), lengths)
    taken = np.arange(len(stages)) - np.repeat(starts, lengths)
    taken[0] = layers - 1
    paid = stages - 1 if group.recompute else np.maximum(2 * stages - 3, 0)
    bottleneck = (total + transfer * paid[:, None]) - first[taken]
    others = np.maximum(stages - 1, 1)[:, None]
    if group.recompute:
        others = others + (group.forward_s / np.maximum(once, np.finfo(float).tiny)).max(axis=0)
    bottleneck /= others
    np.maximum(bottleneck, (first + (0.0 if group.recompute else transfer))[taken], out=bottleneck)
    np.maximum(bottleneck, once.max(axis=0), out=bottleneck)
    bottleneck[0] = once.sum(axis=0)
    parameters = np.cumsum(group.parameter_bytes)[taken, None] / instance.bandwidth_bytes_per_s
    share = (1 / dp)[stages, None]
    time = bottleneck * (share * instance.micro_batches) + 4.0 * (1 - share) * parameters
    np.minimum(time, bottleneck * instance.micro_batches, out=time)
    time += bottleneck * (stages - 1)[:, None]
    return np.concatenate([np.zeros((1, time.shape[1])), np.minimum.reduceat(time, starts, axis=0)])
