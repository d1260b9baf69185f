"""Sums over every possible stage at one tp: seconds, parameters, stash and boundaries, before dp, ZeRO and schedules.

Stages come from `StageSpace`. `build_stage_sums` adds up the layers' profiles; `_ties` counts parameters that several
layers share, `cut_bytes` what crosses the boundaries between stages, and `_relayed_bytes` the tensors that only pass
through a stage. Parameters of layers outside the repeated body may be sharded over all stages, where the target does
that (`StageSums.sharded_over_stages`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from phaze.place.model.placement_problem import PlacementProblem
from phaze.place.model.stage_space import BoolArray, FloatArray, IntArray, StageSpace
from phaze.profile.layer_profile import LayerProfile

__all__ = ["ParameterSums", "StageSums", "StageSumsByTp", "build_stage_sums", "cut_bytes", "frozen_by_layer"]

_NOT_PER_STAGE = frozenset(
    {
        "tp",
        "unsliced_layers",
        "layer_backward_s",
        "layer_weight_s",
        "layer_parameters",
        "layer_expert_parameters",
        "stage_sharded_layers",
        "all_stage_sharded_parameters",
        "frozen",
        "largest_held_parameters",
    }
)
"""Fields of `StageSums` that are no arrays with a stage axis."""


class ParameterSums(NamedTuple):
    """Sums over every stage of parameters that are copied and sharded alike; the words of `StageSums`."""

    parameters: FloatArray
    summed_parameters: FloatArray
    layers: FloatArray
    layer_parameters: FloatArray
    tied_parameters: FloatArray
    tied_groups: FloatArray
    trained_tensors: FloatArray

    def take(self, stages: IntArray) -> ParameterSums:
        """The same sums of only some of the stages."""
        return ParameterSums(*(sums if place == _BY_LAYER else sums[stages] for place, sums in enumerate(self)))


_BY_LAYER = ParameterSums._fields.index("layer_parameters")
"""The place of the one field of `ParameterSums` that is per layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSums:
    """Sums over every stage of one microbatch. Axes: mode (of the problem's recompute modes), stage or layer.

    Attributes:
        tp: devices that each layer is split over.
        forward_s: per (mode, stage).
        backward_input_s: per (mode, stage).
        backward_weight_s: per (mode, stage).
        recompute_s: per (mode, stage).
        layer_backward_s: input and weight part together, per (mode, layer).
        layer_weight_s: the weight part, per (mode, layer).
        layer_parameters: trained parameters without tied ones, per layer.
        parameters: trained parameters per stage, tied ones counted once (where they are sliced unequally, the most).
        summed_parameters: the same, tied ones counted for every layer that has them.
        largest_parameters: trained ones of one layer that ZeRO moves at once, per stage; so all that is largest here.
        parameter_layers: how many layers have parameters, per stage.
        expert_parameters: those of all these that belong to experts which are divided over several devices, per stage.
        layer_expert_parameters: likewise, per layer.
        largest_dense_parameters: of one layer without such experts, per stage.
        dense_layers: how many layers have parameters outside of such experts, per stage.
        expert_layers: how many layers have such experts, per stage.
        tied_parameters: parameters that other layers (here or elsewhere) share, per stage.
        tied_groups: how many ties the stage takes part in.
        trained_tensors: how many tensors the trained parameters are, per stage; none is one of divided experts only.
        split_ties: per (tie, stage), the shared parameters if other stages hold them too, else 0.
        table_bytes: parameters of whole numbers, per stage.
        frozen: parameters that are read and not trained, per stage: dense ones and those of divided experts.
        largest_held_parameters: of one layer, trained or not, per stage: all, and those outside of divided experts.
        stashed_bytes: per microbatch in flight, relayed tensors included, per (mode, stage).
        host_bytes: what goes to the host instead, per (mode, stage).
        working_bytes: what the stage needs at its fullest beyond one microbatch's stash, per (mode, stage).
        received_bytes: what crosses the cut before the stage, per stage.
        sent_bytes: what crosses the cut after it.
        received_whole_bytes: the part of it that every device of the stage holds whole.
        sent_whole_bytes: likewise.
        is_sliced: whether some layer of the stage is tensor-parallel.
        unsliced_layers: how many layers of the graph are not.
        body_layers: how many layers of the most frequent kind the stage has.
        stage_sharded_layers: whether several stages share a layer's parameters among them, a part on each, per layer.
        stage_sharded_parameters: those of such layers and tied ones, per stage.
        all_stage_sharded_parameters: those of the whole model.
    """

    tp: int
    forward_s: FloatArray
    backward_input_s: FloatArray
    backward_weight_s: FloatArray
    recompute_s: FloatArray
    layer_backward_s: FloatArray
    layer_weight_s: FloatArray
    layer_parameters: FloatArray
    parameters: FloatArray
    summed_parameters: FloatArray
    largest_parameters: FloatArray
    parameter_layers: FloatArray
    expert_parameters: FloatArray
    layer_expert_parameters: FloatArray
    largest_dense_parameters: FloatArray
    dense_layers: FloatArray
    expert_layers: FloatArray
    tied_parameters: FloatArray
    tied_groups: FloatArray
    trained_tensors: FloatArray
    split_ties: FloatArray
    table_bytes: FloatArray
    frozen: tuple[ParameterSums, ParameterSums]
    largest_held_parameters: tuple[FloatArray, FloatArray]
    stashed_bytes: FloatArray
    host_bytes: FloatArray
    working_bytes: FloatArray
    received_bytes: FloatArray
    sent_bytes: FloatArray
    received_whole_bytes: FloatArray
    sent_whole_bytes: FloatArray
    is_sliced: BoolArray
    unsliced_layers: int
    body_layers: IntArray
    stage_sharded_layers: BoolArray
    stage_sharded_parameters: FloatArray
    all_stage_sharded_parameters: float

    @property
    def least_s(self) -> FloatArray:
        """Seconds of one microbatch per stage, the least over modes."""
        return np.asarray((self.forward_s + self.backward_input_s + self.backward_weight_s).min(axis=0))

    @property
    def recompute_s_per_byte(self) -> tuple[float, ...]:
        """What each recompute mode costs over the one before it per byte of stash saved, on the whole model."""
        whole_model = int(self.parameter_layers.argmax()) if self.parameter_layers.any() else 0
        stash, recompute = self.stashed_bytes[:, whole_model], self.recompute_s[:, whole_model]
        prices = []
        for mode in range(1, len(self.recompute_s)):
            saved = float(stash[mode - 1] - stash[mode])
            spent = float(recompute[mode] - recompute[mode - 1])
            if saved > 0 and spent > 0:
                prices.append(spent / saved)
        return tuple(prices)

    def kinds(self, ep: int, has_frozen: bool = False) -> tuple[ParameterSums, ...]:
        """Dense parameters, and behind them those of experts where these are divided over ``ep`` > 1 devices.

        Where parameters are frozen, the same of those follow.
        """
        experts = self.expert_parameters
        dense = ParameterSums(
            parameters=self.parameters - experts,
            summed_parameters=self.summed_parameters - experts,
            layers=self.dense_layers,
            layer_parameters=self.layer_parameters - self.layer_expert_parameters,
            tied_parameters=self.tied_parameters,
            tied_groups=self.tied_groups,
            trained_tensors=self.trained_tensors,
        )
        none = np.zeros_like(experts)
        of_experts = ParameterSums(experts, experts, self.expert_layers, self.layer_expert_parameters, none, none, none)
        count = 1 if ep == 1 else 2
        return (*(dense, of_experts)[:count], *(self.frozen[:count] if has_frozen else ()))

    def stage_local_kinds(self, ep: int, has_frozen: bool) -> tuple[FloatArray, ...]:
        """Parameters per stage of each of these kinds, without those that are sharded over stages."""
        trained = (self.stage_local_parameters - self.expert_parameters, self.expert_parameters)
        count = 1 if ep == 1 else 2
        return (*trained[:count], *(kind.parameters for kind in self.frozen[:count] if has_frozen))

    @property
    def stage_local_parameters(self) -> FloatArray:
        """Parameters per stage without those that are sharded over stages."""
        return np.asarray(np.maximum(self.parameters - self.stage_sharded_parameters, 0.0))

    def take(self, stages: IntArray) -> StageSums:
        """The same table with only some of the stages."""
        per_stage = [name for name in self.__slots__ if name not in _NOT_PER_STAGE]
        all_parameters, dense_parameters = self.largest_held_parameters
        return replace(
            self,
            **{name: getattr(self, name)[..., stages] for name in per_stage},
            frozen=(self.frozen[0].take(stages), self.frozen[1].take(stages)),
            largest_held_parameters=(all_parameters[stages], dense_parameters[stages]),
        )

    def sharded_over_stages(self, stages: int) -> StageSums:
        """The same sums in a pipeline of so many stages.

        Each stage has an equal part of what is sharded over stages. It is reduced after all other parameters.
        """
        if stages == 1 or not self.all_stage_sharded_parameters:
            return self
        part = self.all_stage_sharded_parameters / stages
        return replace(
            self,
            parameters=self.stage_local_parameters + part,
            layer_parameters=np.where(self.stage_sharded_layers, 0.0, self.layer_parameters),
            tied_parameters=np.full_like(self.parameters, part),
            tied_groups=np.ones_like(self.tied_groups),
            split_ties=np.zeros_like(self.split_ties),
        )


class StageSumsByTp(Mapping[int, StageSums]):
    """The sums at every tp of a problem, each made when it is first asked for.

    Bounds on whole strategies need none of them: where they rule everything out, nothing is summed over stages.
    """

    def __init__(self, problem: PlacementProblem, space: StageSpace, use_bounds: bool) -> None:
        self._problem, self._space, self._use_bounds = problem, space, use_bounds
        self._known: dict[int, StageSums] = {}

    def __getitem__(self, tp: int) -> StageSums:
        """The sums at one tp."""
        if tp not in self:
            raise KeyError(tp)
        if tp not in self._known:
            self._known[tp] = build_stage_sums(self._problem, self._space, tp, self._use_bounds)
        return self._known[tp]

    def __contains__(self, tp: object) -> bool:
        """Whether the problem has this tp."""
        return tp in self._problem.tp_degrees

    def __iter__(self) -> Iterator[int]:
        """The values of tp."""
        return iter(self._problem.tp_degrees)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._problem.tp_degrees)


def build_stage_sums(problem: PlacementProblem, space: StageSpace, tp: int, use_bounds: bool) -> StageSums:
    """The sums at one tp; seconds are the profiles' values, or their lower bounds."""
    modes, layers = problem.choices.recompute, range(space.layers)
    profiles = [problem.profile(layer, tp, modes[0]) for layer in layers]  # what no recompute mode changes
    seconds = {
        name: np.stack([problem.seconds(name, tp, mode, use_bounds) for mode in modes])
        for name in ("forward_s", "backward_input_s", "backward_weight_s", "recompute_s")
    }
    per_mode = [[problem.profile(layer, tp, mode) for layer in layers] for mode in modes]
    stash, working, host = (
        np.array([[getattr(profile, name) for profile in row] for row in per_mode])
        for name in ("stashed_bytes", "peak_working_bytes", "host_bytes")
    )
    parameters = np.array([profile.parameters for profile in profiles])
    experts = np.array([profile.expert_parameters * (problem.ep > 1) for profile in profiles])
    dense = np.maximum(parameters - experts, 0.0)
    at_once = np.array([profile.moved_at_once for profile in profiles])
    tied = np.array([sum(profile.tied_parameters.values()) for profile in profiles])
    ties = _ties(problem, space, [profile.tied_parameters for profile in profiles])
    cut, whole = cut_bytes(problem, space, profiles), cut_bytes(problem, space, profiles, only_whole=True)
    summed = space.sums(parameters)
    sliced = np.array([float(profile.is_tensor_parallel) for profile in profiles])
    is_sharded = problem.stage_sharded_layers
    stage_sharded = space.sums(np.where(is_sharded, parameters - tied, 0.0)) + ties.held * is_sharded.any()
    return StageSums(
        tp=tp,
        **{name: space.sums(values) for name, values in seconds.items()},
        layer_backward_s=seconds["backward_input_s"] + seconds["backward_weight_s"],
        layer_weight_s=seconds["backward_weight_s"],
        layer_parameters=np.maximum(parameters - tied, 0.0),
        parameters=np.maximum(summed - ties.repeated, 0.0),
        summed_parameters=summed,
        largest_parameters=space.maxima(np.minimum(parameters, at_once)),
        parameter_layers=np.rint(space.sums((parameters > 0).astype(float))),
        expert_parameters=space.sums(experts),
        layer_expert_parameters=experts,
        largest_dense_parameters=space.maxima(np.minimum(dense, at_once)),
        dense_layers=np.rint(space.sums((dense > 0).astype(float))),
        expert_layers=np.rint(space.sums((experts > 0).astype(float))),
        tied_parameters=ties.held,
        tied_groups=ties.groups,
        trained_tensors=space.sums(np.array([float(profile.trained_tensors) for profile in profiles])),
        split_ties=ties.split,
        table_bytes=space.sums(np.array([profile.table_bytes for profile in profiles])),
        frozen=_frozen_sums(problem, space, profiles),
        largest_held_parameters=_largest_held(problem, space, profiles),
        host_bytes=space.sums(host),
        stashed_bytes=space.sums(stash) + _relayed_bytes(problem, space, profiles),
        working_bytes=space.largest_above(working, stash),
        received_bytes=cut[space.source],
        sent_bytes=cut[space.target],
        received_whole_bytes=whole[space.source],
        sent_whole_bytes=whole[space.target],
        is_sliced=space.sums(sliced) > 0.5,
        unsliced_layers=int((sliced == 0).sum()),
        body_layers=np.rint(space.sums(np.array(problem.graph.body, dtype=float))).astype(np.int64),
        stage_sharded_layers=is_sharded,
        stage_sharded_parameters=stage_sharded,
        all_stage_sharded_parameters=float(stage_sharded.max()),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ties:
    """Parameters that several layers share, per stage.

    Attributes:
        held: shared parameters that the stage holds; of each tie the largest of its layers.
        repeated: what the sum over layers counts beyond that.
        groups: how many ties the stage takes part in.
        split: per (tie, stage), the shared parameters if other stages hold them too, else 0.
    """

    held: FloatArray
    repeated: FloatArray
    groups: FloatArray
    split: FloatArray


def _ties(problem: PlacementProblem, space: StageSpace, tied: list[Mapping[str, float]]) -> _Ties:
    """Count the ties of every stage, given the shared parameters of each layer by the name of the tie."""
    stages = len(space.source)
    held, repeated, groups = np.zeros((3, stages))
    split = np.zeros((len(problem.graph.ties), stages))
    for index, (name, members) in enumerate(problem.graph.ties.items()):
        belongs, sizes = np.zeros((2, space.layers))
        for layer in set(members):
            belongs[layer], sizes[layer] = 1.0, tied[layer].get(name, 0.0)
        count, size = np.rint(space.sums(belongs)), space.maxima(sizes)
        held += size
        groups += size > 0
        repeated += np.where(count > 1, space.sums(sizes) - size, 0.0)
        split[index] = np.where(count < belongs.sum(), size, 0.0)
    return _Ties(held=held, repeated=repeated, groups=groups, split=split)


def _frozen_sums(
    problem: PlacementProblem, space: StageSpace, profiles: list[LayerProfile]
) -> tuple[ParameterSums, ParameterSums]:
    """Sums of the parameters that are not trained: dense ones, and those of experts that are divided over devices.

    A layer's trained and frozen parameters of one kind are gathered together: such layers are counted with the trained.
    """
    trained_experts = np.array([profile.expert_parameters * (problem.ep > 1) for profile in profiles])
    trained_dense = np.array([profile.parameters for profile in profiles]) - trained_experts
    experts = np.array([profile.frozen_expert_parameters * (problem.ep > 1) for profile in profiles])
    dense = np.maximum(np.array([profile.frozen_parameters for profile in profiles]) - experts, 0.0)
    repeated = _ties(problem, space, [profile.frozen_ties for profile in profiles]).repeated
    none, no_layer = np.zeros(len(space.source)), np.zeros(space.layers)
    kinds = []
    for counts, trained, counted_twice in ((dense, trained_dense, repeated), (experts, trained_experts, none)):
        summed, gathered_alone = space.sums(counts), (counts > 0) & (trained <= 0)
        layers = np.rint(space.sums(gathered_alone.astype(float)))
        held = np.maximum(summed - counted_twice, 0.0)
        kinds.append(ParameterSums(held, summed, layers, no_layer, none, none, none))
    return kinds[0], kinds[1]


def _largest_held(
    problem: PlacementProblem, space: StageSpace, profiles: list[LayerProfile]
) -> tuple[FloatArray, FloatArray]:
    """The most parameters of one layer, trained or not, per stage: all of them, and those outside of experts."""
    held = np.array([profile.parameters + profile.frozen_parameters for profile in profiles])
    experts = np.array([profile.expert_parameters + profile.frozen_expert_parameters for profile in profiles])
    at_once = np.array([profile.moved_at_once for profile in profiles])
    dense = np.maximum(held - experts * (problem.ep > 1), 0.0)
    return space.maxima(np.minimum(held, at_once)), space.maxima(np.minimum(dense, at_once))


def frozen_by_layer(problem: PlacementProblem, layers: list[int]) -> FloatArray:
    """Parameters that are read and not trained, per (dense or divided experts, tp, layer).

    What several layers read is counted for the first of them.
    """
    frozen = np.zeros((2, len(problem.tp_degrees), len(layers)))
    for row, tp in enumerate(problem.tp_degrees if problem.has_frozen else ()):
        counted = set[str]()
        for column, layer in enumerate(layers):
            profile = problem.profile(layer, tp, problem.choices.recompute[0])
            experts = profile.frozen_expert_parameters * (problem.ep > 1)
            repeated = sum(count for name, count in profile.frozen_ties.items() if name in counted)
            counted.update(profile.frozen_ties)
            frozen[:, row, column] = profile.frozen_parameters - experts - repeated, experts
    return frozen


def cut_bytes(
    problem: PlacementProblem, space: StageSpace, profiles: list[LayerProfile], *, only_whole: bool = False
) -> FloatArray:
    """Per state: bytes of every tensor (or only of whole ones) that was made before the cut and is read after it."""
    flows = problem.graph.flows
    if not flows:
        return np.zeros(space.states)
    tensors = [profiles[flow.producer].outputs[flow.output] for flow in flows]
    sizes = np.array([float(tensor.size_bytes) if tensor.is_whole or not only_whole else 0.0 for tensor in tensors])
    consumers = [layer for flow in flows for layer in flow.consumers]
    first_consumer = np.cumsum([0, *(len(flow.consumers) for flow in flows[:-1])])
    is_read = np.logical_and.reduceat(space.inside[:, consumers], first_consumer, axis=1)
    return np.asarray((space.inside[:, [flow.producer for flow in flows]] & ~is_read) @ sizes)


def _relayed_bytes(problem: PlacementProblem, space: StageSpace, profiles: list[LayerProfile]) -> FloatArray:
    """Per stage: bytes of tensors that only pass through it, made before, read after, and not read inside."""
    relayed = np.zeros(len(space.source))
    for flow in problem.graph.flows:
        if max(flow.consumers) == flow.producer + 1 and space.is_chain:
            continue
        read = space.inside[:, list(flow.consumers)]
        made = space.inside[space.source, flow.producer]
        later = ~read[space.target].all(axis=1)
        unread = (read[space.target] == read[space.source]).all(axis=1)
        size = profiles[flow.producer].outputs[flow.output].size_bytes
        relayed += np.where(made & later & unread, size, 0.0)
    return relayed
