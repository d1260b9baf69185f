"""torch as a target, and the door to its package: plans applied to live modules, and exported as FSDP2 programs.

This module and `fsdp_export.py` load without torch. All others import it at their top, and are imported here when a
plan is applied or a model is cut into stages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaze.backends.torch.fsdp_export import FsdpTarget
from phaze.errors import PlanError, explained_by
from phaze.hooks import hookimpl
from phaze.interfaces import StageBuilder, Target
from phaze.ir import Graph
from phaze.parallelism import PipelineSchedule
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from phaze.backends.torch.applied_module import AppliedModule
    from phaze.hooks import PluginManager
    from phaze.plan.plan import Plan

__all__ = ["ModuleStages", "TorchTarget", "phaze_stage_builders", "phaze_targets"]

_NUMBERED = re.compile(r"\w\.\d+$")
"""The path of an element of a module list."""


@dataclass(frozen=True, slots=True)
class TorchTarget:
    """Arranges a module on a device mesh.

    Options of `apply`:
        inputs: the inputs that `optimize` took; needed for stages, because they say what crosses the cuts.
        optimizer: a function from parameters to a torch optimizer; or an optimizer of the plain model's parameters,
            with its groups, or a list of several, which get the arranged parameters; by default AdamW or SGD, as the
            plan's precision says.
        batch_norm: needed for models with batch norms that would train otherwise than in one process:
            "synchronized" sums their statistics over all copies, "local" keeps those of each microbatch apart.
        loss_weight: how much the loss of a microbatch counts in that of the batch: "samples", a function of the
            microbatch by the model's argument names, or "sum" for losses that are parts of a sum. By default it is the
            targets that cross entropies count where the loss is such a mean, and samples elsewhere.
        weights: for models on the meta device, a folder with safetensors files, or a function of a parameter's name and
            the tensor to fill; each process then holds its shards only.
    """

    name: str = "torch"
    libraries: tuple[str, ...] = ("torch",)
    options: tuple[str, ...] = ("inputs", "optimizer", "batch_norm", "loss_weight", "weights")
    checked: str = "steps of plan.apply on processes of gloo have the losses and gradients of one process"

    @property
    def capabilities(self) -> Capabilities:
        """FSDP2 keeps shards beside gathered parameters: under ZeRO 1 and 2 these are the master copy, or too much.

        Zero-bubble schedules give wrong gradients with FSDP2 and are left out. torch's 1F1B refuses fewer microbatches
        than stages.
        """
        return Capabilities(
            schedules=frozenset({PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED}),
            needs_micro_batches_per_stage=frozenset({PipelineSchedule.ONE_F_ONE_B}),
            zero_stages=frozenset({0, 3}),
            master_zero_stages=frozenset({1, 2}),
            allows_shard_groups=True,
            allows_context_parallel=True,
            allows_expert_parallel=True,
            key_exchanges=frozenset({"all_gather", "ring", "all_to_all"}),
            keeps_gathered_keys=True,
            shards_whole_contexts=False,
            keeps_experts_in_shards=False,
            allows_uneven_stages=True,
            allows_uneven_sequences=True,
            allows_strided_parameters=True,
            hands_on_arguments=True,
        )

    def export(self, plan: Plan, model: object) -> object:
        """Nothing: this target arranges live models."""
        raise PlanError("target 'torch' writes no file; use plan.apply(model), or plan.export('fsdp').")

    @explained_by("torch")
    def apply(
        self,
        plan: Plan,
        model: object,
        *,
        mesh: object,
        loss_fn: object,
        plugins: PluginManager,
        options: Mapping[str, object],
    ) -> AppliedModule:
        """The module arranged on a mesh; plugins' stage builders may cut it into stages.

        Raises PlanError for a model or mesh that is not the plan's.
        """
        from phaze.backends.torch.applied_module import apply_to_module

        return apply_to_module(
            plan,
            model,
            mesh,
            loss_fn=loss_fn,  # type: ignore[arg-type]
            inputs=options.get("inputs"),
            optimizer=options.get("optimizer"),
            batch_norm=options.get("batch_norm"),
            loss_weight=options.get("loss_weight"),
            weights=options.get("weights"),
            stage_builders=[offer.value for offer in plugins.stage_builders()],
        )


@dataclass(frozen=True, slots=True)
class ModuleStages:
    """Cuts modules that call a list of blocks one after another."""

    name: str = "list of blocks"
    target: str = "torch"

    def accepts(self, model: object) -> bool:
        """Whether a module holds a list of at least two blocks of one class, or a graph has layers of such a list."""
        torch = sys.modules.get("torch")
        if isinstance(model, Graph):
            list_paths = [layer.name.rpartition(".")[0] for layer in model.layers if _NUMBERED.search(layer.name)]
            return len(list_paths) > len(set(list_paths))
        if torch is None or not isinstance(model, torch.nn.Module):
            return False
        kinds = torch.nn.ModuleList | torch.nn.Sequential
        block_lists = [submodule for submodule in model.modules() if isinstance(submodule, kinds)]
        return any(len(blocks) > 1 and len({type(block) for block in blocks}) == 1 for blocks in block_lists)

    def build_stages(self, model: object, stages: Sequence[Sequence[str]]) -> Sequence[object]:
        """The modules before which the stages begin; what crosses there is found when the plan is applied."""
        from phaze.backends.torch.stage_cuts import cut_paths

        return cut_paths(stages, model)


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """torch itself, and the FSDP2 programs."""
    return (TorchTarget(), FsdpTarget())


@hookimpl
def phaze_stage_builders() -> tuple[StageBuilder, ...]:
    """The builder that cuts lists of blocks."""
    return (ModuleStages(),)
