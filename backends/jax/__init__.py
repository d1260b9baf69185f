"""JAX as a target, and the door to its package: plans applied to live models, and written for pjit and XLA.

This module and `pjit_export.py` load without JAX. All others import it at their top, and are imported here when a plan
is applied or a module annotated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phaze.backends.jax.pjit_export import PjitTarget
from phaze.errors import PlanError, explained_by
from phaze.hooks import hookimpl
from phaze.interfaces import StageBuilder, Target
from phaze.ir import Graph
from phaze.parallelism import PipelineSchedule
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

    from phaze.backends.jax.applied_plan import AppliedPlan
    from phaze.backends.jax.whole_step import AppliedStep
    from phaze.hooks import PluginManager
    from phaze.plan.plan import Plan

__all__ = ["EqualLayerStages", "JaxTarget", "ModuleTarget", "equal_layers", "phaze_stage_builders", "phaze_targets"]

_SCHEDULES = (PipelineSchedule.GPIPE, PipelineSchedule.EAGER)


@dataclass(frozen=True, slots=True)
class JaxTarget:
    """The target "jax": arranges a loss function, a linen or nnx module that returns its loss, or a train step.

    Options of `apply`:
        inputs: the arguments that `optimize` took; needed, because they say the shapes.
        optimizer: an object with `init` and `update`, such as optax's; by default Adam or plain gradient descent, as
            the plan's precision says.
        takes_mean: True where the loss is no mean over samples, and the mean of the microbatches' losses is wanted.
        targets: the second argument of `loss_fn`, where a module of flax was planned with both; a batch has it last.
    """

    name: str = "jax"
    libraries: tuple[str, ...] = ("jax",)
    options: tuple[str, ...] = ("inputs", "optimizer", "takes_mean", "targets")
    checked: str = "steps of plan.apply on 8 devices of a host have the losses and gradients of one device"

    @property
    def capabilities(self) -> Capabilities:
        """What one program for all devices can run: equal stages in the orders of GPipe and of eager 1F1B.

        It runs on the first devices where a strategy leaves others idle; a search leaves none.

        Keys are gathered over the devices of a sequence. Owners of experts exchange tokens by all-to-alls; not beside
        contexts, where the choice of experts runs along the parts of a sequence.

        A pipeline scatters gradients once, after all microbatches, so that it goes with ZeRO-0 and ZeRO-1 only. All
        stages hold equal parts of the parameters outside of its layers (`spreads_ends`). Recomputed operations are
        compiled together with backward, and the compiler drops those whose results nothing reads (`trims_recompute`).

        Whole train steps are divided by the compiler, as they are.
        """
        return Capabilities(
            schedules=frozenset(_SCHEDULES),
            zero_stages=frozenset({0, 1, 2, 3}),
            excluded_pairs=frozenset((schedule, zero) for schedule in _SCHEDULES for zero in (2, 3)),
            recompute_modes=frozenset({"none", "selective", "dots", "full"}),
            allows_strided_parameters=True,
            allows_parameters_cut_twice=False,
            allows_idle_when_asked=True,
            allows_context_parallel=True,
            allows_dropped_positions=True,
            allows_expert_parallel=True,
            excluded_axes=frozenset({("cp", "ep")}),
            key_exchanges=frozenset({"all_gather"}),
            allows_shard_groups=True,
            spreads_ends=True,
            trims_recompute=True,
            runs_steps_as_written=True,
        )

    def export(self, plan: Plan, model: object) -> object:
        """Raises PlanError: this target arranges live models and writes no files."""
        raise PlanError("target 'jax' writes no file; use plan.apply(model, inputs=...), or plan.export('pjit').")

    @explained_by("jax")
    def apply(
        self,
        plan: Plan,
        model: object,
        *,
        mesh: object,
        loss_fn: object,
        plugins: PluginManager,
        options: Mapping[str, object],
    ) -> AppliedPlan | AppliedStep:
        """The model arranged on a mesh: see `AppliedPlan`, and `AppliedStep` for whole train steps.

        Raises PlanError for a model or mesh that is not the plan's.
        """
        from phaze.backends.jax.applied_plan import apply_plan_to  # the door: this imports jax

        return apply_plan_to(
            plan,
            model,
            mesh,
            plugins=plugins,
            inputs=options.get("inputs"),
            optimizer=options.get("optimizer"),
            takes_mean=bool(options.get("takes_mean")),
            loss_fn=loss_fn,
            targets=options.get("targets"),
        )

    @explained_by("jax")
    def specs(self, plan: Plan, trees: Sequence[object]) -> Sequence[object]:
        """Trees of PartitionSpecs in the structure of those given, parameters first."""
        from phaze.backends.jax.user_shardings import specs_of_trees  # the door: this imports jax

        return specs_of_trees(plan, trees)

    @explained_by("jax")
    def mesh(self, plan: Plan, *, explicit: bool = False) -> Mesh:
        """The plan's mesh of the first devices that JAX sees.

        On one with explicit axes (`jax.sharding.AxisType`) arrays have their layouts as types. Functions that do not
        say the layouts of their lookups and products run there within `jax.sharding.auto_axes`.
        """
        from phaze.backends.jax.jax_mesh import mesh_for_plan, with_explicit_axes  # the door: this imports jax

        mesh = mesh_for_plan(plan, None)
        return with_explicit_axes(mesh) if explicit else mesh

    @explained_by("jax")
    def logical_axis_rules(self, plan: Plan, variables: object, activations: Sequence[str | None]) -> Sequence[object]:
        """Pairs of a name of dimensions and of mesh axes, for modules of flax linen that name them."""
        from phaze.backends.jax.user_shardings import logical_rules  # the door: this imports jax

        return logical_rules(plan, variables, activations)

    def constraints(self, plan: Plan) -> Mapping[str, PartitionSpec]:
        """The specs of the batch and of activations between layers."""
        from phaze.backends.jax.user_shardings import constraints_of_plan  # the door: this imports jax

        return constraints_of_plan(plan)


@dataclass(frozen=True, slots=True)
class ModuleTarget:
    """The targets "stablehlo" and "hlo": write a function that `jax.jit(...).lower(...)` lowered, annotated.

    `model.mlir` or `model.hlo.txt` has Shardy's annotations, `model_gspmd.*` those that XLA had before.
    """

    name: str = "stablehlo"
    libraries: tuple[str, ...] = ("jax",)
    tool: str = "XLA of jaxlib 0.10"
    checked: str = (
        "both modules are parsed by jaxlib, and run on 8 devices of a host have the loss of one device and the plan's "
        "shards"
    )

    @property
    def capabilities(self) -> Capabilities:
        """One stage, and every ZeRO stage, which becomes a layout of the arguments."""
        return Capabilities(zero_stages=frozenset({0, 1, 2, 3}))

    def export(self, plan: Plan, model: object) -> Mapping[str, str]:
        """The annotated module, as StableHLO or HLO text; it has been verified and parsed again."""
        if not hasattr(model, "compiler_ir"):
            raise PlanError(
                f"{self.name} annotates a lowered function, and got {type(model).__name__}; pass one: "
                f"plan.export({self.name!r}, jax.jit(jax.value_and_grad(loss)).lower(params, batch))."
            )
        from phaze.backends.jax.stablehlo_export import annotated_module, hlo_text  # the door: this imports jax

        texts = {"model": annotated_module(plan, model)}
        texts["model_gspmd"] = annotated_module(plan, model, uses_shardy=False)
        if self.name == "hlo":
            return {f"{name}.hlo.txt": hlo_text(plan, text) for name, text in texts.items()}
        return {f"{name}.mlir": text for name, text in texts.items()}


@dataclass(frozen=True, slots=True)
class EqualLayerStages:
    """The stages of models with equal layers, as their graph tells: a scan over them, or one behind the other."""

    name: str = "equal layers"
    target: str = "jax"

    def accepts(self, model: object) -> bool:
        """Whether a graph has equal layers, with at most one layer before and behind them."""
        return isinstance(model, Graph) and bool(equal_layers(model))

    def build_stages(self, model: object, stages: Sequence[Sequence[str]]) -> Sequence[object]:
        """The whole model for each stage: all devices run one program, and stages are shards of stacked parameters."""
        return [model for _ in stages]


def equal_layers(graph: Graph) -> range:
    """The numbers of a graph's equal layers, where at most one layer stands before and behind them; else none.

    Each of them but the last hands what it makes to the next, and to no other.
    """
    keys = [layer.key for layer in graph.layers]
    handed_far = {
        boundary.producer for boundary in graph.layer_graph.boundaries if boundary.consumers != (boundary.producer + 1,)
    }
    for first, behind in ((0, 0), (1, 0), (0, 1), (1, 1)):
        layers = range(first, len(keys) - behind)
        if len(layers) > 1 and len({keys[number] for number in layers}) == 1:
            return layers if handed_far.isdisjoint(layers[:-1]) else range(0)
    return range(0)


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """JAX itself, and what is written for pjit and XLA."""
    return (JaxTarget(), PjitTarget(), ModuleTarget(), ModuleTarget(name="hlo"))


@hookimpl
def phaze_stage_builders() -> tuple[StageBuilder, ...]:
    """The one that cuts equal layers."""
    return (EqualLayerStages(),)
