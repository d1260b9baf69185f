"""How attention runs on split tensors: over heads in tensor parallelism, over positions in context parallelism.

Operands are [batch, heads, positions, width]. Where heads are split, every device computes its own. Where positions
are split, each device has some queries, and keys and values meet them in one of two ways (`KEY_EXCHANGE`): keys and
values are gathered, or queries, keys and values are exchanged so that each device has some heads of all positions.
Causal attention computes for each stretch of a device's positions only the keys up to its end.

This file needs torch alone: target 'fsdp' exports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from phaze.backends.torch.split_collectives import Axis, exchanged
from phaze.backends.torch.split_tensor import (
    NoRule,
    SplitTensor,
    TorchFunction,
    copied,
    is_split,
    rule_for,
    scattered,
    to_whole,
)

__all__ = ["ALL_TO_ALL", "KEY_EXCHANGE", "note_key_exchanges"]

ALL_TO_ALL = "all_to_all"
KEY_EXCHANGE: ContextVar[str] = ContextVar("key_exchange", default="all_gather")
"""How keys meet the queries of all contexts in the module that runs: "all_gather" or "all_to_all"."""

_HEADS, _POSITIONS = -3, -2
"""Dimensions of the operands, counted from the right."""


def note_key_exchanges(module: torch.nn.Module, exchanges: Mapping[str, str]) -> None:
    """Let the attention inside of each module that is named here exchange its keys as it says."""

    def before_forward(_: torch.nn.Module, __: object, *, way: str) -> None:
        KEY_EXCHANGE.set(way)

    known = dict(module.named_modules())
    for path, way in exchanges.items():
        if path in known:
            known[path].register_forward_pre_hook(partial(before_forward, way=way))


@rule_for("scaled_dot_product_attention")
def attention(
    func: TorchFunction,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention split over heads or over positions; any other split, or operands of several ranks, are not known."""
    operands = (query, key, value)
    leader = next(operand for operand in (*operands, attn_mask) if is_split(operand))
    if len({len(operand.shape) for operand in operands}) != 1 or leader.outer != 1:
        raise NoRule
    kwargs["dropout_p"] = dropout_p
    if leader.split_dim - len(leader.shape) == _HEADS:
        return _over_heads(func, operands, attn_mask, leader, {**kwargs, "is_causal": is_causal})
    if not is_split(query) or query.split_dim - len(query.shape) != _POSITIONS:
        raise NoRule
    if KEY_EXCHANGE.get() == ALL_TO_ALL and _can_exchange(operands, attn_mask):
        return _by_exchange(func, operands, attn_mask, {**kwargs, "is_causal": is_causal})
    return _by_gather(func, operands, attn_mask, is_causal, kwargs)


def _over_heads(
    func: TorchFunction,
    operands: tuple[torch.Tensor, ...],
    attn_mask: torch.Tensor | None,
    leader: SplitTensor,
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    if any(operand.shape[_HEADS] % leader.axis.size for operand in operands):
        raise NoRule
    local_operands = [_local_heads(operand, leader) for operand in operands]
    if attn_mask is not None:
        has_heads = len(attn_mask.shape) >= 3
        attn_mask = _local_heads(attn_mask, leader) if has_heads else copied(attn_mask, leader.axis)
    local = func(*local_operands, attn_mask, **kwargs)
    shape = (*operands[0].shape[:-1], operands[2].shape[-1])
    return leader.with_part(local, shape, len(shape) + _HEADS)


def _local_heads(value: torch.Tensor, leader: SplitTensor) -> torch.Tensor:
    """This device's heads of an operand; keys and values may have fewer heads than queries, a mask may have one."""
    heads_dim = len(value.shape) + _HEADS
    if is_split(value):
        if (value.split_dim, value.outer) == (heads_dim, 1):
            return value.local
        value = value.whole()
    return copied(value, leader.axis) if value.shape[heads_dim] == 1 else scattered(value, leader.axis, heads_dim)


# ------------------------------------------------------------------------------------------------ over positions


def _by_gather(
    func: TorchFunction,
    operands: tuple[torch.Tensor, ...],
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """Every device computes its own queries with all keys and values."""
    query, axis = operands[0], operands[0].axis
    assert is_split(query)
    key, value = (
        operand.whole(sums_gradient=True) if is_split(operand) else copied(operand, axis) for operand in operands[1:]
    )
    shape = (*query.shape[:-1], value.shape[-1])
    if is_causal:
        return query.with_part(_causal(func, query, key, value, kwargs), shape)
    if attn_mask is not None:
        attn_mask = query.matching_part(attn_mask, len(attn_mask.shape) + _POSITIONS)
    return query.with_part(func(query.local, key, value, attn_mask, **kwargs), shape)


def _causal(
    func: TorchFunction, query: SplitTensor, key: torch.Tensor, value: torch.Tensor, kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Causal attention, stretch by stretch of this device's queries, each with the keys up to its end."""
    results, taken = [], 0
    for start, count in query.axis.spans(query.length):
        end = start + count
        rows = torch.arange(start, end, device=key.device).unsqueeze(-1)
        mask = rows >= torch.arange(end, device=key.device)
        local_query = query.local[..., taken : taken + count, :]
        results.append(func(local_query, key[..., :end, :], value[..., :end, :], mask, **kwargs))
        taken += count
    return results[0] if len(results) == 1 else torch.cat(results, _POSITIONS)


def _can_exchange(operands: tuple[torch.Tensor, ...], attn_mask: torch.Tensor | None) -> bool:
    """Whether contexts divide the heads that a device holds of every operand, and no other axis splits but heads."""
    if attn_mask is not None and len(attn_mask.shape) >= 3 and attn_mask.shape[_HEADS] != 1:
        return False
    for operand in operands:
        if not is_split(operand) or operand.split_dim - len(operand.shape) != _POSITIONS or operand.outer != 1:
            return False
        local = operand.local
        if isinstance(local, SplitTensor):
            if (local.split_dim - len(local.shape), local.outer) != (_HEADS, 1) or not local.is_even:
                return False
            local = local.local
        if local.shape[_HEADS] % operand.axis.size:
            return False
    return True


def _by_exchange(
    func: TorchFunction, operands: tuple[torch.Tensor, ...], attn_mask: torch.Tensor | None, kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Every device computes some heads with all positions of queries, keys and values."""
    query = operands[0]
    assert is_split(query)
    axis, rank = query.axis, len(query.shape)
    exchange = partial(_exchange_heads, axis=axis, rank=rank)
    inside = [exchange(operand.local) for operand in operands if is_split(operand)]
    whole_mask = None if attn_mask is None else copied(to_whole(attn_mask), axis)
    if isinstance(whole_mask, SplitTensor):
        raise NoRule
    result = exchange(func(*inside, whole_mask, **kwargs), is_back=True)
    local = query.local
    shape = (*query.shape[:-1], operands[2].shape[-1])
    if isinstance(local, SplitTensor):
        result = local.with_part(result, (*local.shape[:-1], shape[-1]))
    return query.with_part(result, shape)


def _exchange_heads(local: torch.Tensor, axis: Axis, rank: int, *, is_back: bool = False) -> torch.Tensor:
    """Some heads of all positions for all heads of some positions, of what this device holds."""
    plain = local.local if isinstance(local, SplitTensor) else local
    return exchanged(plain, axis, gathered=rank + _POSITIONS, divided=rank + _HEADS, is_back=is_back)
