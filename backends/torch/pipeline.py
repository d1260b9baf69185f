"""Pipelines in torch: this process's stages under torch's schedule, and gradients of parameters that stages share.

`build_pipeline` cuts the model, arranges the stages of this process and hands them to a schedule of
torch.distributed.pipelining. `Pipeline.backward` runs it, and sums the gradients of tied parameters (`SharedParameter`)
over the stages that hold them. What stages send each other is decided in `stage_wires`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    _PipelineSchedule,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from phaze.backends.torch.arrange import schedule_gradient_sync
from phaze.backends.torch.contexts import Contexts
from phaze.backends.torch.split_collectives import Axis
from phaze.backends.torch.stage_cuts import DryRun, block_paths, dry_run
from phaze.backends.torch.stage_models import StageEnd, StageModel, build_stage
from phaze.backends.torch.stage_wires import Wires
from phaze.errors import PlanError
from phaze.interfaces import StageBuilder
from phaze.parallelism import PipelineSchedule

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["ArrangeFunction", "LossFunction", "Pipeline", "SharedParameter", "build_pipeline", "find_cut_paths"]

ArrangeFunction: TypeAlias = Callable[[torch.nn.Module, Mapping[str, str]], Axis | None]
"""Arranges a module on the mesh; takes the recompute modes of its blocks by path, returns the tensor-parallel axis."""

LossFunction: TypeAlias = Callable[..., torch.Tensor]
"""Calls a module (first argument) with a batch (the others), and returns the scalar loss."""

_SCHEDULES = {
    PipelineSchedule.GPIPE: ScheduleGPipe,
    PipelineSchedule.ONE_F_ONE_B: Schedule1F1B,
    PipelineSchedule.INTERLEAVED: ScheduleInterleaved1F1B,
}


class _ZeroStage(PipelineStage):
    """A stage whose copies reduce gradients as often as its ZeRO stage says; torch's own does so once a step."""

    zero = 0

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: Mapping[str, object], last_backward: bool = False
    ) -> tuple[object, object]:
        """The backward of a microbatch."""
        if self.zero < 2 or backward_type != "full":
            answer: tuple[object, object] = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            return answer
        self.submod.set_is_last_backward(last_backward)
        schedule_gradient_sync(self.submod, self.zero, is_last=last_backward)
        names = ("stage_output", "output_grads", "input_values")
        return stage_backward(*(bwd_kwargs[name] for name in names)), None


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several stages hold: its copies on this process, and the processes that have others.

    The group is None where no other process has a copy. Of all copies the process at the first place counts one, where
    gradients are counted.
    """

    copies: tuple[torch.nn.Parameter, ...]
    group: dist.ProcessGroup | None
    is_at_first_place: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """This process's stages under a schedule.

    Attributes:
        modules: the model of each stage of this process, in order.
        schedule: torch's schedule, ready to step.
        shared_parameters: parameters whose gradients are summed over stages.
        argument_names: the names of the model's arguments, for those of a batch that are given without names.
        group: the processes of this pipeline.
        holds_loss: whether this process has the last stage.
    """

    modules: tuple[torch.nn.Module, ...]
    schedule: _PipelineSchedule
    shared_parameters: tuple[SharedParameter, ...]
    argument_names: tuple[str, ...]
    group: dist.ProcessGroup
    holds_loss: bool

    @property
    def counted_elsewhere(self) -> frozenset[int]:
        """Ids of this process's parameters that are counted by another copy, where every parameter counts once."""
        return frozenset(
            id(parameter)
            for shared in self.shared_parameters
            for parameter in (shared.copies[1:] if shared.is_at_first_place else shared.copies)
        )

    def backward(self, count: int, args: Sequence[object], kwargs: Mapping[str, object]) -> torch.Tensor:
        """Run `count` microbatches; the mean loss on every process of the pipeline, and gradients of that mean."""
        batch = {**dict(zip(self.argument_names, args, strict=False)), **kwargs}
        losses: list[torch.Tensor] = []
        # torch calls the loss function only where it is given a target; `_loss_of_last_stage` ignores it.
        target = {"target": torch.zeros(count)} if self.holds_loss else {}
        # Gradients of earlier calls are set aside, so that sums over stages hold those of this call alone.
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        earlier = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        self.schedule.step(**batch, **target, losses=losses, return_outputs=False)
        for shared in self.shared_parameters:
            _sum_gradients(shared)
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        loss = torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
        device = next(iter(batch.values())).device  # type: ignore[attr-defined]
        loss = loss.to(device, torch.float32)
        dist.all_reduce(loss, group=self.group)
        if not bool(torch.isfinite(loss)):
            raise PlanError(
                "the loss is not finite. Either training diverged, or a stage reads something that an earlier stage "
                "made and that is no argument of the module where it begins; plan with strategy pp=1 to find out."
            )
        return loss


def _sum_gradients(shared: SharedParameter) -> None:
    """Give all copies of a parameter the sum of their gradients, over the stages of all processes that hold it."""
    for parameter in shared.copies:  # a stage may hold a parameter that it does not use
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in shared.copies if parameter.grad is not None]
    local_gradients = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    if not local_gradients:
        return
    is_one = len(local_gradients) == 1
    total = local_gradients[0].contiguous() if is_one else torch.stack(local_gradients).sum(0)
    if shared.group is not None:
        dist.all_reduce(total, group=shared.group)
    for gradient in local_gradients:
        gradient.copy_(total)


def build_pipeline(
    plan: Plan,
    model: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    inputs: object,
    loss: LossFunction,
    arrange: ArrangeFunction,
    contexts: Contexts | None,
    stage_builders: Iterable[StageBuilder],
) -> Pipeline:
    """Cut the model as the plan says and arrange the stages of this process."""
    argument_names = tuple(inspect.signature(model.forward).parameters)
    paths = find_cut_paths(model, [[layer.path for layer in stage.layers] for stage in plan.stages], stage_builders)
    batch = _example_micro_batch(inputs, argument_names, plan.strategy.micro_batch_size)
    run = dry_run(model, paths, batch, getattr(torch, plan.question.precision.compute_dtype))
    place, group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
    local_stages = [index for index, stage in enumerate(plan.stages) if stage.place == place]
    holders = _stages_of_shared_parameters(model, run)
    models, stages = [], []
    for index in local_stages:
        stage_model = build_stage(model, paths, run, index)
        modes = dict.fromkeys(
            block_paths([layer.path for layer in plan.stages[index].layers], stage_model.module),
            plan.stages[index].recompute,
        )
        # FSDP2 puts its own class before the module's: the model's forward is looked up before.
        forward = _stage_forward(stage_model, type(stage_model.module).forward, loss)
        stage_model.wires = Wires(contexts, arrange(stage_model.module, modes))
        stage_model.module.forward = types.MethodType(forward, stage_model.module)
        models.append(stage_model)
        stages.append(_torch_stage(stage_model, index, len(plan.stages), mesh, group))
        stages[-1].zero = plan.strategy.zero
    return Pipeline(
        modules=tuple(stage_model.module for stage_model in models),
        schedule=_torch_schedule(plan, stages),
        shared_parameters=_shared_parameters(model, holders, local_stages, models, mesh),
        argument_names=argument_names,
        group=group,
        holds_loss=len(plan.stages) - 1 in local_stages,
    )


def find_cut_paths(
    model: torch.nn.Module, layers: Sequence[Sequence[str]], stage_builders: Iterable[StageBuilder]
) -> list[str]:
    """The modules before whose calls stages begin, as the first stage builder says that accepts the model.

    Raises PlanError where no builder accepts it, or where the builder's answer names no such modules.
    """
    builders = [builder for builder in stage_builders if builder.target == "torch"]
    builder = next((builder for builder in builders if builder.accepts(model)), None)
    if builder is None:
        known = ", ".join(sorted(builder.name for builder in builders))
        raise PlanError(f"nothing cuts {type(model).__name__} into stages (known: {known}); plan with strategy pp=1.")
    paths = [str(path) for path in builder.build_stages(model, layers)]
    modules = {name for name, _ in model.named_modules()}
    wrong = [path for path in paths if path not in modules]
    if wrong or len(paths) != len(layers) - 1:
        raise PlanError(
            f"stage builder {builder.name!r} named {paths} for {len(layers)} stages; expected the paths of the modules "
            "before whose calls all but the first begin."
        )
    return paths


def _example_micro_batch(inputs: object, names: Sequence[str], size: int) -> dict[str, object]:
    """Example inputs by name, at the size of a microbatch."""
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        listed = inputs if isinstance(inputs, list | tuple) else (inputs,)
        named = dict(zip(names, listed, strict=False))

    def sized(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.zeros((size, *leaf.shape[1:]), dtype=leaf.dtype)

    return {name: tree_map(sized, value) for name, value in named.items()}


# ---------------------------------------------------------------------------------------- torch's stages and schedule


def _torch_stage(
    stage_model: StageModel, index: int, count: int, mesh: DeviceMesh, group: dist.ProcessGroup
) -> _ZeroStage:
    """Stage `index` of `count` for torch's schedule, with the shapes of what it receives and sends."""
    is_cpu = mesh.device_type == "cpu"
    wires, boundary_in, boundary_out = stage_model.wires, stage_model.boundary_in, stage_model.boundary_out
    loss_shapes = (torch.empty(1, device="meta", requires_grad=True),)
    return _ZeroStage(
        stage_model.module,
        index,
        count,
        mesh.device_type if is_cpu else torch.device("cuda", torch.cuda.current_device()),
        input_args=wires.shapes(boundary_in) if boundary_in is not None else (),
        output_args=wires.shapes(boundary_out) if boundary_out is not None else loss_shapes,
        group=group,
    )


def _torch_schedule(plan: Plan, stages: Sequence[_ZeroStage]) -> _PipelineSchedule:
    kind = PipelineSchedule(plan.strategy.schedule)
    count = plan.question.global_batch_size // (plan.strategy.dp * plan.strategy.micro_batch_size)
    scheduled = stages if kind is PipelineSchedule.INTERLEAVED else stages[0]
    return _SCHEDULES[kind](scheduled, count, loss_fn=_loss_of_last_stage)


def _loss_of_last_stage(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The last stage returns the loss itself."""
    return output.sum()


def _stage_forward(
    stage_model: StageModel, model_forward: Callable[..., object], loss: LossFunction
) -> Callable[..., object]:
    """A stage's forward: takes what crosses the cut before it, returns what crosses the one behind it, or the loss."""

    def forward(module: torch.nn.Module, *received: torch.Tensor, **batch: object) -> object:
        stage_model.received.clear()
        stage_model.replaced.clear()
        boundary_in = stage_model.boundary_in
        arrived = [] if boundary_in is None else list(zip(received, boundary_in.tensors, strict=True))
        wires = stage_model.wires
        stage_model.incoming[:] = [wires.receive(value, like) for value, like in arrived]
        try:
            value = loss(types.MethodType(model_forward, module), **batch)
        except StageEnd as end:
            assert stage_model.boundary_out is not None
            crossing = zip(end.values, stage_model.boundary_out.tensors, strict=True)
            return tuple(wires.send(value).to(like.dtype) for value, like in crossing)
        return value.reshape(1).clone()

    return forward


# ---------------------------------------------------------------------------------------- parameters of several stages


def _stages_of_shared_parameters(model: torch.nn.Module, run: DryRun) -> dict[str, list[int]]:
    """The stages that hold each parameter which several stages hold, by its first name."""
    first_name = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[str, set[int]] = {}
    for path, stages in run.stages.items():
        for parameter in model.get_submodule(path)._parameters.values():
            if parameter is not None:
                holders.setdefault(first_name[id(parameter)], set()).update(stages)
    return {name: sorted(stages) for name, stages in holders.items() if len(stages) > 1}


def _shared_parameters(
    model: torch.nn.Module,
    holders: Mapping[str, Sequence[int]],
    local_stages: Sequence[int],
    stage_models: Sequence[StageModel],
    mesh: DeviceMesh,
) -> tuple[SharedParameter, ...]:
    aliases: dict[str, list[str]] = {}
    first_name = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(first_name[id(parameter)], []).append(name)
    groups = _groups_of_holders(mesh, holders)
    shared = []
    for name, stages in holders.items():
        if not set(stages) & set(local_stages):
            continue
        copies: dict[int, torch.nn.Parameter] = {}
        for stage_model in stage_models:
            known = dict(stage_model.module.named_parameters(remove_duplicate=False))
            for alias in aliases[name]:
                if alias in known:
                    copies[id(known[alias])] = known[alias]
        places = _places(stages, mesh)
        is_at_first_place = mesh.get_local_rank("pp") == places[0]
        shared.append(SharedParameter(tuple(copies.values()), groups.get(places), is_at_first_place))
    return tuple(shared)


def _places(stages: Iterable[int], mesh: DeviceMesh) -> tuple[int, ...]:
    """The places in the pipeline that run these stages; with several stages per device they go round the places."""
    return tuple(sorted({stage % mesh["pp"].size() for stage in stages}))


def _groups_of_holders(
    mesh: DeviceMesh, holders: Mapping[str, Sequence[int]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This process's group among the pipeline places that share a parameter.

    torch wants all processes to make all groups, in the same order, also those that they are not in.
    """
    columns = mesh.mesh.reshape(mesh["pp"].size(), -1).T.tolist()
    groups = {}
    for places in sorted({_places(stages, mesh) for stages in holders.values()}):
        if len(places) == 1:
            continue
        for column in columns:
            ranks = [column[place] for place in places]
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[places] = group
    return groups
