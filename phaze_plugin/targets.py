"""Targets: what one can run, which bounds what a search may choose, and which target a plan is for.

`Capabilities` describe the part of the plan space in which a search for a target stays. A placement is executable on a
target if all of these hold: its pipeline schedule, ZeRO stage and recompute modes are listed, the first two no excluded
pair, no two of its axes exclude each other, and each freedom that it takes (stages of unequal layers, values of tp that
differ between stages, idle devices, a microbatch count that dp does not divide, a sequence that tp does not divide and
that is split all the same, parameters split along a factor that is not the major one of its dimension) is allowed.

`find_target` finds the target of a plan by its name or by the model's framework, and takes from what it can run what
the model at hand does not allow (`ChosenTarget`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phaze.errors import QuestionError, UnknownNameError, shown
from phaze.ir import Graph, RecomputeMode
from phaze.parallelism import PIPELINE_SCHEDULES, ZERO_STAGES, Offload, PipelineSchedule

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.interfaces import StageBuilder

__all__ = ["ANALYSIS", "AXES", "ONE_STAGE", "Capabilities", "ChosenTarget", "find_target"]

AXES = ("tp", "cp", "ep", "pp", "shard")
"""The axes that `excluded_axes` names; "shard" is ZeRO over groups of devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one target can run. The defaults allow little; `Capabilities.everything()` allows all.

    Attributes:
        schedules: pipeline schedules that it runs; empty for a target that runs one stage only.
        zero_stages: ZeRO stages that it runs.
        master_zero_stages: ZeRO stages that it runs only for precisions with a separate master copy.
        excluded_pairs: pairs of a schedule and a ZeRO stage that it runs wrongly or not at all.
        needs_micro_batches_per_stage: schedules that need at least as many microbatches as stages.
        recompute_modes: recompute modes that it runs.
        offloads: what it can keep in the memory of the host.
        allows_uneven_stages: stages may have different numbers of layers.
        allows_mixed_tp: stages may have different tp.
        allows_idle_devices: a plan may leave devices idle.
        allows_uneven_micro_batches: dp x micro_batch_size need not divide the batch.
        allows_uneven_sequences: tp need not divide the sequences that it splits.
        allows_sequence_parallel: sequences may be split between layers over the tp devices.
        allows_mixed_sequences: they may be split between or inside of some layers only.
        allows_strided_parameters: parameters may be split inside of a dimension.
        allows_parameters_cut_twice: the tp devices may cut two dimensions of one parameter.
        allows_idle_when_asked: a strategy that the user gave may leave devices idle, although no other may.
        allows_context_parallel: it has cp.
        allows_dropped_positions: cp divides sequences although the model drops some of their last positions.
        allows_expert_parallel: it has ep.
        allows_shard_groups: ZeRO may shard over a part of the dp x cp devices, with copies between the parts.
        key_exchanges: how attention may get the keys of other contexts (see `KeyExchange`), gathers among them.
        keeps_gathered_keys: keys that were gathered forward are kept for backward, and not gathered again.
        excluded_axes: pairs of "tp", "cp", "ep", "pp" and "shard" (ZeRO over groups) that it does not run together.
        tensor_parallel_zero_stages: ZeRO stages that it runs with tp above 1.
        context_parallel_zero_stages: those that it runs with cp above 1.
        expert_parallel_zero_stages: those that it runs with ep above 1.
        shard_group_zero_stages: those that may shard over groups.
        shards_whole_contexts: a group of ZeRO has all cp devices of its sequences.
        keeps_experts_in_shards: ep divides the size of such a group.
        experts_need_split_sequences: with experts, tp above 1 needs sequences that are split between all layers.
        cuts_experts: the tp devices cut every expert, and divide no whole ones among them.
        product_dtypes: quantized types, such as fp8, that it computes products in.
        compute_dtypes: types that it computes in; None stands for all.
        needs_whole_nodes: it uses all devices of every node (or slice).
        needs_several_copies: it runs no single copy, because it must shard.
        can_cut_stages: it cuts any model into stages by itself; without it, a stage builder must accept the model.
        hands_on_arguments: a stage gets only what the block where it begins takes, so that no block may read more.
        runs_steps_as_written: a captured train step, with its optimizer, runs as it is written (`for_whole_step`).
        needs_single_micro_batch: every copy runs all its samples at once.
        spreads_ends: one program runs on all stages. They hold equal parts of what lies outside of their equal layers
            (embedding, head), gather all of it for a batch, and scatter its gradients at the end.
        trims_recompute: full recompute runs only what leads to a tensor that backward reads.
        fuses_gates: a gated activation is one kernel, whose backward computes the activated gate again.
    """

    schedules: frozenset[PipelineSchedule] = frozenset()
    zero_stages: frozenset[int] = frozenset({0})
    master_zero_stages: frozenset[int] = frozenset()
    excluded_pairs: frozenset[tuple[PipelineSchedule, int]] = frozenset()
    needs_micro_batches_per_stage: frozenset[PipelineSchedule] = frozenset()
    recompute_modes: frozenset[str] = frozenset({"none", "selective", "full"})
    offloads: frozenset[str] = frozenset({Offload.NONE})
    allows_uneven_stages: bool = False
    allows_mixed_tp: bool = False
    allows_idle_devices: bool = False
    allows_uneven_micro_batches: bool = False
    allows_uneven_sequences: bool = False
    allows_sequence_parallel: bool = True
    allows_mixed_sequences: bool = False
    allows_strided_parameters: bool = False
    allows_parameters_cut_twice: bool = True
    allows_idle_when_asked: bool = False
    allows_context_parallel: bool = False
    allows_dropped_positions: bool = False
    allows_expert_parallel: bool = False
    allows_shard_groups: bool = False
    key_exchanges: frozenset[str] = frozenset({"all_gather", "ring", "all_to_all"})
    keeps_gathered_keys: bool = False
    excluded_axes: frozenset[tuple[str, str]] = frozenset()
    tensor_parallel_zero_stages: frozenset[int] = frozenset(ZERO_STAGES)
    context_parallel_zero_stages: frozenset[int] = frozenset(ZERO_STAGES)
    expert_parallel_zero_stages: frozenset[int] = frozenset(ZERO_STAGES)
    shard_group_zero_stages: frozenset[int] = frozenset(ZERO_STAGES)
    shards_whole_contexts: bool = True
    keeps_experts_in_shards: bool = True
    experts_need_split_sequences: bool = False
    cuts_experts: bool = False
    product_dtypes: frozenset[str] = frozenset()
    compute_dtypes: frozenset[str] | None = None
    needs_whole_nodes: bool = False
    needs_several_copies: bool = False
    can_cut_stages: bool = False
    hands_on_arguments: bool = False
    runs_steps_as_written: bool = False
    needs_single_micro_batch: bool = False
    spreads_ends: bool = False
    trims_recompute: bool = False
    fuses_gates: bool = False

    def __post_init__(self) -> None:
        for field in ("schedules", "needs_micro_batches_per_stage"):
            object.__setattr__(self, field, frozenset(PipelineSchedule(name) for name in getattr(self, field)))
        for name in ("zero_stages", "master_zero_stages"):
            object.__setattr__(self, name, frozenset(getattr(self, name)))
        pairs = frozenset((PipelineSchedule(schedule), zero) for schedule, zero in self.excluded_pairs)
        object.__setattr__(self, "excluded_pairs", pairs)
        object.__setattr__(self, "excluded_axes", frozenset((first, second) for first, second in self.excluded_axes))
        for pair in self.excluded_axes:
            if not set(pair) <= set(AXES) or set(pair) <= {"pp", "shard"}:
                raise ValueError(f"excluded_axes has {pair}; expected one of tp, cp, ep, and one of {', '.join(AXES)}")
        known = {stage for _, stage in pairs} | self.zero_stages | self.master_zero_stages
        unknown = sorted(known - set(ZERO_STAGES))
        if unknown:
            raise ValueError(f"ZeRO stage {unknown[0]!r}; expected some of {ZERO_STAGES}")
        if not self.zero_stages:
            raise ValueError("zero_stages is empty; expected at least one of 0, 1, 2, 3 (0 shards nothing)")
        if self.spreads_ends:
            self._check_spreading()

    def _check_spreading(self) -> None:
        is_uneven = self.allows_uneven_stages or self.allows_mixed_tp
        if is_uneven or any(schedule.has_chunks for schedule in self.schedules):
            raise ValueError("spreads_ends goes with even stages of one tp, one on each device")
        if any(self.supports(schedule, zero) for schedule in self.schedules for zero in (2, 3)):
            raise ValueError("spreads_ends goes with ZeRO-0 and 1 in pipelines; expected the others as excluded_pairs")

    @classmethod
    def everything(cls) -> Capabilities:
        """No restriction: what analysis without a target searches.

        Eager 1F1B is left to targets that have no other: it takes as long as 1F1B, and holds more.
        """
        return cls(
            schedules=frozenset(PIPELINE_SCHEDULES) - {PipelineSchedule.EAGER},
            zero_stages=frozenset(ZERO_STAGES),
            recompute_modes=frozenset(RecomputeMode),
            offloads=frozenset(Offload),
            allows_uneven_stages=True,
            allows_mixed_tp=True,
            allows_idle_devices=True,
            allows_uneven_micro_batches=True,
            allows_uneven_sequences=True,
            allows_mixed_sequences=True,
            allows_strided_parameters=True,
            allows_context_parallel=True,
            allows_expert_parallel=True,
            allows_shard_groups=True,
            shards_whole_contexts=False,
            keeps_experts_in_shards=False,
            can_cut_stages=True,
        )

    def for_whole_step(self) -> Capabilities:
        """What it runs of a captured train step: one stage, all samples of a copy at once, and nothing recomputed.

        No experts are divided, because nothing in a step that runs as it is written exchanges their tokens.
        """
        if not self.runs_steps_as_written:
            return self
        return replace(
            self,
            schedules=frozenset(),
            recompute_modes=frozenset({"none"}),
            needs_single_micro_batch=True,
            allows_expert_parallel=False,
        )

    def with_master(self, master_bytes: float) -> Capabilities:
        """What it runs for a precision whose optimizer keeps a master copy of so many bytes per parameter, or none."""
        also = self.master_zero_stages if master_bytes else frozenset()
        return replace(self, zero_stages=self.zero_stages | also, master_zero_stages=frozenset())

    def at_degrees(self, *, tp: int = 1, cp: int = 1, ep: int = 1) -> Capabilities:
        """What it runs at these degrees: fewer ZeRO stages, no pipelines or no groups, where it combines less."""
        degrees = {"tp": tp, "cp": cp, "ep": ep}
        stages = {
            "tp": self.tensor_parallel_zero_stages,
            "cp": self.context_parallel_zero_stages,
            "ep": self.expert_parallel_zero_stages,
        }
        used = {axis for axis, degree in degrees.items() if degree > 1}
        without = {other for pair in self.excluded_axes for axis, other in (pair, pair[::-1]) if axis in used}
        zero_stages = self.zero_stages.intersection(*(stages[axis] for axis in used))
        schedules = frozenset[PipelineSchedule]() if "pp" in without else self.schedules
        return replace(
            self,
            zero_stages=zero_stages,
            needs_several_copies=self.needs_several_copies or (0 in self.zero_stages and 0 not in zero_stages),
            schedules=schedules,
            spreads_ends=self.spreads_ends and bool(schedules),
            allows_shard_groups=self.allows_shard_groups and "shard" not in without,
        )

    def excluded_together(self, *, tp: int = 1, cp: int = 1, ep: int = 1) -> tuple[str, str] | None:
        """Two of these axes that are used and that it does not run together; None where there are none."""
        degrees = {"tp": tp, "cp": cp, "ep": ep}
        pairs = sorted(pair for pair in self.excluded_axes if all(degrees.get(axis, 1) > 1 for axis in pair))
        return pairs[0] if pairs else None

    def runs_groups(self, size: int, *, zero: int, cp: int, ep: int) -> bool:
        """Whether it divides states of a ZeRO stage over groups of so many of the dp x cp devices."""
        is_run = self.allows_shard_groups and zero in self.shard_group_zero_stages
        is_run &= size % cp == 0 or not self.shards_whole_contexts
        return is_run and (size % ep == 0 or not self.keeps_experts_in_shards)

    def supports(self, schedule: PipelineSchedule, zero: int) -> bool:
        """Whether a pipeline of several stages may use this schedule together with this ZeRO stage."""
        return schedule in self.schedules and zero in self.zero_stages and (schedule, zero) not in self.excluded_pairs

    def fills_stages(self, schedule: PipelineSchedule, micro_batches: int, stages: int) -> bool:
        """Whether a pipeline of so many stages has enough microbatches for this schedule."""
        return schedule not in self.needs_micro_batches_per_stage or micro_batches >= stages


ONE_STAGE = "one pipeline stage only"
"""How the note begins that says why the model at hand is not cut."""

_NUMBERED = re.compile(r"\w\.\d+$")
"""The path of an element of a list of blocks."""


@dataclass(frozen=True, slots=True)
class ChosenTarget:
    """A target's name and what it can run; without a name the plan is analysis, and not executable.

    `notes` say what the model at hand takes away from what the target can run otherwise.
    """

    name: str | None
    capabilities: Capabilities
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name or "none, not executable"


ANALYSIS = ChosenTarget(None, Capabilities.everything())


def find_target(
    name: str | None, model: object, plugins: PluginManager, graph: object = None, *, is_step: bool = False
) -> ChosenTarget:
    """The target called `name`; "auto" is the target of the framework that the model comes from, if there is one.

    `is_step` says that the model is a whole train step, with its update.

    Raises UnknownNameError for a name that no target has.
    """
    if name is None:
        return ANALYSIS
    if not isinstance(name, str):
        raise QuestionError(f"target is {shown(name)}; expected a target's name, 'auto', or None for analysis.")
    targets = {offer.name: offer.value for offer in plugins.targets()}
    if name != "auto":
        if name not in targets:
            raise UnknownNameError("target", name, (*targets, "auto"))
        target = ChosenTarget(name, targets[name].capabilities)
    else:
        frontend = _frontend_of(model, plugins)
        if frontend not in targets:
            return ANALYSIS
        target = ChosenTarget(frontend, targets[str(frontend)].capabilities)
    if is_step and target.capabilities.runs_steps_as_written:
        note = (
            "a whole train step runs as it is written: in one stage, all samples of a copy at once, and computing "
            "again what it says itself; a plan of its loss may choose more"
        )
        return replace(target, capabilities=target.capabilities.for_whole_step(), notes=(note,))
    return _for_model(target, model, plugins, graph)


def _for_model(target: ChosenTarget, model: object, plugins: PluginManager, graph: object) -> ChosenTarget:
    """A target that cuts no model by itself has pipelines only for the models that some stage builder of its cuts.

    Builders are asked about the model and about its graph: some kinds of model show what they are in the graph only.
    """
    capabilities = target.capabilities
    builders = [offer.value for offer in plugins.stage_builders() if offer.value.target == target.name]
    if capabilities.can_cut_stages or not capabilities.schedules:
        return target
    if not _is_cut(builders, model, graph):
        known = ", ".join(sorted(builder.name for builder in builders)) or "none"
        name = model.name if isinstance(model, Graph) else type(model).__name__
        reason = f"nothing cuts {name} into stages for target {target.name} (known: {known})"
    elif capabilities.hands_on_arguments and isinstance(graph, Graph) and (reader := _reader_past_blocks(graph)):
        reason = f"{reader}, which stages of target {target.name} do not hand on"
    else:
        return target
    note = f"{ONE_STAGE}: {reason}"
    return replace(target, capabilities=replace(capabilities, schedules=frozenset()), notes=(note,))


def _reader_past_blocks(graph: Graph) -> str:
    """Which layer reads something of a block past blocks that do not, such as scores of all routers; else nothing."""
    makers = {name: layer.index for layer in graph.layers for op in layer.forward for name in op.outputs}
    readers: dict[str, set[int]] = {}
    for layer in graph.layers:
        for name in layer.inputs:
            readers.setdefault(name, set()).add(layer.index)
    blocks = {layer.index for layer in graph.layers if _NUMBERED.search(layer.name)}
    for name, indices in readers.items():
        maker, last = makers.get(name, -1), max(indices)
        if maker in blocks and (blocks - indices) & set(range(maker + 1, last)):
            return f"{graph.layers[last].name!r} reads {name!r} of an earlier block"
    return ""


def _is_cut(builders: Sequence[StageBuilder], model: object, graph: object) -> bool:
    return any(builder.accepts(form) for builder in builders for form in (model, graph) if form is not None)


def _frontend_of(model: object, plugins: PluginManager) -> str | None:
    if isinstance(model, str):
        return None
    for offer in plugins.frontends():
        if offer.value.accepts(model):
            return offer.name
    return None
