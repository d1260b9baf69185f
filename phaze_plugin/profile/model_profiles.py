"""The profiles of a whole model at one microbatch size and one tp: sliced, priced and scheduled, each layer once.

Slicings are a choice like any other (`slicings`): whoever plans, evaluates or verifies a strategy takes them from here,
and a strategy's `sequence_parallel` names one of them.

Equal layers may be sliced differently: the first block reads a whole tensor, the others one that is split along the
sequence. Layers therefore share a profile only where they are equal and sliced alike (`layer_keys`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phaze.cost import Calibration
from phaze.errors import ShardError
from phaze.hardware import Cluster
from phaze.ir import SEARCHED_MODES, Graph, OpKind, RecomputeMode
from phaze.parallelism import MIXED_SEQUENCES, Offload
from phaze.profile.layer_passes import (
    LayerReport,
    ProfileOptions,
    placement_graph,
    profile_and_report,
    training_passes,
)
from phaze.profile.layer_profile import LayerProfile, PlacementGraph, ProfileKey
from phaze.question import Question
from phaze.shard import (
    Axis,
    SequenceParallel,
    ShardedLayer,
    ShardedModel,
    ShardingProblem,
    ShardingTables,
    ShardOptions,
    sequence_lengths,
    shard_model,
    shard_variants,
    unsharded,
)
from phaze.shard.expert_slicing import expert_counts
from phaze.shard.mesh_axes import nearest_divisors
from phaze.solvers import AUTOMATIC_SOLVERS
from phaze.tolerances import EQUAL_RESULTS

__all__ = [
    "ModelProfiles",
    "dominates",
    "expert_tp_of",
    "fastest_slicing",
    "layer_keys",
    "layer_variants",
    "least_pass_s",
    "profile_model",
    "profile_options",
    "profiled_modes",
    "recomputed_keys",
    "repeated_layers",
    "sequence_parallel_of",
    "slice_model",
    "slicings",
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
        offload: what plans of these slices keep on the host.
    """

    graph: Graph
    sharded: ShardedModel
    placement: PlacementGraph
    modes: tuple[RecomputeMode, ...]
    profiles: Mapping[ProfileKey, LayerProfile]
    reports: Mapping[ProfileKey, LayerReport]
    offload: Offload = Offload.NONE

    @property
    def micro_batch_size(self) -> int:
        """Sequences in a microbatch."""
        return self.graph.micro_batch_size

    @property
    def tp(self) -> int:
        """Devices that share a layer."""
        return self.sharded.axis.tp

    @property
    def cp(self) -> int:
        """Devices that share a sequence."""
        return self.sharded.axis.cp

    @property
    def ep(self) -> int:
        """Devices that experts are divided over."""
        return self.sharded.axis.ep

    def report(self, layer: int, mode: RecomputeMode) -> LayerReport:
        """The passes of one layer of the graph."""
        return self.reports[self.placement.layers[layer].key, self.tp, mode]

    def placed(self, layer: int, mode: RecomputeMode) -> LayerProfile:
        """The profile of one layer of the graph."""
        return self.profiles[self.placement.layers[layer].key, self.tp, mode]


def profile_options(question: Question, modes: tuple[RecomputeMode, ...] = SEARCHED_MODES) -> ProfileOptions:
    """How the passes of a question are scheduled: with little work, unless the optimum is asked for.

    Half of the gap is left to placement.
    """
    return ProfileOptions(
        gap=question.gap / 2,
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


def slicings(
    question: Question, graph: Graph, tp: int, tables: ShardingTables | None = None, *, cp: int = 1, ep: int = 1
) -> tuple[ShardedModel, ...]:
    """The slicings that a question may choose from at one microbatch size and tp, each distinct layer solved once.

    With cp or ep the graph is that of one of their devices (`local_graphs.py`).

    There are up to three, which depend on the model, the cluster and the target, and on nothing else that is asked: all
    sequences split between layers (least memory), no sequence split at all, and whatever is fastest (least time), where
    that is another one. A question that says which it wants selects from these; a "mixed" one gets the fastest of them.
    `tables` keep what serves other microbatch sizes again. Raises ShardError where there is no slicing.
    """
    _check_axes(question, tp, cp, ep)
    axis = Axis(question.cluster, tp, question.calibration, cp, ep)
    if tp == 1:
        return (_whole_model(graph, axis),)
    _check_experts(question, tp, ep)
    asked = question.choices.sequence_parallel
    models = shard_variants(graph, axis, _shard_options(question, tp), _sequence_kinds(question, graph, tp), tables)
    fastest = models.pop(SequenceParallel.FREE, None)
    least_s = min((model.seconds for model in models.values()), default=math.inf)
    if fastest is not None and fastest.seconds < least_s * (1 - EQUAL_RESULTS):
        models[SequenceParallel.FREE] = fastest
    listed = tuple(models.values())
    return (min(listed, key=lambda model: model.seconds),) if asked == MIXED_SEQUENCES else listed


def _sequence_kinds(question: Question, graph: Graph, tp: int) -> list[SequenceParallel]:
    """How sequences may be split, as the question asks or in every way that the target runs."""
    asked = question.choices.sequence_parallel
    if asked is not None and asked != MIXED_SEQUENCES:
        if asked:
            _check_sequences(question, graph, tp)
        elif _must_split_sequences(question):
            raise ShardError(_whole_sequences_text(question, tp))
        return [_SEQUENCE_KINDS[asked]]
    kinds = [] if _must_split_sequences(question) else [SequenceParallel.OFF]
    if question.capabilities.allows_sequence_parallel and _is_even(question, graph, tp):
        if max(sequence_lengths(graph), default=0) >= tp:
            kinds.insert(0, SequenceParallel.ON)
        if question.capabilities.allows_mixed_sequences:
            kinds.append(SequenceParallel.FREE)
    if not kinds:
        raise ShardError(_whole_sequences_text(question, tp))
    return kinds


def _check_axes(question: Question, tp: int, cp: int, ep: int) -> None:
    """Raise ShardError for axes that the target does not have, or does not run together."""
    runs = question.capabilities
    for axis, degree, is_run in (("cp", cp, runs.allows_context_parallel), ("ep", ep, runs.allows_expert_parallel)):
        if degree > 1 and not is_run:
            raise ShardError(f"target {question.target} does not run {axis} {degree}.")
    pair = runs.excluded_together(tp=tp, cp=cp, ep=ep)
    if pair is not None:
        degrees = {"tp": tp, "cp": cp, "ep": ep}
        told = " beside ".join(f"{axis} {degrees[axis]}" for axis in pair)
        raise ShardError(f"target {question.target} does not run {told}.")


def _check_experts(question: Question, tp: int, ep: int) -> None:
    """Raise ShardError where a strategy says how tp devices share experts that cannot be shared so."""
    expert_tp, counts = question.choices.expert_tp, expert_counts(question.graph)
    if expert_tp is None:
        return
    if not counts:
        raise ShardError(f"model {question.graph.name!r} has no experts; leave expert_tp out.")
    for name, count in counts.items():
        if expert_tp == 1 and count % (ep * tp):
            raise ShardError(
                f"expert_tp 1 divides whole experts over ep x tp devices, {ep} x {tp}, which do not divide the {count} "
                f"experts of op {name!r}; {nearest_divisors(count, ep * tp)}, or use expert_tp {tp}."
            )


def _must_split_sequences(question: Question) -> bool:
    """Whether the target runs this model at tp above 1 only with sequences split between layers."""
    return question.capabilities.experts_need_split_sequences and bool(expert_counts(question.graph))


def _whole_sequences_text(question: Question, tp: int) -> str:
    return (
        f"target {question.target} runs models with experts at tp {tp} only with sequences split between layers; use "
        "tp 1, or sequence_parallel=True on lengths that tp divides."
    )


def _shard_options(question: Question, tp: int) -> ShardOptions:
    """What the sharding program may do for a question, whatever becomes of sequences."""
    return ShardOptions(
        constraints=question.constraints,
        may_stride_parameters=question.capabilities.allows_strided_parameters,
        may_cut_parameters_twice=question.capabilities.allows_parameters_cut_twice,
        expert_dims=question.expert_dims,
        expert_tp=tp if question.capabilities.cuts_experts else question.choices.expert_tp,
        solver=question.solver or AUTOMATIC_SOLVERS,
    )


def fastest_slicing(question: Question, graph: Graph, tp: int) -> ShardedModel:
    """Among the slicings of a microbatch size and tp, the one whose layers take least time one after the other."""
    return min(slicings(question, graph, tp), key=lambda model: model.seconds)


def expert_tp_of(model: ShardedModel, tp: int) -> int | None:
    """The `expert_tp` of a strategy of so many tp devices that selects a slicing."""
    return model.expert_tp if tp == model.axis.tp else None


def sequence_parallel_of(model: ShardedModel) -> bool | str:
    """The `sequence_parallel` of a strategy that selects a slicing among those of its microbatch size and tp."""
    return {kind: value for value, kind in _SEQUENCE_KINDS.items()}[model.sequence_parallel]


_SEQUENCE_KINDS: dict[bool | str, SequenceParallel] = {
    True: SequenceParallel.ON,
    False: SequenceParallel.OFF,
    MIXED_SEQUENCES: SequenceParallel.FREE,
}


def slice_model(
    question: Question,
    graph: Graph,
    tp: int,
    *,
    sequence_parallel: bool | str,
    cluster: Cluster | None = None,
    cp: int = 1,
    ep: int = 1,
) -> ShardedModel:
    """One slicing: layouts of every layer, each distinct one solved once; the graph is that of a device of cp and ep.

    Raises ShardError where the model cannot be sliced so many ways, or has no sequences that could be split.
    """
    axis = Axis(cluster or question.cluster, tp, question.calibration, cp, ep)
    if tp == 1:
        return _whole_model(graph, axis)
    if sequence_parallel is True:
        _check_sequences(question, graph, tp)
    options = replace(_shard_options(question, tp), sequence_parallel=_SEQUENCE_KINDS[sequence_parallel])
    return shard_model(graph, axis, options)


def _whole_model(graph: Graph, axis: Axis) -> ShardedModel:
    """The model with every layer on one device of the tensor-parallel axis."""
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


def _is_even(question: Question, graph: Graph, tp: int) -> bool:
    """Whether tp devices divide every sequence, or the target does not mind."""
    return question.capabilities.allows_uneven_sequences or not any(length % tp for length in sequence_lengths(graph))


def _check_sequences(question: Question, graph: Graph, tp: int) -> None:
    """Raise ShardError where sequences cannot be split between layers as they are asked to be."""
    if not question.capabilities.allows_sequence_parallel:
        raise ShardError(
            f"target {question.target} splits no sequence over the tp devices; leave sequence_parallel out."
        )
    lengths = sequence_lengths(graph)
    if max(lengths, default=0) < tp:
        raise ShardError(
            f"no tensor between layers has a sequence of at least {tp} positions, which sequence_parallel would split; "
            "leave sequence_parallel out."
        )
    if not _is_even(question, graph, tp):
        odd = next(length for length in lengths if length % tp)
        raise ShardError(
            f"a sequence of {odd} cannot be split evenly {tp} ways, as target {question.target} does it; leave "
            "sequence_parallel out, or train on lengths that tp divides."
        )


def profile_model(model: ShardedModel, options: ProfileOptions) -> ModelProfiles:
    """Price and schedule every distinct layer once."""
    profiles: dict[ProfileKey, LayerProfile] = {}
    reports: dict[ProfileKey, LayerReport] = {}
    repeated = repeated_layers(model)
    for key, layer in layer_variants(model).items():
        modes = options.modes if layer.problem.layer.key in repeated else (RecomputeMode.NONE,)
        by_mode = _known_profiles(layer, modes, options)
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


def _known_profiles(
    sharded: ShardedLayer, modes: tuple[RecomputeMode, ...], options: ProfileOptions
) -> dict[RecomputeMode, tuple[LayerProfile, LayerReport]]:
    """The profiles of a layer, made once for all slicings of a question that slice the layer alike."""
    content = _content(sharded, options)
    key = (modes, content)
    if key not in options.profiles:
        options.profiles[key] = profile_and_report(sharded, modes, options, options.passes.pop(content, None))
    return options.profiles[key]


def _content(sharded: ShardedLayer, options: ProfileOptions) -> tuple[object, ...]:
    """What the profiles of a layer depend on, besides the recompute mode.

    A layer without collectives of its own is the same whatever ep divides the experts of other layers.
    """
    problem = sharded.problem
    axis, layer = problem.axis, problem.layer
    sends = any(op.kind is OpKind.COLLECTIVE for op in problem.ops)
    return (
        options.what_profiles_depend_on,
        (axis.cluster, axis.calibration, axis.tp, axis.cp, axis.ep if sends else 1),
        (layer.index, layer.key, tuple(sorted(problem.graph.layer_graph.tied_parameters))),
        *(tuple(layouts.items()) for layouts in (sharded.splits, sharded.parameters, problem.layouts)),
    )


def least_pass_s(model: ShardedModel, options: ProfileOptions) -> float:
    """No plan takes less on a device for forward and backward of one microbatch through all layers.

    What is scheduled for it serves the profiles again that are made afterwards, if any are.
    """
    counts = Counter(layer_keys(model))
    seconds = 0.0
    for key, layer in layer_variants(model).items():
        content = _content(layer, options)
        if content not in options.least_s:
            options.passes[content] = training_passes(layer, options)
            options.least_s[content] = options.passes[content].least_s
        seconds += counts[key] * options.least_s[content]
    return seconds


def dominates(first: ModelProfiles, second: ModelProfiles) -> bool:
    """Whether no strategy is faster or smaller on the second slicing than on the first, of the same size and tp.

    So it is where every layer takes no more seconds (as priced, and as bounded), keeps no more bytes and sends no more:
    the simulated time of a strategy only grows with each of them.
    """
    layers = range(len(first.placement.layers))
    if first.offload.moves_activations:  # shorter passes hide less of what moves to the host: parts may grow
        return False
    return first.offload is second.offload and all(
        _is_no_more(first.placed(layer, mode), second.placed(layer, mode), first.tp)
        for layer in layers
        for mode in first.modes
    )


def _is_no_more(first: LayerProfile, second: LayerProfile, tp: int) -> bool:
    """Whether one profile of a layer is nowhere above another."""
    passes = ("forward_s", "backward_input_s", "backward_weight_s", "recompute_s")
    seconds = [
        float(getattr(getattr(profile, name), kind)[0])
        for profile in (first, second)
        for name in passes
        for kind in ("value", "bound")
    ]
    half = len(seconds) // 2
    # A whole tensor may be sent in tp parts that are put together behind the link, so that a part must be no larger.
    sent = all(
        ours.size_bytes <= (theirs.size_bytes / tp if theirs.is_whole and not ours.is_whole else theirs.size_bytes)
        and (theirs.is_whole or not ours.is_whole)
        for ours, theirs in zip(first.outputs, second.outputs, strict=True)
    )
    return (
        sent
        and all(ours <= theirs for ours, theirs in zip(seconds[:half], seconds[half:], strict=True))
        and first.stashed_bytes <= second.stashed_bytes
        and first.peak_working_bytes <= second.peak_working_bytes
        and all(first.parameter_bytes[dtype] <= size for dtype, size in second.parameter_bytes.items())
        and first.frozen_parameters <= second.frozen_parameters
        and all(first.tied_parameters[name] <= count for name, count in second.tied_parameters.items())
        and all(first.frozen_ties[name] <= count for name, count in second.frozen_ties.items())
    )


def repeated_layers(model: ShardedModel) -> frozenset[str]:
    """Keys of the layers that may be recomputed: all, or those that repeat (all where none does)."""
    return recomputed_keys(model.graph, model.axis.calibration)


def recomputed_keys(graph: Graph, calibration: Calibration) -> frozenset[str]:
    """Keys of the layers of a graph that the software stack of a calibration may recompute."""
    counts = Counter(layer.kind for layer in graph.layers)
    often = frozenset(layer.key for layer in graph.layers if counts[layer.kind] > 1)
    every = frozenset(layer.key for layer in graph.layers)
    return every if calibration.stack.recomputes_ends or not often else often


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
