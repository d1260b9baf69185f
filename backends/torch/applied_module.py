"""A plan applied to a live torch module: its device mesh, the module or its stages arranged on it, a training step.

`apply_to_module` checks that plan, model and mesh belong together, and returns an `AppliedModule`.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _PipelineSchedule

from phaze.backends.torch.arrange import Cut, arrange_module, schedule_gradient_sync
from phaze.backends.torch.checkpoints import (
    TrainingState,
    fill_meta_model,
    is_on_meta,
    load_checkpoint,
    save_checkpoint,
    save_whole_model,
)
from phaze.backends.torch.dropout_and_batch_norm import RandomStream, settle_batch_norms
from phaze.backends.torch.expert_devices import ExpertDevices, expert_modules, run_experts_on
from phaze.backends.torch.fsdp_export import stored_cut
from phaze.backends.torch.micro_batches import (
    BatchLosses,
    Division,
    LossFunction,
    LossWeight,
    agreed_sizes,
    check_equal_counts,
    checked_weight,
    divided,
    is_number,
    loss_function,
    micro_batch,
    padded,
    sample_count,
    scale_gradients,
    settled_loss,
    share_of,
)
from phaze.backends.torch.model_checks import check_packed_positions, check_samples_apart, checked_model
from phaze.backends.torch.optimizers import OptimizerParameters, clip_gradients, make_optimizer
from phaze.backends.torch.pipeline import ArrangeFunction, Pipeline, build_pipeline
from phaze.backends.torch.process_groups import (
    Contexts,
    contexts_of_plan,
    expert_mesh_of_plan,
    made_by_all,
    mesh_of_plan,
    told_to_all,
)
from phaze.backends.torch.split_collectives import Axis
from phaze.backends.torch.split_products import note_key_exchanges
from phaze.backends.torch.stage_cuts import block_paths
from phaze.backends.torch.step_measurement import (
    RunReport,
    StepProfile,
    WholeCalls,
    axes_of_groups,
    measured_step,
)
from phaze.errors import PlanError
from phaze.interfaces import StageBuilder

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["AppliedModule", "apply_to_module"]

_NO_FACTOR = 1e-12
"""A factor of gradients that is so close to 1 is the rounding of a sum of equal weights."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AppliedModule:
    """A model arranged on a mesh, as this process sees it.

    Weights must be equal in all processes when the plan is applied. Dropout draws from a stream of the run's own
    (`RandomStream`): equal on devices that share samples, different between copies, and other than in one process.

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
    _loss_weight: LossWeight
    _batch: PlannedBatch
    _zero: int
    _plan: Plan
    _whole_calls: WholeCalls
    _random: RandomStream
    _said: set[str]

    def share(self, batch: Any) -> Any:
        """This process's part of a global batch: dimension 0 of every tensor, cut over the copies of the model.

        A batch need not have the planned number of samples, nor one that the copies divide.
        """
        return share_of(batch, self._batch.copies, _copy_index(self.mesh, self._replicas // self._batch.copies))

    def step(self, *args: object, **kwargs: object) -> torch.Tensor:
        """One training step on this process's share of a batch, given as the model takes it; the batch's mean loss."""
        self.optimizer.zero_grad()
        loss = self.backward(*args, **kwargs)
        self.optimizer.step()
        return loss

    def backward(self, *args: object, **kwargs: object) -> torch.Tensor:
        """The loss of the batch, its gradients added to those that parameters have; nothing is updated.

        Losses of microbatches and copies count as they do in one process: by the targets that count where the loss is a
        mean of cross entropies, by samples elsewhere, or as `loss_weight=` said; with Hugging Face's
        `num_items_in_batch=` (of the whole batch) they are added. An error on one process is told to the others, which
        raise it as a PlanError.
        """
        with told_to_all():
            parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
            # Gradients of earlier calls are set aside, so that sums and factors are of this call's gradients alone.
            earlier = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
            for parameter, _ in earlier:
                parameter.grad = None
            loss, factor = self._run(args, kwargs, trains=True)
            if factor is not None:
                scale_gradients(parameters, factor)
            for parameter, gradient in earlier:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss

    def evaluate(self, *args: object, **kwargs: object) -> torch.Tensor:
        """The loss of a batch, of which this process gives its share; no gradients, and the model in evaluation mode.

        Every process calls it, whatever its stage. Modes are as they were afterwards.
        """
        modes = [(part, part.training) for stage in self.stages for part in stage.modules()]
        try:
            for stage in self.stages:
                stage.eval()
            with told_to_all(), torch.no_grad():
                return self._run(args, kwargs, trains=False)[0]
        finally:
            for part, mode in modes:
                part.training = mode

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own `generate` returns; every process calls it, also those without prompts of their own.

        Where parameters are sharded, processes go on together until the last one has ended. Raises PlanError for a
        model that is cut into stages.
        """
        if self.module is None:
            raise PlanError(
                "the model is cut into stages, which do not generate; write it with `run.save_pretrained(folder)` and "
                "read it in one process, or apply a plan with pp=1."
            )
        if self._replicas > 1:
            kwargs.setdefault("synced_gpus", True)  # a process that stopped early would leave others in a gather
        with told_to_all(), torch.no_grad():
            return self.module.generate(*args, **kwargs)

    def report(self) -> RunReport:
        """Which functions of torch ran on gathered tensors on this process, for want of a rule for split ones.

        They are right and cost time: how often they ran and how many bytes they gathered. `print` it.
        """
        return self._whole_calls.report()

    def profile(self, batch: Mapping[str, object], *, steps: int = 3) -> StepProfile:
        """Time training steps on this process's share of a batch, and compare them with the plan; `print` the result.

        These are real steps, one to warm up and `steps` more: parameters are updated. Every process calls it.
        """
        with told_to_all():
            meshes = [self.mesh, *([self._expert_mesh] if self._expert_mesh is not None else [])]
            place = self.mesh.get_local_rank("pp")
            local_stages = [index for index, stage in enumerate(self._plan.stages) if stage.place == place]
            contexts = {self._contexts.group: "cp"} if self._contexts is not None else {}
            run = functools.partial(self.step, **batch)
            return measured_step(run, self._plan, axes_of_groups(meshes, contexts), local_stages, steps=steps)

    def _run(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, trains: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a batch; its loss, and the factor that gradients lack, or None where they lack none."""
        copies = [self.mesh[name].get_group() for name in ("replicate", "shard") if self.mesh[name].size() > 1]
        local, device = sample_count((args, kwargs)), torch.device(self.mesh.device_type)
        fewest, most = agreed_sizes(local, copies, device)
        division = divided(local, fewest, most, self._batch.micro_batch_size, keeps_shape=self._pipeline is not None)
        self._check_division(division, fewest, most)
        if trains:
            check_packed_positions(self.stages, self._named(args, kwargs))
        args, kwargs = padded((tuple(args), dict(kwargs)), sum(division.rows))
        losses = BatchLosses(
            way=self._loss_weight,
            samples=division.samples,
            unit=float(most),
            targets_of_sample=self._batch.targets_of_sample,
            copies=self._batch.copies,
            checks_means="means" not in self._said and (self._replicas > 1 or len(division.rows) > 1),
            averages_samples=self._batch.averages_samples,
        )
        with self._whole_calls.counted(), self._random.drawn_from():
            if self._pipeline is not None:
                batch = self._named(args, kwargs)
                # torch cuts all tensors, also those of one number, which belong to all samples.
                numbers = {name: value.item() for name, value in batch.items() if is_number(value)}
                self._pipeline.run(len(division.rows), losses, {**batch, **numbers}, trains=trains)
            else:
                self._accumulate(division, losses, args, kwargs, trains=trains)
        self._said.add("means")
        check_equal_counts(losses, copies)
        groups = [*copies, self._pipeline.group] if self._pipeline is not None else copies
        loss, factor = settled_loss(losses, groups, replicas=self._replicas, device=device)
        if self._pipeline is None:
            is_even = fewest == most and len(set(division.rows)) == 1
            return loss, factor if losses.counts or callable(self._loss_weight) or not is_even else None
        if not bool(torch.isfinite(loss)):
            raise PlanError(
                "the loss is not finite. Either training diverged, or a stage reads something that an earlier stage "
                "made and that is no argument of the module where it begins; plan with strategy pp=1 to find out."
            )
        return loss, None if abs(float(factor) - 1) < _NO_FACTOR else factor

    def _check_division(self, division: Division, fewest: int, most: int) -> None:
        """Say once that a batch is not the planned one; refuse it where batch norms could not see it as one."""
        if fewest == most == self._batch.share_size:
            return
        if self._batch.is_one_for_norms and (len(division.rows) > 1 or not fewest):
            raise PlanError(
                f"copies of the model have {fewest} to {most} samples of this batch, and batch norms are synchronized "
                "over copies that run one microbatch each, with at least one sample; drop incomplete batches."
            )
        if "size" not in self._said:
            self._said.add("size")
            warnings.warn(
                f"copies of the model have {most if fewest == most else f'{fewest} to {most}'} samples of a batch "
                f"where the plan has {self._batch.share_size} (microbatches: {len(division.rows)}). "
                "`run.share(batch)` takes a process's share from a global batch. This is said once.",
                stacklevel=4,
            )

    def _named(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """A batch by the model's own argument names."""
        if self._pipeline is not None:
            names = tuple(self._pipeline.argument_names)
        else:
            names = tuple(inspect.signature(self.stages[0].forward).parameters)
        return {**dict(zip(names, args, strict=False)), **kwargs}

    @property
    def _replicas(self) -> int:
        """Devices that hold the same parameters, or shards of them: those of contexts and of copies."""
        return int(self.mesh["replicate"].size() * self.mesh["shard"].size())

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients: by 1 / n behind `backward` on n batches, whose gradients are added."""
        parameters = (parameter for stage in self.stages for parameter in stage.parameters())
        scale_gradients(parameters, torch.tensor(factor, device=self.mesh.device_type))

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
        """Write the whole model as safetensors files with its config, as Hugging Face reads them; in every process.

        Of a model of peft it writes the adapters alone, as their own `save_pretrained` does.
        """
        with told_to_all():
            is_first = all(not self.mesh.get_local_rank(name) for name in ("replicate", "shard", "tp"))
            save_whole_model(self._state, folder, pipeline=self.mesh["pp"].get_group(), writes=is_first)
            dist.barrier()

    def _accumulate(
        self,
        division: Division,
        losses: BatchLosses,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        trains: bool,
    ) -> None:
        """Run all microbatches one after another."""
        start = 0
        for index, rows in enumerate(division.rows):
            micro_args, micro_kwargs = micro_batch(args, kwargs, start, rows)
            start += rows
            schedule_gradient_sync(self.module, self._zero, is_last=index == len(division.rows) - 1)
            run = functools.partial(self._loss, self.module, *micro_args, **micro_kwargs)
            value = losses.weighted(run, self._named(micro_args, micro_kwargs))
            if trains:
                value.backward()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """What a plan says of a batch.

    Attributes:
        copies: copies of the model, each with samples of its own.
        share_size: samples of each copy.
        micro_batch_size: samples of a microbatch.
        targets_of_sample: targets of a sample, about.
        is_one_for_norms: whether batch norms are synchronized, so that a copy must run its share at once.
        averages_samples: whether samples are known to count alike in the loss, which is the model's own.
    """

    copies: int
    share_size: int
    micro_batch_size: int
    targets_of_sample: int
    is_one_for_norms: bool
    averages_samples: bool


def apply_to_module(
    plan: Plan,
    model: object,
    mesh: object,
    *,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: object,
    optimizer: object,
    batch_norm: object,
    loss_weight: object,
    weights: object,
    stage_builders: Iterable[StageBuilder],
) -> AppliedModule:
    """Check that plan, model and mesh belong together, and arrange the model; raises PlanError where they do not."""
    model = checked_model(plan, model)
    if loss_weight is None:
        check_samples_apart(plan)
    device_mesh = mesh_of_plan(plan, mesh)
    batch = _planned_batch(plan, is_one_for_norms=batch_norm == "synchronized", has_own_loss=loss_fn is None)
    copies = [device_mesh[name].get_group() for name in ("replicate", "shard") if device_mesh[name].size() > 1]
    micro_batches = batch.share_size // batch.micro_batch_size
    settle_batch_norms(model, batch_norm, copies=copies, micro_batches=micro_batches)
    contexts = contexts_of_plan(plan, device_mesh)
    loss = loss_function(loss_fn, model, contexts)
    note_key_exchanges(model, plan.layouts.key_exchanges)
    expert_mesh = expert_mesh_of_plan(plan, device_mesh)
    first_names = _first_names(model)
    own_optimizers = OptimizerParameters.of(optimizer, model)
    arrange = _arrange_function(plan, model, device_mesh, expert_mesh)
    pipeline = None
    if plan.strategy.pp > 1:
        cut = functools.partial(build_pipeline, plan, model, device_mesh, inputs=inputs, loss=loss, arrange=arrange)
        pipeline = cut(contexts=contexts, stage_builders=stage_builders)
    else:
        _arrange_whole(plan, model, arrange, weights, device_mesh.device_type)
    stages = pipeline.modules if pipeline else (model,)
    arranged = _arranged_parameters(stages, first_names)
    make_own = functools.partial(make_optimizer, plan, optimizer, own_optimizers, arranged)
    return AppliedModule(
        module=None if pipeline else model,
        stages=stages,
        schedule=pipeline.schedule if pipeline else None,
        mesh=device_mesh,
        optimizer=made_by_all(make_own, device_mesh),
        _pipeline=pipeline,
        _contexts=contexts,
        _expert_mesh=expert_mesh,
        _first_names=first_names,
        _loss=loss,
        _loss_weight=checked_weight(loss_weight),
        _batch=batch,
        _zero=plan.strategy.zero,
        _plan=plan,
        _whole_calls=WholeCalls(),
        _random=RandomStream.of_copy(device_mesh, _copy_index(device_mesh, plan.strategy.cp)),
        _said=set(),
    )


def _copy_index(mesh: DeviceMesh, cp: int) -> int:
    """Which copy of the model this process belongs to; the `cp` devices of a context share their samples."""
    place = mesh.get_local_rank("replicate") * mesh["shard"].size() + mesh.get_local_rank("shard")
    return int(place // cp)


def _planned_batch(plan: Plan, *, is_one_for_norms: bool, has_own_loss: bool) -> PlannedBatch:
    return PlannedBatch(
        copies=plan.strategy.dp,
        share_size=plan.question.global_batch_size // plan.strategy.dp,
        micro_batch_size=plan.strategy.micro_batch_size,
        targets_of_sample=max(1, plan.model.tokens_per_sample),
        is_one_for_norms=is_one_for_norms,
        averages_samples=has_own_loss and plan.model.averages_samples,
    )


def _arranged_parameters(
    stages: Sequence[torch.nn.Module], first_names: Mapping[str, str]
) -> dict[str, torch.nn.Parameter]:
    """The parameters of this process's stages, by the names under which the whole model lists them first."""
    arranged: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            arranged.setdefault(id(parameter), (first_names.get(name, name), parameter))
    return dict(arranged.values())


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
