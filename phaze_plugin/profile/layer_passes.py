"""From a sharded layer to what placement reads: its slice is priced and scheduled, its bytes are counted.

Forward, backward and what is computed again are scheduled as passes of their own, collectives as links. The part of
backward that makes gradients of inputs is what leads to a gradient that leaves the layer; the rest makes gradients of
parameters, and its time is what the whole backward takes longer than that part. Bounds follow: the two parts' bounds
add up to no more than the whole's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phaze.cost import Collective
from phaze.hardware import AcceleratorArray
from phaze.ir import (
    SEARCHED_MODES,
    Graph,
    Layer,
    Op,
    OpKind,
    Phase,
    RecomputeMode,
    Role,
    kept_tensors,
    recomputed_ops,
)
from phaze.ir.layers import single_layer
from phaze.profile.layer_jobs import PricedPass, price_pass
from phaze.profile.layer_profile import (
    BoundaryTensor,
    Bounded,
    Flow,
    LayerProfile,
    PlacementGraph,
    PlacementLayer,
)
from phaze.schedule import Compatibility, Resource, Schedule, ScheduleCache, exposed_link_s, schedule_layer
from phaze.shard import WHOLE, ShardedLayer, slice_layer
from phaze.solvers import SolverChain

if TYPE_CHECKING:
    from phaze.interfaces import OpPricer

__all__ = [
    "LayerReport",
    "PassReport",
    "ProfileOptions",
    "layer_outputs",
    "layer_parameter_bytes",
    "leading_to_inputs",
    "least_pass_seconds",
    "peak_working_bytes",
    "placement_graph",
    "priced_pass",
    "profile_and_report",
    "profile_layer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How the passes of a layer are priced and scheduled.

    Attributes:
        is_fused: whether elementwise epilogues are fused into the matrix op before them.
        gap: the relative gap to which schedules are proven.
        work: the work (see `schedule_layer`) after which a schedule keeps the gap that it has; None for no limit.
        prices: prices of ops that plugins bring.
        cache: schedules that were found so far.
        gradient_bytes: bytes per parameter in which the gradients of microbatches are summed.
        modes: recompute modes to profile; no recompute comes first.
        trims_recompute: whether full recompute leaves out what backward does not read.
        solver: the solver on which the paper's integer program schedules; None for the exact search.
    """

    is_fused: bool = True
    gap: float = 0.01
    work: int | None = None
    prices: Mapping[str, OpPricer] | None = None
    cache: ScheduleCache = field(default_factory=ScheduleCache)
    gradient_bytes: float = 0.0
    modes: tuple[RecomputeMode, ...] = SEARCHED_MODES
    trims_recompute: bool = False
    solver: SolverChain | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """One pass of one microbatch on one device: its time, energy, that of its links, and links that nothing hides.

    `ops` counts what was scheduled and `method` says how; both are empty for a pass that does nothing.
    """

    time_s: float = 0.0
    bound_s: float = 0.0
    energy_j: float = 0.0
    link_energy_j: float = 0.0
    exposed_link_s: float = 0.0
    ops: int = 0
    method: str = ""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The passes behind a profile."""

    forward: PassReport
    backward: PassReport
    recompute: PassReport


def profile_layer(sharded: ShardedLayer, mode: RecomputeMode, options: ProfileOptions | None = None) -> LayerProfile:
    """One microbatch of a sharded layer on one device."""
    return profile_and_report(sharded, (mode,), options or ProfileOptions())[mode][0]


def profile_and_report(
    sharded: ShardedLayer, modes: Sequence[RecomputeMode], options: ProfileOptions
) -> dict[RecomputeMode, tuple[LayerProfile, LayerReport]]:
    """One microbatch of a sharded layer on one device, under each recompute mode."""
    local = slice_layer(sharded)
    layer = single_layer(local)
    forward = _schedule(sharded, local, layer.forward, options)
    backward = _schedule(sharded, local, layer.backward, options)
    to_inputs, to_weights = _backward_parts(
        backward, _schedule(sharded, local, leading_to_inputs(local, layer), options)
    )
    to_weights = _later(to_weights, _accumulation_s(sharded, local, options))
    tied = sharded.problem.graph.layer_graph.tied_parameters
    found = {}
    for mode in modes:
        ops = recomputed_ops(local, layer, mode, is_trimmed=options.trims_recompute)
        again = _schedule(sharded, local, ops, options)
        profile = LayerProfile(
            forward_s=_timed(forward),
            backward_input_s=to_inputs,
            backward_weight_s=to_weights,
            recompute_s=_timed(again),
            parameter_bytes=layer_parameter_bytes(local),
            stashed_bytes=_bytes(local, kept_tensors(local, layer, mode)),
            peak_working_bytes=peak_working_bytes(local, layer, mode, is_trimmed=options.trims_recompute),
            outputs=layer_outputs(sharded),
            is_tensor_parallel=sharded.problem.axis.tp > 1,
            tied_parameters={name: local.tensors[name].elements for name in tied if name in local.tensors},
        )
        reports = [_report(sharded, local, schedule) for schedule in (forward, backward, again)]
        found[mode] = (profile, LayerReport(*reports))
    return found


def _accumulation_s(sharded: ShardedLayer, local: Graph, options: ProfileOptions) -> float:
    """Seconds of adding a microbatch's gradients to their sum: read the new ones, read and write the sum."""
    axis = sharded.problem.axis
    if axis.calibration.stack.accumulates_in_products or not options.gradient_bytes:
        return 0.0
    moved = sum(
        tensor.size_bytes + 2 * options.gradient_bytes * tensor.elements
        for tensor in local.parameters
        if tensor.dtype.is_float
    )
    return moved / (axis.cluster.accelerator.hbm_bandwidth_bytes_per_s * axis.calibration.memory)


def _later(seconds: Bounded, more_s: float) -> Bounded:
    return Bounded(seconds.value + more_s, seconds.bound + more_s) if more_s else seconds


def _report(sharded: ShardedLayer, local: Graph, schedule: Schedule | None) -> PassReport:
    if schedule is None:
        return PassReport()
    links = [
        op for name in (job.name for job in schedule.problem.jobs) if (op := local.op(name)).kind is OpKind.COLLECTIVE
    ]
    alone_s = sum(
        entry.end_s - entry.start_s
        for entry, job in zip(schedule.jobs, schedule.problem.jobs, strict=True)
        if job.resource is not Resource.LINK and local.op(job.name).kind is OpKind.COLLECTIVE
    )
    sent_j = sum(sharded.problem.axis.joules(Collective(op.function), _link_bytes(op)) for op in links)
    return PassReport(
        time_s=schedule.time_s,
        bound_s=schedule.time_bound_s,
        energy_j=schedule.energy_j,
        link_energy_j=sent_j,
        exposed_link_s=exposed_link_s(schedule) + alone_s,
        ops=len(schedule.jobs),
        method=schedule.method,
    )


def placement_graph(graph: Graph, keys: Sequence[str] | None = None) -> PlacementGraph:
    """The layers of a graph, what flows between them, and which share parameters.

    `keys` says which layers share profiles, where equal layers may be sliced in different ways.
    """
    layers = graph.layer_graph
    keys = keys or [layer.key for layer in layers.layers]
    return PlacementGraph(
        layers=tuple(
            PlacementLayer(f"{layer.index}:{layer.name}", key) for layer, key in zip(layers.layers, keys, strict=True)
        ),
        flows=tuple(
            Flow(boundary.producer, boundary.consumers, layers.layers[boundary.producer].outputs.index(boundary.tensor))
            for boundary in layers.boundaries
        ),
        ties=layers.tied_parameters,
    )


def _timed(schedule: Schedule | None) -> Bounded:
    return Bounded.exact(0.0) if schedule is None else _bounded(schedule.time_s, schedule.time_bound_s)


def _bounded(value: float, bound: float) -> Bounded:
    return Bounded(value, min(value, max(0.0, bound)))  # type: ignore[arg-type]


def least_pass_seconds(sharded: ShardedLayer, options: ProfileOptions) -> float:
    """A bound under the forward and backward of one microbatch, without a schedule."""
    local = slice_layer(sharded)
    layer = single_layer(local)
    passes = [priced_pass(sharded, local, ops, options) for ops in (layer.forward, layer.backward) if ops]
    return float(sum(one.lower_bounds(is_tight=False)[0] for one in passes))


def _schedule(sharded: ShardedLayer, local: Graph, ops: Sequence[Op], options: ProfileOptions) -> Schedule | None:
    if not ops:
        return None
    problem = priced_pass(sharded, local, ops, options).problem()
    return schedule_layer(problem, gap=options.gap, work=options.work, solver=options.solver, cache=options.cache)


def priced_pass(
    sharded: ShardedLayer,
    local: Graph,
    ops: Sequence[Op],
    options: ProfileOptions,
    accelerators: AcceleratorArray | None = None,
    compatibility: Compatibility = Compatibility.PHAZE,
) -> PricedPass:
    """Some ops of a sharded layer, priced on its own accelerator or on many others."""
    axis = sharded.problem.axis

    def link_s(op: Op) -> float:
        return axis.seconds(Collective(op.function), _link_bytes(op))

    return price_pass(
        local,
        ops,
        axis.cluster.accelerator if accelerators is None else accelerators,
        name=local.name,
        is_fused=options.is_fused,
        link_s=link_s,
        calibration=axis.calibration,
        prices=options.prices,
        compatibility=compatibility,
    )


def _link_bytes(op: Op) -> float:
    return float(op.collective_bytes)


def _backward_parts(whole: Schedule | None, first: Schedule | None) -> tuple[Bounded, Bounded]:
    """The parts of backward that make gradients of inputs (`first`) and of parameters (the rest of the whole)."""
    if whole is None:
        return Bounded.exact(0.0), Bounded.exact(0.0)
    inputs_s, inputs_bound_s = (first.time_s, first.time_bound_s) if first is not None else (0.0, 0.0)
    inputs_s = min(inputs_s, whole.time_s)
    weights_s = whole.time_s - inputs_s
    return _bounded(inputs_s, inputs_bound_s), _bounded(weights_s, whole.time_bound_s - inputs_s)


def leading_to_inputs(local: Graph, layer: Layer) -> tuple[Op, ...]:
    """Backward ops that a gradient which leaves the layer depends on."""
    wanted = {name for name in local.outputs if (op := local.producer(name)) and op.phase is Phase.BACKWARD}
    for op in reversed(layer.backward):
        if wanted.intersection(op.outputs):
            wanted.update(op.inputs)
    return tuple(op for op in layer.backward if wanted.intersection(op.outputs))


def layer_parameter_bytes(local: Graph) -> dict[str, float]:
    """Bytes of parameters by type."""
    sizes: dict[str, float] = {}
    for tensor in local.parameters:
        sizes[tensor.dtype.value] = sizes.get(tensor.dtype.value, 0.0) + tensor.size_bytes
    return sizes


def _bytes(local: Graph, names: Sequence[str]) -> float:
    return float(sum(local.tensors[name].size_bytes for name in names))


def peak_working_bytes(local: Graph, layer: Layer, mode: RecomputeMode, *, is_trimmed: bool = False) -> float:
    """The most that lives beside parameters, their gradients and what is kept: in forward, or in backward.

    In backward, what is kept or made again is there until it was read for the last time; what other layers keep too
    (what enters this one) stays.
    """
    kept = set(kept_tensors(local, layer, mode))
    gradients = {gradient for _, gradient in local.gradients}
    forward = _peak_alive_bytes(local, layer.forward, kept | gradients)
    own = {name for op in layer.forward for name in op.outputs if name in kept}
    read = {name for op in layer.forward for name in op.inputs}
    entering = [
        name
        for op in layer.backward
        for name in op.inputs
        if local.tensors[name].role is Role.OTHER and name not in read
    ]
    again = (*recomputed_ops(local, layer, mode, is_trimmed=is_trimmed), *layer.backward)
    backward = _peak_alive_bytes(local, again, (kept - own) | gradients, (*own, *entering))
    return max(forward, backward - _bytes(local, tuple(own)), 0.0)


def _peak_alive_bytes(local: Graph, ops: Sequence[Op], stays: set[str], start: Sequence[str] = ()) -> float:
    """The most bytes alive at once when ops run in order and ``start`` is there before them.

    Views take no room, nor does what stays.
    """
    last_use = {local.storage(name): at for at, op in enumerate(ops) for name in (*op.inputs, *op.outputs)}
    alive = {name: local.tensors[name].size_bytes for name in start}
    now = peak = sum(alive.values())
    for at, op in enumerate(ops):
        if op.kind is not OpKind.VIEW:
            for name in op.outputs:
                if name not in stays and name not in alive:
                    alive[name] = local.tensors[name].size_bytes
                    now += alive[name]
        peak = max(peak, now)
        for name in [name for name in alive if last_use.get(name, -1) <= at]:
            now -= alive.pop(name)
    return float(peak)


def layer_outputs(sharded: ShardedLayer) -> tuple[BoundaryTensor, ...]:
    """What leaves a layer, as it lies on one device."""
    task = sharded.problem
    found = []
    for name in task.layer.outputs:
        tensor, layout = task.graph.tensors[name], task.layouts.get(name, WHOLE)
        elements = 1
        for size in layout.local_shape(tensor.shape):
            elements *= size
        found.append(BoundaryTensor(float(elements * tensor.dtype.size_bytes), str(layout)))
    return tuple(found)
