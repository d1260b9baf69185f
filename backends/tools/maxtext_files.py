"""Target 'maxtext': a plan as a config of MaxText (github.com/AI-Hypercomputer/maxtext); its YAML and scripts read.

MaxText has an axis per kind of parallelism, inside a slice (`ici_`) and between slices (`dcn_`); the product of the
first is a slice's devices, that of the second the number of slices. Copies are its `data` axis. Parameters are divided
over `fsdp`, `expert` and `context` together, so that cp and ep go with ZeRO-3 only. Every block is recomputed in part
at least.

The batch per device counts samples between two accumulations of gradients. A pipeline runs its microbatches in one such
step, and accumulates nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phaze.backends.tools.config_texts import YAML, ConfigText, Settings
from phaze.backends.tools.script_texts import ASSIGNED_OPTIONS
from phaze.backends.tools.tool_target import (
    ToolTarget,
    block_counts,
    micro_batches,
    nodes,
    shard_groups,
    shard_of,
    strongest_recompute,
    unread_keys,
    whole,
)
from phaze.errors import PlanError, QuestionError
from phaze.hooks import hookimpl
from phaze.interfaces import Target
from phaze.ir import RecomputeMode
from phaze.ir.kept_activations import MAXTEXT_POLICIES, recompute_mode
from phaze.parallelism import PipelineSchedule
from phaze.strategy_files import StrategyFile
from phaze.targets import Capabilities

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["MaxTextTarget", "phaze_targets"]

_FILE = "maxtext.yml"
_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor", "tensor_sequence")
"""From the outermost on the network to the innermost, as a plan has them."""
_MORE_AXES = (
    *("fsdp_transpose", "sequence", "tensor_transpose", "context_autoregressive", "autoregressive", "diloco"),
    "context_usp_ulysses",
)
"""Axes that a file may name and that no plan uses."""
_REMAT_POLICIES = {str(mode): policy for policy, mode in MAXTEXT_POLICIES.items() if policy != "none"}
"""Its code rematerializes every block: the least that it computes again is what `minimal_with_context` does."""
_MODELS = {
    *("llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3.1-8b", "llama3.1-70b"),
    *("llama3.1-405b", "llama3.3-70b", "mistral-7b", "mixtral-8x7b", "mixtral-8x22b", "gpt3-175b", "gpt-oss-20b"),
    *("gpt-oss-120b", "gemma-2b", "gemma-7b", "gemma2-2b", "gemma2-9b", "gemma2-27b", "gemma3-4b", "gemma3-12b"),
    "gemma3-27b",
}
"""Models that both know by this name: files of configs/models in 0.2.3."""
_OTHERS = (
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "num_pipeline_microbatches",
    "num_layers_per_pipeline_stage",
    "remat_policy",
    "max_target_length",
    "model_name",
    "base_config",
    "shard_optimizer_over_data",
    "quantization",
)


_PASSED_OVER = ("allow_split_physical_axes", "custom_mesh*", "mesh_axes", "logical_axis_rules", "*_batch_size_*")
"""Keys of base.yml whose names speak of axes or batches and that decide nothing of a plan; most others do not."""


class MaxTextTarget(ToolTarget):
    """Writes a plan's parallelism as overrides of MaxText's configuration."""

    name = "maxtext"
    tool = "MaxText 0.2.3"
    checked = (
        "parsed by maxtext 0.2.3's pyconfig, which settles the plan's batch; axes of its mesh and shards of its model "
        "on 8 devices of a host are the plan's; loss and gradients of its model there are one device's; not compared: "
        "losses of its pipelines, which draw other parameters; not run: its trainer, which asks for tensorflow"
    )

    @property
    def capabilities(self) -> Capabilities:
        """GPipe over equal stages. It lays out parameters by its own rules, strided or not."""
        return Capabilities(
            schedules=frozenset({PipelineSchedule.GPIPE}),
            zero_stages=frozenset({0, 1, 3}),
            context_parallel_zero_stages=frozenset({3}),
            expert_parallel_zero_stages=frozenset({3}),
            shard_group_zero_stages=frozenset({3}),
            # Its axis of experts is a part of the copies: experts divided over contexts have no word there.
            excluded_axes=frozenset({("cp", "ep")}),
            compute_dtypes=frozenset({"bfloat16"}),
            needs_whole_nodes=True,
            recompute_modes=frozenset(_REMAT_POLICIES),
            allows_strided_parameters=True,
            allows_context_parallel=True,
            allows_expert_parallel=True,
            allows_shard_groups=True,
            # Its rules put the inner dimension of experts on the tensor axis (wi_kernel_axes of layers/moe.py).
            cuts_experts=True,
            can_cut_stages=True,
        )

    def text_of(self, name: str, part: str | None, text: str) -> ConfigText | None:
        """YAML, or a script with `name=value` options."""
        marks = ("_parallelism", "per_device_batch_size", "remat_policy")
        if not any(mark in text for mark in marks) or "parallelism_config" in text:
            return None
        return YAML if name.endswith((".yml", ".yaml")) else ASSIGNED_OPTIONS if not name.endswith(".py") else None

    def settings(self, plan: Plan, kind: ConfigText) -> dict[str, object]:
        """Axes, batch, recompute and the sequence."""
        return _options(plan)

    def files(self, plan: Plan) -> dict[str, str]:
        """One file of overrides."""
        return {_FILE: YAML.render(self.head(plan), {"base_config": "base.yml", **_options(plan)})}

    def launch(self, plan: Plan) -> str:
        """MaxText's trainer, on every host of the slices."""
        return f"python3 -m maxtext.trainers.pre_train.train {_FILE} run_name=$RUN"

    def left_out(self, plan: Plan) -> list[str]:
        """What a pipeline and an unknown model leave open."""
        sentences = [
            "All other settings are those of MaxText's own base.yml, which it finds in its package.",
            "MaxText orders the devices of its mesh itself, and stages lie inside of copies there.",
        ]
        if plan.model.name not in _MODELS:
            sentences.append("model_name is not set: MaxText knows no model of the planned one's name.")
        if plan.strategy.pp > 1:
            sentences.append("The embedding and the head lie outside of MaxText's pipeline, on all of its stages.")
        return [*sentences, *super().left_out(plan)]

    def owned(self, settings: Settings) -> set[str]:
        """All axes, and what a pipeline has."""
        names = {f"{where}_{axis}_parallelism" for where in ("ici", "dcn") for axis in (*_AXES, *_MORE_AXES)}
        pipeline = {"num_pipeline_microbatches", "num_layers_per_pipeline_stage"}
        return (names | pipeline | {"gradient_accumulation_steps", "shard_optimizer_over_data"}) & settings.keys()

    def strategy_of(self, settings: Settings, devices: int, global_batch_size: int | None) -> StrategyFile:
        """The strategy of options, with the defaults of base.yml: all devices of a slice are its fsdp axis."""
        sizes = _axis_sizes(settings, devices)
        tp = sizes["tensor"] * sizes["tensor_sequence"] * sizes["tensor_transpose"]
        cp = sizes["context"] * sizes["context_usp_ulysses"]
        shards = sizes["fsdp"] * sizes["fsdp_transpose"] * sizes["expert"]
        dp, pp = sizes["data"] * shards, sizes["pipeline"]
        is_first_stage = str(settings.get("shard_optimizer_over_data", "")).lower() == "true"
        zero = 3 if shards * cp > 1 else 1 if is_first_stage and dp > 1 else 0
        accumulated = whole(settings.get("gradient_accumulation_steps", 1)) or 1
        per_device = _number(settings.get("per_device_batch_size", 12.0))
        in_flight = (whole(settings.get("num_pipeline_microbatches")) or pp) if pp > 1 else 1
        micro = None if per_device is None else whole(per_device * devices / dp / in_flight)
        policy = str(settings.get("remat_policy", "full"))
        strategy = {
            "dp": dp,
            "shard": shard_of(sizes["data"], shards, cp) if zero == 3 else "all" if zero else None,
            "zero": zero,
            "cp": cp,
            "ep": sizes["expert"],
            "tp": tp,
            "expert_tp": tp if tp > 1 and sizes["expert"] > 1 else None,
            "sequence_parallel": sizes["tensor_sequence"] > 1 if tp > 1 else None,
            "micro_batch_size": micro,
            "pp": pp,
            "schedule": PipelineSchedule.GPIPE if pp > 1 else None,
            "recompute": _mode(policy),
        }
        known = {f"{where}_{axis}_parallelism" for where in ("ici", "dcn") for axis in (*_AXES, *_MORE_AXES)}
        return StrategyFile(
            tool=self.name,
            strategy={key: value for key, value in strategy.items() if value is not None},
            global_batch_size=None if per_device is None else whole(per_device * devices * accumulated),
            sequence_length=whole(settings.get("max_target_length")),
            precision="fp8" if "fp8" in str(settings.get("quantization", "")) else None,
            model=str(settings["model_name"]) if settings.get("model_name") else None,
            **unread_keys(settings, {*known, *_OTHERS}, _PASSED_OVER, is_whole=False),
            notes=_notes(settings, policy, sizes),
        )


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _axis_sizes(settings: Settings, devices: int) -> dict[str, int]:
    """The size of every axis, over a slice and the slices; one of each may be -1, which is what is left."""
    axes = (*_AXES, *_MORE_AXES)
    defaults = {"ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1}
    sizes = {
        f"{where}_{axis}": whole(settings.get(key, defaults.get(key, 1))) or 1
        for where in ("ici", "dcn")
        for axis in axes
        if (key := f"{where}_{axis}_parallelism")
    }
    fixed = {
        where: math.prod(sizes[f"{where}_{axis}"] for axis in axes if sizes[f"{where}_{axis}"] > 0)
        for where in ("ici", "dcn")
    }
    has_open_slice = any(sizes[f"ici_{axis}"] < 0 for axis in axes)
    for key, size in sizes.items():
        if size < 0:
            # Slices are found by MaxText from the devices; a file that leaves both open is taken for one slice.
            slices = 1 if has_open_slice else devices // fixed["ici"]
            sizes[key] = max(1, slices if key.startswith("dcn") else devices // (fixed["dcn"] * fixed["ici"]))
    return {axis: sizes[f"ici_{axis}"] * sizes[f"dcn_{axis}"] for axis in axes}


def _mode(policy: str) -> str:
    """The recompute mode of a policy; one that has none, such as one that offloads, is priced as full."""
    try:
        return str(recompute_mode(policy))
    except QuestionError:
        return str(RecomputeMode.FULL)


def _notes(settings: Settings, policy: str, sizes: dict[str, int]) -> tuple[str, ...]:
    notes = []
    if policy != "full" and _mode(policy) == "full":
        notes.append(f"remat_policy {policy} is priced as full")
    for axis in _MORE_AXES:
        if sizes[axis] > 1 and axis not in ("fsdp_transpose", "tensor_transpose", "context_usp_ulysses"):
            notes.append(f"the axis {axis} (of {sizes[axis]}) is not priced")
    if settings.get("quantization") not in (None, "", "fp8"):
        notes.append(f"quantization {settings['quantization']} is not priced")
    return tuple(notes)


def _options(plan: Plan) -> dict[str, object]:
    strategy = plan.strategy
    if strategy.zero != 3 and strategy.cp * strategy.ep > 1:
        raise PlanError(
            f"MaxText divides parameters over its context and expert axes; the plan has cp {strategy.cp} and ep "
            f"{strategy.ep} with ZeRO stage {strategy.zero}. Plan with strategy zero=3."
        )
    if plan.question.precision.compute_dtype != "bfloat16":
        raise PlanError(
            f"MaxText's options are written for bf16; the plan's precision is {plan.question.precision.name}."
        )
    micro_batch_count = micro_batches(plan)
    accumulated = 1 if strategy.pp > 1 else micro_batch_count
    samples_per_device = plan.question.global_batch_size / accumulated / plan.cluster.device_count
    options: dict[str, object] = {
        **({"model_name": plan.model.name} if plan.model.name in _MODELS else {}),
        "max_target_length": plan.model.tokens_per_sample,
        **_axes(plan),
        "shard_optimizer_over_data": strategy.zero == 1,
        "per_device_batch_size": samples_per_device,
        "gradient_accumulation_steps": accumulated,
        "remat_policy": _REMAT_POLICIES[strongest_recompute(plan)],
    }
    if strategy.pp > 1:
        blocks = sum(block_counts(plan, "MaxText"))
        if blocks % strategy.pp:
            raise PlanError(f"MaxText has equal stages; {blocks} blocks do not divide by pp {strategy.pp}.")
        options["num_pipeline_microbatches"] = micro_batch_count
        options["num_layers_per_pipeline_stage"] = blocks // strategy.pp
    return options


def _axes(plan: Plan) -> dict[str, object]:
    """The ici and dcn size of every axis: slices are taken from the outermost axes."""
    strategy = plan.strategy
    copies, shards = shard_groups(strategy, "MaxText") if strategy.zero == 3 else (strategy.dp, 1)
    if shards % strategy.ep:
        raise PlanError(f"MaxText divides experts inside of a shard group; ep {strategy.ep} does not divide {shards}.")
    is_split = bool(strategy.sequence_parallel)
    sizes = dict.fromkeys(_AXES, 1) | {
        "pipeline": strategy.pp,
        "data": copies,
        "fsdp": shards // strategy.ep,
        "expert": strategy.ep,
        "context": strategy.cp,
        "tensor_sequence" if is_split else "tensor": strategy.tp,
    }
    slices, each = nodes(plan)
    if slices * each != plan.cluster.device_count:
        raise PlanError(
            f"MaxText uses all devices of its slices; the plan has {plan.cluster.device_count} devices on {slices} "
            f"slices of {each}. Plan for whole slices."
        )
    between: dict[str, int] = {}
    for axis in _AXES:
        between[axis] = math.gcd(slices, sizes[axis])
        slices //= between[axis]
    axes = {f"ici_{axis}_parallelism": sizes[axis] // between[axis] for axis in _AXES}
    return {**axes, **{f"dcn_{axis}_parallelism": between[axis] for axis in _AXES}}


@hookimpl
def phaze_targets() -> tuple[Target, ...]:
    """The options for MaxText."""
    return (MaxTextTarget(),)
