"""JAX: plans as meshes, named shardings and a compiled training step; and as texts for other tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaze.backends.jax.maxtext import MaxTextTarget
from phaze.backends.jax.pjit import PjitTarget
from phaze.backends.jax.stablehlo import StableHloTarget
from phaze.capabilities import Capabilities, PipelineSchedule
from phaze.errors import PlanError
from phaze.hooks import hookimpl
from phaze.interfaces import StageBuilder, Target
from phaze.ir import Graph

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["JaxTarget", "ScanStages", "phaze_stage_builders", "phaze_targets"]

_GPIPE = PipelineSchedule.GPIPE


@dataclass(frozen=True, slots=True)
class JaxTarget:
    """Arranges a loss function or a linen module on a mesh.

    Options of `apply`: `inputs` as `optimize` took them (needed: they say the shapes), `optimizer` (an object with
    `init` and `update`; Adam or plain gradient descent by default, as the plan's precision says).
    """

    name: str = "jax"
    libraries: tuple[str, ...] = ("jax",)

    @property
    def capabilities(self) -> Capabilities:
        """One program for all devices: equal stages in GPipe's order, no idle devices.

        A pipeline scatters gradients once, after all microbatches, and gathers no parameters but those outside of its
        layers, of which all stages hold equal parts. What is computed again is compiled, so that nothing is computed
        for nobody.
        """
        return Capabilities(
            schedules=frozenset({_GPIPE}),
            zero_stages=frozenset({0, 1, 2, 3}),
            excluded_pairs=frozenset({(_GPIPE, 2), (_GPIPE, 3)}),
            allows_strided_parameters=True,
            spreads_ends=True,
            trims_recompute=True,
        )

    def export(self, plan: Plan, model: object) -> object:
        """Nothing: this target arranges live models."""
        raise PlanError("target 'jax' writes no file; use plan.apply(model, inputs=...), or plan.export('pjit').")

    def apply(self, plan: Plan, model: object, *, mesh: object, loss_fn: object, options: Mapping[str, object]) -> Any:
        """See `phaze.backends.jax.applied.Applied`."""
        from phaze.backends.jax.applied import apply_plan_to

        if loss_fn is not None:
            raise PlanError(
                "a JAX plan is applied to a loss, which needs no loss_fn; plan and apply a function that computes it, "
                "such as lambda params, x, y: loss_fn(model.apply({'params': params}, x), y)."
            )
        return apply_plan_to(plan, model, mesh, options)


@dataclass(frozen=True, slots=True)
class ScanStages:
    """Pipelines for models whose layers are one scan over stacked parameters, as their graph tells."""

    name: str = "scan over layers"
    target: str = "jax"

    def accepts(self, model: object) -> bool:
        """Whether a graph has equal layers of one scan, with at most one layer before and behind them."""
        if not isinstance(model, Graph):
            return False
        names = [layer.name.partition(":")[2] or layer.name for layer in model.layers]
        scanned = [bool(re.fullmatch(r"(?:.*\.)?scan\.\d+", name)) for name in names]
        inner = [layer.key for layer, is_scanned in zip(model.layers, scanned, strict=True) if is_scanned]
        return len(set(inner)) == 1 and scanned.count(False) <= 2 and all(scanned[1:-1])

    def build_stages(self, model: object, stages: Sequence[Sequence[str]]) -> Sequence[object]:
        """Nothing to cut: all devices run one program, and stages are shards of the stacked parameters."""
        return [model for _ in stages]


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """JAX itself, and texts."""
    return (JaxTarget(), PjitTarget(), StableHloTarget(), MaxTextTarget())


@hookimpl
def phaze_stage_builders() -> tuple[StageBuilder, ...]:
    """The one that cuts scans."""
    return (ScanStages(),)
