"""What a model must be for a plan to be applied to it: the planned one, and nothing that arranging it would lose.

All of it is checked before anything is changed. Where a model would train otherwise than in one process without saying
so, or would fail in the first step, it is refused by name (`checked_model`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import FSDPModule

from phaze.backends.torch.checkpoints import is_on_meta
from phaze.backends.torch.expert_devices import expert_modules
from phaze.errors import PlanError

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["check_packed_positions", "check_samples_apart", "checked_model"]

SHOWN_DIFFERENCES = 5
"""How many differences between model and plan a message lists: the first ones say enough, and hundreds may follow."""


def checked_model(plan: Plan, model: object) -> torch.nn.Module:
    """The model; raises PlanError saying what differs where it is not the planned one, by parameters and layers."""
    model = _without_compilation(model)
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"the model is a {type(model).__name__}; this plan arranges a torch.nn.Module.")
    if any(isinstance(submodule, FSDPModule) for submodule in model.modules()):
        raise PlanError("the model is sharded already; apply a plan to the plain model, once.")
    if plan.strategy.pp > 1 and is_on_meta(model):
        raise PlanError("the model is on the meta device and the plan has stages, which needs weights; use pp=1.")
    if plan.strategy.ep > 1 and not expert_modules(model):
        raise PlanError(
            f"{type(model).__name__} has no module of experts that ep {plan.strategy.ep} could divide: one that takes "
            "tokens, chosen experts and weights, and whose parameters count experts first. Plan with ep=1."
        )
    _check_hooks(plan, model)
    _check_types(model)
    _say_router_losses(plan, model)
    _run_uncompiled(plan, model)
    _leave_recompute_to_plan(plan, model)
    count = sum(parameter.numel() for parameter in model.parameters())
    differences = []
    if count != plan.model.parameter_count:
        differences.append(f"{plan.model.parameter_count:,} parameters in the plan, {count:,} here")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, splits in plan.layouts.parameters.items():
        if name not in shapes:
            differences.append(f"the plan splits {name!r}, which the model does not have")
        elif any(split.dim >= len(shapes[name]) for split in splits):
            shape = list(shapes[name])
            differences.append(f"the plan splits dimension {splits[0].dim} of {name!r}, whose shape is {shape}")
    if differences:
        listed = "\n  ".join(differences[:SHOWN_DIFFERENCES])
        raise PlanError(f"the model is not the one that was planned ({plan.model.name}):\n  {listed}\nPlan this one.")
    return model


def check_samples_apart(plan: Plan) -> None:
    """Raise PlanError for a loss that mixes or numbers samples where a batch is run in parts."""
    parts = plan.question.global_batch_size // plan.strategy.micro_batch_size
    if plan.model.mixes_samples and parts > 1:
        raise PlanError(
            f"the loss does not treat samples apart: {plan.model.mixes_samples}. {plan.strategy.dp} copies and their "
            "microbatches have other samples beside each other than one process has. Mix, compare or number samples "
            "before they are given to the model; or plan with one microbatch on one copy (strategy dp=1, "
            "micro_batch_size = the global batch); or pass loss_weight= to apply: what a microbatch counts, such as "
            "the sum of a mask, or 'samples' to take the mean of the losses of microbatches as they are."
        )


def check_packed_positions(parts: Iterable[torch.nn.Module], batch: Mapping[str, object]) -> None:
    """Raise PlanError for packed sequences that one process would not keep apart.

    Hugging Face's models find out from positions that begin anew where sequences lie one behind the other, but only
    while they keep no caches. A plan trains without them (`without_caches`), and one process with the model's config.
    """
    positions = batch.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or batch.get("attention_mask") is not None:
        return
    configs = (getattr(module, "config", None) for part in parts for module in part.modules())
    if any(getattr(config, "use_cache", None) is True for config in configs) and bool((positions.diff() != 1).any()):
        raise PlanError(
            "position_ids begin anew inside of a sequence, and config.use_cache is True: with it Hugging Face's models "
            "let packed sequences attend to each other, and without it, as plans train, they keep them apart. Set "
            "model.config.use_cache = False to keep them apart, or pass the attention_mask that is meant."
        )


def _check_hooks(plan: Plan, model: torch.nn.Module) -> None:
    """Refuse hooks that arranged parameters would not have, or that would lose gradients of split tensors."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise PlanError(
                f"parameter {name!r} has a hook on its gradient, which the arranged parameter in its place would not "
                "have; register it after `plan.apply`, on the parameters of `run.stages`."
            )
    if plan.strategy.tp == 1 and plan.strategy.cp == 1:
        return
    for name, part in model.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise PlanError(
                f"module {name!r} has a backward hook, which torch runs as an autograd.Function; tensors that are "
                "split over devices (tp or cp) would lose their gradients there. Remove it, or plan with tp=1 and cp=1."
            )


def _check_types(model: torch.nn.Module) -> None:
    """Refuse trained parameters of several types, of which FSDP2 holds one in a group, and those without dimensions."""
    first: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise PlanError(
                f"parameter {name!r} is a scalar, which FSDP2 does not hold; make it a tensor of one element "
                "(`torch.nn.Parameter(value.reshape(1))`)."
            )
        if parameter.requires_grad:
            first.setdefault(parameter.dtype, name)
    if len(first) > 1:
        listed = ", ".join(f"{name!r} is {dtype}" for dtype, name in first.items())
        raise PlanError(
            f"trained parameters have several types ({listed}), and FSDP2 takes one; convert the model to one of them "
            "(`model.float()`): forward computes in the plan's precision anyway. Frozen ones may have another."
        )


def _say_router_losses(plan: Plan, model: torch.nn.Module) -> None:
    """Say that the auxiliary losses of Hugging Face's mixtures are no means over samples: each part has its own."""
    config = getattr(model, "config", None)
    is_added = getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0)
    copies = plan.strategy.dp
    micro_batches = plan.question.global_batch_size // (copies * plan.strategy.micro_batch_size)
    if is_added and copies * micro_batches > 1:
        warnings.warn(
            f"the loss of routers (`router_aux_loss_coef`) is that of each of {copies} copies and {micro_batches} "
            "microbatches by itself, as under gradient accumulation; one process takes it of the whole batch.",
            stacklevel=2,
        )


def _without_compilation(model: object) -> object:
    """The model that `torch.compile` wraps, and say so: it would follow FSDP2's hooks, stages and split tensors."""
    if not isinstance(model, OptimizedModule):
        return model
    warnings.warn(
        "the model runs uncompiled: torch.compile of all of it does not follow how it is arranged. Compile its blocks "
        "instead (`block.compile()` for each, before `plan.apply`), which run compiled under dp and pp.",
        stacklevel=2,
    )
    return model._orig_mod


def _run_uncompiled(plan: Plan, model: torch.nn.Module) -> None:
    """Let modules that were compiled in place run as they are written where tensors are split, and say so."""
    if plan.strategy.tp == 1 and plan.strategy.cp == 1:
        return
    compiled = [name for name, part in model.named_modules() if getattr(part, "_compiled_call_impl", None) is not None]
    for name in compiled:
        model.get_submodule(name)._compiled_call_impl = None
    if compiled:
        warnings.warn(
            f"{compiled[0]!r} and {len(compiled) - 1} other modules run uncompiled: torch.compile does not follow "
            "tensors that are split over devices (tp or cp).",
            stacklevel=2,
        )


def _leave_recompute_to_plan(plan: Plan, model: torch.nn.Module) -> None:
    """Switch off the checkpointing of Hugging Face's models, and say so: a plan says itself what is computed again."""
    switched = [part for part in model.modules() if getattr(part, "gradient_checkpointing", None) is True]
    for part in switched:
        part.gradient_checkpointing = False
    if switched:
        modes = ", ".join(sorted({stage.recompute for stage in plan.stages}))
        warnings.warn(
            f"gradient checkpointing of {type(switched[0]).__name__} is switched off: the plan says what is computed "
            f"again in backward (recompute {modes}). Plan with strategy recompute='full' for all blocks.",
            stacklevel=2,
        )
