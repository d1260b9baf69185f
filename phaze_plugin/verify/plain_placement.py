"""Placement written a second time, for verification: plainly, layer by layer, without tables, bounds or numpy.

`phaze.place` finds a placement with prefix sums over all stages. Here the stages of one given placement are added up
one after the other; `plain_pipeline.py` simulates them. Only values, and the prices of single collectives and of the
update, are shared with that code. The rules, and where they stand:

    seconds of a stage's passes                `PlainCosts.stage`
    reductions of gradients, ties, the update  `PlainCosts._add_what_follows`, `PlainCosts._add_reduction`
    memory of a stage                          `PlainCosts._add_memory`
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from phaze.cost import Collective, broadcast_fill_s, price_collective, price_works, update_work
from phaze.hardware import Cluster, InterconnectLevel
from phaze.hardware.accelerator import EnergyModel, energy_model
from phaze.ir import RecomputeMode
from phaze.parallelism import Parallelism, PipelineSchedule
from phaze.place import LayerProfile, PlacementProblem
from phaze.verify.plain_pipeline import PlainStage, plain_in_flight

__all__ = ["PlainCosts"]

_UPDATED_PARAMETERS = 1 << 30
"""Parameters of the update that is priced to know the seconds of one: so many that fixed costs do not show."""


_BUCKET_BYTES = 64 * 2**20
"""States pass through the device in two buckets of this size."""


class _Groups(NamedTuple):
    """The devices that hold copies of the same parameters: groups that share ZeRO's states.

    Attributes:
        shard: devices of a group.
        groups: how many groups there are.
        stride: how many copies of the stage neighbours in a group lie apart.
    """

    shard: int
    groups: int
    stride: int


class _Tie(NamedTuple):
    """Parameters that several layers share, as a stage with some of these layers sees them.

    Attributes:
        held: parameters that the stage holds of it.
        repeated: parameters of all these layers of the stage together.
        layers_here: how many of the layers are in the stage.
        layers: how many layers share the parameters.
        joins_ends: whether these are the first and the last layer of the model.
    """

    held: float
    repeated: float
    layers_here: int
    layers: int
    joins_ends: bool


_WHOLE_BACKWARD = (
    PipelineSchedule.NONE,
    PipelineSchedule.GPIPE,
    PipelineSchedule.ONE_F_ONE_B,
    PipelineSchedule.INTERLEAVED,
    PipelineSchedule.EAGER,
)
"""Schedules whose backward passes make the gradients of inputs and of weights together."""


@dataclass(slots=True)
class PlainCosts:
    """Seconds and bytes of stages under one parallelism, added up layer by layer.

    With `allows_mixed_tp`, a stage none of whose layers is split takes one device instead of tp. With `uses_bounds`,
    layers take what no schedule of theirs beats. `known_s` are prices and sums so far, which serve all strategies of
    a problem.
    """

    problem: PlacementProblem
    parallelism: Parallelism
    allows_mixed_tp: bool
    uses_bounds: bool = False
    energy: EnergyModel = field(default_factory=energy_model)
    known_s: dict[tuple[object, ...], float] = field(default_factory=dict)
    known_groups: dict[bool, _Groups] = field(default_factory=dict)

    def stage(self, before: set[int], layers: set[int], mode: RecomputeMode) -> PlainStage:
        """One stage with some layers and a recompute mode, given the layers that come before it."""
        order = sorted(layers)
        profiles = {layer: self._profile(layer, mode) for layer in order}
        is_split = any(profile.is_tensor_parallel for profile in profiles.values())
        devices = self.parallelism.tp if is_split or not self.allows_mixed_tp else 1
        received_s, returned_s = self._transfer_s(before), self._transfer_s(before | layers)
        gather_s, scatter_s = (
            sum(self._in_pass_s(kind, profile, devices) for profile in profiles.values())
            for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        )
        together_s = self.problem.calibration.together_s
        inputs_s, weights_s = self._sum_s(profiles, "backward_input_s"), self._sum_s(profiles, "backward_weight_s")
        start_s = max(returned_s, self._sum_s(profiles, "recompute_s"))
        result = PlainStage(devices=devices)
        result.received_s, result.waited_s = received_s, start_s - self._sum_s(profiles, "recompute_s")
        result.forward_s = received_s + together_s(self._sum_s(profiles, "forward_s"), gather_s)
        result.backward_s = start_s + together_s(inputs_s + weights_s, gather_s + scatter_s)
        if self._splits_backward:
            result.backward_s = start_s + together_s(inputs_s, gather_s)
            result.weight_s = together_s(weights_s, scatter_s)
        self._add_what_follows(result, profiles)
        self._add_memory(result, before, profiles, self._cut_bytes(before) + self._cut_bytes(before | layers))
        return result

    @property
    def _splits_backward(self) -> bool:
        return self.parallelism.schedule not in _WHOLE_BACKWARD

    @property
    def _has_both_ends_together(self) -> bool:
        """Whether the first and the last layer are on one device: layers in a row go down the devices and come back."""
        count = len(self.problem.graph.layers)
        follows = all(
            any(flow.producer == layer and layer + 1 in flow.consumers for flow in self.problem.graph.flows)
            for layer in range(count - 1)
        )
        in_v_shape = (PipelineSchedule.ZERO_BUBBLE_V, PipelineSchedule.DUAL_PIPE_V)
        return follows and self.parallelism.schedule in in_v_shape

    @property
    def _owners_broadcast(self) -> bool:
        """Whether each device sends the tensors that it updated to the others by itself."""
        return self.parallelism.zero == 1 and self.problem.calibration.stack.owners_broadcast

    @property
    def _used_devices(self) -> int:
        return self._copies * self.parallelism.tp * self.parallelism.pp

    @property
    def _copies(self) -> int:
        """Devices that run the same layers with the same part of tensor parallelism."""
        return self.parallelism.dp * self.problem.cp

    def _groups(self, is_expert: bool) -> _Groups:
        """How copies of dense parameters, or of those of experts, are divided into groups that share ZeRO's states."""
        if is_expert not in self.known_groups:
            shard, ep = self.parallelism.shard, self.problem.ep if is_expert else 1
            members = [copy for copy in range(self._copies) if copy % ep == 0]  # devices with the same as the first
            size = self._copies if isinstance(shard, str) else shard
            first_group = [copy for copy in members if copy < size]
            self.known_groups[is_expert] = _Groups(len(first_group), len(members) // len(first_group), ep)
        return self.known_groups[is_expert]

    def _in_pass_s(self, collective: Collective, profile: LayerProfile, devices: int) -> float:
        """Seconds of gathering a layer's parameters for a pass (ZeRO-3), or of scattering its gradients after one."""
        recipe, zero = self.problem.recipe, self.parallelism.zero
        counts = self._by_kind(profile)
        if collective is Collective.REDUCE_SCATTER:
            each = recipe.reduction_bytes if zero >= 2 else 0.0
        else:
            each = recipe.parameter_bytes if zero == 3 else 0.0
            frozen = dict(self._frozen_by_kind(profile))  # a layer's parameters of one kind are gathered together
            counts = [(kind, count + frozen[kind]) for kind, count in counts]
        return sum(self._in_group_s(collective, count * each, devices, kind) for kind, count in counts)

    def _by_kind(self, profile: LayerProfile) -> list[tuple[bool, float]]:
        """The parameters of a layer: whether they belong to experts that are divided over ep, and how many."""
        if self.problem.ep == 1:
            return [(False, profile.parameters)]
        return [(False, profile.parameters - profile.expert_parameters), (True, profile.expert_parameters)]

    def _frozen_by_kind(self, profile: LayerProfile) -> list[tuple[bool, float]]:
        """The same of the parameters that are read and not trained."""
        experts = profile.frozen_expert_parameters if self.problem.ep > 1 else 0.0
        return [(False, profile.frozen_parameters - experts), (True, experts)]

    def _reduce_s(self, count: float, devices: int, is_expert: bool = False) -> float:
        """Seconds of what follows the last backward pass for the gradients of so many parameters."""
        groups, zero = self._groups(is_expert), self.parallelism.zero
        size = count * self.problem.recipe.reduction_bytes
        if zero == 0 or self._owners_broadcast:
            copies = groups.shard * groups.groups
            return self._over_copies_s(Collective.ALL_REDUCE, size, copies, groups.stride * devices)
        stride = groups.stride * groups.shard * devices
        takes_s = self._over_copies_s(Collective.ALL_REDUCE, size / groups.shard, groups.groups, stride)
        if zero == 1:
            takes_s += self._in_group_s(Collective.REDUCE_SCATTER, size, devices, is_expert)
        return takes_s

    def _in_group_s(self, collective: Collective, size: float, devices: int, is_expert: bool) -> float:
        """Seconds of a collective within a group of devices that share ZeRO's states."""
        groups = self._groups(is_expert)
        return self._over_copies_s(collective, size, groups.shard, groups.stride * devices)

    def _sum_s(self, profiles: Mapping[int, LayerProfile], name: str) -> float:
        """The seconds of one pass over all layers of a stage, and what each waits for its tensors on the host."""
        return math.fsum(
            self._pass_s(profile, name) + self._waits_s(layer, profile, name) for layer, profile in profiles.items()
        )

    def _moves(self, layer: int) -> bool:
        """Whether the kept tensors of a layer go to the host: those of layers that repeat, or of all if none does."""
        if "activations" not in self.problem.offload:
            return False
        kinds = [placed.kind for placed in self.problem.graph.layers]
        return kinds.count(kinds[layer]) > 1 or len(set(kinds)) == len(kinds)

    def _waits_s(self, layer: int, profile: LayerProfile, name: str) -> float:
        """What a pass takes longer than its ops because the layer's kept tensors move beside it."""
        host = self.problem.cluster.host
        if host is None or name not in ("forward_s", "backward_input_s") or not self._moves(layer):
            return 0.0
        beside_s = self._pass_s(profile, name)
        if name == "backward_input_s":  # of a bound the same is certain that the value waits
            passes = (profile.backward_input_s, profile.backward_weight_s)
            beside_s = float(sum(seconds.value[self.problem.accelerator] for seconds in passes))
        moved_s = profile.stashed_bytes / host.bandwidth_bytes_per_s
        return self.problem.calibration.together_s(beside_s, moved_s) - beside_s

    def _most_in_flight(self) -> int:
        """The most microbatches that any chunk of the pipeline has in flight."""
        strategy = self.parallelism
        schedule = "1f1b" if strategy.schedule is PipelineSchedule.NONE else strategy.schedule.value
        micro_batches = strategy.micro_batches_per_pipeline(self.problem.micro_batches)
        key = ("in flight", schedule, strategy.pp, micro_batches, strategy.chunks)
        if key not in self.known_s:
            self.known_s[key] = max(
                plain_in_flight(schedule, strategy.pp, micro_batches, strategy.chunks, device, chunk)
                for device in range(strategy.pp)
                for chunk in range(strategy.chunks)
            )
        return int(self.known_s[key])

    def _pass_s(self, profile: LayerProfile, name: str) -> float:
        """The seconds of one pass of one layer, or the bound under them."""
        seconds = getattr(profile, name)
        return float((seconds.bound if self.uses_bounds else seconds.value)[self.problem.accelerator])

    def _profile(self, layer: int, mode: RecomputeMode | None = None) -> LayerProfile:
        key = self.problem.graph.layers[layer].key
        return self.problem.profiles[key, self.parallelism.tp, mode or self.problem.choices.recompute[0]]

    def _over_copies_s(self, collective: Collective, size: float, members: int, stride: int) -> float:
        """Seconds of a collective over some copies, or parts, of a stage."""
        if members == 1 or size <= 0:
            return 0.0
        key = (collective, size, members, stride, self._used_devices)
        if key not in self.known_s:
            self.known_s[key] = self._seconds(collective, size, self._used_cluster(), members, stride)
        return self.known_s[key]

    def _seconds(
        self, collective: Collective, size: float, part: Cluster, members: int, stride: int = 1, is_inner: bool = True
    ) -> float:
        calibration = self.problem.calibration if is_inner else self.problem.calibration.between_nodes
        price = price_collective(
            collective, size, part, members, stride, calibration=calibration, energy=self.energy, is_bulk=True
        )
        return float(price.seconds)

    def _used_cluster(self) -> Cluster:
        """The devices that are used; the outermost level is made larger if the cluster's levels hold fewer."""
        cluster, used, levels = self.problem.cluster, self._used_devices, self.problem.cluster.levels
        if math.prod(level.size for level in levels) < used:
            levels = (*levels[:-1], replace(levels[-1], size=levels[-1].size * used))
        return Cluster(cluster.accelerator, used, levels)

    def _between_stages_s(self, collective: Collective, size: float, members: int) -> float:
        """Seconds of a collective between stages, on the links that reach farthest."""
        if self.parallelism.pp == 1 or size <= 0:
            return 0.0
        stride = self._copies * self.parallelism.tp
        key = (collective, size, members, "between", self.parallelism.pp, stride)
        if key not in self.known_s:
            cluster = self.problem.cluster
            far, is_inner = cluster.levels[-1], cluster.inner_levels[-1]
            if self._used_devices <= math.prod(level.size for level in cluster.levels):
                span = self._used_cluster().axis_spans(self.parallelism.pp, stride)[-1]
                far, is_inner = span.level, span.is_inner
            level = InterconnectLevel(members, far.bandwidth_bytes_per_s, far.latency_s)
            part = Cluster(cluster.accelerator, members, (level,))
            self.known_s[key] = self._seconds(collective, size, part, members, is_inner=is_inner)
        return self.known_s[key]

    def _transfer_s(self, placed: set[int]) -> float:
        """Seconds of what crosses the cut after some layers: sent by every device, or in parts that are gathered."""
        size, whole = self._cut_bytes(placed), self._cut_bytes(placed, only_whole=True)
        sent_s = self._between_stages_s(Collective.POINT_TO_POINT, size, 2)
        tp = self.parallelism.tp
        if self.parallelism.pp == 1 or tp == 1 or whole <= 0:
            return sent_s
        gather_s = self._over_copies_s(Collective.ALL_GATHER, whole, tp, 1)
        parts_s = self._between_stages_s(Collective.POINT_TO_POINT, size - whole + whole / tp, 2)
        return min(sent_s, parts_s + gather_s)

    def _cut_bytes(self, placed: set[int], *, only_whole: bool = False) -> float:
        """Bytes of tensors (or only of those that every device holds whole) made before a cut and read behind it."""
        total = 0.0
        for flow in self.problem.graph.flows:
            if flow.producer in placed and not set(flow.consumers) <= placed:
                tensor = self._profile(flow.producer).outputs[flow.output]
                total += tensor.size_bytes if tensor.is_whole or not only_whole else 0.0
        return total

    def _ties(self, order: Sequence[int]) -> list[_Tie]:
        """The ties that some layer of a stage has."""
        ties = []
        for name, members in self.problem.graph.ties.items():
            sizes = [self._profile(layer).tied_parameters.get(name, 0.0) for layer in set(members) & set(order)]
            if sizes:
                joins_ends = set(members) == {0, len(self.problem.graph.layers) - 1}
                ties.append(_Tie(max(sizes), sum(sizes), len(sizes), len(set(members)), joins_ends))
        return ties

    def _add_what_follows(self, result: PlainStage, profiles: Mapping[int, LayerProfile]) -> None:
        """Add what follows the last backward pass: reductions, exchanges of tied parameters, and the update."""
        recipe, order, spread = self.problem.recipe, list(profiles), self._spread_parameters()
        pp, zero = self.parallelism.pp, self.parallelism.zero
        gradient_bytes = recipe.reduction_bytes
        self._add_reduction(result, profiles)
        result.tie_s += self._between_stages_s(Collective.ALL_GATHER, spread * recipe.parameter_bytes, pp)
        result.tie_s += self._between_stages_s(Collective.REDUCE_SCATTER, spread * gradient_bytes, pp)
        for tie in self._ties(order):
            if tie.layers_here < tie.layers and not spread and not (tie.joins_ends and self._has_both_ends_together):
                members = min(tie.layers, pp)
                result.tie_s += self._between_stages_s(Collective.ALL_REDUCE, tie.held * gradient_bytes, members)
        for is_expert, parameters in self._held_by_kind(profiles):
            result.finish_s += parameters * self._update_s() / (self._groups(is_expert).shard if zero >= 1 else 1)
            if zero in (1, 2) and recipe.trains:
                size = parameters * recipe.parameter_bytes
                result.finish_s += self._in_group_s(Collective.ALL_GATHER, size, result.devices, is_expert)
        if self._owners_broadcast:
            groups = self._groups(is_expert=False)
            owners = min(sum(profile.trained_tensors for profile in profiles.values()), groups.shard)
            result.finish_s += owners * broadcast_fill_s(self._used_cluster(), groups.shard, result.devices)

    def _add_reduction(self, result: PlainStage, profiles: Mapping[int, LayerProfile]) -> None:
        """Reduce gradients behind the last backward pass, the last layer first; those of tied parameters at the end."""
        spread = self._spread_parameters()
        network_free_s = ready_s = 0.0
        for layer in reversed(list(profiles)):
            profile = profiles[layer]
            ready_s += self._pass_s(profile, "backward_weight_s")
            if not self._splits_backward:
                ready_s += self._pass_s(profile, "backward_input_s") + self._waits_s(layer, profile, "backward_input_s")
            parameters = 0.0 if spread and self.problem.stage_sharded_layers[layer] else self._untied_parameters(layer)
            experts = profile.expert_parameters if self.problem.ep > 1 else 0.0
            takes_s = self._reduce_s(parameters - experts, result.devices)
            takes_s += self._reduce_s(experts, result.devices, is_expert=True)
            result.reduction_s += takes_s
            network_free_s = max(network_free_s, ready_s) + takes_s
        exposed_s = network_free_s - ready_s if self.problem.overlaps_reduction else result.reduction_s
        overlap = self.problem.calibration.hidden_share
        result.exposed_s = overlap * exposed_s + (1 - overlap) * result.reduction_s
        tied = [tie.held for tie in self._ties(list(profiles))]
        for parameters in [spread / self.parallelism.pp] if spread else tied:
            takes_s = self._reduce_s(parameters, result.devices)
            result.exposed_s += takes_s
            result.reduction_s += takes_s

    def _update_s(self) -> float:
        """Seconds of the update of one parameter."""
        if ("update",) not in self.known_s:
            calibration, chip = self.problem.calibration, self.problem.cluster.accelerator
            works = [update_work(self.problem.recipe, _UPDATED_PARAMETERS, stack=calibration.stack)]
            estimate = price_works(works, chip, calibration=calibration, energy=self.energy)
            update_s = float(estimate.spread_s[0, 0]) / _UPDATED_PARAMETERS
            host = self.problem.cluster.host
            if host is not None and "optimizer" in self.problem.offload:  # all states pass over the link, both ways
                update_s = max(update_s, self.problem.recipe.optimizer_bytes / host.bandwidth_bytes_per_s)
            self.known_s["update",] = update_s
        return self.known_s["update",]

    def _untied_parameters(self, layer: int) -> float:
        profile = self._profile(layer)
        return profile.parameters - sum(profile.tied_parameters.values())

    def _spread_parameters(self) -> float:
        """Parameters that all stages hold in equal parts: of layers unlike most, and tied ones, each once."""
        if self.parallelism.pp == 1:
            return 0.0
        key = ("spread", self.parallelism.tp)
        if key not in self.known_s:
            spread = self.problem.stage_sharded_layers
            layers = range(len(spread)) if spread.any() else range(0)
            shared = sum(tie.held for tie in self._ties(layers))
            self.known_s[key] = sum(self._untied_parameters(layer) for layer in layers if spread[layer]) + shared
        return self.known_s[key]

    def _held_parameters(self, order: Sequence[int]) -> float:
        """Parameters of a stage: shared ones are counted once, spread ones by the stage's part."""
        if spread := self._spread_parameters():
            unspread = [layer for layer in order if not self.problem.stage_sharded_layers[layer]]
            return sum(self._untied_parameters(layer) for layer in unspread) + spread / self.parallelism.pp
        repeats = sum(tie.repeated - tie.held for tie in self._ties(order))
        return sum(self._profile(layer).parameters for layer in order) - repeats

    def _held_by_kind(self, profiles: Mapping[int, LayerProfile]) -> list[tuple[bool, float]]:
        """Parameters of a stage: whether they belong to experts that are divided over ep, and how many."""
        held = self._held_parameters(list(profiles))
        if self.problem.ep == 1:
            return [(False, held)]
        experts = sum(profile.expert_parameters for profile in profiles.values())
        return [(False, held - experts), (True, experts)]

    def _frozen_held_by_kind(self, profiles: Mapping[int, LayerProfile]) -> list[tuple[bool, float]]:
        """Parameters of a stage that are read and not trained; what several of its layers read is held once."""
        held = experts = 0.0
        largest_of_tie: dict[str, float] = {}
        for profile in profiles.values():
            experts += profile.frozen_expert_parameters if self.problem.ep > 1 else 0.0
            held += profile.frozen_parameters - sum(profile.frozen_ties.values())
            for name, count in profile.frozen_ties.items():
                largest_of_tie[name] = max(count, largest_of_tie.get(name, 0.0))
        return [(False, held + sum(largest_of_tie.values()) - experts), (True, experts)]

    def _shared_parameters(self, counts: Sequence[tuple[bool, float]]) -> float:
        """How many of some parameters are divided over several devices, where ZeRO divides them."""
        return sum(count for is_expert, count in counts if self._groups(is_expert).shard > 1)

    def _add_memory(
        self, result: PlainStage, before: set[int], profiles: Mapping[int, LayerProfile], transferred_bytes: float
    ) -> None:
        """Add what each device of a stage holds, stashes and needs for a while."""
        recipe, zero = self.problem.recipe, self.parallelism.zero
        result.held_bytes = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
        result.held_bytes["parameters"] = sum(profile.table_bytes for profile in profiles.values())
        for is_expert, parameters in self._held_by_kind(profiles):
            shard = self._groups(is_expert).shard
            if zero < 3 or not recipe.casts_gathered_weights:
                result.held_bytes["parameters"] += parameters * recipe.parameter_bytes / (shard if zero == 3 else 1)
            result.held_bytes["gradients"] += parameters * recipe.gradient_bytes / (shard if zero >= 2 else 1)
            result.held_bytes["optimizer"] += parameters * recipe.optimizer_bytes / (shard if zero >= 1 else 1)
        for is_expert, parameters in self._frozen_held_by_kind(profiles):
            shard = self._groups(is_expert).shard if zero == 3 else 1
            result.held_bytes["parameters"] += parameters * recipe.parameter_bytes / shard
        largest = max(
            min(self._shared_parameters(self._by_kind(profile)), profile.moved_at_once) for profile in profiles.values()
        )
        largest_held = max(
            min(
                self._shared_parameters([*self._by_kind(profile), *self._frozen_by_kind(profile)]),
                profile.moved_at_once,
            )
            for profile in profiles.values()
        )
        stashed_bytes = peak_bytes = moved_bytes = 0.0
        for layer, profile in profiles.items():
            on_host_bytes = profile.stashed_bytes if self._moves(layer) else 0.0
            moved_bytes += on_host_bytes
            stashed_bytes += profile.stashed_bytes - on_host_bytes
            peak_bytes = max(peak_bytes, stashed_bytes + profile.peak_working_bytes + 2 * on_host_bytes)
        result.working_bytes = peak_bytes - stashed_bytes
        spread_bytes = self._spread_parameters() * (recipe.parameter_bytes + recipe.gradient_bytes)
        result.buffer_bytes = transferred_bytes + spread_bytes
        host = self.problem.cluster.host
        if host is not None and "optimizer" in self.problem.offload:
            states_bytes = result.held_bytes["optimizer"]
            result.host_bytes = min(states_bytes, host.memory_bytes / self.parallelism.chunks)
            result.held_bytes["optimizer"] = states_bytes - result.host_bytes
            result.buffer_bytes += 2 * min(result.host_bytes, _BUCKET_BYTES)
        if zero >= 2:
            result.buffer_bytes += largest * recipe.reduction_bytes
        if zero == 3:  # one layer's parameters are gathered while another's are used
            result.buffer_bytes += 2 * largest_held * recipe.parameter_bytes
        if host is not None and moved_bytes:
            room_bytes = host.memory_bytes / self.parallelism.chunks - result.host_bytes
            result.host_stash_bytes = min(moved_bytes, room_bytes / self._most_in_flight())
        result.stash_bytes = stashed_bytes + moved_bytes - result.host_stash_bytes
        placed = before | set(profiles)
        for flow in self.problem.graph.flows:
            readers = set(flow.consumers)
            # A tensor that only later stages read is relayed, and stashed on the way.
            if flow.producer in before and not readers <= placed and not readers & set(profiles):
                result.stash_bytes += self._profile(flow.producer).outputs[flow.output].size_bytes
