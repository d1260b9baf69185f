"""Models on the meta device: arranged without storage, then given storage for this process's shards and their values.

No process holds the model whole. Values come from the safetensors files of a folder, one tensor at a time, or from a
function that fills what this process holds of a parameter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from phaze.errors import PlanError, shown

__all__ = ["fill_meta_model", "is_on_meta"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def is_on_meta(module: torch.nn.Module) -> bool:
    """Whether a model's parameters have no storage."""
    return any(parameter.is_meta for parameter in module.parameters())


def fill_meta_model(module: torch.nn.Module, weights: object, device: str) -> None:
    """Give an arranged model storage and values.

    `weights` is a folder with safetensors files, or a function of a parameter's name and the part of it that this
    process holds, which it fills. Raises PlanError for anything else, and for tensors that the folder lacks.
    """
    if weights is None:
        raise PlanError(
            "the model is on the meta device, so that it has no weights; pass weights=FOLDER with its safetensors "
            "files, or weights=FUNCTION of a parameter's name and the tensor to fill."
        )
    with _swapped_in_place():
        module.to_empty(device=device)
    _make_buffers(module)
    if isinstance(weights, str | os.PathLike):
        _read_weights(module, Path(weights))
    elif callable(weights):
        _call_weights(module, weights)
    else:
        raise PlanError(f"weights is {shown(weights)}; expected a folder with safetensors files, or a function.")


class _swapped_in_place:  # noqa: N801 - used as a context, in the way of a function
    """Let torch exchange the contents of parameters instead of making new ones, so that tied ones stay tied."""

    def __enter__(self) -> None:
        self.before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)

    def __exit__(self, *_: object) -> None:
        torch.__future__.set_swap_module_params_on_conversion(self.before)


def _make_buffers(module: torch.nn.Module) -> None:
    """Compute buffers anew that no file has, such as the frequencies of rotary embeddings, as the model itself does."""
    saved = module.state_dict().keys()
    for path, part in module.named_modules():
        lost = [name for name in part._buffers if f"{path}.{name}".lstrip(".") not in saved]
        if not lost:
            continue
        reset = getattr(module, "_init_weights", None) if not part._parameters else None
        if reset is None:
            raise PlanError(
                f"{path!r} has the buffer {lost[0]!r}, which no file has and which cannot be computed again on the "
                "meta device; build the model on a real device, or register the buffer as a persistent one."
            )
        with torch.no_grad():
            reset(part)


def _read_weights(module: torch.nn.Module, folder: Path) -> None:
    first_names = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    wanted = first_names & module.state_dict().keys()
    for name, value in _tensors_in(folder):
        if name in wanted:
            module.load_state_dict({name: value}, strict=False)
            wanted.remove(name)
    if wanted:
        raise PlanError(
            f"{os.fspath(folder)!r} lacks {min(wanted)!r} and {len(wanted) - 1} other tensors of the model."
        )


def _tensors_in(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a folder, one at a time."""
    from safetensors import safe_open

    names = [_SINGLE]
    if (folder / _INDEX).exists():
        names = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    for name in names:
        if not (folder / name).exists():
            raise PlanError(
                f"{os.fspath(folder)!r} has no {name!r}; expected safetensors files as Hugging Face writes."
            )
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - the file is no mapping
                yield key, file.get_tensor(key)


def _call_weights(module: torch.nn.Module, fill: Callable[[str, torch.Tensor], object]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            fill(name, parameter.to_local() if isinstance(parameter, DTensor) else parameter)
