"""Parameters on the tensor axis: stored as DTensors, seen by their modules as parts.

A split that is not one block of its dimension (a fused projection cut by heads) is stored as a copy whose elements are
put in the order of devices, so that every part is one block; states that are saved or loaded have the model's own
order. An optimizer sees them, and saves what it knows of them, in the order of devices.

This file needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from phaze.backends.torch import split_products, split_rules
from phaze.backends.torch.split_collectives import Axis, part_of
from phaze.backends.torch.split_tensor import SplitTensor

__all__ = ["Cut", "showing", "split_parameters", "take_whole_states", "to_device_order", "to_model_order"]

Cut = tuple[int, int]
"""A dimension, and the equal runs of it inside of which it is cut."""

_RULES = (split_products, split_rules)
_SHOWS: ContextVar[bool] = ContextVar("shows", default=False)


@contextmanager
def showing() -> Iterator[None]:
    """Inside, parameters that modules have are parts; outside, DTensors."""
    token = _SHOWS.set(True)
    try:
        yield
    finally:
        _SHOWS.reset(token)


def split_parameters(module: Any, cuts: Mapping[str, Cut], mesh: Any, axis: Axis) -> None:
    """Replace every parameter by its DTensor on the tensor axis; `cuts` by any of its names, others are whole."""
    made: dict[int, Any] = {}
    found = {id(own): cuts.get(name) for name, own in module.named_parameters(remove_duplicate=False)}
    found |= {id(own): cuts[name] for name, own in module.named_parameters(remove_duplicate=False) if name in cuts}
    for part in module.modules():
        own = {}
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            cut = found[id(parameter)]
            if id(parameter) not in made:
                made[id(parameter)] = _distributed(parameter, cut, mesh, axis)
            part._parameters[key] = made[id(parameter)]
            own[key] = cut
        if own:
            _show_parts(part, own, axis)


def _distributed(parameter: Any, cut: Cut | None, mesh: Any, axis: Axis) -> Any:
    value = parameter.detach()
    local = value if cut is None else part_of(value, axis, *cut).contiguous()
    placement = Replicate() if cut is None else Shard(cut[0])
    stored = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=value.shape, stride=value.contiguous().stride()
    )
    return torch.nn.Parameter(stored, requires_grad=parameter.requires_grad)


class _ShowsParts:
    """Beside a module's own class: while the model runs, its parameters are parts to whoever reads them."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        cuts, axis = self.__dict__["_phaze_cuts"]
        if name not in cuts or not _SHOWS.get():
            return value
        local, cut = value.to_local() if isinstance(value, DTensor) else value, cuts[name]
        return local if cut is None else SplitTensor(local, axis, value.shape, *cut)


def _show_parts(module: Any, cuts: Mapping[str, Cut | None], axis: Axis) -> None:
    module._phaze_cuts = (cuts, axis)
    kind = type(module)
    module.__class__ = type(kind.__name__, (_ShowsParts, kind), {})
    strided = {key: (cut, axis.size) for key, cut in cuts.items() if cut is not None and cut[1] > 1}
    if strided:
        module._phaze_strided = strided
        _restore_order(module, strided)


def to_device_order(value: torch.Tensor, cut: Cut, ways: int) -> torch.Tensor:
    """Elements of (runs, devices, chunk) in the order (devices, runs, chunk)."""
    dim, outer = cut
    return value.unflatten(dim, (outer, ways, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def to_model_order(value: torch.Tensor, cut: Cut, ways: int) -> torch.Tensor:
    """The way back."""
    return to_device_order(value, (cut[0], ways), cut[1])


def _restore_order(module: Any, cuts: Mapping[str, tuple[Cut, int]]) -> None:
    """States are in the model's own order, whoever saves, loads or distributes them."""

    def reordered(state: dict[str, Any], prefix: str, order: Callable[..., torch.Tensor]) -> None:
        for key, (cut, ways) in cuts.items():
            stored = state.get(prefix + key)
            if isinstance(stored, DTensor):
                whole = order(stored.detach().full_tensor(), cut, ways)
                state[prefix + key] = distributed_as(whole, stored)

    def saving(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        reordered(state, prefix, to_model_order)

    def loading(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        reordered(state, prefix, to_device_order)

    module.register_state_dict_post_hook(saving)
    module.register_load_state_dict_pre_hook(loading)


def take_whole_states(module: Any) -> None:
    """Let `load_state_dict` take whole tensors, equal in all processes, beside the DTensors that `state_dict` gives."""

    def loading(_: Any, state: dict[str, Any], *__: Any) -> None:
        for name, own in module.named_parameters(remove_duplicate=False):
            given = state.get(name)
            if isinstance(own, DTensor) and isinstance(given, torch.Tensor) and not isinstance(given, DTensor):
                state[name] = distributed_as(given, own)

    module.register_load_state_dict_pre_hook(loading)


def distributed_as(whole: torch.Tensor, like: DTensor) -> DTensor:
    """A whole tensor, equal in all processes, distributed as another one is."""
    moved = whole.detach().to(like.device, like.dtype).contiguous()
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)
