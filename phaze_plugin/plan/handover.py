"""From a plan to what runs it: the target is found by name, and the plan is held against what it can run."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phaze.errors import PlanError, explained_by, meant, shown
from phaze.interfaces import RunnableTarget, SpecTarget, Target
from phaze.parallelism import MIXED_SEQUENCES, Parallelism, PipelineSchedule
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from phaze.hooks import PluginManager
    from phaze.plan.plan import Plan

__all__ = ["apply_plan", "axes_not_run", "export_plan", "obstacles", "spec_target"]


@explained_by("targets")
def apply_plan(
    plan: Plan,
    plugins: PluginManager,
    model: object,
    mesh: object,
    loss_fn: object,
    named: Mapping[str, object],
    others: Mapping[str, object],
) -> Any:
    """What the plan's own target makes of a live model; a named option that is None was not given."""
    if plan.question.target is None:
        raise PlanError(
            "this plan is analysis only and is not executable: it was made with target=None, or for a model that is "
            "known by name. Plan the live model itself with target='auto', then apply that plan."
        )
    target = _find_target(plan, plugins, plan.question.target)
    if not isinstance(target, RunnableTarget):
        raise PlanError(
            f"target {target.name!r} writes files and arranges no live model; use plan.export({target.name!r}), or "
            "plan with target='auto'."
        )
    given = {name: value for name, value in named.items() if value is not None} | dict(others)
    for option in given:
        if option not in target.options:
            raise PlanError(
                f"apply has no option {shown(option)} for target {target.name!r}; expected some of "
                f"{', '.join(target.options) or 'none'}.{meant(option, target.options)}"
            )
    return target.apply(plan, model, mesh=mesh, loss_fn=loss_fn, plugins=plugins, options=given)


@explained_by("targets")
def spec_target(plan: Plan, plugins: PluginManager) -> SpecTarget:
    """The plan's own target, which says the plan as specs of arrays."""
    if plan.question.target is None:
        raise PlanError(
            "this plan is analysis only and has no specs: it was made with target=None, or for a model that is known "
            "by name. Plan the live model itself with target='auto', or with target='pjit'."
        )
    target = _find_target(plan, plugins, plan.question.target)
    if not isinstance(target, SpecTarget):
        raise PlanError(f"target {target.name!r} has no specs of arrays; plan with target='jax' or 'pjit'.")
    return target


@explained_by("targets")
def export_plan(plan: Plan, plugins: PluginManager, name: str, model: object) -> Mapping[str, str]:
    """What a target writes for a plan: texts by file name."""
    target = _find_target(plan, plugins, name)
    exported = target.export(plan, model)
    if isinstance(exported, str):
        return {f"{name}.txt": exported}
    if isinstance(exported, Mapping) and all(isinstance(text, str) for pair in exported.items() for text in pair):
        return {str(file_name): str(text) for file_name, text in exported.items()}
    raise PlanError(
        f"target {name!r} gave {type(exported).__name__} where texts by file name were expected; its plugin must "
        "return a mapping from file names to text."
    )


def obstacles(plan: Plan, capabilities: Capabilities) -> list[str]:
    """What a plan has that a target does not run, in words; empty where the target runs all of it."""
    chosen, recipe = plan.strategy, plan.question.precision
    reasons = []
    pair = capabilities.excluded_together(tp=chosen.tp, cp=chosen.cp, ep=chosen.ep)
    if pair is not None:
        reasons.append(" beside ".join(f"{axis} {getattr(chosen, axis)}" for axis in pair))
    capabilities = capabilities.at_degrees(tp=chosen.tp, cp=chosen.cp, ep=chosen.ep)
    if chosen.zero not in capabilities.with_master(recipe.master_bytes).zero_stages:
        needs = f" in {recipe.name}, which has no master copy" if chosen.zero in capabilities.master_zero_stages else ""
        beside = [f"{axis} {getattr(chosen, axis)}" for axis in ("tp", "cp", "ep") if getattr(chosen, axis) > 1]
        told = f" at {', '.join(beside)}" if beside and not needs else ""
        reasons.append(f"ZeRO stage {chosen.zero}{needs}{told}")
    if capabilities.compute_dtypes is not None and recipe.compute_dtype not in capabilities.compute_dtypes:
        reasons.append(f"computation in {recipe.compute_dtype} ({recipe.name})")
    if recipe.quantizes_products and recipe.product_dtype not in capabilities.product_dtypes:
        reasons.append(f"products in {recipe.product_dtype} ({recipe.name})")
    reasons += axes_not_run(chosen, capabilities)
    unknown = sorted(set(chosen.recompute) - capabilities.recompute_modes)
    if unknown:
        reasons.append(f"recompute mode {unknown[0]}")
    if len(plan.stages) > 1:
        schedule = PipelineSchedule(chosen.schedule)
        if schedule not in capabilities.schedules:
            reasons.append(f"a pipeline with schedule {schedule.value}")
        elif (schedule, chosen.zero) in capabilities.excluded_pairs:
            reasons.append(f"schedule {schedule.value} together with ZeRO stage {chosen.zero}")
        micro_batches = plan.question.global_batch_size // (chosen.dp * chosen.micro_batch_size)
        if not capabilities.fills_stages(schedule, micro_batches, len(plan.stages)):
            count = f"{micro_batches} microbatch{'es' if micro_batches > 1 else ''}"
            reasons.append(f"schedule {schedule.value} with {count} in {len(plan.stages)} stages")
    if len({stage.tp for stage in plan.stages}) > 1 and not capabilities.allows_mixed_tp:
        reasons.append("stages of different tp")
    if chosen.tp > 1 and chosen.sequence_parallel and not capabilities.allows_sequence_parallel:
        reasons.append("sequences split over the tp devices")
    elif chosen.tp > 1 and chosen.ep > 1 and _leaves_sequences(chosen, capabilities):
        reasons.append(f"tp {chosen.tp} beside ep {chosen.ep} without sequences split between layers")
    elif chosen.sequence_parallel == MIXED_SEQUENCES and not capabilities.allows_mixed_sequences:
        reasons.append("sequences that are split in some layers only")
    used = {device for stage in plan.stages for device in stage.devices}
    is_asked = capabilities.allows_idle_when_asked and bool(plan.question.strategy.keys() & {"dp", "tp", "pp"})
    may_idle = capabilities.allows_idle_devices or is_asked
    if len(used) < plan.cluster.device_count and not may_idle:
        reasons.append(f"{plan.cluster.device_count - len(used)} idle devices")
    if capabilities.needs_whole_nodes and not plan.cluster.has_whole_nodes:
        reasons.append(f"{plan.cluster.device_count} devices, which are no whole number of nodes (or slices)")
    uneven = plan.question.global_batch_size % (chosen.dp * chosen.micro_batch_size) > 0
    if uneven and not capabilities.allows_uneven_micro_batches:
        reasons.append("a batch that dp x micro_batch_size does not divide")
    strided = sorted(
        name for name, splits in plan.layouts.parameters.items() if any(split.outer > 1 for split in splits)
    )
    if strided and not capabilities.allows_strided_parameters:
        reasons.append(f"parameters that are split inside a dimension ({strided[0]})")
    return reasons


def axes_not_run(chosen: Parallelism, capabilities: Capabilities) -> list[str]:
    """The axes beside dp, tp and pp that a strategy has and a target does not run, in words."""
    reasons = []
    if chosen.cp > 1 and not capabilities.allows_context_parallel:
        reasons.append(f"context parallelism (cp {chosen.cp})")
    if chosen.ep > 1 and not capabilities.allows_expert_parallel:
        reasons.append(f"expert parallelism (ep {chosen.ep})")
    if chosen.expert_tp == 1 and capabilities.cuts_experts:
        reasons.append(f"whole experts divided over {chosen.tp} tp devices (expert_tp 1)")
    if chosen.offload not in capabilities.offloads:
        reasons.append(f"memory of the host (offload {chosen.offload})")
    size, replicas = chosen.shard_devices, chosen.replicas
    has_groups = chosen.zero > 0 and size < replicas
    if has_groups and not capabilities.runs_groups(size, zero=chosen.zero, cp=chosen.cp, ep=chosen.ep):
        others = f" (ZeRO stage {chosen.zero}, cp {chosen.cp}, ep {chosen.ep})"
        told = others if capabilities.allows_shard_groups else ""
        reasons.append(f"ZeRO over {size} of {replicas} devices{told}")
    return reasons


def _leaves_sequences(chosen: Parallelism, capabilities: Capabilities) -> bool:
    """Whether sequences are whole somewhere, and the target wants them split."""
    return capabilities.experts_need_split_sequences and chosen.sequence_parallel is not True


def _find_target(plan: Plan, plugins: PluginManager, name: str) -> Target:
    """The target of this name. Raises PlanError where its libraries are missing, or where it cannot run this plan."""
    target = plugins.targets().get(name)
    if not plan.is_feasible:
        remedies = "; ".join(remedy.text for remedy in plan.remedies) or "plan.explain() says more"
        raise PlanError(f"this plan does not fit its devices and cannot run. What would fit: {remedies}.")
    missing = [library for library in target.libraries if importlib.util.find_spec(library) is None]
    if missing:
        raise PlanError(
            f"target {name!r} needs {', '.join(missing)}, which cannot be imported; install it with the extra of its "
            f"name: pip install 'phaze-plugin[{missing[0]}]'."
        )
    reasons = obstacles(plan, target.capabilities)
    if reasons:
        raise PlanError(
            f"target {name!r} cannot run this plan: it has {', '.join(reasons)}. Plan with target={name!r} "
            f"(--target {name})."
        )
    return target
