"""A plan applied to a torch module: the module or its stages on a mesh, and a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from phaze.backends.torch.arrange import arrange, synchronise
from phaze.backends.torch.layouts import blocks_of, cut_of
from phaze.backends.torch.meshes import mesh_of
from phaze.backends.torch.pipeline import Pipeline, build_pipeline
from phaze.backends.torch.split_collectives import sharing
from phaze.backends.torch.split_tensor import SplitTensor
from phaze.errors import PlanError, shown
from phaze.loss_in_output import loss_candidates
from phaze.plan.plan import Plan

__all__ = ["Applied", "apply_plan_to", "loss_of"]

OPTIONS = ("inputs", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Applied:
    """A model arranged on a mesh, as this process sees it.

    Weights must be equal in all processes when the plan is applied, and with dropout the seeds of processes that share
    parameters on the tensor axis too.

    Attributes:
        module: the model itself, arranged; None where it is cut into stages.
        stages: this process's stages, in order, with the model's own names; the module alone without a pipeline.
        schedule: a ready schedule of torch.distributed.pipelining; None without a pipeline.
        mesh: axes pp, replicate, shard, tp.
        optimizer: the optimizer of this process's parameters.
    """

    module: Any
    stages: tuple[Any, ...]
    schedule: Any
    mesh: DeviceMesh
    optimizer: torch.optim.Optimizer
    _pipeline: Pipeline | None
    _forward: Callable[..., Any]
    _micro_batch_size: int
    _share_size: int
    _zero: int

    def share(self, batch: Any) -> Any:
        """This process's part of a global batch: dimension 0 of every tensor, cut over the copies of the model."""
        copies = self.mesh["replicate"].size() * self.mesh["shard"].size()
        index = self.mesh.get_local_rank("replicate") * self.mesh["shard"].size() + self.mesh.get_local_rank("shard")
        size = self._share_size

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.shape[0] != copies * size:
                raise PlanError(f"the batch has {leaf.shape[0]} samples; the plan's has {copies * size}.")
            return leaf[index * size : (index + 1) * size]

        return tree_map(cut, batch)

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One training step on this process's share of a batch, given as the model takes it; the batch's mean loss."""
        self.optimizer.zero_grad()
        loss = self.backward(*args, **kwargs)
        self.optimizer.step()
        return loss

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss, its gradients added to those that parameters have; nothing is updated."""
        count = self._micro_batches(args, kwargs)
        if self._pipeline is not None:
            loss = self._pipeline.backward(count, args, kwargs)
        else:
            loss = self._accumulate(count, args, kwargs)
        for name in ("replicate", "shard"):
            if self.mesh[name].size() > 1:
                dist.all_reduce(loss, group=self.mesh[name].get_group())
                loss /= self.mesh[name].size()
        return loss

    def _micro_batches(self, args: Any, kwargs: Any) -> int:
        sizes = {leaf.shape[0] for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)}
        if sizes != {self._share_size}:
            raise PlanError(
                f"the batch has tensors of {sorted(sizes)} samples; expected {self._share_size} in each: this "
                "process's share (`run.share(batch)` takes it from a global batch)."
            )
        return self._share_size // self._micro_batch_size

    def _accumulate(self, count: int, args: Any, kwargs: Any) -> torch.Tensor:
        size, total = self._micro_batch_size, None
        for index in range(count):
            part = tree_map(
                lambda leaf, at=index * size: leaf[at : at + size] if isinstance(leaf, torch.Tensor) else leaf,
                (args, kwargs),
            )
            synchronise(self.module, self._zero, is_last=index == count - 1)
            loss = self._forward(self.module, *part[0], **part[1]) / count
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total


def apply_plan_to(
    plan: Plan, model: Any, mesh: Any, loss_fn: Callable[..., Any] | None, options: Mapping[str, Any]
) -> Applied:
    """Check that plan, model and mesh belong together, and arrange the model."""
    for name in options:
        if name not in OPTIONS:
            raise PlanError(f"apply has no option {shown(name)} for torch; expected some of {', '.join(OPTIONS)}.")
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"the model is a {type(model).__name__}; this plan arranges a torch.nn.Module.")
    _check_model(plan, model)
    chosen = plan.strategy
    placed = mesh_of(plan, mesh)
    forward = _forward_of(loss_fn)
    arrange_part = _arranger(plan, model, placed)
    pipeline = None
    if chosen.pp > 1:
        inputs = options.get("inputs")
        if inputs is None:
            raise PlanError(
                "a plan with stages needs inputs=..., as optimize took them: they say what crosses the cuts."
            )
        pipeline = build_pipeline(plan, model, placed, inputs, forward, arrange_part)
        stages = pipeline.modules
    else:
        modes = dict.fromkeys(blocks_of(plan.stages[0].layers, model), plan.stages[0].recompute)
        arrange_part(model, modes)
        stages = (model,)
    return Applied(
        module=None if pipeline else model,
        stages=stages,
        schedule=pipeline.schedule if pipeline else None,
        mesh=placed,
        optimizer=_optimizer(plan, stages, options.get("optimizer")),
        _pipeline=pipeline,
        _forward=forward,
        _micro_batch_size=chosen.micro_batch_size,
        _share_size=plan.question.global_batch_size // chosen.dp,
        _zero=chosen.zero,
    )


def _check_model(plan: Plan, model: Any) -> None:
    """Whether the model is the planned one, by its parameters and layers; raises PlanError saying what differs."""
    if any(isinstance(part, FSDPModule) for part in model.modules()):
        raise PlanError("the model is sharded already; apply a plan to the plain model, once.")
    count = sum(parameter.numel() for parameter in model.parameters())
    found = []
    if count != plan.model.parameter_count:
        found.append(f"{plan.model.parameter_count:,} parameters in the plan, {count:,} here")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, splits in plan.layouts.parameters.items():
        if name not in shapes:
            found.append(f"the plan splits {name!r}, which the model does not have")
        elif any(split.dim >= len(shapes[name]) for split in splits):
            found.append(f"the plan splits dimension {splits[0].dim} of {name!r}, whose shape is {list(shapes[name])}")
    if found:
        listed = "\n  ".join(found[:5])
        raise PlanError(f"the model is not the one that was planned ({plan.model.name}):\n  {listed}\nPlan this one.")


def _arranger(plan: Plan, model: Any, mesh: DeviceMesh) -> Callable[[Any, Mapping[str, str]], Any]:
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    layouts = plan.layouts.parameters
    cuts = {
        name: cut_of(layouts[first[id(parameter)]])
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if layouts.get(first[id(parameter)])
    }
    recipe = plan.question.precision

    def arranged(module: Any, blocks: Mapping[str, str]) -> Any:
        return arrange(
            module,
            mesh,
            cuts=cuts,
            splits_sequences=plan.strategy.sequence_parallel and plan.strategy.tp > 1,
            blocks=blocks,
            zero=plan.strategy.zero,
            compute_dtype=getattr(torch, recipe.compute_dtype),
            reduction_dtype=getattr(torch, recipe.reduction_dtype),
        )

    return arranged


def _forward_of(loss_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """The scalar loss of a call of a module; with a `loss_fn`, `targets` of the batch are for that."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        targets = kwargs.pop("targets", None) if loss_fn is not None else None
        with sharing():
            output = module(*args, **kwargs)
            if loss_fn is None:
                loss = loss_of(output)
            else:
                loss = loss_fn(output) if targets is None else loss_fn(output, targets)
            return loss.whole() if isinstance(loss, SplitTensor) else loss

    return forward


def loss_of(output: Any) -> Any:
    """The scalar that a model returns: itself, under `loss`, or first in a tuple; raises PlanError."""
    for candidate in loss_candidates(output):
        if isinstance(candidate, torch.Tensor) and candidate.numel() == 1:
            return candidate
    raise PlanError(
        f"the model returned a {type(output).__name__} without a scalar loss; pass labels in the batch, or loss_fn= to "
        "apply (a function of the output, and of targets= where those are in the batch)."
    )


def _optimizer(plan: Plan, stages: Sequence[Any], make: Any) -> torch.optim.Optimizer:
    parameters = list({id(p): p for stage in stages for p in stage.parameters() if p.requires_grad}.values())
    if make is None:
        is_adam = plan.question.precision.state_bytes > 0
        make = torch.optim.AdamW if is_adam else (lambda own: torch.optim.SGD(own, lr=1e-2))
    if not callable(make):
        raise PlanError(f"optimizer is {shown(make)}; expected a function from parameters to a torch optimizer.")
    made = make(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise PlanError(f"optimizer made a {type(made).__name__}; expected a torch.optim.Optimizer.")
    return made
