"""How a module is arranged on a mesh: tensor-parallel parameters first, then recompute, then FSDP2.

`arrange_module` does all three in place. `schedule_gradient_sync` decides, microbatch by microbatch, when copies of the
model exchange gradients and drop gathered parameters (ZeRO). `checkpoint_block` recomputes a block in backward.
`without_caches` keeps Hugging Face models from collecting keys and values while they train.

Parameters are stored for tensor parallelism as DTensors, which their modules see as split tensors.
`distribute_parameters` replaces the parameters of a module; while `parameters_as_parts` is entered, the module's own
code reads SplitTensors in their place. A split that is not one block of its dimension (a fused projection that is split
by heads) is stored as a copy whose elements stand in the order of devices, so that every part is one block. States that
are saved or loaded have the model's own order. An optimizer sees such parameters, and saves what it knows of them, in
the order of devices.

This file needs torch alone: target 'fsdp' exports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from phaze.backends.torch import split_products, split_rules
from phaze.backends.torch.split_collectives import Axis, local_part
from phaze.backends.torch.split_tensor import SplitTensor, TorchFunction, is_split

__all__ = [
    "Cut",
    "accept_whole_states",
    "arrange_module",
    "checkpoint_block",
    "distribute_parameters",
    "distributed_as",
    "parameters_as_parts",
    "schedule_gradient_sync",
    "to_device_order",
    "to_model_order",
    "without_caches",
]

_RULES = (split_products, split_rules)  # imported for their rules, which register themselves
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


def arrange_module(
    module: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    cuts: Mapping[str, Cut],
    splits_sequences: bool,
    blocks: Mapping[str, str],
    zero: int,
    compute_dtype: torch.dtype,
    reduction_dtype: torch.dtype,
    splits_contexts: bool = False,
    expert_meshes: Mapping[str, DeviceMesh] | None = None,
) -> Axis | None:
    """Arrange a module in place, and return its tensor-parallel axis (None where tp is 1).

    The mesh has axes replicate, shard and tp. `cuts` are of parameters by name, and `blocks` are the recompute modes of
    the module's repeated layers by path; FSDP2 gathers each block by itself, unless it shares parameters with others.
    With `splits_contexts` the module is called with sequences that are split. `expert_meshes` are of the modules whose
    experts are divided, by path: axes expert_replicate, expert_shard, ep and tp.
    """
    expert_meshes = expert_meshes or {}
    axis = None
    if mesh["tp"].size() > 1:
        tensor_mesh = mesh["tp"]
        axis = Axis(tensor_mesh.get_group(), tensor_mesh.size(), tensor_mesh.get_local_rank(), splits_sequences)
    if axis is not None or expert_meshes:
        distribute_parameters(module, cuts, mesh, axis, expert_meshes)
    for path, mode in blocks.items():
        checkpoint_block(module.get_submodule(path), mode)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduction_dtype)
    sharded = [(module.get_submodule(path), _copies(own, "expert_")) for path, own in expert_meshes.items()]
    sharded += [(part, _copies(mesh)) for part in (*_blocks_of_their_own(module, blocks), module)]
    for part, copies in sharded:
        fully_shard(part, mesh=copies, mp_policy=policy, reshard_after_forward=zero == 3)
    accept_whole_states(module)
    if axis is not None or splits_contexts:
        for path in (*blocks, *expert_meshes):
            _let_split_tensors_through(module.get_submodule(path))
    if splits_contexts:
        _let_split_tensors_through(module)
    if axis is not None or expert_meshes:
        # Blocks, too, enter it: a model may compute them again in backward, outside of its own forward.
        for part in (*(module.get_submodule(path) for path in blocks), module):
            _run_forward_inside(part, parameters_as_parts)
    _run_forward_inside(module, functools.partial(without_caches, module))
    module.register_forward_hook(_drop_gathered_parameters)
    return axis


def _drop_gathered_parameters(module: torch.nn.Module, *_: object) -> None:
    """Drop what a forward without gradients gathered: no backward follows it, and an update would not change it."""
    if not torch.is_grad_enabled():
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _copies(mesh: DeviceMesh, prefix: str = "") -> DeviceMesh:
    """The devices that hold copies of the same parameters, or shards of them."""
    replicate, shard = f"{prefix}replicate", f"{prefix}shard"
    return mesh[replicate, shard] if mesh[replicate].size() > 1 else mesh[shard]


def _blocks_of_their_own(module: torch.nn.Module, paths: Iterable[str]) -> list[torch.nn.Module]:
    """The blocks that share no parameter with the rest of the module: FSDP2 gathers each of them by itself.

    Tied parameters must lie in one group of FSDP2. It is the module's own, which is gathered from beginning to end: a
    tied embedding is read by the first layer and by the last.
    """
    holders: dict[int, set[int]] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            holders.setdefault(id(parameter), set()).add(id(part))
    blocks = []
    for block in (module.get_submodule(path) for path in paths):
        parts = {id(part) for part in block.modules()}
        if all(holders[id(parameter)] <= parts for parameter in block.parameters()):
            blocks.append(block)
    return blocks


def _run_forward_inside(module: torch.nn.Module, make_context: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter a context for every forward, behind FSDP2's own hook, which wants to see what is stored."""
    entered: list[AbstractContextManager[None]] = []

    def before_forward(*_: object) -> None:
        entered.append(make_context())
        entered[-1].__enter__()

    def after_forward(*_: object) -> None:
        if entered:  # empty where an earlier hook failed
            entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before_forward)
    module.register_forward_hook(after_forward, always_call=True)


@contextmanager
def without_caches(module: torch.nn.Module) -> Iterator[None]:
    """Switch off `config.use_cache` of a model and its parts while gradients are recorded, and put it back behind.

    Training never reads these caches of keys and values. Blocks that are computed again in backward would fill them
    twice, and pipeline stages would send them. Generation, which records no gradients, keeps them.
    """
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    switched = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    if not torch.is_grad_enabled():
        switched = []
    for config in switched:
        config.use_cache = False
    try:
        yield
    finally:
        for config in switched:
            config.use_cache = True


def schedule_gradient_sync(module: FSDPModule, zero: int, *, is_last: bool) -> None:
    """Say what the backward of the next microbatch does between copies of the model; call it before each one.

    Under ZeRO 2 and 3 gradients are scattered over the shards after every microbatch, and below after the last one.
    Copies of a group of shards exchange theirs after the last one only. Parameters stay gathered from one microbatch to
    the next below ZeRO 3.
    """
    module.set_requires_gradient_sync(zero >= 2 or is_last)
    module.set_requires_all_reduce(is_last)
    module.set_reshard_after_backward(zero == 3 or is_last)


def checkpoint_block(block: torch.nn.Module, mode: str) -> None:
    """Compute a block's forward again in backward: all of it ("full"), or its attention only ("selective").

    Attention is what `scaled_dot_product_attention` computes. The selective mode keeps attention that a model writes
    out as products and a softmax.
    """
    if mode == "full":
        block.forward = functools.partial(checkpoint, parameters_as_parts()(block.forward), use_reentrant=False)
    elif mode == "selective":
        block.forward = functools.partial(_call_with_attention_recomputed, block.forward)


class _RecomputesAttention(TorchFunctionMode):
    """Keeps what enters attention, and computes the rest of attention again in backward."""

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return checkpoint(func, *args, use_reentrant=False, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _call_with_attention_recomputed(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    with _RecomputesAttention():
        return forward(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _OpenedTensor:
    """A split tensor taken apart, for FSDP2, which ties its hooks to the tensors that it finds inside dataclasses."""

    kind: type[SplitTensor]
    local: object
    axis: Axis
    shape: tuple[int, ...]
    dim: int
    outer: int


def _open_split_tensors(_: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    def opened(leaf: object) -> object:
        if not isinstance(leaf, SplitTensor):
            return leaf
        local, shape = opened(leaf.local), tuple(leaf.shape)
        return _OpenedTensor(type(leaf), local, leaf.axis, shape, leaf.split_dim, leaf.outer)

    return tree_map(opened, (args, kwargs), is_leaf=is_split)


def _close_split_tensors(_: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    def closed(leaf: object) -> object:
        if not isinstance(leaf, _OpenedTensor):
            return leaf
        local = closed(leaf.local)
        assert isinstance(local, torch.Tensor)
        return leaf.kind(local, leaf.axis, leaf.shape, leaf.dim, leaf.outer)

    return tree_map(closed, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, _OpenedTensor))


def _let_split_tensors_through(module: torch.nn.Module) -> None:
    """Take split tensors apart before FSDP2's own pre-hook, which runs first of those there are, and rejoin them."""
    module.register_forward_pre_hook(_open_split_tensors, prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(_close_split_tensors, with_kwargs=True)
