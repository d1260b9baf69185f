"""Weights from files and to files: checkpoints that any plan resumes, whole models written, empty models filled.

Models on the meta device are arranged without storage, then given storage for this process's shards and their values
(`fill_meta_model`). No process holds the model whole. Values come from the safetensors files of a folder, one tensor at
a time, or from a function that fills what this process holds of a parameter.

A checkpoint is a folder of torch.distributed.checkpoint. Its tensors are those of the whole model under the model's own
names, in the model's own order, each process having written its parts, so that another plan and another number of
processes read what they need of it (`save_checkpoint`, `load_checkpoint`):

    model.NAME                parameters and persistent buffers
    optimizer.NAME.KEY        what the optimizer knows of a parameter, such as Adam's two moments and its step
    groups                    the optimizer's parameter groups without their parameters (learning rates and the like)

`save_whole_model` writes the safetensors files that Hugging Face reads; no process holds more than one stage's part of
them, one file at a time.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from phaze.backends.torch.arrange import distributed_as, to_device_order, to_model_order
from phaze.errors import PlanError, shown

__all__ = ["TrainingState", "fill_meta_model", "is_on_meta", "load_checkpoint", "save_checkpoint", "save_whole_model"]

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


_GROUPS = "groups"
LARGEST_FILE_BYTES = 4 * 2**30
"""Files of a whole model are no larger, unless one tensor is: more would be held in memory at once, fewer make many
files."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a process has of a training run: its stages and its optimizer.

    `first_names` are the names under which the whole model lists parameters first, by all names that it has for them: a
    stage may know a tied parameter by another name.
    """

    stages: Sequence[torch.nn.Module]
    optimizer: torch.optim.Optimizer
    first_names: Mapping[str, str]

    def parameters(self) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
        """Every parameter of every stage, with its name there."""
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                yield stage, name, parameter

    def whole_name(self, name: str) -> str:
        """The name of a parameter or buffer in the whole model."""
        return self.first_names.get(name, name)


def save_checkpoint(state: TrainingState, folder: str | os.PathLike[str]) -> None:
    """Write a checkpoint; all processes call this, with one folder that they all reach."""
    tensors: dict[str, Any] = {}
    for stage in state.stages:
        tensors |= {_model_path(state, name): value.detach() for name, value in _model_state(stage).items()}
    for stage, name, parameter in state.parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[_optimizer_path(state, name, key)] = _in_model_order(stage, name, value)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in _groups(state)]
    tensors[_GROUPS] = json.dumps(groups, default=str)
    with _without_warnings():
        dcp.save(tensors, checkpoint_id=os.fspath(folder), no_dist=not dist.is_initialized())


def load_checkpoint(state: TrainingState, folder: str | os.PathLike[str]) -> None:
    """Read a checkpoint into a model and its optimizer, however they and the checkpoint's own were arranged.

    Raises PlanError where the folder is no checkpoint, or not of this model.
    """
    known = _metadata(folder).state_dict_metadata
    tensors: dict[str, Any] = {}
    for stage in state.stages:
        tensors |= {_model_path(state, name): torch.empty_like(value) for name, value in _model_state(stage).items()}
    places = list(_optimizer_places(state, known))
    for _, name, key, parameter in places:
        path = _optimizer_path(state, name, key)
        like = parameter.detach() if known[path].size == parameter.shape else torch.empty(known[path].size)
        tensors[path] = torch.zeros_like(like, dtype=known[path].properties.dtype)
    missing = sorted(name for name in tensors if name not in known)
    if missing:
        raise PlanError(
            f"checkpoint {os.fspath(folder)!r} has no {missing[0]!r} ({len(missing)} names are missing): it is of "
            "another model. Expected one that `run.save` wrote for this one."
        )
    tensors[_GROUPS] = ""
    with _without_warnings():
        dcp.load(tensors, checkpoint_id=os.fspath(folder), no_dist=not dist.is_initialized())
    for stage in state.stages:  # other names of tied parameters are not in it
        stage.load_state_dict({name: tensors[_model_path(state, name)] for name in _model_state(stage)}, strict=False)
    for stage, name, key, parameter in places:
        value = _in_device_order(stage, name, tensors[_optimizer_path(state, name, key)])
        state.optimizer.state[parameter][key] = value
    _set_groups(state, json.loads(tensors[_GROUPS]))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Let a single process without a process group save and load, which torch warns about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _model_path(state: TrainingState, name: str) -> str:
    return f"model.{state.whole_name(name)}"


def _optimizer_path(state: TrainingState, name: str, key: str) -> str:
    return f"optimizer.{state.whole_name(name)}.{key}"


def _model_state(stage: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, each once, in the model's own order."""
    first_names = {name for name, _ in stage.named_parameters()} | {name for name, _ in stage.named_buffers()}
    return {name: value for name, value in stage.state_dict().items() if name in first_names}


def _metadata(folder: str | os.PathLike[str]) -> Metadata:
    try:
        return dcp.FileSystemReader(folder).read_metadata()
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{os.fspath(folder)!r} is no checkpoint that can be read ({error}); expected a folder that `run.save` "
            "wrote and that every process reaches."
        ) from error


def _optimizer_places(
    state: TrainingState, known: Mapping[str, Any]
) -> Iterator[tuple[torch.nn.Module, str, str, torch.nn.Parameter]]:
    """What a checkpoint has of the optimizer for this process: stage, name, key and parameter of each tensor."""
    keys: dict[str, list[str]] = {}
    for path in known:
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        if kind == "optimizer":
            keys.setdefault(name, []).append(key)
    for stage, name, parameter in state.parameters():
        if parameter.requires_grad:
            for key in keys.get(state.whole_name(name), ()):
                yield stage, name, key, parameter


def _groups(state: TrainingState) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = state.optimizer.param_groups
    return groups


def _set_groups(state: TrainingState, saved: Sequence[Mapping[str, Any]]) -> None:
    """Take learning rates and the like of a checkpoint, where its optimizer had as many groups as this one."""
    if len(saved) != len(_groups(state)):
        raise PlanError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, and this one has {len(_groups(state))}; "
            "make the optimizer with the same groups."
        )
    for group, values in zip(_groups(state), saved, strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


# ------------------------------------------------------------------------------------- the order of fused projections


def _order(stage: torch.nn.Module, name: str) -> Any:
    """The cut and the number of devices of a parameter that is stored in the order of devices; None for others."""
    path, _, key = name.rpartition(".")
    return getattr(stage.get_submodule(path), "_phaze_strided", {}).get(key)


def _in_model_order(stage: torch.nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
    order = _order(stage, name)
    if order is None or not isinstance(value, DTensor):
        return value
    return distributed_as(to_model_order(value.full_tensor(), *order), value)


def _in_device_order(stage: torch.nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
    order = _order(stage, name)
    if order is None or not isinstance(value, DTensor):
        return value
    return distributed_as(to_device_order(value.full_tensor(), *order), value)


# --------------------------------------------------------------------------------------------------- whole models


def save_whole_model(
    state: TrainingState, folder: str | os.PathLike[str], *, pipeline: dist.ProcessGroup, writes: bool
) -> None:
    """Write safetensors files of the whole model, and its config where it has one; all processes call this.

    Of a model with adapters (peft) only those are written, as its own `save_pretrained` does. `pipeline` are the
    processes of all stages, and `writes` says whether this process writes those of its stages.
    """
    from safetensors.torch import save_file

    if hasattr(state.stages[0], "peft_config"):
        _save_adapters(state, folder, pipeline, writes=writes)
        return
    target, place = Path(folder), dist.get_rank(pipeline)
    target.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[str]] = {}
    for tensors in _files_of(_whole_tensors(state, pipeline)):
        file = f"model-stage{place}-{len(files)}.safetensors"
        files[file] = list(tensors)
        if writes:
            save_file(tensors, target / file, metadata={"format": "pt"})
    _write_index(state.stages, target, files, pipeline, writes=writes)


def _save_adapters(
    state: TrainingState, folder: str | os.PathLike[str], pipeline: dist.ProcessGroup, *, writes: bool
) -> None:
    """Write the adapters of all stages with their configs, as peft reads them."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    trained = {
        state.whole_name(name)
        for stage in state.stages
        for name, parameter in stage.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    own = dict(_whole_tensors(state, pipeline, trained))
    for adapter, config in state.stages[0].peft_config.items():
        named: dict[str, torch.Tensor] = {}
        for stage in state.stages:
            named |= get_peft_model_state_dict(stage, own, adapter, save_embedding_layers=False)
        gathered: list[Any] = [None] * dist.get_world_size(pipeline)
        dist.all_gather_object(gathered, named, group=pipeline)
        if writes and not dist.get_rank(pipeline):
            target = Path(folder) if adapter == "default" else Path(folder, adapter)
            target.mkdir(parents=True, exist_ok=True)
            joined = {name: tensor for of_place in gathered for name, tensor in of_place.items()}
            save_file(joined, target / "adapter_model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(target)


def _whole_tensors(
    state: TrainingState, pipeline: dist.ProcessGroup, wanted: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that this process's place in the pipeline writes, gathered one by one; tied ones once.

    Those `wanted` by the model's own names; all, where none are named.
    """
    gathered: list[Any] = [None] * dist.get_world_size(pipeline)
    names = [state.whole_name(name) for stage in state.stages for name in _model_state(stage)]
    dist.all_gather_object(gathered, names, group=pipeline)
    done = {name for of_place in gathered[: dist.get_rank(pipeline)] for name in of_place}
    for stage in state.stages:
        for name, value in _model_state(stage).items():
            if state.whole_name(name) not in done and (wanted is None or state.whole_name(name) in wanted):
                done.add(state.whole_name(name))
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                yield state.whole_name(name), whole.detach().cpu().contiguous().clone()


def _files_of(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors by the file that they are written to."""
    waiting: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if waiting and size + tensor_bytes > LARGEST_FILE_BYTES:
            yield waiting
            waiting, size = {}, 0
        waiting[name] = tensor
        size += tensor_bytes
    if waiting:
        yield waiting


def _write_index(
    stages: Sequence[torch.nn.Module],
    target: Path,
    files: Mapping[str, Sequence[str]],
    pipeline: dist.ProcessGroup,
    *,
    writes: bool,
) -> None:
    """Write which file has which tensor, and the model's config."""
    gathered: list[Any] = [None] * dist.get_world_size(pipeline)
    dist.all_gather_object(gathered, dict(files), group=pipeline)
    if not writes or dist.get_rank(pipeline):
        return
    index = {name: file for of_place in gathered for file, names in of_place.items() for name in names}
    document = json.dumps({"metadata": {}, "weight_map": index}, indent=1)
    (target / "model.safetensors.index.json").write_text(document + "\n")
    config = getattr(stages[0], "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        config.save_pretrained(target)
