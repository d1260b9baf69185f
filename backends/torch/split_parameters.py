"""How parameters are stored for tensor parallelism: as DTensors, which their modules see as split tensors.

`distribute_parameters` replaces the parameters of a module; while `parameters_as_parts` is entered, the module's own
code reads SplitTensors in their place.

A split that is not one block of its dimension (a fused projection that is split by heads) is stored as a copy whose
elements stand in the order of devices, so that every part is one block. States that are saved or loaded have the
model's own order. An optimizer sees such parameters, and saves what it knows of them, in the order of devices.

This file needs torch alone: target 'fsdp' exports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from phaze.backends.torch import split_attention, split_products, split_rules
from phaze.backends.torch.split_collectives import Axis, local_part
from phaze.backends.torch.split_tensor import SplitTensor

__all__ = [
    "Cut",
    "accept_whole_states",
    "distribute_parameters",
    "distributed_as",
    "parameters_as_parts",
    "to_device_order",
    "to_model_order",
]

_RULES = (split_attention, split_products, split_rules)  # imported for their rules, which register themselves
_READS_PARTS: ContextVar[bool] = ContextVar("reads_parts", default=False)


class Cut(NamedTuple):
    """Where a parameter is cut: dimension `dim`, inside each of its `outer` equal runs, into one chunk per device."""

    dim: int
    outer: int


@contextmanager
def parameters_as_parts() -> Iterator[None]:
    """While this is entered, modules read their parameters as parts; otherwise they read DTensors."""
    token = _READS_PARTS.set(True)
    try:
        yield
    finally:
        _READS_PARTS.reset(token)


def distribute_parameters(
    module: torch.nn.Module,
    cuts: Mapping[str, Cut],
    mesh: DeviceMesh,
    axis: Axis | None,
    expert_meshes: Mapping[str, DeviceMesh],
) -> None:
    """Replace every parameter by its DTensor on the tensor-parallel axis, where there is one.

    `cuts` names a parameter by any of its names; parameters that are not named are whole on every device. Those of the
    modules in `expert_meshes` are divided along their first dimension over the axis `ep` of a mesh of their own.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    cut_of: dict[int, Cut | None] = {id(parameter): None for _, parameter in named}
    cut_of |= {id(parameter): cuts[name] for name, parameter in named if name in cuts}
    distributed: dict[int, torch.nn.Parameter] = {}
    for path, submodule in module.named_modules():
        own_mesh = expert_meshes.get(path)
        if axis is None and own_mesh is None:
            continue
        cuts_here: dict[str, Cut | None] = {}
        for key, parameter in submodule._parameters.items():
            if parameter is None:
                continue
            cut = cut_of[id(parameter)]
            if id(parameter) not in distributed:  # tied parameters stay one parameter
                distributed[id(parameter)] = _distributed(parameter, cut, own_mesh or mesh, axis)
            submodule._parameters[key] = distributed[id(parameter)]
            cuts_here[key] = cut
        if cuts_here:
            _let_module_read_parts(submodule, cuts_here, axis, own_mesh["ep"].size() if own_mesh else 1)


def _distributed(
    parameter: torch.nn.Parameter, cut: Cut | None, mesh: DeviceMesh, axis: Axis | None
) -> torch.nn.Parameter:
    """A parameter on the axes `ep`, which divides its first dimension, and `tp` of a mesh, as far as it has them."""
    value = local = parameter.detach()
    axes: list[str] = []
    placements: list[Placement] = []
    if "ep" in (mesh.mesh_dim_names or ()):
        experts = mesh["ep"]
        local = local.chunk(experts.size())[experts.get_local_rank()]
        axes, placements = ["ep"], [Shard(0)]
    if axis is not None:
        local = local if cut is None else local_part(local, axis, cut.dim, cut.outer)
        axes, placements = [*axes, "tp"], [*placements, Replicate() if cut is None else Shard(cut.dim)]
    stored = DTensor.from_local(
        local.contiguous() if local is not value else local,
        mesh[tuple(axes)] if len(axes) > 1 else mesh[axes[0]],
        placements,
        run_check=False,
        shape=value.shape,
        stride=value.contiguous().stride(),
    )
    return torch.nn.Parameter(stored, requires_grad=parameter.requires_grad)


class _ReadsParts:
    """A base class that is put before a module's own: while the model runs, its parameters read as parts."""

    def __getattr__(self, name: str) -> object:
        value = super().__getattr__(name)  # type: ignore[misc]
        cuts, axis, expert_devices = self.__dict__["_phaze_cuts"]
        if name not in cuts or not _READS_PARTS.get():
            return value
        local, cut = value.to_local() if isinstance(value, DTensor) else value, cuts[name]
        if cut is None or axis is None:
            return local
        shape = (value.shape[0] // expert_devices, *value.shape[1:])
        return SplitTensor(local, axis, shape, cut.dim, cut.outer)


def _let_module_read_parts(
    module: torch.nn.Module, cuts: Mapping[str, Cut | None], axis: Axis | None, expert_devices: int
) -> None:
    module._phaze_cuts = (cuts, axis, expert_devices)
    kind = type(module)
    module.__class__ = type(kind.__name__, (_ReadsParts, kind), {})
    ways = 1 if axis is None else axis.size
    strided = {key: (cut, ways) for key, cut in cuts.items() if cut is not None and cut.outer > 1 and ways > 1}
    if strided:
        module._phaze_strided = strided
        _keep_model_order_in_states(module, strided)


def to_device_order(value: torch.Tensor, cut: Cut, ways: int) -> torch.Tensor:
    """Put elements of (runs, devices, chunk) in the order (devices, runs, chunk)."""
    dim, outer = cut
    return value.unflatten(dim, (outer, ways, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def to_model_order(value: torch.Tensor, cut: Cut, ways: int) -> torch.Tensor:
    """Undo `to_device_order`."""
    return to_device_order(value, Cut(cut.dim, ways), cut.outer)


def _keep_model_order_in_states(module: torch.nn.Module, strided: Mapping[str, tuple[Cut, int]]) -> None:
    """Let states have the model's own order, whoever saves, loads or distributes them."""

    def reorder(state: dict[str, object], prefix: str, order: Callable[[torch.Tensor, Cut, int], torch.Tensor]) -> None:
        for key, (cut, ways) in strided.items():
            stored = state.get(prefix + key)
            if isinstance(stored, DTensor):
                whole = order(stored.detach().full_tensor(), cut, ways)
                state[prefix + key] = distributed_as(whole, stored)

    def after_saving(_: torch.nn.Module, state: dict[str, object], prefix: str, __: object) -> None:
        reorder(state, prefix, to_model_order)

    def before_loading(_: torch.nn.Module, state: dict[str, object], prefix: str, *__: object) -> None:
        reorder(state, prefix, to_device_order)

    module.register_state_dict_post_hook(after_saving)
    module.register_load_state_dict_pre_hook(before_loading)


def accept_whole_states(module: torch.nn.Module) -> None:
    """Let `load_state_dict` take whole tensors, equal in all processes, beside the DTensors that `state_dict` gives."""

    def before_loading(_: torch.nn.Module, state: dict[str, object], *__: object) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            given = state.get(name)
            if isinstance(parameter, DTensor) and isinstance(given, torch.Tensor) and not isinstance(given, DTensor):
                state[name] = distributed_as(given, parameter)

    module.register_load_state_dict_pre_hook(before_loading)


def distributed_as(whole: torch.Tensor, like: DTensor) -> DTensor:
    """A whole tensor, equal in all processes, distributed as another one is."""
    moved = whole.detach().to(like.device, like.dtype).contiguous()
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)
