"""Pipelines: this process's stages, torch's schedule over them, and parameters that several stages share."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from phaze.backends.torch.arrange import synchronise
from phaze.backends.torch.layouts import blocks_of
from phaze.backends.torch.split_collectives import Axis, parted
from phaze.backends.torch.split_tensor import SplitTensor
from phaze.backends.torch.stages import Rehearsal, StageCut, StagePart, build_stage, rehearse
from phaze.capabilities import PipelineSchedule
from phaze.errors import PlanError
from phaze.plan.plan import Plan

__all__ = ["Pipeline", "build_pipeline"]

_SCHEDULES = {
    PipelineSchedule.GPIPE: ScheduleGPipe,
    PipelineSchedule.ONE_F_ONE_B: Schedule1F1B,
    PipelineSchedule.INTERLEAVED: ScheduleInterleaved1F1B,
}


class _Stage(PipelineStage):
    """A stage whose copies reduce gradients as often as its ZeRO stage says; torch's own does so once a step."""

    zero = 0

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """A backward of a microbatch."""
        if self.zero < 2 or backward_type != "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self.submod.set_is_last_backward(last_backward)
        synchronise(self.submod, self.zero, is_last=last_backward)
        names = ("stage_output", "output_grads", "input_values")
        return stage_backward(*(bwd_kwargs[name] for name in names)), None


@dataclass(frozen=True, slots=True)
class Tie:
    """Copies of one parameter on this process, and the processes whose stages hold others."""

    parameters: tuple[Any, ...]
    group: Any


@dataclass(frozen=True, slots=True)
class Pipeline:
    """This process's stages under a schedule."""

    modules: tuple[Any, ...]
    schedule: Any
    ties: tuple[Tie, ...]
    names: tuple[str, ...]
    group: Any
    holds_loss: bool

    def backward(self, count: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The mean loss over microbatches on every process of the pipeline; gradients are those of that mean."""
        batch = {**dict(zip(self.names, args, strict=False)), **kwargs}
        losses: list[Any] = []
        target = {"target": torch.zeros(count)} if self.holds_loss else {}
        held = [(own, own.grad) for module in self.modules for own in module.parameters() if own.grad is not None]
        for own, _ in held:
            own.grad = None
        self.schedule.step(**batch, **target, losses=losses, return_outputs=False)
        for tie in self.ties:
            _sum_gradients(tie)
        for own, before in held:
            own.grad = before if own.grad is None else own.grad + before
        loss = torch.stack([one.detach() for one in losses]).mean() if losses else torch.zeros(())
        device = next(iter(batch.values())).device
        loss = loss.to(device, torch.float32)
        dist.all_reduce(loss, group=self.group)
        if not bool(torch.isfinite(loss)):
            raise PlanError(
                "the loss is not finite. Either training diverged, or a stage reads something that an earlier stage "
                "made and that is no argument of the module where it begins; plan with strategy pp=1 to find out."
            )
        return loss


def _sum_gradients(tie: Tie) -> None:
    for parameter in tie.parameters:  # a stage may hold a parameter that it does not use
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in tie.parameters if parameter.grad is not None]
    local = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
    if not local:
        return
    total = torch.stack(local).sum(0) if len(local) > 1 else local[0].contiguous()
    if tie.group is not None:
        dist.all_reduce(total, group=tie.group)
    for one in local:
        one.copy_(total)


def build_pipeline(
    plan: Plan,
    model: Any,
    mesh: Any,
    inputs: Any,
    forward: Callable[..., Any],
    arranged: Callable[[Any, Mapping[str, str]], Any],
) -> Pipeline:
    """Cut the model as the plan says and arrange the stages of this process."""
    layers = [stage.layers for stage in plan.stages]
    names = tuple(inspect.signature(model.forward).parameters)
    batch = _micro_batch(inputs, names, plan.strategy.micro_batch_size)
    paths = _paths(model, layers)
    seen = rehearse(model, paths, batch, getattr(torch, plan.question.precision.compute_dtype))
    place, pipeline_group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
    own = [index for index, stage in enumerate(plan.stages) if stage.place == place]
    count = plan.question.global_batch_size // (plan.strategy.dp * plan.strategy.micro_batch_size)
    holders = _holders(model, seen)
    parts, stages = [], []
    for index in own:
        part = build_stage(model, paths, seen, index)
        modes = dict.fromkeys(blocks_of(plan.stages[index].layers, part.module), plan.stages[index].recompute)
        run = types.MethodType(_stage_forward(part, type(part.module).forward, forward), part.module)
        axis = arranged(part.module, modes)
        part.axis = axis
        part.module.forward = run
        parts.append(part)
        stages.append(
            _Stage(
                part.module,
                index,
                len(plan.stages),
                mesh.device_type if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device()),
                input_args=_wire_shapes(part.relay_in, axis) if index else (),
                output_args=_wire_shapes(part.relay_out, axis)
                if part.relay_out
                else (torch.empty(1, device="meta", requires_grad=True),),
                group=pipeline_group,
            )
        )
        stages[-1].zero = plan.strategy.zero
    kind = PipelineSchedule(plan.strategy.schedule)
    made = _SCHEDULES[kind](stages if kind is PipelineSchedule.INTERLEAVED else stages[0], count, loss_fn=_given_loss)
    return Pipeline(
        modules=tuple(part.module for part in parts),
        schedule=made,
        ties=_ties(model, holders, own, parts, mesh),
        names=names,
        group=pipeline_group,
        holds_loss=len(plan.stages) - 1 in own,
    )


def _paths(model: Any, layers: Sequence[Sequence[str]]) -> list[str]:
    """Where the model is cut: what the first stage builder that accepts it says; raises PlanError."""
    from phaze.hooks import PluginManager

    builders = [offer.value for offer in PluginManager.load().stage_builders() if offer.value.target == "torch"]
    builder = next((one for one in builders if one.accepts(model)), None)
    if builder is None:
        known = ", ".join(sorted(one.name for one in builders))
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


def _given_loss(output: Any, _: Any) -> Any:
    """The last stage returns the loss itself."""
    return output.sum()


def _micro_batch(inputs: Any, names: Sequence[str], size: int) -> dict[str, Any]:
    """Example inputs by name, at the size of a microbatch."""
    if isinstance(inputs, Mapping):
        given = dict(inputs)
    else:
        flat = inputs if isinstance(inputs, list | tuple) else (inputs,)
        given = dict(zip(names, flat, strict=False))

    def sized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.zeros((size, *leaf.shape[1:]), dtype=leaf.dtype)

    return {name: tree_map(sized, value) for name, value in given.items()}


def _stage_forward(part: StagePart, whole: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """A stage's forward: what it received in, what crosses its end out, or the loss."""

    def run(module: Any, *received: Any, **batch: Any) -> Any:
        part.received.clear()
        part.kept.clear()
        part.incoming[:] = [_from_wire(value, like, part.axis) for value, like in _pairs(part, received)]
        call = types.MethodType(whole, module)
        try:
            loss = forward(call, **batch)
        except StageCut as cut:
            assert part.relay_out is not None
            pairs = zip(cut.values, part.relay_out.tensors, strict=True)
            return tuple(_to_wire(value, part.axis).to(like.dtype) for value, like in pairs)
        return loss.reshape(1).clone()

    return run


def _pairs(part: StagePart, received: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(received, part.relay_in.tensors, strict=True)) if part.relay_in is not None else []


def _is_sent_in_parts(value: Any, axis: Axis | None) -> bool:
    return bool(axis and axis.splits_sequences and len(value.shape) >= 3 and value.shape[1] % axis.size == 0)


def _to_wire(value: Any, axis: Axis | None) -> Any:
    if axis is None or not _is_sent_in_parts(value, axis):
        return (value.whole() if isinstance(value, SplitTensor) else value).contiguous()
    if isinstance(value, SplitTensor) and (value.dim_, value.outer) == (1, 1):
        return value.local.contiguous()
    whole = value.whole() if isinstance(value, SplitTensor) else value
    return parted(whole, axis, 1)


def _from_wire(value: Any, like: Any, axis: Axis | None) -> Any:
    if axis is None or not _is_sent_in_parts(like, axis):
        return value
    return SplitTensor(value, axis, like.shape, 1)


def _wire_shapes(relay: Any, axis: Axis | None) -> tuple[Any, ...]:
    made = []
    for tensor in relay.tensors:
        shape = list(tensor.shape)
        if axis is not None and _is_sent_in_parts(tensor, axis):
            shape[1] //= axis.size
        made.append(torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad))
    return tuple(made)


def _holders(model: Any, seen: Rehearsal) -> dict[str, list[int]]:
    """The stages that hold each parameter which several hold, by its first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, set[int]] = {}
    for path, stages in seen.stages.items():
        for parameter in model.get_submodule(path)._parameters.values():
            if parameter is not None:
                found.setdefault(first[id(parameter)], set()).update(stages)
    return {name: sorted(stages) for name, stages in found.items() if len(stages) > 1}


def _ties(
    model: Any, holders: Mapping[str, Sequence[int]], own: Sequence[int], parts: Sequence[StagePart], mesh: Any
) -> tuple[Tie, ...]:
    aliases: dict[str, list[str]] = {}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(first[id(parameter)], []).append(name)
    groups = _groups(mesh, holders)
    ties = []
    for name, stages in holders.items():
        if not set(stages) & set(own):
            continue
        found: dict[int, Any] = {}
        for part in parts:
            known = dict(part.module.named_parameters(remove_duplicate=False))
            for alias in aliases[name]:
                if alias in known:
                    found[id(known[alias])] = known[alias]
        places = tuple(sorted({stage % mesh["pp"].size() for stage in stages}))
        ties.append(Tie(tuple(found.values()), groups.get(places)))
    return tuple(ties)


def _groups(mesh: Any, holders: Mapping[str, Sequence[int]]) -> dict[tuple[int, ...], Any]:
    """This process's group among the pipeline places that share a parameter; made by all processes in one order."""
    size = mesh["pp"].size()
    wanted = sorted({tuple(sorted({stage % size for stage in stages})) for stages in holders.values()})
    columns = mesh.mesh.reshape(size, -1).T.tolist()
    found = {}
    for places in wanted:
        if len(places) == 1:
            continue
        for column in columns:
            ranks = [column[place] for place in places]
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                found[places] = group
    return found
