"""torch: plans applied to modules: DTensors, FSDP2, recompute and pipelines; and as texts for other tools."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaze.backends.torch.fsdp import FsdpTarget
from phaze.capabilities import Capabilities, PipelineSchedule
from phaze.errors import PlanError
from phaze.hooks import hookimpl
from phaze.interfaces import StageBuilder, Target
from phaze.ir import Graph

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

_NUMBERED = re.compile(r"\w\.\d+$")

__all__ = ["ModuleStages", "TorchTarget", "phaze_stage_builders", "phaze_targets"]


@dataclass(frozen=True, slots=True)
class TorchTarget:
    """Arranges a module on a device mesh.

    Options of `apply`: `inputs` as `optimize` took them (needed for stages: they say what crosses the cuts) and
    `optimizer` (a function from parameters to a torch optimizer; by default AdamW or SGD, as the plan's precision
    says).
    """

    name: str = "torch"
    libraries: tuple[str, ...] = ("torch",)

    @property
    def capabilities(self) -> Capabilities:
        """FSDP2 keeps shards beside gathered parameters: under ZeRO 1 and 2 these are the master copy, or too much.

        Zero-bubble schedules give wrong gradients with FSDP2 and are left out.
        """
        return Capabilities(
            schedules=frozenset({PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED}),
            zero_stages=frozenset({0, 3}),
            master_zero_stages=frozenset({1, 2}),
            allows_uneven_stages=True,
            allows_uneven_sequences=True,
            allows_strided_parameters=True,
        )

    def export(self, plan: Plan, model: object) -> object:
        """Nothing: this target arranges live models."""
        raise PlanError("target 'torch' writes no file; use plan.apply(model), or plan.export('fsdp').")

    def apply(self, plan: Plan, model: object, *, mesh: object, loss_fn: object, options: Mapping[str, object]) -> Any:
        """See `phaze.backends.torch.applied.Applied`."""
        from phaze.backends.torch.applied import apply_plan_to

        return apply_plan_to(plan, model, mesh, loss_fn, options)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ModuleStages:
    """Cuts modules that call a list of blocks one after another."""

    name: str = "list of blocks"
    target: str = "torch"

    def accepts(self, model: object) -> bool:
        """Whether a module holds a list of at least two blocks of one class, or a graph has layers of such a list."""
        torch = sys.modules.get("torch")
        if isinstance(model, Graph):
            lists = [layer.name.rpartition(".")[0] for layer in model.layers if _NUMBERED.search(layer.name)]
            return len(lists) > len(set(lists))
        if torch is None or not isinstance(model, torch.nn.Module):
            return False
        lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList | torch.nn.Sequential)]
        return any(len(part) > 1 and len({type(child) for child in part}) == 1 for part in lists)

    def build_stages(self, model: object, stages: Sequence[Sequence[str]]) -> Sequence[object]:
        """The modules before which the stages begin; what crosses there is found when the plan is applied."""
        from phaze.backends.torch.stages import cut_paths

        return cut_paths(stages, model)


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """torch itself, and texts."""
    return (TorchTarget(), FsdpTarget())


@hookimpl
def phaze_stage_builders() -> tuple[StageBuilder, ...]:
    """The one that cuts lists of blocks."""
    return (ModuleStages(),)
