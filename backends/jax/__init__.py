"""JAX as a target, and the door to its package: plans applied to live models, and written for pjit, XLA and MaxText.

This module and the texts of `pjit_export.py` and `maxtext_export.py` load without JAX. All others import it at their
top, and are imported here when a plan is applied or a module annotated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaze.backends.jax.maxtext_export import MaxTextTarget
from phaze.backends.jax.pjit_export import PjitTarget
from phaze.capabilities import Capabilities, PipelineSchedule
from phaze.errors import PlanError, shown
from phaze.hooks import hookimpl
from phaze.interfaces import StageBuilder, Target
from phaze.ir import Graph

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.plan.plan import Plan

__all__ = ["JaxTarget", "ScanStages", "StableHloTarget", "phaze_stage_builders", "phaze_targets"]

_GPIPE = PipelineSchedule.GPIPE
_OPTIONS = ("inputs", "optimizer", "takes_mean")
"""What `JaxTarget.apply` understands."""


@dataclass(frozen=True, slots=True)
class JaxTarget:
    """Arranges a loss function or a linen module on a mesh.

    Options of `apply`:
        inputs: the arguments that `optimize` took; needed, because they say the shapes.
        optimizer: an object with `init` and `update`, such as optax's; by default Adam or plain gradient descent, as
            the plan's precision says.
        takes_mean: True where the loss is no mean over samples, and the mean of the microbatches' losses is wanted.
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

    def apply(
        self,
        plan: Plan,
        model: object,
        *,
        mesh: object,
        loss_fn: object,
        plugins: PluginManager,
        options: Mapping[str, object],
    ) -> Any:
        """The model arranged on a mesh: see `phaze.backends.jax.applied_plan.AppliedPlan`.

        Raises PlanError for a model or mesh that is not the plan's, and for options other than those above.
        """
        from phaze.backends.jax.applied_plan import apply_plan_to

        if loss_fn is not None:
            raise PlanError(
                "a JAX plan is applied to a loss, which needs no loss_fn; plan and apply a function that computes it, "
                "such as lambda params, x, y: loss_fn(model.apply({'params': params}, x), y)."
            )
        for name in options:
            if name not in _OPTIONS:
                raise PlanError(f"apply has no option {shown(name)} for JAX; expected some of {', '.join(_OPTIONS)}.")
        return apply_plan_to(
            plan,
            model,
            mesh,
            inputs=options.get("inputs"),
            optimizer=options.get("optimizer"),
            takes_mean=bool(options.get("takes_mean")),
        )


@dataclass(frozen=True, slots=True)
class StableHloTarget:
    """Writes `model.mlir`: what `jax.jit(...).lower(...)` gave, annotated."""

    name: str = "stablehlo"
    libraries: tuple[str, ...] = ("jax",)

    @property
    def capabilities(self) -> Capabilities:
        """One stage; ZeRO as layouts of arguments."""
        return Capabilities(zero_stages=frozenset({0, 1, 2, 3}))

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """The annotated module; it has been verified and parsed again."""
        if not hasattr(model, "compiler_ir"):
            raise PlanError(
                f"stablehlo annotates a lowered function, and got {type(model).__name__}; pass one: "
                "plan.export('stablehlo', jax.jit(jax.value_and_grad(loss)).lower(params, batch))."
            )
        from phaze.backends.jax.stablehlo_export import annotated_module

        return {"model.mlir": annotated_module(plan, model)}


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
