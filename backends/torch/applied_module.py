"""A plan applied to a live torch module: its device mesh, the module or its stages arranged on it, a training step.

`apply_to_module` checks that plan, model and mesh belong together, and returns an `AppliedModule`.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.utils._pytree import tree_map

from phaze.backends.torch.arrange import arrange_module, schedule_gradient_sync
from phaze.backends.torch.batch_statistics import settle_batch_norms
from phaze.backends.torch.checkpoints import TrainingState, load_checkpoint, save_checkpoint, save_whole_model
from phaze.backends.torch.contexts import Contexts
from phaze.backends.torch.expert_devices import ExpertDevices, expert_modules, run_experts_on
from phaze.backends.torch.fsdp_export import stored_cut
from phaze.backends.torch.gradient_norm import clip_gradients
from phaze.backends.torch.meta_models import fill_meta_model, is_on_meta
from phaze.backends.torch.pipeline import ArrangeFunction, LossFunction, Pipeline, build_pipeline
from phaze.backends.torch.rank_failures import told_to_all
from phaze.backends.torch.split_attention import note_key_exchanges
from phaze.backends.torch.split_collectives import Axis, shared_gradient_sums
from phaze.backends.torch.split_parameters import Cut
from phaze.backends.torch.split_tensor import to_whole
from phaze.backends.torch.stage_cuts import block_paths
from phaze.errors import PlanError, shown
from phaze.interfaces import StageBuilder
from phaze.loss_in_output import loss_candidates

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["AppliedModule", "apply_to_module", "loss_of_output"]

MESH_AXES = ("pp", "replicate", "shard", "tp")
"""Pipeline stages, whole copies, shards of a copy (ZeRO), and tensor-parallel devices."""

EXPERT_MESH_AXES = ("pp", "expert_replicate", "expert_shard", "ep", "tp")
"""Stages, copies of a device's experts, shards of a copy, devices with different experts, tensor-parallel devices."""

SGD_LEARNING_RATE = 1e-2
"""For the SGD of plans whose precision keeps no optimizer states, where no `optimizer=` is given. It is not tuned for
any model: a larger rate learns faster and diverges earlier."""

SHOWN_DIFFERENCES = 5
"""How many differences between model and plan a message lists: the first ones say enough, and hundreds may follow."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AppliedModule:
    """A model arranged on a mesh, as this process sees it.

    Weights must be equal in all processes when the plan is applied, and with dropout the seeds of processes that share
    parameters on the tensor-parallel axis too.

    Attributes:
        module: the model itself, arranged; None where it is cut into stages.
        stages: this process's stages, in order, with the model's own names; the module alone without a pipeline.
        schedule: a ready schedule of torch.distributed.pipelining; None without a pipeline.
        mesh: axes pp, replicate, shard, tp; devices of a context are among those of replicate and shard.
        optimizer: the optimizer of this process's parameters.
    """

    module: torch.nn.Module | None
    stages: tuple[torch.nn.Module, ...]
    schedule: _PipelineSchedule | None
    mesh: DeviceMesh
    optimizer: torch.optim.Optimizer
    _pipeline: Pipeline | None
    _contexts: Contexts | None
    _expert_mesh: DeviceMesh | None
    _first_names: Mapping[str, str]
    _loss: LossFunction
    _micro_batch_size: int
    _share_size: int
    _zero: int

    def share(self, batch: Any) -> Any:
        """This process's part of a global batch: dimension 0 of every tensor, cut over the copies of the model."""
        cp = self._contexts.size if self._contexts else 1  # devices of a context share their samples
        copies = self.mesh["replicate"].size() * self.mesh["shard"].size() // cp
        place = self.mesh.get_local_rank("replicate") * self.mesh["shard"].size() + self.mesh.get_local_rank("shard")
        index, size = place // cp, self._share_size

        def cut(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.shape[0] != copies * size:
                raise PlanError(f"the batch has {leaf.shape[0]} samples; the plan's has {copies * size}.")
            return leaf[index * size : (index + 1) * size]

        return tree_map(cut, batch)

    def step(self, *args: object, **kwargs: object) -> torch.Tensor:
        """One training step on this process's share of a batch, given as the model takes it; the batch's mean loss."""
        self.optimizer.zero_grad()
        loss = self.backward(*args, **kwargs)
        self.optimizer.step()
        return loss

    def backward(self, *args: object, **kwargs: object) -> torch.Tensor:
        """The loss, its gradients added to those that parameters have; nothing is updated.

        An error on one process is told to the others, which raise it as a PlanError.
        """
        with told_to_all():
            count = self._micro_batch_count(args, kwargs)
            if self._pipeline is not None:
                loss = self._pipeline.backward(count, args, kwargs)
            else:
                loss = self._accumulate(count, args, kwargs)
            for name in ("replicate", "shard"):
                if self.mesh[name].size() > 1:
                    dist.all_reduce(loss, group=self.mesh[name].get_group())
                    loss /= self.mesh[name].size()
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of the whole model so that their norm is at most `max_norm`; the norm before that.

        Call it in every process, between `backward` and the optimizer's step. torch's own function would count
        parameters that tensor-parallel devices or stages share several times, and leave others out.
        """
        elsewhere = self._pipeline.counted_elsewhere if self._pipeline else frozenset()
        return clip_gradients(
            (parameter for stage in self.stages for parameter in stage.parameters()),
            self.mesh,
            expert_mesh=self._expert_mesh,
            counted_elsewhere=elsewhere,
            max_norm=max_norm,
            norm_type=norm_type,
        )

    @property
    def _state(self) -> TrainingState:
        return TrainingState(self.stages, self.optimizer, self._first_names)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint of model and optimizer, each process its own parts; call it in every process.

        The folder must be one that all processes reach. Any other plan of the model can `load` it.
        """
        with told_to_all():
            save_checkpoint(self._state, folder)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Take model and optimizer from a checkpoint that `save` wrote under this plan or another one."""
        with told_to_all():
            load_checkpoint(self._state, folder)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the whole model as safetensors files with its config, as Hugging Face reads them; in every process."""
        with told_to_all():
            is_first = all(not self.mesh.get_local_rank(name) for name in ("replicate", "shard", "tp"))
            save_whole_model(self._state, folder, pipeline=self.mesh["pp"].get_group(), writes=is_first)
            dist.barrier()

    def _micro_batch_count(self, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
        sizes = {leaf.shape[0] for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)}
        if sizes != {self._share_size}:
            raise PlanError(
                f"the batch has tensors of {sorted(sizes)} samples; expected {self._share_size} in each: this "
                "process's share (`run.share(batch)` takes it from a global batch)."
            )
        return self._share_size // self._micro_batch_size

    def _accumulate(self, count: int, args: Sequence[object], kwargs: Mapping[str, object]) -> torch.Tensor:
        """Run all microbatches one after another; their mean loss."""
        size, total = self._micro_batch_size, None
        for index in range(count):

            def sliced(leaf: object, start: int = index * size) -> object:
                return leaf[start : start + size] if isinstance(leaf, torch.Tensor) else leaf

            micro_args, micro_kwargs = tree_map(sliced, (args, kwargs))
            schedule_gradient_sync(self.module, self._zero, is_last=index == count - 1)
            loss = self._loss(self.module, *micro_args, **micro_kwargs) / count
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total


def apply_to_module(
    plan: Plan,
    model: object,
    mesh: object,
    *,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: object,
    optimizer: object,
    batch_norm: object,
    weights: object,
    stage_builders: Iterable[StageBuilder],
) -> AppliedModule:
    """Check that plan, model and mesh belong together, and arrange the model; raises PlanError where they do not."""
    model = _checked_model(plan, model)
    device_mesh = _mesh_of_plan(plan, mesh)
    share_size = plan.question.global_batch_size // plan.strategy.dp
    copies = [device_mesh[name].get_group() for name in ("replicate", "shard") if device_mesh[name].size() > 1]
    micro_batches = share_size // plan.strategy.micro_batch_size
    settle_batch_norms(model, batch_norm, copies=copies, micro_batches=micro_batches)
    contexts = _contexts_of_plan(plan, device_mesh)
    loss = _loss_function(loss_fn, model, contexts)
    note_key_exchanges(model, plan.layouts.key_exchanges)
    expert_mesh = _expert_mesh_of_plan(plan, device_mesh)
    first_names = _first_names(model)
    arrange = _arrange_function(plan, model, device_mesh, expert_mesh)
    pipeline = None
    if plan.strategy.pp > 1:
        if inputs is None:
            raise PlanError(
                "a plan with stages needs inputs=..., as optimize took them: they say what crosses the cuts."
            )
        pipeline = build_pipeline(
            plan,
            model,
            device_mesh,
            inputs=inputs,
            loss=loss,
            arrange=arrange,
            contexts=contexts,
            stage_builders=stage_builders,
        )
        stages = pipeline.modules
    else:
        _arrange_whole(plan, model, arrange, weights, device_mesh.device_type)
        stages = (model,)
    return AppliedModule(
        module=None if pipeline else model,
        stages=stages,
        schedule=pipeline.schedule if pipeline else None,
        mesh=device_mesh,
        optimizer=_make_optimizer(plan, stages, optimizer),
        _pipeline=pipeline,
        _contexts=contexts,
        _expert_mesh=expert_mesh,
        _first_names=first_names,
        _loss=loss,
        _micro_batch_size=plan.strategy.micro_batch_size,
        _share_size=share_size,
        _zero=plan.strategy.zero,
    )


def _arrange_whole(plan: Plan, model: torch.nn.Module, arrange: ArrangeFunction, weights: object, device: str) -> None:
    """Arrange a model that is not cut into stages, and give it its weights where it has none."""
    paths = block_paths([layer.path for layer in plan.stages[0].layers], model)
    arrange(model, dict.fromkeys(paths, plan.stages[0].recompute))
    if is_on_meta(model):
        fill_meta_model(model, weights, device)


def _first_names(model: torch.nn.Module) -> dict[str, str]:
    """The name under which the model lists a parameter first, by each of its names."""
    by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: by_identity[id(parameter)] for name, parameter in named}


def _checked_model(plan: Plan, model: object) -> torch.nn.Module:
    """The model; raises PlanError saying what differs where it is not the planned one, by parameters and layers."""
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


def _arrange_function(
    plan: Plan, model: torch.nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh | None
) -> ArrangeFunction:
    """A function that arranges the model, or a stage of it, as the plan says."""
    layouts = plan.layouts.parameters
    cuts = {name: Cut(*stored_cut(layouts[first])) for name, first in _first_names(model).items() if layouts.get(first)}
    recipe = plan.question.precision
    devices = ExpertDevices(None, 1, 0, plan.strategy.cp)
    if expert_mesh is not None:
        own = expert_mesh["ep"]
        devices = ExpertDevices(own.get_group(), own.size(), own.get_local_rank(), plan.strategy.cp)

    def arrange(module: torch.nn.Module, blocks: Mapping[str, str]) -> Axis | None:
        experts = expert_modules(module) if plan.strategy.cp > 1 or expert_mesh is not None else {}
        for part in experts.values():
            run_experts_on(part, devices)
        return arrange_module(
            module,
            mesh,
            cuts=cuts,
            splits_sequences=plan.strategy.sequence_parallel is True and plan.strategy.tp > 1,
            blocks=blocks,
            zero=plan.strategy.zero,
            compute_dtype=getattr(torch, recipe.compute_dtype),
            reduction_dtype=getattr(torch, recipe.reduction_dtype),
            splits_contexts=plan.strategy.cp > 1,
            expert_meshes={} if expert_mesh is None else dict.fromkeys(experts, expert_mesh),
        )

    return arrange


def _loss_function(
    loss_fn: Callable[..., torch.Tensor] | None, model: torch.nn.Module, contexts: Contexts | None
) -> LossFunction:
    """A function that calls a module and returns the scalar loss; with contexts, on sequences that are split.

    The batch's `targets` go to whoever declares them: to the model, to `loss_fn`, or to both.
    """
    model_takes_targets = loss_fn is None or "targets" in inspect.signature(model.forward).parameters
    loss_takes_targets = loss_fn is not None and (not model_takes_targets or _declares_targets(loss_fn))

    def loss(module: Callable[..., object], *args: object, **kwargs: object) -> torch.Tensor:
        if contexts is not None:
            args, kwargs = contexts.split_batch((args, kwargs))
        targets = kwargs.get("targets")
        if not model_takes_targets:
            kwargs.pop("targets", None)
        with shared_gradient_sums():
            output = module(*args, **kwargs)
            if loss_fn is None:
                return to_whole(loss_of_output(output))
            is_given = loss_takes_targets and targets is not None
            return to_whole(loss_fn(output, targets) if is_given else loss_fn(output))

    return loss


def _declares_targets(loss_fn: Callable[..., torch.Tensor]) -> bool:
    """Whether a function of the output takes a second argument: one without a default, or one named `targets`."""
    called = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [value for value in inspect.signature(called).parameters.values() if value.kind in positional]
    second = parameters[1] if len(parameters) > 1 else None
    return second is not None and (second.default is inspect.Parameter.empty or second.name == "targets")


def loss_of_output(output: object) -> torch.Tensor:
    """The scalar with a gradient that a model returns: itself, under `loss`, or in a tuple; raises PlanError."""
    tensors = [candidate for candidate in loss_candidates(output) if isinstance(candidate, torch.Tensor)]
    scalars = [tensor for tensor in tensors if tensor.numel() == 1 and tensor.is_floating_point()]
    for scalar in scalars:
        if scalar.requires_grad:
            return scalar
    if scalars:
        return scalars[0]
    raise PlanError(
        f"the model returned a {type(output).__name__} without a scalar loss; pass labels in the batch, or loss_fn= to "
        "apply (a function of the output, and of targets= where those are in the batch)."
    )


def _make_optimizer(plan: Plan, stages: Sequence[torch.nn.Module], make: object) -> torch.optim.Optimizer:
    """The optimizer of this process's parameters: the user's, or AdamW or SGD as the plan's precision says."""
    trained = [parameter for stage in stages for parameter in stage.parameters() if parameter.requires_grad]
    parameters = list({id(parameter): parameter for parameter in trained}.values())  # tied ones once
    if make is None:
        if plan.question.precision.state_bytes > 0:
            return torch.optim.AdamW(parameters)
        return torch.optim.SGD(parameters, lr=SGD_LEARNING_RATE)
    if not callable(make):
        raise PlanError(f"optimizer is {shown(make)}; expected a function from parameters to a torch optimizer.")
    optimizer = make(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(f"optimizer made a {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    return optimizer


# ---------------------------------------------------------------------------------------------------- the device mesh


def _mesh_of_plan(plan: Plan, given: object) -> DeviceMesh:
    """A mesh with axes pp, replicate, shard, tp over the ranks of the given one (axes pp, dp, cp, tp), or over all.

    Data and context parallelism are `replicate` where every copy of parameters is whole, and `shard` where copies are
    sharded (ZeRO); hybrid sharding has both. Raises PlanError where the mesh, or the launch, does not have the plan's
    sizes.
    """
    strategy = plan.strategy
    sizes = {"pp": strategy.pp, "dp": strategy.dp, "cp": strategy.cp, "tp": strategy.tp}
    wanted = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if not dist.is_initialized():
        raise PlanError("torch.distributed has no process group; call torch.distributed.init_process_group() first.")
    ranks = _ranks_of_launch(sizes, wanted) if given is None else _ranks_of_mesh(given, sizes, wanted)
    shards = strategy.shard_devices if strategy.zero else 1
    shape = (strategy.pp, strategy.replicas // shards, shards, strategy.tp)
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    return DeviceMesh(device, ranks.reshape(shape), mesh_dim_names=MESH_AXES)


def _contexts_of_plan(plan: Plan, mesh: DeviceMesh) -> Contexts | None:
    """The devices with which this process splits sequences; None where they are whole."""
    strategy = plan.strategy
    if strategy.cp == 1:
        return None
    ranks = mesh.mesh.reshape(strategy.pp, strategy.dp, strategy.cp, strategy.tp)
    axes = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("pp", "dp", "cp", "tp"))
    return Contexts(axes["cp"].get_group(), strategy.cp, axes.get_local_rank("cp"))


def _expert_mesh_of_plan(plan: Plan, mesh: DeviceMesh) -> DeviceMesh | None:
    """A mesh of the same ranks for experts: neighbours on axis ep hold different ones; None where ep is 1."""
    strategy = plan.strategy
    if strategy.ep == 1:
        return None
    copies = strategy.replicas // strategy.ep
    shards = max(1, strategy.shard_devices // strategy.ep) if strategy.zero else 1
    ranks = mesh.mesh.reshape(strategy.pp, copies // shards, shards, strategy.ep, strategy.tp)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=EXPERT_MESH_AXES)


def _ranks_of_launch(sizes: Mapping[str, int], wanted: str) -> torch.Tensor:
    count = math.prod(sizes.values())
    if dist.get_world_size() != count:
        raise PlanError(
            f"the plan takes {count} processes ({wanted}), and {dist.get_world_size()} were launched; launch {count}, "
            "or plan for as many devices."
        )
    return torch.arange(count)


def _ranks_of_mesh(mesh: object, sizes: Mapping[str, int], wanted: str) -> torch.Tensor:
    """The ranks of a mesh in the order pp, dp, cp, tp."""
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(f"mesh is a {type(mesh).__name__}; expected a torch DeviceMesh with axes {wanted}.")
    names = list(mesh.mesh_dim_names or ())
    listed = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=False)) or "no names"
    if not names or not set(names) <= set(sizes):
        raise PlanError(f"mesh has the axes {listed}; the plan's are {wanted}. Name them so.")
    given_sizes = dict(zip(names, mesh.shape, strict=True))
    if any(given_sizes.get(name, 1) != size for name, size in sizes.items()):
        raise PlanError(f"mesh has the sizes {listed}; the plan needs {wanted}. Pass such a mesh, or none.")
    order = [names.index(name) for name in sizes if name in names]
    return mesh.mesh.permute(order)
