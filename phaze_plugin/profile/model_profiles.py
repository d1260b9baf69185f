"""The profiles of a whole model at one microbatch size and one tp: sliced, priced and scheduled, each layer once.

Equal layers may be sliced differently: the first block reads a whole tensor, the others one that is split along the
sequence. Layers therefore share a profile only where they are equal and sliced alike (`layer_keys`).

Before anything is scheduled, `least_step_s` bounds the time of every plan of these slices from below: all microbatches
of all layers, each on as many devices as it is sliced for, on all devices of the cluster without a pause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from phaze.cost import Calibration
from phaze.errors import ShardError
from phaze.hardware import Cluster
from phaze.ir import SEARCHED_MODES, Graph, RecomputeMode
from phaze.profile.layer_passes import (
    LayerReport,
    ProfileOptions,
    least_pass_seconds,
    placement_graph,
    profile_and_report,
)
from phaze.profile.layer_profile import LayerProfile, PlacementGraph, ProfileKey
from phaze.question import Question
from phaze.shard import (
    Axis,
    SequenceParallel,
    ShardedLayer,
    ShardedModel,
    ShardingProblem,
    ShardOptions,
    sequence_lengths,
    shard_model,
    unsharded,
)
from phaze.solvers import AUTOMATIC_SOLVERS

__all__ = [
    "ModelProfiles",
    "layer_keys",
    "layer_variants",
    "least_step_s",
    "profile_model",
    "profile_options",
    "profiled_modes",
    "recomputed_keys",
    "repeated_layers",
    "slice_model",
]

_WORK = 400_000
"""How many extensions the schedule of one pass may look at: a second or two, after which it keeps the gap it has."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelProfiles:
    """The profiles of all layers at one microbatch size and tp.

    Attributes:
        graph: in the types of the precision recipe, at this microbatch.
        sharded: the layouts of every layer.
        placement: its layers as placement sees them.
        modes: recompute modes that were profiled.
        profiles: by layer, tp and recompute mode.
        reports: the passes behind the profiles.
    """

    graph: Graph
    sharded: ShardedModel
    placement: PlacementGraph
    modes: tuple[RecomputeMode, ...]
    profiles: Mapping[ProfileKey, LayerProfile]
    reports: Mapping[ProfileKey, LayerReport]

    @property
    def micro_batch_size(self) -> int:
        """Sequences in a microbatch."""
        return self.graph.micro_batch_size

    @property
    def tp(self) -> int:
        """Devices that share a layer."""
        return self.sharded.axis.tp

    def report(self, layer: int, mode: RecomputeMode) -> LayerReport:
        """The passes of one layer of the graph."""
        return self.reports[self.placement.layers[layer].key, self.tp, mode]


def profile_options(question: Question, modes: tuple[RecomputeMode, ...] = SEARCHED_MODES) -> ProfileOptions:
    """How the passes of a question are scheduled: with little work, unless the optimum is asked for."""
    return ProfileOptions(
        gap=question.gap,
        work=None if question.gap == 0.0 else _WORK,
        prices=question.prices,
        gradient_bytes=question.recipe.gradient_bytes,
        modes=modes,
        trims_recompute=question.capabilities.trims_recompute,
        solver=question.solver,
    )


def profiled_modes(question: Question) -> tuple[RecomputeMode, ...]:
    """Recompute modes to profile: those that are searched anyway, and those that a strategy asks for."""
    asked = question.choices.recompute
    return tuple(mode for mode in RecomputeMode if mode in SEARCHED_MODES or mode in asked)


def slice_model(
    question: Question,
    graph: Graph,
    tp: int,
    *,
    sequence_parallel: bool | None = None,
    cluster: Cluster | None = None,
) -> ShardedModel:
    """Layouts of every layer, each distinct one solved once.

    Whether sequences are split between layers is what the question says, unless `sequence_parallel` says otherwise.
    Raises ShardError where the model cannot be sliced so many ways.
    """
    axis = Axis(cluster or question.cluster, tp, question.calibration)
    if tp > 1:
        options = ShardOptions(
            sequence_parallel=_runnable(question, graph, tp, sequence_parallel),
            constraints=question.constraints,
            may_stride_parameters=question.capabilities.allows_strided_parameters,
            solver=question.solver or AUTOMATIC_SOLVERS,
        )
        return shard_model(graph, axis, options)
    whole = {
        layer.key: unsharded(ShardingProblem(graph=graph, layer=layer, axis=axis)) for layer in graph.distinct_layers
    }
    return ShardedModel(
        graph=graph,
        axis=axis,
        layers=tuple(whole[layer.key] for layer in graph.layers),
        parameters={},
        is_sequence_split=(False,) * len(graph.layers),
    )


def _runnable(question: Question, graph: Graph, tp: int, asked: bool | None) -> SequenceParallel:
    """Off where the target splits sequences only evenly and these are not divided; ShardError where it must be on."""
    asked = question.choices.sequence_parallel if asked is None else asked
    wanted = SequenceParallel.FREE if asked is None else SequenceParallel.ON if asked else SequenceParallel.OFF
    odd = [length for length in sequence_lengths(graph) if length % tp]
    if question.capabilities.allows_uneven_sequences or not odd:
        return wanted
    if wanted is SequenceParallel.ON:
        raise ShardError(
            f"a sequence of {odd[0]} cannot be split evenly {tp} ways, as target {question.target} does it; leave "
            "sequence_parallel out, or train on lengths that tp divides."
        )
    return SequenceParallel.OFF


def least_step_s(question: Question, model: ShardedModel, options: ProfileOptions) -> float:
    """Seconds that no plan of these slices beats, found without scheduling."""
    once = {key: least_pass_seconds(layer, options) for key, layer in layer_variants(model).items()}
    batches = question.global_batch_size // model.graph.micro_batch_size
    devices = model.axis.cluster.device_count // model.axis.tp
    return batches * sum(once[key] for key in layer_keys(model)) / max(1, devices)


def profile_model(model: ShardedModel, options: ProfileOptions) -> ModelProfiles:
    """Price and schedule every distinct layer once."""
    profiles: dict[ProfileKey, LayerProfile] = {}
    reports: dict[ProfileKey, LayerReport] = {}
    repeated = repeated_layers(model)
    for key, layer in layer_variants(model).items():
        modes = options.modes if layer.problem.layer.key in repeated else (RecomputeMode.NONE,)
        by_mode = profile_and_report(layer, modes, options)
        for mode in options.modes:
            profile, report = by_mode.get(mode, by_mode[RecomputeMode.NONE])
            profiles[key, model.axis.tp, mode] = profile
            reports[key, model.axis.tp, mode] = report
    return ModelProfiles(
        graph=model.graph,
        sharded=model,
        placement=placement_graph(model.graph, layer_keys(model)),
        modes=options.modes,
        profiles=profiles,
        reports=reports,
    )


def repeated_layers(model: ShardedModel) -> frozenset[str]:
    """Keys of the layers that may be recomputed: all, or those that repeat (all where none does)."""
    return recomputed_keys(model.graph, model.axis.calibration)


def recomputed_keys(graph: Graph, calibration: Calibration) -> frozenset[str]:
    """Keys of the layers of a graph that the software stack of a calibration may recompute."""
    counts = Counter(layer.key for layer in graph.layers)
    often = frozenset(key for key, count in counts.items() if count > 1)
    return frozenset(counts) if calibration.stack.recomputes_ends or not often else often


def layer_keys(model: ShardedModel) -> list[str]:
    """A key for each layer: the key of its content, and the number of the slicing that it got."""
    slicings: dict[str, dict[int, int]] = {}
    keys = []
    for layer, sharded in zip(model.graph.layers, model.layers, strict=True):
        numbers = slicings.setdefault(layer.key, {})
        keys.append(f"{layer.key}#{numbers.setdefault(id(sharded), len(numbers))}")
    return keys


def layer_variants(model: ShardedModel) -> dict[str, ShardedLayer]:
    """One sharded layer for each key of `layer_keys`."""
    return dict(zip(layer_keys(model), model.layers, strict=True))
