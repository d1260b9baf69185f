"""Parameters on the tensor axis: stored as DTensors, seen by their modules as parts.

A split that is not one block of its dimension (a fused projection cut by heads) is stored as a copy whose elements are
put in the order of devices, so that every part is one block; `state_dict` gives them back in the model's own order, and
`load_state_dict` takes either.

This file needs torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from phaze.backends.torch import split_products, split_rules
from phaze.backends.torch.split_collectives import Axis, part_of
from phaze.backends.torch.split_tensor import SplitTensor

__all__ = ["Cut", "split_parameters", "to_device_order", "to_model_order"]

Cut = tuple[int, int]
"""A dimension, and the equal runs of it inside of which it is cut."""

_RULES = (split_products, split_rules)


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


def _show_parts(module: Any, cuts: Mapping[str, Cut | None], axis: Axis) -> None:
    """Inside the module's forward its parameters are parts; they stand before the real ones in its namespace."""

    def entering(*_: Any) -> None:
        for key, cut in cuts.items():
            parameter = module._parameters[key]
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            shown = local if cut is None else SplitTensor(local, axis, parameter.shape, *cut)
            module.__dict__[key] = shown

    def leaving(*_: Any) -> None:
        for key in cuts:
            module.__dict__.pop(key, None)

    module.register_forward_pre_hook(entering)
    module.register_forward_hook(leaving, always_call=True)
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
    def saving(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        for key, (cut, ways) in cuts.items():
            stored = state.get(prefix + key)
            if isinstance(stored, DTensor):
                state[prefix + key] = to_model_order(stored.detach().full_tensor(), cut, ways)

    def loading(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for key, (cut, ways) in cuts.items():
            given, own = state.get(prefix + key), module._parameters[key]
            if isinstance(given, torch.Tensor) and not isinstance(given, DTensor) and isinstance(own, DTensor):
                from torch.distributed.tensor import distribute_tensor

                ordered = to_device_order(given, cut, ways).contiguous()
                state[prefix + key] = distribute_tensor(ordered, own.device_mesh, own.placements, src_data_rank=None)

    module.register_state_dict_post_hook(saving)
    module.register_load_state_dict_pre_hook(loading)
