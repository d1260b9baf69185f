"""Lower bounds on step times over a whole space of accelerators, in one vectorised sweep per model, microbatch and tp.

A *slicing* is a model at one microbatch size and one tp. Its layers are sliced once, on a reference accelerator, and
these slices serve for every accelerator, so that what is bounded is what is evaluated. A certificate therefore speaks
about these slices (at tp 1 there is only one way to slice).

For each distinct layer, the sweep computes what no schedule of a pass beats (`phaze.schedule.lower_bounds`: work per
kind of core, chains, off-chip bytes over bandwidth), on all accelerators at once (`_bound_layer`). These are the
columns of `SlicingBounds.pass_s`, which has a row for each accelerator:

    forward      bound of the forward pass
    to_inputs    bound of the part of backward that makes gradients of inputs
    to_weights   bound of the whole backward, less the longest that the first part can take (its ops one after another,
                 each spread over all cores: always a schedule)
    a mode       bound of what is computed again, for each recompute mode

The time of a placement is the longest path through passes whose order is fixed, and memory depends on bytes only. So
the step time never falls when a number of the row rises, when the update takes longer, or when memory shrinks. For any
set of accelerators, therefore,

    step time of each  >=  step time of their *best case*: the least of every column over the set, an update on an
                           accelerator with the most of every field over the set (`best_case_accelerator`), and the
                           largest memory

and one run of the placement program bounds the best case from below (`phaze.place.bound_placement`, on the problem that
`Slicing.problem_with` makes). The best case of a single accelerator is its own row. A quicker bound, without placement,
is `SlicingBounds.step_s`: all microbatches of all layers on all devices without a pause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phaze.errors import ShardError
from phaze.explore.executors import Workers
from phaze.explore.search_question import SearchQuestion
from phaze.hardware import Accelerator, AcceleratorArray
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS
from phaze.ir import SEARCHED_MODES, Graph, Op, RecomputeMode, recomputed_ops
from phaze.ir.layers import single_layer
from phaze.place import Bounded, LayerProfile, PlacementProblem
from phaze.place.model.network_prices import Network
from phaze.planner.strategy_search import graph_at, narrowed_problem, placement_problem
from phaze.profile.layer_jobs import PricedPass
from phaze.profile.layer_passes import ProfileOptions, leading_to_inputs, priced_pass
from phaze.profile.layer_profile import ProfileKey
from phaze.profile.model_profiles import (
    ModelProfiles,
    fastest_slicing,
    layer_variants,
    profile_model,
    profile_options,
    repeated_layers,
)
from phaze.schedule import Compatibility
from phaze.shard import ShardedLayer, ShardedModel, slice_layer
from phaze.tolerances import CLAIM_MARGIN, PASS_BOUND_MARGIN

__all__ = [
    "FORWARD",
    "TO_INPUTS",
    "TO_WEIGHTS",
    "FloatArray",
    "IntArray",
    "PassColumn",
    "RefusedSlicing",
    "SlicedModel",
    "Slicing",
    "SlicingBounds",
    "SweepTask",
    "SweptSlicing",
    "best_case_accelerator",
    "least_steps_s",
    "run_sweeps",
    "slice_model",
    "sweep_slicing",
    "sweep_tasks",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_ACCELERATORS_AT_ONCE = 1 << 15
"""How many accelerators are priced in one call: the paper's 29,360 go at once, larger spaces in parts of some hundred
megabytes."""

_SIZES_ONLY_GAP = 0.99
_SIZES_ONLY_WORK = 1
"""The gap and the search nodes with which layers are scheduled on the reference accelerator, where only the sizes of
their profiles are wanted: the first schedule that is found will do."""

FORWARD, TO_INPUTS, TO_WEIGHTS = "forward", "to_inputs", "to_weights"
"""Names of the passes of a layer that are not recompute modes."""


class PassColumn(NamedTuple):
    """What a column of `SlicingBounds.pass_s` is about: a distinct layer, and a pass of it or a recompute mode."""

    layer_key: str
    pass_name: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slicing:
    """A model at one microbatch size and one tp: its slices, and its placement problem but for the seconds.

    Attributes:
        model: the model's position in the question.
        sharded: the sliced model.
        problem: the placement problem. It holds the sizes of every profile; its seconds are those of the reference
            accelerator and serve for nothing.
        columns: what the columns of `SlicingBounds.pass_s` are about.
        is_paper: whether the search counts as the paper does.
        network: prices of links, which do not depend on the accelerator.
    """

    model: int
    sharded: ShardedModel
    problem: PlacementProblem
    columns: tuple[PassColumn, ...]
    is_paper: bool
    network: Network

    @property
    def micro_batch_size(self) -> int:
        """Sequences in a microbatch."""
        return self.sharded.graph.micro_batch_size

    @property
    def tp(self) -> int:
        """Devices that share a layer."""
        return self.sharded.axis.tp

    @property
    def name(self) -> str:
        """The name by which a journal's tasks call it."""
        return _slicing_name(self.model, self.micro_batch_size, self.tp)

    def problem_with(self, pass_s: FloatArray, accelerator: Accelerator) -> PlacementProblem:
        """The placement problem on an accelerator whose passes take exactly these seconds, one for each column."""
        seconds = dict(zip(self.columns, pass_s.tolist(), strict=True))
        profiles: dict[ProfileKey, LayerProfile] = {}
        for (key, tp, mode), profile in self.problem.profiles.items():
            profiles[key, tp, mode] = replace(
                profile,
                forward_s=Bounded.exact(seconds[PassColumn(key, FORWARD)]),
                backward_input_s=Bounded.exact(seconds[PassColumn(key, TO_INPUTS)]),
                backward_weight_s=Bounded.exact(seconds[PassColumn(key, TO_WEIGHTS)]),
                recompute_s=Bounded.exact(seconds[PassColumn(key, mode.value)]),
            )
        cluster = replace(self.problem.cluster, accelerator=accelerator)
        return replace(self.problem, profiles=profiles, cluster=cluster)


def _slicing_name(model: int, micro_batch_size: int, tp: int) -> str:
    return f"{model}:b{micro_batch_size}t{tp}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlicingBounds:
    """Lower bounds of a slicing on every accelerator of the space.

    Attributes:
        pass_s: seconds of each pass, by accelerator and column; rows rise when their layers are scheduled.
        step_s: seconds of a step, by accelerator.
        step_j: dynamic joules of a step, by accelerator.
    """

    pass_s: FloatArray
    step_s: FloatArray
    step_j: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class SweptSlicing:
    """A slicing with its bounds on every accelerator."""

    slicing: Slicing
    bounds: SlicingBounds


@dataclass(frozen=True, slots=True)
class RefusedSlicing:
    """A microbatch size and a tp at which a model cannot be sliced, and why."""

    model: int
    micro_batch_size: int
    tp: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SweepTask:
    """One slicing to sweep over the space.

    Attributes:
        question: the search's question with the one model only, so that no other is sent to the worker.
        model: the model's position in the whole question.
        micro_batch_size: sequences in a microbatch.
        tp: devices that share a layer.
        is_tight: whether chains of ops and cores together bound a pass, or work and the longest path only, which is
            quicker and enough for slicings that are far from the best.
    """

    question: SearchQuestion
    model: int
    micro_batch_size: int
    tp: int
    is_tight: bool = False

    @property
    def slicing_name(self) -> str:
        """As `Slicing.name`."""
        return _slicing_name(self.model, self.micro_batch_size, self.tp)


def sweep_tasks(question: SearchQuestion) -> list[SweepTask]:
    """A task for each slicing, large tp first because they take longest."""
    return [
        SweepTask(
            question=replace(question, names=(question.names[model],), questions=(model_question,)),
            model=model,
            micro_batch_size=size,
            tp=tp,
        )
        for model, model_question in enumerate(question.questions)
        for tp in sorted(model_question.tp_degrees, reverse=True)
        for size in model_question.micro_batch_sizes
    ]


def run_sweeps(
    tasks: Sequence[SweepTask], workers: Workers, report: Callable[[str], object] = lambda doing: None
) -> tuple[list[SweptSlicing], list[RefusedSlicing]]:
    """The slicings with their bounds over the whole space, and those that are impossible."""

    def done(index: int, _: SweptSlicing | RefusedSlicing) -> None:
        task = tasks[index]
        report(f"sweep {task.question.names[0]}, microbatch {task.micro_batch_size}, tp {task.tp}")

    results = workers.run(_sweep_or_refuse, tasks, done)
    swept = [result for result in results if isinstance(result, SweptSlicing)]
    return swept, [result for result in results if isinstance(result, RefusedSlicing)]


def _sweep_or_refuse(task: SweepTask) -> SweptSlicing | RefusedSlicing:
    try:
        return sweep_slicing(task)
    except ShardError as error:
        return RefusedSlicing(task.model, task.micro_batch_size, task.tp, str(error))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlicedModel:
    """A model sliced for a task, as on the reference accelerator: what every bound of the slicing begins with.

    Attributes:
        task: the slicing.
        sharded: the sliced model.
        problem: its placement problem; only its sizes count.
        options: how passes are priced.
    """

    task: SweepTask
    sharded: ShardedModel
    problem: PlacementProblem
    options: ProfileOptions

    def layers(self) -> Iterator[tuple[str, ShardedLayer, int]]:
        """Each distinct layer by its key, and how many devices all layers like it keep busy in a microbatch."""
        tp, keys = self.task.tp, [layer.key for layer in self.problem.graph.layers]
        for key, layer in layer_variants(self.sharded).items():
            devices = tp if self.problem.profiles[key, tp, RecomputeMode.NONE].is_tensor_parallel else 1
            yield key, layer, keys.count(key) * devices

    def bounder(self, layer: ShardedLayer, points: AcceleratorArray) -> _PassBounder:
        """Bounds the passes of a layer on some accelerators."""
        return _PassBounder(
            layer=layer,
            local=slice_layer(layer),
            points=points,
            options=self.options,
            is_paper=self.task.question.is_paper,
            is_tight=self.task.is_tight,
        )

    def step_s(self, busy_s: FloatArray) -> FloatArray:
        """The least seconds of a step whose microbatches keep devices busy for so long: nobody ever waits."""
        device_count = self.problem.cluster.device_count
        return self.problem.micro_batches * busy_s / device_count * (1 - CLAIM_MARGIN)


def slice_model(task: SweepTask) -> SlicedModel:
    """Slice a model; raises ShardError where the tp is impossible."""
    (model_question,) = task.question.questions
    sharded = fastest_slicing(model_question, graph_at(model_question, task.micro_batch_size), task.tp)
    options = replace(profile_options(model_question), gap=_SIZES_ONLY_GAP, work=_SIZES_ONLY_WORK)
    problem = _open_problem(task.question, profile_model(sharded, options))
    return SlicedModel(task=task, sharded=sharded, problem=problem, options=options)


def least_steps_s(sliced: SlicedModel, points: AcceleratorArray) -> FloatArray:
    """As `SlicingBounds.step_s`, for any accelerators and without the rest of a sweep."""
    busy_s = np.zeros(len(points))
    for _, layer, devices in sliced.layers():
        bounder = sliced.bounder(layer, points)
        whole = single_layer(bounder.local)
        busy_s += devices * (bounder.bounds_of(whole.forward).least_s + bounder.bounds_of(whole.backward).least_s)
    return sliced.step_s(busy_s)


def sweep_slicing(task: SweepTask) -> SweptSlicing:
    """Slice a model and bound its passes on all accelerators; raises ShardError where the tp is impossible."""
    sliced, points = slice_model(task), task.question.points
    problem, repeated = sliced.problem, repeated_layers(sliced.sharded)
    columns: list[PassColumn] = []
    column_s: list[FloatArray] = []
    busy_s, busy_j = np.zeros(len(points)), np.zeros(len(points))
    for key, layer, devices in sliced.layers():
        layer_bounds = _bound_layer(sliced.bounder(layer, points), layer.problem.layer.key in repeated)
        columns += [PassColumn(key, name) for name in layer_bounds.pass_s]
        column_s += list(layer_bounds.pass_s.values())
        busy_s += devices * layer_bounds.through_s
        busy_j += devices * layer_bounds.energy_j
    slicing = Slicing(
        model=task.model,
        sharded=sliced.sharded,
        problem=problem,
        columns=tuple(columns),
        is_paper=task.question.is_paper,
        network=Network(problem.cluster, problem.calibration),
    )
    bounds = SlicingBounds(
        pass_s=np.stack(column_s, axis=1),
        step_s=sliced.step_s(busy_s),
        step_j=problem.micro_batches * busy_j * (1 - CLAIM_MARGIN),
    )
    return SweptSlicing(slicing, bounds)


def _open_problem(question: SearchQuestion, slices: ModelProfiles) -> PlacementProblem:
    """The placement problem of a model's slices with everything open that the question does not fix."""
    (model_question,) = question.questions
    if not model_question.fixed:
        return placement_problem(model_question, slices).choosing(schedule=question.schedules)
    problem = narrowed_problem(model_question, slices).choosing(recompute=slices.modes)
    return problem if "schedule" in model_question.fixed else problem.choosing(schedule=question.schedules)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LayerBounds:
    """Lower bounds of one layer on every accelerator.

    Attributes:
        pass_s: seconds of each pass, by the pass's name or the recompute mode.
        through_s: seconds of forward and backward together.
        energy_j: dynamic joules of both.
    """

    pass_s: Mapping[str, FloatArray]
    through_s: FloatArray
    energy_j: FloatArray


def _bound_layer(bounder: _PassBounder, is_recomputed: bool) -> _LayerBounds:
    local = bounder.local
    whole = single_layer(local)
    forward, backward = bounder.bounds_of(whole.forward), bounder.bounds_of(whole.backward)
    first = bounder.bounds_of(leading_to_inputs(local, whole))
    inputs_s = np.minimum(first.least_s, backward.least_s)
    weights_s = np.maximum(0.0, backward.least_s - np.maximum(first.most_s, inputs_s))
    if bounder.is_paper:  # the paper's program reads the whole backward only
        inputs_s, weights_s = backward.least_s, np.zeros(len(bounder.points))
    recompute_s = {
        mode.value: bounder.bounds_of(recomputed_ops(local, whole, mode) if is_recomputed else ()).least_s
        for mode in SEARCHED_MODES
    }
    return _LayerBounds(
        pass_s={FORWARD: forward.least_s, TO_INPUTS: inputs_s, TO_WEIGHTS: weights_s, **recompute_s},
        through_s=forward.least_s + backward.least_s,
        energy_j=forward.least_j + backward.least_j,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _PassBounds:
    """Bounds of one pass on every accelerator.

    Attributes:
        least_s: no schedule is shorter.
        most_s: some schedule is no longer.
        least_j: no schedule draws less dynamic energy.
    """

    least_s: FloatArray
    most_s: FloatArray
    least_j: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PassBounder:
    """Bounds the passes of one layer; passes that consist of the same ops are bounded once."""

    layer: ShardedLayer
    local: Graph
    points: AcceleratorArray
    options: ProfileOptions
    is_paper: bool
    is_tight: bool
    _known: dict[tuple[str, ...], _PassBounds] = field(default_factory=dict)

    def bounds_of(self, ops: Sequence[Op]) -> _PassBounds:
        """The bounds of the pass that consists of these ops."""
        key = tuple(op.id for op in ops)
        if key not in self._known:
            self._known[key] = self._compute(ops)
        return self._known[key]

    def _compute(self, ops: Sequence[Op]) -> _PassBounds:
        if not ops:
            nothing = np.zeros(len(self.points))
            return _PassBounds(nothing, nothing, nothing)
        parts = [_pass_bounds(priced, self.is_tight) for priced in self._priced(ops)]
        return _PassBounds(
            np.concatenate([part.least_s for part in parts]),
            np.concatenate([part.most_s for part in parts]),
            np.concatenate([part.least_j for part in parts]),
        )

    def _priced(self, ops: Sequence[Op]) -> Iterator[PricedPass]:
        compatibility = Compatibility.PAPER if self.is_paper else Compatibility.PHAZE
        for start in range(0, len(self.points), _ACCELERATORS_AT_ONCE):
            end = min(start + _ACCELERATORS_AT_ONCE, len(self.points))
            part = self.points if end - start == len(self.points) else self.points.take(np.arange(start, end))
            yield priced_pass(self.layer, self.local, ops, self.options, part, compatibility)


def _pass_bounds(priced: PricedPass, is_tight: bool) -> _PassBounds:
    one_after_another_s = np.minimum(priced.latency_s, priced.spread_s).sum(axis=1)
    memory_s = 0.0 if priced.compatibility is Compatibility.PAPER else priced.memory_s
    return _PassBounds(
        priced.lower_bounds(is_tight=is_tight) * (1 - PASS_BOUND_MARGIN),
        np.maximum(one_after_another_s, memory_s),
        np.minimum(priced.energy_j, priced.spread_energy_j).sum(axis=1),
    )


def best_case_accelerator(points: AcceleratorArray, chosen: IntArray) -> Accelerator:
    """An accelerator with the most of every field over some points; the cost model's laws make its update quickest."""
    fields = {name: getattr(points, name)[chosen].max().item() for name in (*INTEGER_FIELDS, *REAL_FIELDS)}
    first = replace(points.take(chosen[:1]), rates=points.rates[chosen].max(axis=0, keepdims=True))
    return replace(first.at(0), name="best case", **fields)
