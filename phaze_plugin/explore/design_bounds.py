"""Bounds under the step time on every accelerator of a space, in one vectorised sweep.

A model at one microbatch size and one tensor width is a *cell*. Its layers are sliced once, on a reference accelerator,
and these slices serve for every accelerator: what is bounded is what is evaluated. A certificate therefore speaks about
these slices (at width 1 there is only one way to slice).

For each distinct layer the sweep gives what no schedule of a pass beats (`phaze.schedule.lower_bounds`: work per kind
of core, chains, off-chip bytes over bandwidth), on all accelerators at once. They make the *row* of an accelerator:

    forward      bound of the forward pass
    to_inputs    bound of the part of backward that makes gradients of inputs
    to_weights   bound of the whole backward, less what that part takes at most (its ops one after another, each spread
                 over all cores: always a schedule)
    again        bound of what is computed again, per recompute mode

The time of a placement is the longest path through passes whose order is fixed, and memory depends on bytes only. So
the step time never falls when a number of the row rises, when the update takes longer, or when memory shrinks, and
for any set of accelerators

    step time of each  >=  step time of the *corner*: the least of every number over the set, an update on the most of
                           every field over the set, the largest memory

which one run of the placement program bounds from below (`phaze.place.bound_placement`). A corner of one accelerator is
its own row. The sweep's own bound, without placement, is `least_s`: all microbatches of all layers on all devices
without a pause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phaze.hardware import Accelerator, AcceleratorArray
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS
from phaze.ir import SEARCHED_MODES, Graph, Op, RecomputeMode, recomputed_ops
from phaze.ir.layers import single_layer
from phaze.parallelism import PipelineSchedule
from phaze.place import Bounded, LayerProfile, PlacementProblem
from phaze.place.model.network_prices import Network
from phaze.place.model.placement_problem import ProfileKey
from phaze.planner.strategy_search import graph_at, placement_problem
from phaze.profile.layer_jobs import PricedPass
from phaze.profile.layer_passes import ProfileOptions, leading_to_inputs, priced_pass
from phaze.profile.model_profiles import layer_variants, profile_model, profile_options, repeated_layers, slice_model
from phaze.question import Question
from phaze.schedule import Compatibility
from phaze.shard import ShardedLayer, ShardedModel, slice_layer

__all__ = ["Cell", "FloatArray", "IntArray", "Rows", "corner_accelerator", "sweep_cell"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_AT_ONCE = 1 << 15
_PASSES = ("forward", "to_inputs", "to_weights")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """One microbatch size and tensor width of a model: its slices, and its placement problem but for the seconds.

    `problem` holds the sizes of every profile; its seconds are those of the reference accelerator and serve for
    nothing. `numbers` says what the numbers of a row are: a distinct layer's key, and a pass or a recompute mode.
    `network` knows the prices of its links, whatever the accelerator.
    """

    model: int
    sharded: ShardedModel
    problem: PlacementProblem
    numbers: tuple[tuple[str, str], ...]
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
        """As records name it."""
        return f"{self.model}:b{self.micro_batch_size}t{self.tp}"

    def problem_at(self, row: FloatArray, accelerator: Accelerator) -> PlacementProblem:
        """The placement problem whose layers take exactly the seconds of a row."""
        seconds = dict(zip(self.numbers, row.tolist(), strict=True))
        profiles: dict[ProfileKey, LayerProfile] = {}
        for (key, tp, mode), profile in self.problem.profiles.items():
            forward, inputs, weights = (Bounded.exact(seconds[key, name]) for name in _PASSES)
            profiles[key, tp, mode] = replace(
                profile,
                forward_s=forward,
                backward_input_s=inputs,
                backward_weight_s=weights,
                recompute_s=Bounded.exact(seconds[key, mode.value]),
            )
        cluster = replace(self.problem.cluster, accelerator=accelerator)
        return replace(self.problem, profiles=profiles, cluster=cluster)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """A cell on every accelerator: rows, and bounds under the seconds and the dynamic joules of a step."""

    seconds: FloatArray  # [accelerator, number]
    least_s: FloatArray  # [accelerator]
    least_j: FloatArray  # [accelerator]


def sweep_cell(
    model_question: Question,
    model: int,
    micro_batch_size: int,
    tp: int,
    points: AcceleratorArray,
    schedules: Sequence[PipelineSchedule],
    *,
    is_paper: bool = False,
    is_tight: bool = True,
) -> tuple[Cell, Rows]:
    """Slice a model and bound its passes on all accelerators; raises ShardError where the width is impossible.

    Without `is_tight` only work and the longest path bound a pass: quicker, and enough for cells that are far off.
    """
    sharded = slice_model(model_question, graph_at(model_question, micro_batch_size), tp)
    options = replace(profile_options(model_question), gap=0.99, work=1)
    slices = profile_model(sharded, options)
    problem = placement_problem(model_question, slices).choosing(schedule=tuple(schedules))
    variants = layer_variants(sharded)
    counts = {key: sum(layer.key == key for layer in slices.placement.layers) for key in variants}
    repeated = repeated_layers(sharded)
    numbers: list[tuple[str, str]] = []
    columns: list[FloatArray] = []
    busy_s, busy_j = np.zeros(len(points)), np.zeros(len(points))
    for key, layer in variants.items():
        bounding = _Bounding(layer, slice_layer(layer), points, options, is_paper, is_tight)
        found = _bound_layer(bounding, layer.problem.layer.key in repeated)
        numbers += [(key, name) for name in found.seconds]
        columns += list(found.seconds.values())
        devices = tp if problem.profiles[key, tp, RecomputeMode.NONE].is_tensor_parallel else 1
        busy_s += counts[key] * devices * found.through_s
        busy_j += counts[key] * devices * found.energy_j
    batches = problem.micro_batches
    cell = Cell(
        model=model,
        sharded=sharded,
        problem=problem,
        numbers=tuple(numbers),
        is_paper=is_paper,
        network=Network(problem.cluster, problem.calibration),
    )
    rows = Rows(
        seconds=np.stack(columns, axis=1),
        least_s=batches * busy_s / model_question.cluster.device_count * (1 - 1e-9),
        least_j=batches * busy_j * (1 - 1e-9),
    )
    return cell, rows


@dataclass(frozen=True, slots=True, eq=False)
class _LayerBounds:
    """By the names of a row's numbers; forward and backward together; and the least dynamic energy of both."""

    seconds: Mapping[str, FloatArray]
    through_s: FloatArray
    energy_j: FloatArray


def _bound_layer(bounded: _Bounding, is_recomputed: bool) -> _LayerBounds:
    local = bounded.local
    whole = single_layer(local)
    forward, backward = bounded.of(whole.forward), bounded.of(whole.backward)
    first = bounded.of(leading_to_inputs(local, whole))
    inputs_s = np.minimum(first.least_s, backward.least_s)
    weights_s = np.maximum(0.0, backward.least_s - np.maximum(first.most_s, inputs_s))
    if bounded.is_paper:  # the paper's program reads the whole backward only
        inputs_s, weights_s = backward.least_s, np.zeros(len(bounded.points))
    again = {
        mode.value: bounded.of(recomputed_ops(local, whole, mode) if is_recomputed else ()).least_s
        for mode in SEARCHED_MODES
    }
    return _LayerBounds(
        {"forward": forward.least_s, "to_inputs": inputs_s, "to_weights": weights_s, **again},
        forward.least_s + backward.least_s,
        forward.least_j + backward.least_j,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _PassBounds:
    """A pass on every accelerator: no schedule is shorter, some schedule is no longer, and none draws less."""

    least_s: FloatArray
    most_s: FloatArray
    least_j: FloatArray


@dataclass(slots=True, eq=False)
class _Bounding:
    """Bounds the passes of one layer; passes of the same ops once."""

    layer: ShardedLayer
    local: Graph
    points: AcceleratorArray
    options: ProfileOptions
    is_paper: bool
    is_tight: bool
    _found: dict[tuple[str, ...], _PassBounds] | None = None

    def of(self, ops: Sequence[Op]) -> _PassBounds:
        """The bounds of a pass."""
        self._found = {} if self._found is None else self._found
        key = tuple(op.id for op in ops)
        if key not in self._found:
            self._found[key] = self._bounds(ops)
        return self._found[key]

    def _bounds(self, ops: Sequence[Op]) -> _PassBounds:
        if not ops:
            nothing = np.zeros(len(self.points))
            return _PassBounds(nothing, nothing, nothing)
        parts = [_pass_bounds(priced, self.is_tight) for priced in self._priced(ops)]
        joined = (np.concatenate([getattr(part, name) for part in parts]) for name in _PassBounds.__slots__)
        return _PassBounds(*joined)

    def _priced(self, ops: Sequence[Op]) -> Iterator[PricedPass]:
        compatibility = Compatibility.PAPER if self.is_paper else Compatibility.PHAZE
        for start in range(0, len(self.points), _AT_ONCE):
            part = self.points.take(np.arange(start, min(start + _AT_ONCE, len(self.points))))
            yield priced_pass(self.layer, self.local, ops, self.options, part, compatibility)


def _pass_bounds(priced: PricedPass, is_tight: bool) -> _PassBounds:
    shortest = np.minimum(priced.latency_s, priced.spread_s).sum(axis=1)
    floor = 0.0 if priced.compatibility is Compatibility.PAPER else priced.memory_s
    least_j = np.minimum(priced.energy_j, priced.spread_energy_j).sum(axis=1)
    return _PassBounds(priced.lower_bounds(is_tight=is_tight) * (1 - 1e-12), np.maximum(shortest, floor), least_j)


def corner_accelerator(points: AcceleratorArray, chosen: IntArray) -> Accelerator:
    """The most of every field over some accelerators; the cost model's laws make its update the quickest."""
    fields = {name: getattr(points, name)[chosen].max().item() for name in (*INTEGER_FIELDS, *REAL_FIELDS)}
    quickest = points.take(chosen[:1])
    quickest = replace(quickest, rates=points.rates[chosen].max(axis=0, keepdims=True))
    return replace(quickest.at(0), name="corner", **fields)
