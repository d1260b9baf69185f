"""A module arranged on a mesh: parameters on the tensor axis, recompute, shards of copies, in this order."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from phaze.backends.torch.split_collectives import Axis
from phaze.backends.torch.split_parameters import Cut, showing, split_parameters, take_whole_states
from phaze.backends.torch.split_tensor import SplitTensor, is_split

__all__ = ["arrange", "recompute", "synchronise"]


def arrange(
    module: Any,
    mesh: Any,
    *,
    cuts: Mapping[str, Cut],
    splits_sequences: bool,
    blocks: Mapping[str, str],
    zero: int,
    compute_dtype: Any,
    reduction_dtype: Any,
) -> Axis | None:
    """Arrange a module in place; `blocks` are its repeated layers, each with its recompute mode.

    Gives the tensor axis, None where there is none.
    """
    axis = None
    if mesh["tp"].size() > 1:
        tensor = mesh["tp"]
        axis = Axis(tensor.get_group(), tensor.size(), tensor.get_local_rank(), splits_sequences)
        split_parameters(module, cuts, tensor, axis)
    for path, mode in blocks.items():
        recompute(module.get_submodule(path), mode)
    copies = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduction_dtype)
    for part in (*(module.get_submodule(path) for path in blocks), module):
        fully_shard(part, mesh=copies, mp_policy=policy, reshard_after_forward=zero == 3)
    take_whole_states(module)
    if axis is not None:
        for path in blocks:
            _let_parts_through(module.get_submodule(path))
        _show_while_running(module)
    return axis


def _show_while_running(module: Any) -> None:
    """Behind FSDP2's own hook, which wants to see what is stored."""
    runs: list[Any] = []

    def entering(*_: Any) -> None:
        runs.append(showing())
        runs[-1].__enter__()

    def leaving(*_: Any) -> None:
        if runs:  # none where an earlier hook failed
            runs.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(entering)
    module.register_forward_hook(leaving, always_call=True)


def synchronise(module: Any, zero: int, *, is_last: bool) -> None:
    """What the backward of a microbatch does between copies.

    From ZeRO 2 on gradients are reduced after every one, below after the last; parameters stay gathered until then
    below ZeRO 3.
    """
    module.set_requires_gradient_sync(zero >= 2 or is_last)
    module.set_reshard_after_backward(zero == 3 or is_last)


def recompute(block: Any, mode: str) -> None:
    """Run a block's forward again in backward: all of it, or only `scaled_dot_product_attention`.

    Attention that a model writes out as products and a softmax is kept by the selective mode.
    """
    if mode == "full":
        block.forward = functools.partial(checkpoint, showing()(block.forward), use_reentrant=False)
    elif mode == "selective":
        block.forward = functools.partial(_with_attention_again, block.forward)


class _AttentionAgain(TorchFunctionMode):
    """Keeps what enters attention, and computes the rest of it again in backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return checkpoint(func, *args, use_reentrant=False, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _with_attention_again(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with _AttentionAgain():
        return forward(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Part:
    """A split tensor in a form that FSDP2 looks into: it ties its hooks to tensors that autograd knows."""

    local: torch.Tensor
    how: tuple[Any, ...]


def _open_parts(_: Any, args: Any, kwargs: Any) -> Any:
    def opened(leaf: Any) -> Any:
        if not isinstance(leaf, SplitTensor):
            return leaf
        return _Part(leaf.local, (leaf.axis, tuple(leaf.shape), leaf.dim_, leaf.outer))

    return tree_map(opened, (args, kwargs), is_leaf=is_split)


def _close_parts(_: Any, args: Any, kwargs: Any) -> Any:
    def closed(leaf: Any) -> Any:
        return SplitTensor(leaf.local, *leaf.how) if isinstance(leaf, _Part) else leaf

    return tree_map(closed, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, _Part))


def _let_parts_through(module: Any) -> None:
    """Around FSDP2's own hook, which runs first of those there are."""
    module.register_forward_pre_hook(_open_parts, prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(_close_parts, with_kwargs=True)
