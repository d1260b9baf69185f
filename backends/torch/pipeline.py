"""Pipelines in torch: this process's stages under torch's schedule, and gradients of parameters that stages share.

`build_pipeline` cuts the model, arranges the stages of this process and hands them to a schedule of
torch.distributed.pipelining (`ShapedSchedules`). `Pipeline.run` runs it, and sums the gradients of tied parameters
(`SharedParameter`) over the stages that hold them. What stages send each other is decided in `stage_models`.
"""

from __future__ import annotations

import functools
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
    ScheduleLoopedBFS,
    _PipelineSchedule,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from phaze.backends.torch.arrange import schedule_gradient_sync
from phaze.backends.torch.micro_batches import BatchLosses, LossFunction
from phaze.backends.torch.process_groups import Contexts
from phaze.backends.torch.split_collectives import Axis
from phaze.backends.torch.stage_cuts import DryRun, block_paths, clone_with_tensors, dry_run
from phaze.backends.torch.stage_models import StageEnd, StageModel, Wires, build_stage
from phaze.errors import PlanError
from phaze.interfaces import StageBuilder
from phaze.parallelism import PipelineSchedule

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["ArrangeFunction", "Pipeline", "SharedParameter", "build_pipeline", "find_cut_paths"]

ArrangeFunction: TypeAlias = Callable[[torch.nn.Module, Mapping[str, str]], Axis | None]
"""Arranges a module on the mesh; takes the recompute modes of its blocks by path, returns the tensor-parallel axis."""
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
        schedule: torch's schedule for the planned batch, ready to step.
        shapes: the schedules for all batches that were met.
        shared_parameters: parameters whose gradients are summed over stages.
        argument_names: the names of the model's arguments, for those of a batch that are given without names.
        group: the processes of this pipeline.
        holds_loss: whether this process has the last stage.
    """

    modules: tuple[torch.nn.Module, ...]
    schedule: _PipelineSchedule
    shapes: ShapedSchedules
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

    def run(self, count: int, losses: BatchLosses, batch: Mapping[str, object], *, trains: bool) -> None:
        """Run `count` microbatches and, where this process has the last stage, put their losses into `losses`.

        With `trains` gradients of the weighted losses are added to parameters, summed over stages that share them;
        parameters must not have any before.
        """
        schedule = self.shapes.schedule_for(batch, count)
        for stage_model in self.shapes.stage_models:
            stage_model.losses = losses
        # torch calls the loss function only where it is given a target; `_loss_of_last_stage` ignores it.
        target = {"target": torch.zeros(count)} if self.holds_loss else {}
        schedule._has_backward = trains
        try:
            schedule.step(**batch, **target, losses=[], return_outputs=False)
        finally:
            schedule._has_backward = True
        for shared in self.shared_parameters if trains else ():
            _sum_gradients(shared)


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
    """Cut the model as the plan says and arrange the stages of this process.

    Raises PlanError without inputs, unless the model describes some itself: others may follow in the first batch.
    """
    inputs = getattr(model, "dummy_inputs", None) if inputs is None else inputs
    if inputs is None:
        raise PlanError("a plan with stages needs inputs=..., as optimize took them: they say what crosses the cuts.")
    argument_names = tuple(inspect.signature(model.forward).parameters)
    paths = find_cut_paths(model, [[layer.path for layer in stage.layers] for stage in plan.stages], stage_builders)
    batch = _example_micro_batch(inputs, argument_names, plan.strategy.micro_batch_size)
    run = dry_run(model, paths, batch, getattr(torch, plan.question.precision.compute_dtype))
    place, group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
    local_stages = [index for index, stage in enumerate(plan.stages) if stage.place == place]
    holders = _stages_of_shared_parameters(model, run)
    blueprint = clone_with_tensors(model, lambda tensor: torch.empty_like(tensor, device="meta"))
    models = []
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
    shapes = ShapedSchedules(plan, blueprint, paths, models, local_stages, mesh)
    shapes.note_run(batch, run)
    count = plan.question.global_batch_size // (plan.strategy.dp * plan.strategy.micro_batch_size)
    return Pipeline(
        modules=tuple(stage_model.module for stage_model in models),
        schedule=shapes.schedule_of(batch, count),
        shapes=shapes,
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


class ShapedSchedules:
    """torch's schedules by the shapes and the number of microbatches; each is made when such a batch is first met.

    torch's stages know the shapes of what they receive. A batch of other lengths, or an incomplete one, gets stages of
    its own over the same modules, for which the model runs on fake tensors once more.
    """

    def __init__(
        self,
        plan: Plan,
        blueprint: torch.nn.Module,
        paths: Sequence[str],
        stage_models: Sequence[StageModel],
        indices: Sequence[int],
        mesh: DeviceMesh,
    ) -> None:
        """`blueprint` is the whole model without storage, and `indices` are the stages of this process."""
        self._plan, self._blueprint, self._paths, self._mesh = plan, blueprint, tuple(paths), mesh
        self.stage_models, self._indices = tuple(stage_models), tuple(indices)
        self._names: frozenset[str] = frozenset(inspect.signature(blueprint.forward).parameters)
        self._runs: dict[object, DryRun] = {}
        self._schedules: dict[object, _PipelineSchedule] = {}
        self._current: object = None

    def note_run(self, batch: Mapping[str, object], run: DryRun) -> None:
        """Take the dry run of a microbatch, whose names are then among those that the model takes."""
        self._names |= batch.keys()
        self._current = self._key(batch)
        self._runs[self._current] = run

    def schedule_for(self, batch: Mapping[str, object], count: int) -> _PipelineSchedule:
        """The schedule for a batch of `count` microbatches, with the stage models ready for its shapes."""

        def first(leaf: object) -> object:
            return leaf[: len(leaf) // count] if isinstance(leaf, torch.Tensor) else leaf

        micro_batch = {name: tree_map(first, value) for name, value in batch.items() if name in self._names}
        return self.schedule_of(micro_batch, count)

    def schedule_of(self, micro_batch: Mapping[str, object], count: int) -> _PipelineSchedule:
        """The schedule for `count` microbatches of these shapes."""
        key = self._key(micro_batch)
        if key not in self._runs:
            dtype = getattr(torch, self._plan.question.precision.compute_dtype)
            self._runs[key] = dry_run(self._blueprint, self._paths, micro_batch, dtype)
        if key != self._current:
            for stage_model, index in zip(self.stage_models, self._indices, strict=True):
                stage_model.take_shapes(self._runs[key], index)
            self._current = key
        if (key, count) not in self._schedules:
            self._schedules[key, count] = self._made(count)
        return self._schedules[key, count]

    def _key(self, micro_batch: Mapping[str, object]) -> object:
        """Names, shapes and types of the tensors of a microbatch."""
        named = ((name, tree_leaves(value)) for name, value in sorted(micro_batch.items()))
        return tuple(
            (name, tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)))
            for name, leaves in named
            if any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        )

    def _made(self, count: int) -> _PipelineSchedule:
        """A schedule of new stages. Too few microbatches for the planned one run forward first, then backward."""
        pairs = zip(self.stage_models, self._indices, strict=True)
        stages = [_torch_stage(model, index, len(self._plan.stages), self._mesh) for model, index in pairs]
        for stage in stages:
            stage.zero = self._plan.strategy.zero
        kind, pp = PipelineSchedule(self._plan.strategy.schedule), self._plan.strategy.pp
        if kind is PipelineSchedule.INTERLEAVED:
            made_for_count = _SCHEDULES[kind] if count % max(1, count // pp) == 0 else ScheduleLoopedBFS
            return made_for_count(stages, count, loss_fn=_loss_of_last_stage, scale_grads=False)
        made_for_count = _SCHEDULES[kind] if count >= pp else ScheduleGPipe
        return made_for_count(stages[0], count, loss_fn=_loss_of_last_stage, scale_grads=False)


def _torch_stage(stage_model: StageModel, index: int, count: int, mesh: DeviceMesh) -> _ZeroStage:
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
        group=mesh["pp"].get_group(),
    )


def _loss_of_last_stage(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The last stage returns the loss itself."""
    return output.sum()


def _stage_forward(
    stage_model: StageModel, model_forward: Callable[..., object], loss: LossFunction
) -> Callable[..., object]:
    """A stage's forward: takes what crosses the cut before it, returns what crosses the one behind it, or the loss."""

    def forward(module: torch.nn.Module, *received: torch.Tensor, **batch: object) -> object:
        stage_model.records_gradients, boundary_in = torch.is_grad_enabled(), stage_model.boundary_in
        arrived = [] if boundary_in is None else list(zip(received, boundary_in.tensors, strict=True))
        wires = stage_model.wires
        stage_model.incoming[:] = [wires.receive(value, like) for value, like in arrived]
        run = functools.partial(loss, types.MethodType(model_forward, module), **batch)
        try:
            # Only the last stage comes to the loss; the others need no look at how it is taken.
            value = run() if stage_model.boundary_out is not None else stage_model.losses.weighted(run, batch)
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
