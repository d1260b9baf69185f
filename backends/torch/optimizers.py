"""The optimizer of an arranged model, made or taken over from the user, and clipping by the norm of all gradients.

Clipping (`clip_gradients`): each element counts once, wherever it lies. Parameters are DTensors on meshes of their own:
some are split over tensor-parallel devices and some are whole on them, all are split over ZeRO's shards, and stages of
a pipeline hold different ones. The local sums are therefore collected by the mesh axes over which a parameter is split,
and each collection is summed over just these axes. A parameter that several stages hold has the same gradient on all of
them and counts on the first.

Optimizers (`make_optimizer`) are made by the user's function, or are the user's own with parameters exchanged.
Arranging a model replaces its parameters. An optimizer that was made for the plain model, with parameter groups chosen
by name or by module, is kept as it is: each group gets the arranged parameters of the same names that this process
holds (`OptimizerParameters`). Learning-rate schedulers that hold such an optimizer go on working.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from phaze.errors import PlanError, shown

if TYPE_CHECKING:
    from phaze.plan.plan import Plan

__all__ = ["OptimizerParameters", "SeveralOptimizers", "clip_gradients", "make_optimizer"]

_SMALL_NORM = 1e-6
"""Added to the norm before it divides, as torch's own `clip_grad_norm_` does, so that no gradient divides by zero."""

_GRADIENT_AXES = ("shard", "expert_shard", "ep", "tp")
_POSSIBLE_AXES = tuple(
    axes
    for axes in itertools.chain.from_iterable(
        itertools.combinations(_GRADIENT_AXES, count) for count in range(len(_GRADIENT_AXES))
    )
    if not {"shard", "expert_shard"} <= set(axes) and not {"shard", "ep"} <= set(axes)
)
"""Every set of mesh axes that a parameter may be split over; experts have axes of their own."""


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter],
    mesh: DeviceMesh,
    *,
    expert_mesh: DeviceMesh | None,
    counted_elsewhere: Collection[int],
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; the norm that they had before.

    `counted_elsewhere` are ids of parameters that an earlier stage counts.
    """
    is_largest = math.isinf(norm_type)
    gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    by_axes: dict[tuple[str, ...], torch.Tensor] = {}
    device = gradients[0][1].device if gradients else torch.device(mesh.device_type)
    for parameter, gradient in gradients:
        if id(parameter) in counted_elsewhere:
            continue
        local = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach().float()
        if not local.numel():
            size = torch.zeros((), device=device)
        elif is_largest:
            size = local.abs().max()
        else:
            size = torch.linalg.vector_norm(local, norm_type) ** norm_type
        axes = _split_axes(gradient)
        known = by_axes.get(axes)
        by_axes[axes] = size if known is None else _joined(known, size, is_largest)
    total, mesh_axes = torch.zeros((), device=device), mesh.mesh_dim_names or ()
    # Stages hold different parameters, so that their processes agree on an order of collectives by all possible axes.
    for axes in _POSSIBLE_AXES:
        size = by_axes.get(axes, torch.zeros((), device=device)).clone()
        for axis in axes:
            _reduce(size, mesh if axis in mesh_axes else expert_mesh, axis, is_largest)
        total = _joined(total, size, is_largest)
    _reduce(total, mesh, "pp", is_largest)
    norm = total if is_largest else total ** (1.0 / norm_type)
    scale = torch.clamp(max_norm / (norm + _SMALL_NORM), max=1.0)
    for _, gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm


def _split_axes(gradient: torch.Tensor) -> tuple[str, ...]:
    """The mesh axes over which a gradient is split, in the mesh's order."""
    if not isinstance(gradient, DTensor):
        return ()
    names = gradient.device_mesh.mesh_dim_names or ()
    split = {name for name, placement in zip(names, gradient.placements, strict=True) if placement != Replicate()}
    return tuple(name for name in _GRADIENT_AXES if name in split)


def _joined(first: torch.Tensor, second: torch.Tensor, is_largest: bool) -> torch.Tensor:
    return torch.maximum(first, second) if is_largest else first + second


def _reduce(value: torch.Tensor, mesh: DeviceMesh | None, axis: str, is_largest: bool) -> None:
    if mesh is not None and mesh[axis].size() > 1:
        operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        dist.all_reduce(value, op=operation, group=mesh[axis].get_group())


SGD_LEARNING_RATE = 1e-2
"""For the SGD of plans whose precision keeps no optimizer states, where no `optimizer=` is given. It is not tuned for
any model: a larger rate learns faster and diverges earlier."""


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers of different parameters that step together; groups and states are those of all of them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        super().__init__([{"params": []}], {})  # torch refuses groups with names beside groups without
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            optimizer.state = self.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update all parameters."""
        if closure is not None:
            raise PlanError("several optimizers step together without a closure; call each one's own step.")
        for optimizer in self.optimizers:
            optimizer.step()


@dataclass(frozen=True, slots=True)
class OptimizerParameters:
    """Optimizers that were made for the plain model, and the names of the parameters in each of their groups."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    names: tuple[tuple[tuple[str, ...], ...], ...]

    @classmethod
    def of(cls, given: object, model: torch.nn.Module) -> OptimizerParameters | None:
        """What is needed to exchange the parameters of given optimizers; None where a function, or nothing, is given.

        Raises PlanError for optimizers of other parameters, or that have made steps.
        """
        listed = list(given) if isinstance(given, list | tuple) else [given]
        optimizers = tuple(each for each in listed if isinstance(each, torch.optim.Optimizer))
        if not optimizers and not isinstance(given, list | tuple):
            return None
        if len(optimizers) != len(listed) or not listed:
            raise PlanError(f"optimizer is {shown(given)}; expected a function, an optimizer, or a list of optimizers.")
        known = {id(parameter): name for name, parameter in model.named_parameters()}
        seen: dict[str, int] = {}
        names = []
        for place, optimizer in enumerate(optimizers):
            if optimizer.state:
                raise PlanError(
                    "the optimizer has made steps already, and its states belong to the parameters of the plain model; "
                    "apply the plan first, and load a checkpoint with `run.load`."
                )
            groups = [[known.get(id(parameter), "") for parameter in group["params"]] for group in _groups(optimizer)]
            flat = [name for group in groups for name in group]
            if "" in flat or any(name in seen for name in flat):
                raise PlanError(
                    f"optimizer {place} has a parameter that "
                    + ("is none of the model's" if "" in flat else "another optimizer has, too")
                    + "; make optimizers of the parameters of the model that the plan is applied to, each once."
                )
            seen |= dict.fromkeys(flat, place)
            names.append(tuple(map(tuple, groups)))
        return cls(optimizers, tuple(names))

    def exchanged(self, arranged: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizers with the arranged parameters that this process holds, by the model's names."""
        for optimizer, groups in zip(self.optimizers, self.names, strict=True):
            for group, names in zip(_groups(optimizer), groups, strict=True):
                held = [name for name in names if name in arranged]
                group["params"] = [arranged[name] for name in held]
                if "param_names" in group:
                    group["param_names"] = held
        return self.optimizers[0] if len(self.optimizers) == 1 else SeveralOptimizers(self.optimizers)


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def make_optimizer(
    plan: Plan,
    make: object,
    given: OptimizerParameters | None,
    arranged: Mapping[str, torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """The optimizer of this process's parameters: the user's, or AdamW or SGD as the plan's precision says.

    `arranged` are the parameters of this process by the names under which the model lists them first: tied ones once.
    """
    if given is not None:
        return given.exchanged(arranged)
    trained = [parameter for parameter in arranged.values() if parameter.requires_grad]
    # torch refuses an empty list: a stage may have nothing but frozen parameters.
    stand_in = torch.nn.Parameter(torch.empty(0))
    optimizer = _made(plan, make, trained or [stand_in])
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not stand_in]
    return optimizer


def _made(plan: Plan, make: object, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if make is None:
        if plan.question.precision.state_bytes > 0:
            return torch.optim.AdamW(parameters)
        return torch.optim.SGD(parameters, lr=SGD_LEARNING_RATE)
    if not callable(make):
        raise PlanError(
            f"optimizer is {shown(make)}; expected a function from parameters to a torch optimizer, or one or several "
            "optimizers of the plain model's parameters."
        )
    optimizer = make(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(f"optimizer made a {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    return optimizer
