"""The model of one pipeline stage: the model's own forward, run with stand-ins for other stages, and what stages send.

A stage runs the whole forward of the model, but holds only its own modules. Modules of other stages are absent: what
stands in their place returns tensors of the right shapes full of NaN, which cost nothing and must never reach a result
(`_AbsentModule`). The stage before a cut runs up to the call of the module behind it, and hands over those of its
arguments that depend on parameters (`_StageExit`). The stage behind the cut runs up to the same call, puts what it
received in their place (`_receive_boundary`), and goes on. Whatever is made of the batch alone, such as masks and
positions, every stage makes for itself. Where the cuts stand and what crosses them says the dry run of `stage_cuts`.

What stages send each other (`Wires`) are parts of sequences where sequences are split, whole tensors elsewhere. A
tensor [batch, positions, ...] that crosses a cut is sent in parts over the devices of a context, and each part in parts
over the tensor-parallel axis under sequence parallelism. Both sides of a cut decide so by the shape alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from phaze.backends.torch.micro_batches import BatchLosses
from phaze.backends.torch.process_groups import Contexts
from phaze.backends.torch.split_collectives import Axis
from phaze.backends.torch.split_tensor import ContextTensor, SplitTensor, is_split, scattered, to_whole
from phaze.backends.torch.stage_cuts import Boundary, DryRun, PreHook, clone_with_tensors, is_inside, tensors_in
from phaze.errors import PlanError

__all__ = ["StageEnd", "StageModel", "Wires", "build_stage"]


@dataclass(frozen=True, slots=True)
class Wires:
    """The axes over which tensors that cross a cut may be split; None where there is no such axis."""

    contexts: Contexts | None
    axis: Axis | None

    def shapes(self, boundary: Boundary) -> tuple[torch.Tensor, ...]:
        """Shapes and types of what one process sends over a cut, as tensors without storage."""
        return tuple(
            torch.empty(self._sent_shape(tensor), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
            for tensor in boundary.tensors
        )

    def _sent_shape(self, tensor: torch.Tensor) -> list[int]:
        shape = self._context_shape(list(tensor.shape))
        if self._is_cut_further(shape):
            assert self.axis is not None
            shape[1] //= self.axis.size
        return shape

    def _context_shape(self, shape: list[int]) -> list[int]:
        if self.contexts is None or not self.contexts.divides(shape):
            return shape
        return [shape[0], shape[1] // self.contexts.size, *shape[2:]]

    def _is_cut_further(self, shape: list[int]) -> bool:
        """Whether devices of the tensor-parallel axis each send their part of dimension 1."""
        axis = self.axis
        return bool(axis and axis.splits_sequences and len(shape) >= 3 and shape[1] % axis.size == 0)

    def send(self, value: torch.Tensor) -> torch.Tensor:
        """What this process sends of a tensor to the next stage."""
        if self.contexts is not None and self.contexts.divides(value.shape):
            if isinstance(value, ContextTensor) and (value.split_dim, value.outer) == (1, 1):
                value = value.local
            else:
                whole = value.whole() if isinstance(value, ContextTensor) else value
                value = scattered(whole, self.contexts.axis(whole.shape[1]), 1)
        elif isinstance(value, ContextTensor):
            value = value.whole()
        if self.axis is None or not self._is_cut_further(list(value.shape)):
            return to_whole(value).contiguous()
        if isinstance(value, SplitTensor) and (value.split_dim, value.outer) == (1, 1):
            return value.local.contiguous()
        return scattered(to_whole(value), self.axis, 1)

    def receive(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A tensor that arrived as the model sees it; `like` has the shape of the whole."""
        shape = self._context_shape(list(like.shape))
        if self.axis is not None and self._is_cut_further(shape):
            value = SplitTensor(value, self.axis, shape, 1)
        if self.contexts is not None and self.contexts.divides(like.shape):
            return ContextTensor(value, self.contexts.axis(like.shape[1]), like.shape, 1)
        return value


class _StandIn(torch.nn.Module):
    """Stands in the place of a module that a stage does not run; its attributes are those of the original."""

    def __init__(self, original: torch.nn.Module) -> None:
        super().__init__()
        # In a tuple, behind torch's back: the original must not become a submodule, nor bring its parameters.
        object.__setattr__(self, "original", (original,))

    def __getattr__(self, name: str) -> object:
        return getattr(object.__getattribute__(self, "original")[0], name)


class _AbsentModule(_StandIn):
    """Stands for a module of another stage: its results have the right shapes, and NaN where they have numbers."""

    def __init__(self, original: torch.nn.Module, results: Sequence[object]) -> None:
        super().__init__(original)
        self.results, self.calls = tuple(results), 0

    def forward(self, *args: object, **kwargs: object) -> object:
        """What the call of this number returned in the dry run, filled with NaN."""
        result = self.results[self.calls % len(self.results)]
        self.calls += 1
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), torch.device("cpu"))

        def filled(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            value = float("nan") if leaf.is_floating_point() else 0
            return torch.full((), value, dtype=leaf.dtype, device=device).expand(leaf.shape)

        return tree_map(filled, result)


class StageEnd(Exception):  # noqa: N818 - ends a stage's forward, never seen by users
    """The forward has come to the end of its stage; `values` are what crosses the cut."""

    def __init__(self, values: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.values = values


class _StageExit(_StandIn):
    """Stands for the module behind a stage's end: its call hands over what crosses the cut."""

    def __init__(self, original: torch.nn.Module, boundary: Boundary) -> None:
        super().__init__(original)
        self.boundary = boundary

    def forward(self, *args: object, **kwargs: object) -> object:
        """Ends the stage; a tensor that the stage itself received goes on as it was received."""
        leaves, _ = tree_flatten((args, kwargs), is_leaf=is_split)
        values = (leaves[same[0]] for same in self.boundary.places)
        raise StageEnd(tuple(map(_received, values)))


@dataclass(slots=True)
class StageModel:
    """The model of one stage, and what it received for the microbatch at hand.

    Attributes:
        module: the whole model, in which only the stage's own modules have parameters.
        boundary_in: what crosses the cut before the stage; None for the first one.
        boundary_out: what crosses the cut behind the stage; None for the last one.
        incoming: tensors that arrived and were not put in their places yet.
        wires: how tensors that cross its cuts are sent.
        losses: where the last stage puts the losses of the batch at hand.
        exit: what stands at the end of the stage; None for the last one.
        records_gradients: whether the forward at hand was begun with gradients.
    """

    module: torch.nn.Module
    boundary_in: Boundary | None
    boundary_out: Boundary | None
    incoming: list[torch.Tensor] = field(default_factory=list)
    wires: Wires = field(default_factory=lambda: Wires(None, None))
    losses: BatchLosses = field(init=False)
    exit: _StageExit | None = None
    records_gradients: bool = True

    def take_shapes(self, run: DryRun, stage: int) -> None:
        """Take what another dry run says of this stage: microbatches of other shapes follow."""
        self.boundary_in = run.boundaries[stage - 1] if stage else None
        self.boundary_out = run.boundaries[stage] if stage < len(run.boundaries) else None
        for name, part in self.module.named_modules():
            if isinstance(part, _AbsentModule):
                part.results, part.calls = tuple(run.results[name]), 0
        if self.exit is not None and self.boundary_out is not None:
            self.exit.boundary = self.boundary_out


def build_stage(module: torch.nn.Module, paths: Sequence[str], run: DryRun, stage: int) -> StageModel:
    """The model with the modules of one stage; its parameters are the model's own."""
    live = {name for name, stages in run.stages.items() if stage in stages}
    clone = clone_with_tensors(module, lambda tensor: torch.empty_like(tensor, device="meta"))
    originals = dict(module.named_modules(remove_duplicate=False))
    for name, submodule in clone.named_modules():
        if name in live:
            for key in submodule._parameters:
                submodule._parameters[key] = originals[name]._parameters[key]
        for key in submodule._buffers:
            submodule._buffers[key] = originals[name]._buffers[key]
    boundary_in = run.boundaries[stage - 1] if stage else None
    boundary_out = run.boundaries[stage] if stage < len(paths) else None
    built = StageModel(clone, boundary_in, boundary_out)
    exit_path = paths[stage] if stage < len(paths) else None
    _replace_absent_modules(clone, "", live, exit_path, run, built)
    _drop_parameters_of_others(clone, originals)
    if boundary_in is not None:
        entry = paths[stage - 1]
        clone.get_submodule(entry).register_forward_pre_hook(_receive_boundary(built), with_kwargs=True)
        for name, submodule in clone.named_modules():
            if name != entry and any(is_inside(path, name) for path in live):
                submodule.register_forward_pre_hook(_replace_received, with_kwargs=True)
    return built


def _replace_absent_modules(
    module: torch.nn.Module, path: str, live: set[str], exit_path: str | None, run: DryRun, built: StageModel
) -> None:
    """Put stand-ins in the place of the modules below `path` that the stage does not run."""
    for key, child in list(module._modules.items()):
        if child is None:
            continue
        name = f"{path}.{key}".lstrip(".")
        if name == exit_path:
            assert built.boundary_out is not None
            built.exit = _StageExit(child, built.boundary_out)
            if not any(is_inside(live_path, name) for live_path in live):
                module._modules[key] = built.exit
                continue
            # The stage itself calls a part of this module, as models of images and words do with their embedding.
            child.forward = built.exit.forward
            _replace_absent_modules(child, name, live, exit_path, run, built)
        elif not any(True for _ in child.parameters()):
            continue
        elif not any(is_inside(live_path, name) for live_path in live) and name in run.results:
            module._modules[key] = _AbsentModule(child, run.results[name])
        else:  # it holds modules of the stage, or is a container that is never called itself
            _replace_absent_modules(child, name, live, exit_path, run, built)


def _drop_parameters_of_others(clone: torch.nn.Module, originals: Mapping[str, torch.nn.Module]) -> None:
    """Modules that are never called keep what the stage holds anyway (tied parameters), and nothing else."""
    held = {id(parameter) for parameter in clone.parameters() if parameter.device.type != "meta"}
    for name, submodule in clone.named_modules():
        for key, parameter in submodule._parameters.items():
            if parameter is not None and parameter.device.type == "meta" and name in originals:
                original = originals[name]._parameters[key]
                if original is not parameter:
                    submodule._parameters[key] = original if id(original) in held else None


_RECEIVED = "_phaze_received"
"""The attribute of an absent module's tensor that holds what was received in its place. A model that computes a block
again in backward (`torch.utils.checkpoint`) calls it with the same tensors, when other microbatches have arrived."""


def _received(leaf: Any) -> Any:
    """What was received in the place of an absent module's tensor; anything else as it is."""
    return getattr(leaf, _RECEIVED, leaf) if isinstance(leaf, torch.Tensor) else leaf


def _receive_boundary(built: StageModel) -> PreHook:
    """Before the call where a stage begins: put what it received in the place of what absent modules returned."""

    def hook(_: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        leaves, tree = tree_flatten((args, kwargs), is_leaf=is_split)
        if built.incoming:
            if built.records_gradients and not torch.is_grad_enabled():
                raise PlanError(
                    "the module where a stage begins runs without gradients, as torch.utils.checkpoint does with "
                    "use_reentrant=True, so that earlier stages would get none; pass use_reentrant=False, or leave "
                    "it to the plan (strategy recompute='full')."
                )
            assert built.boundary_in is not None
            for same, value in zip(built.boundary_in.places, built.incoming, strict=True):
                for place in same:
                    setattr(leaves[place], _RECEIVED, value)
            built.incoming.clear()
        return tree_unflatten([_received(leaf) for leaf in leaves], tree)

    return hook


def _replace_received(_: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Before later calls of the stage: arguments that crossed the cut are those that were received."""
    leaves, tree = tree_flatten((args, kwargs), is_leaf=is_split)
    return tree_unflatten([_received(leaf) for leaf in leaves], tree)
