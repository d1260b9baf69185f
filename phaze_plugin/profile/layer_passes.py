"""The `LayerProfile` of a sharded layer: its forward, backward and recompute passes are priced and scheduled.

Each pass is scheduled on its own, with collectives as jobs on the link. Backward is divided in two
(`_backward_parts`). The first part consists of the ops that lead to a gradient which leaves the layer
(`leading_to_inputs`); its time is that of their own schedule. The second part makes the gradients of parameters; its
time is what the whole backward takes longer than the first part. The bounds of the two parts add up to no more than
the bound of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from phaze.cost import PriceTables, Work
from phaze.hardware import AcceleratorArray
from phaze.ir import (
    SEARCHED_MODES,
    Graph,
    Layer,
    Op,
    OpKind,
    Phase,
    Recomputation,
    RecomputeMode,
    kept_tensors,
    recomputation,
)
from phaze.ir.layers import single_layer
from phaze.ir.recompute_budget import recompute_front, within_budget
from phaze.profile.layer_jobs import PricedPass, price_pass
from phaze.profile.layer_profile import (
    Bounded,
    Flow,
    LayerProfile,
    PlacementGraph,
    PlacementLayer,
    expert_parameters,
    frozen_parameters,
    kept_bytes,
    layer_outputs,
    layer_parameter_bytes,
    moved_at_once,
    peak_working_bytes,
    shared_parameters,
    total_bytes,
    trained_tensors,
)
from phaze.schedule import Compatibility, Method, Resource, Schedule, ScheduleCache, exposed_link_s, schedule_layer
from phaze.shard import ShardedLayer, slice_layer
from phaze.solvers import SolverChain
from phaze.tolerances import PASS_BOUND_MARGIN

if TYPE_CHECKING:
    from phaze.interfaces import OpPricer

__all__ = [
    "LayerReport",
    "PassReport",
    "ProfileOptions",
    "TrainingPasses",
    "leading_to_inputs",
    "op_seconds",
    "placement_graph",
    "priced_pass",
    "profile_and_report",
    "profile_layer",
    "recomputations",
    "training_passes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How the passes of a layer are priced and scheduled.

    Attributes:
        is_fused: whether elementwise epilogues are fused into the matrix op before them.
        gap: the relative gap to which schedules are proven.
        work: the work (see `schedule_layer`) after which a schedule keeps the gap that it has; None for the default
            limit.
        prices: prices of ops that plugins bring.
        cache: schedules that were found so far.
        tables: prices that were found so far.
        profiles: profiles of layers that were made so far (`model_profiles.py`); they hold for one question.
        passes: forward and backward of layers whose profiles are not made yet.
        least_s: the bounds of these, and of those whose profiles were made since.
        gradient_bytes: bytes per parameter in which the gradients of microbatches are summed.
        modes: recompute modes to profile; no recompute comes first.
        trims_recompute: whether full recompute leaves out what backward does not read.
        solver: the solver on which the paper's integer program schedules; None for the exact search.
        is_quick: whether every pass gets no more than a list schedule and a closed-form bound, which are proven to the
            gap where they happen to be near each other. The search that follows otherwise only improves on them.
    """

    is_fused: bool = True
    gap: float = 0.01
    work: int | None = None
    prices: Mapping[str, OpPricer] | None = None
    cache: ScheduleCache = field(default_factory=ScheduleCache)
    tables: PriceTables = field(default_factory=PriceTables)
    profiles: dict[object, dict[RecomputeMode, tuple[LayerProfile, LayerReport]]] = field(default_factory=dict)
    passes: dict[object, TrainingPasses] = field(default_factory=dict)
    least_s: dict[object, float] = field(default_factory=dict)
    gradient_bytes: float = 0.0
    modes: tuple[RecomputeMode, ...] = SEARCHED_MODES
    trims_recompute: bool = False
    solver: SolverChain | None = None
    is_quick: bool = False

    @property
    def what_profiles_depend_on(self) -> tuple[object, ...]:
        """All options but the modes and what is kept from one layer to the next."""
        scheduled = (self.gap, self.work, self.is_quick, None if self.solver is None else self.solver.name)
        return (*scheduled, self.is_fused, id(self.prices), self.gradient_bytes, self.trims_recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """One pass of one microbatch on one device: its time, energy, that of its links, and links that nothing hides.

    `ops` counts what was scheduled, `method` says how and `schedule` when; all are empty for a pass that does nothing.
    """

    time_s: float = 0.0
    bound_s: float = 0.0
    energy_j: float = 0.0
    link_energy_j: float = 0.0
    exposed_link_s: float = 0.0
    ops: int = 0
    method: str = ""
    schedule: Schedule | None = None


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The passes behind a profile, the largest relative gap of their schedules, and the tensors that are kept."""

    forward: PassReport
    backward: PassReport
    recompute: PassReport
    gap: float = 0.0
    kept: tuple[str, ...] = ()


def profile_layer(sharded: ShardedLayer, mode: RecomputeMode, options: ProfileOptions | None = None) -> LayerProfile:
    """One microbatch of a sharded layer on one device."""
    return profile_and_report(sharded, (mode,), options or ProfileOptions())[mode][0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingPasses:
    """Forward and backward of a sharded layer, scheduled: what all recompute modes have in common.

    `works` are those of its groups of ops, and `accumulation_s` are the seconds of adding up gradients.
    """

    local: Graph
    layer: Layer
    works: dict[tuple[str, ...], Work]
    forward: Schedule | None
    backward: Schedule | None
    accumulation_s: float

    @property
    def least_s(self) -> float:
        """No plan runs both passes of a microbatch on a device in less."""
        passes_s = (0.0 if schedule is None else schedule.time_bound_s for schedule in (self.forward, self.backward))
        return sum(passes_s) + self.accumulation_s


def training_passes(sharded: ShardedLayer, options: ProfileOptions) -> TrainingPasses:
    """Forward and backward of one microbatch of a sharded layer on one device."""
    local = slice_layer(sharded)
    layer = single_layer(local)
    works: dict[tuple[str, ...], Work] = {}
    return TrainingPasses(
        local=local,
        layer=layer,
        works=works,
        forward=_schedule(sharded, local, layer.forward, options, works),
        backward=_schedule(sharded, local, layer.backward, options, works),
        accumulation_s=_accumulation_s(sharded, local, options),
    )


def profile_and_report(
    sharded: ShardedLayer,
    modes: Sequence[RecomputeMode],
    options: ProfileOptions,
    passes: TrainingPasses | None = None,
) -> dict[RecomputeMode, tuple[LayerProfile, LayerReport]]:
    """One microbatch of a sharded layer on one device, under each recompute mode; `passes` where they are known."""
    passes = passes or training_passes(sharded, options)
    local, layer, works, forward, backward = passes.local, passes.layer, passes.works, passes.forward, passes.backward
    first = _schedule(sharded, local, leading_to_inputs(local, layer), options, works)
    to_inputs, to_weights = _backward_parts(backward, first)
    to_weights = _later(to_weights, passes.accumulation_s)
    tied = sharded.problem.graph.layer_graph.tied_parameters
    profiles = {}
    for mode, chosen in recomputations(sharded, passes, modes, options).items():
        ops = chosen.again
        again = forward if ops is layer.forward else _schedule(sharded, local, ops, options, works)
        profile = LayerProfile(
            forward_s=_timed(forward),
            backward_input_s=to_inputs,
            backward_weight_s=to_weights,
            recompute_s=_timed(again),
            parameter_bytes=layer_parameter_bytes(local),
            stashed_bytes=kept_bytes(local, layer, chosen, sharded.problem.axis.calibration.stack),
            peak_working_bytes=peak_working_bytes(local, layer, chosen),
            outputs=layer_outputs(sharded),
            is_tensor_parallel=sharded.problem.axis.tp > 1,
            tied_parameters=shared_parameters(local, tied),
            expert_parameters=expert_parameters(local),
            frozen_parameters=frozen_parameters(local),
            frozen_expert_parameters=expert_parameters(local, frozen=True),
            frozen_ties=shared_parameters(local, tied, frozen=True),
            moved_at_once=moved_at_once(local, sharded.problem.axis.cluster.accelerator),
            trained_tensors=trained_tensors(local),
        )
        reports = [_report(sharded, local, schedule) for schedule in (forward, backward, again)]
        gap = max((part.gap for part in (forward, backward, first, again) if part is not None), default=0.0)
        profiles[mode] = (profile, LayerReport(reports[0], reports[1], reports[2], gap, chosen.kept))
    return profiles


def recomputations(
    sharded: ShardedLayer, passes: TrainingPasses, modes: Sequence[RecomputeMode], options: ProfileOptions
) -> dict[RecomputeMode, Recomputation]:
    """What the layer keeps and runs again in each mode; seconds of ops count alone and unfused within a budget."""
    local, layer = passes.local, passes.layer
    named = {
        mode: recomputation(local, layer, mode, is_trimmed=options.trims_recompute)
        for mode in modes
        if mode.budget is None
    }
    if len(named) == len(modes):
        return named
    front = recompute_front(local, layer, op_seconds(sharded, local, layer.forward, options))
    least, most = (
        int(total_bytes(local, kept_tensors(local, layer, mode))) for mode in (RecomputeMode.FULL, RecomputeMode.NONE)
    )
    return {mode: named.get(mode) or within_budget(local, layer, mode, front, (least, most)) for mode in modes}


def op_seconds(sharded: ShardedLayer, local: Graph, ops: Sequence[Op], options: ProfileOptions) -> dict[str, float]:
    """The seconds of each op by itself, spread over the cores where that is quicker."""
    priced = priced_pass(sharded, local, ops, replace(options, is_fused=False))
    seconds = np.minimum(priced.latency_s[0], priced.spread_s[0]).tolist()
    return dict(zip(priced.names, seconds, strict=True))


def _accumulation_s(sharded: ShardedLayer, local: Graph, options: ProfileOptions) -> float:
    """Seconds of adding a microbatch's gradients to their sum: read the new ones, read and write the sum."""
    axis = sharded.problem.axis
    if axis.calibration.stack.accumulates_in_products or not options.gradient_bytes:
        return 0.0
    moved = sum(
        tensor.size_bytes + 2 * options.gradient_bytes * tensor.elements
        for tensor in local.parameters
        if tensor.is_trained
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
    sent_j = sum(sharded.problem.axis.link_j(local, op) for op in links)
    return PassReport(
        time_s=schedule.time_s,
        bound_s=schedule.time_bound_s,
        energy_j=schedule.energy_j,
        link_energy_j=sent_j,
        exposed_link_s=exposed_link_s(schedule) + alone_s,
        ops=len(schedule.jobs),
        method=schedule.method,
        schedule=schedule,
    )


def placement_graph(graph: Graph, keys: Sequence[str] | None = None) -> PlacementGraph:
    """The layers of a graph, what flows between them, and which share parameters.

    `keys` says which layers share profiles, where equal layers may be sliced in different ways.
    """
    layers = graph.layer_graph
    keys = keys or [layer.key for layer in layers.layers]
    return PlacementGraph(
        layers=tuple(
            PlacementLayer(f"{layer.index}:{layer.name}", key, layer.forward_key)
            for layer, key in zip(layers.layers, keys, strict=True)
        ),
        flows=tuple(
            Flow(boundary.producer, boundary.consumers, layers.layers[boundary.producer].outputs.index(boundary.tensor))
            for boundary in layers.boundaries
        ),
        ties=layers.tied_parameters,
    )


def _timed(schedule: Schedule | None) -> Bounded:
    return Bounded.exact(0.0) if schedule is None else _bounded(schedule.time_s, schedule.time_bound_s, schedule)


def _bounded(value: float, bound: float, schedule: Schedule) -> Bounded:
    """Seconds with their bound, which is the same number where only the rounding of a schedule's sums lies between.

    A problem whose seconds are all their own bounds is searched once, and not once more on lower bounds.
    """
    if bound >= value - PASS_BOUND_MARGIN * schedule.time_s:
        return Bounded.exact(value)
    return Bounded(value, max(0.0, bound))  # type: ignore[arg-type]


def _schedule(
    sharded: ShardedLayer,
    local: Graph,
    ops: Sequence[Op],
    options: ProfileOptions,
    known_works: dict[tuple[str, ...], Work],
) -> Schedule | None:
    if not ops:
        return None
    problem = priced_pass(sharded, local, ops, options, known_works=known_works).problem()
    return schedule_layer(
        problem,
        gap=options.gap,
        work=options.work,
        method=Method.LIST if options.is_quick else Method.AUTO,
        solver=None if options.is_quick else options.solver,
        cache=options.cache,
    )


def priced_pass(
    sharded: ShardedLayer,
    local: Graph,
    ops: Sequence[Op],
    options: ProfileOptions,
    accelerators: AcceleratorArray | None = None,
    compatibility: Compatibility = Compatibility.PHAZE,
    known_works: dict[tuple[str, ...], Work] | None = None,
) -> PricedPass:
    """Some ops of a sharded layer, priced on its own accelerator or on many others."""
    axis = sharded.problem.axis

    def link_s(op: Op) -> float:
        return axis.link_s(local, op)

    return price_pass(
        local,
        ops,
        axis.cluster.accelerator if accelerators is None else accelerators,
        name=local.name,
        is_fused=options.is_fused,
        link_s=link_s,
        calibration=axis.calibration,
        prices=options.prices,
        table=options.tables.on(axis.cluster.accelerator, axis.calibration) if accelerators is None else None,
        known_works=known_works,
        tp=axis.tp,
        compatibility=compatibility,
    )


def _backward_parts(whole: Schedule | None, first: Schedule | None) -> tuple[Bounded, Bounded]:
    """The parts of backward that make gradients of inputs (`first`) and of parameters (the rest of the whole)."""
    if whole is None:
        return Bounded.exact(0.0), Bounded.exact(0.0)
    inputs_s, inputs_bound_s = (first.time_s, first.time_bound_s) if first is not None else (0.0, 0.0)
    inputs_s = min(inputs_s, whole.time_s)
    weights_s = whole.time_s - inputs_s
    return _bounded(inputs_s, inputs_bound_s, whole), _bounded(weights_s, whole.time_bound_s - inputs_s, whole)


def leading_to_inputs(local: Graph, layer: Layer) -> tuple[Op, ...]:
    """Backward ops that a gradient which leaves the layer depends on."""
    wanted = {name for name in local.outputs if (op := local.producer(name)) and op.phase is Phase.BACKWARD}
    for op in reversed(layer.backward):
        if wanted.intersection(op.outputs):
            wanted.update(op.inputs)
    return tuple(op for op in layer.backward if wanted.intersection(op.outputs))
