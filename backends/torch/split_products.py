"""How products, embeddings, cross entropy and attention run on split tensors, and where devices sum or exchange.

Rules by function: `linear`, `addmm`, `matmul` and `baddbmm` (products), `embedding`, `cross_entropy` and
`scaled_dot_product_attention`.

Products, embeddings and cross entropy. A sum over devices is taken where its partial results arise
(`sum_over_devices`): it is whole on every device or, under sequence parallelism, scattered along dimension 1.

Attention runs over heads in tensor parallelism and over positions in context parallelism. Operands are [batch, heads,
positions, width]. Where heads are split, every device computes its own. Where positions are split, each device has some
queries, and keys and values meet them in one of three ways (`KEY_EXCHANGE`): they are gathered; they go around the
devices in a ring (`ring_attention`); or queries, keys and values are exchanged so that each device has some heads of
all positions. Keys that cannot go around or be exchanged (with a mask of each head, for one) are gathered. Causal
attention computes for each stretch of a device's positions only the keys up to its end.

This file needs torch alone: target 'fsdp' exports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from phaze.backends.torch import ring_attention
from phaze.backends.torch.split_collectives import Axis, chunk_sizes, exchanged
from phaze.backends.torch.split_tensor import (
    NoRule,
    SplitTensor,
    TorchFunction,
    all_reduced,
    copied,
    is_split,
    reduce_scattered,
    rule_for,
    scattered,
    to_whole,
)

__all__ = ["ALL_TO_ALL", "KEY_EXCHANGE", "RING", "note_key_exchanges", "sum_over_devices"]


def sum_over_devices(partial: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum partial results [batch, sequence, ...] over devices, scattered along the sequence where sequences are split.

    A result without a sequence, or with one that the devices do not divide, is whole.
    """
    is_scattered = axis.splits_sequences and partial.dim() >= 3 and partial.shape[1] % axis.size == 0
    if not is_scattered:
        return all_reduced(partial, axis)
    return SplitTensor(reduce_scattered(partial, axis, 1), axis, partial.shape, 1)


def _whole_operand(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The whole of an operand for a product that works on parts: its gradient is summed over devices."""
    return value.whole(sums_gradient=True) if is_split(value) else copied(value, axis)


@rule_for("linear")
def linear(
    func: TorchFunction, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x[..., i] weight[o, i] -> [..., o].

    A weight split along o gives a result split along o; one split along i gives partial results, which are summed.
    """
    if not is_split(weight):
        return _linear_of_split_rows(func, x, weight, bias)
    axis = weight.axis
    if weight.split_dim == 0:
        local_bias = None if bias is None else weight.matching_part(bias, 0)
        local = F.linear(_whole_operand(x, axis), weight.local, local_bias)
        return weight.with_part(local, (*x.shape[:-1], weight.length), len(x.shape) - 1)
    local_x = weight.matching_part(x, len(x.shape) - 1)
    total = sum_over_devices(F.linear(local_x, weight.local), axis)
    return total if bias is None else total + to_whole(bias)


def _linear_of_split_rows(
    func: TorchFunction, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """A whole weight applied to rows that are split, such as those of a split sequence."""
    if not is_split(x) or x.split_dim == len(x.shape) - 1:
        raise NoRule
    bias = None if bias is None else copied(to_whole(bias), x.axis)
    local = func(x.local, copied(weight, x.axis), bias)
    return x.with_part(local, (*x.shape[:-1], weight.shape[0]))


@rule_for("addmm")
def addmm(
    func: TorchFunction, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **kwargs: object
) -> torch.Tensor:
    """bias[o] + x[r, i] weight[i, o]; the rows r are (batch sequence)."""
    if kwargs or len(bias.shape) != 1:
        raise NoRule
    return linear(F.linear, x, weight.t(), bias)


@rule_for("matmul", "bmm", "mm", "__matmul__")
def matmul(func: TorchFunction, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left[..., r, i] right[..., i, c] -> [..., r, c], with equally many leading dimensions.

    The result is split as the first split operand is: along a leading dimension, along r or along c.
    """
    if len(right.shape) == 2:
        return linear(F.linear, left, right.t())
    if len(left.shape) != len(right.shape) or len(left.shape) < 2:
        raise NoRule
    leader = left if is_split(left) else right
    rank = len(left.shape)
    shape = (*torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    if leader.split_dim < rank - 2:  # heads, or whatever the products are batched over
        local_left = leader.matching_part(left, leader.split_dim)
        return leader.with_part(torch.matmul(local_left, leader.matching_part(right, leader.split_dim)), shape)
    if leader is left and left.split_dim == rank - 2:
        return left.with_part(torch.matmul(left.local, _whole_operand(right, left.axis)), shape)
    if leader is right and right.split_dim == rank - 1:
        return right.with_part(torch.matmul(_whole_operand(left, right.axis), right.local), shape)
    raise NoRule


@rule_for("baddbmm")
def baddbmm(
    func: TorchFunction,
    added: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """A scaled product, and a scaled sum."""
    product = torch.matmul(batch1, batch2) * alpha
    return product if beta == 0 else product + added * beta  # beta=0 ignores even NaN in `added`, as torch does


@rule_for("embedding")
def embedding(
    func: TorchFunction,
    ids: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Rows of a table. Where rows are split, every device looks up those that it holds, and the results are summed.

    Where the width is split, the results are gathered. Split ids of a whole table give results that are split as the
    ids are.
    """
    if max_norm or scale_grad_by_freq or sparse or is_split(weight) == is_split(ids):
        raise NoRule
    if is_split(ids):
        local = F.embedding(ids.local, copied(weight, ids.axis), padding_idx)
        return ids.with_part(local, (*ids.shape, weight.shape[1]))
    assert is_split(weight)
    if weight.split_dim == 0 and weight.outer > 1:
        raise NoRule
    if weight.split_dim == 1:
        local = F.embedding(ids, weight.local, padding_idx)
        # Gathered at once, as plans have it: kept in parts, each projection of the residual stream would gather it.
        return weight.with_part(local, (*ids.shape, weight.length), len(ids.shape)).whole()
    local_ids, is_local = _local_rows(ids, weight)
    rows = F.embedding(local_ids, weight.local) * is_local.unsqueeze(-1)
    if padding_idx is not None:
        is_padding = (ids == padding_idx % weight.length).unsqueeze(-1)
        rows = torch.where(is_padding, rows.detach(), rows)  # the padding's row gets no gradient
    return sum_over_devices(rows, weight.axis)


def _local_rows(ids: torch.Tensor, table: SplitTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row lies in this device's part (0 where it does not), and whether it lies there."""
    sizes = chunk_sizes(table.length, table.axis.size)
    start, count = sum(sizes[: table.axis.index]), sizes[table.axis.index]
    is_local = (ids >= start) & (ids < start + count)
    return torch.where(is_local, ids - start, 0), is_local


@rule_for("cross_entropy")
def cross_entropy(
    func: TorchFunction,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The cross entropy of logits [rows, classes] that are split by class, or of any that are split by row.

    By class, three numbers per row are reduced over devices: the largest logit, the sum of exponentials and the
    target's logit. By row, losses are summed over devices, and divided by how many rows of all devices count.
    """
    is_known = weight is None and size_average is None and reduce is None and is_split(logits)
    if not is_known or target.is_floating_point() or reduction not in ("mean", "sum", "none"):
        raise NoRule
    assert is_split(logits)
    if logits.split_dim != 1:
        return _cross_entropy_of_rows(logits, target, ignore_index, reduction, label_smoothing)
    if len(logits.shape) != 2 or logits.outer != 1 or label_smoothing != 0.0:
        raise NoRule
    axis, local = logits.axis, logits.local.float()
    largest = local.detach().amax(-1)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=axis.group)
    shifted = local - largest.unsqueeze(-1)
    exponentials = all_reduced(shifted.exp().sum(-1), axis)
    is_counted = target != ignore_index
    local_target, is_local = _local_rows(torch.where(is_counted, target, 0), logits)
    target_logit = all_reduced(shifted.gather(-1, local_target.unsqueeze(-1)).squeeze(-1) * is_local, axis)
    losses = torch.where(is_counted, exponentials.log() - target_logit, 0.0)
    if reduction == "mean":
        losses = losses.sum() / is_counted.sum()
    return (losses.sum() if reduction == "sum" else losses).to(logits.dtype)


def _cross_entropy_of_rows(
    logits: SplitTensor, target: torch.Tensor, ignore_index: int, reduction: str, label_smoothing: float
) -> torch.Tensor:
    """The cross entropy of logits that are split along any dimension but that of classes, which is the second."""
    dim = max(0, logits.split_dim - 1)  # targets have no classes
    local_target = logits.matching_part(target, dim)
    how = "none" if reduction == "none" else "sum"
    local = F.cross_entropy(
        logits.local, local_target, ignore_index=ignore_index, reduction=how, label_smoothing=label_smoothing
    )
    if reduction == "none":
        return logits.with_part(local, target.shape, dim)
    total = all_reduced(local, logits.axis)
    if reduction == "sum":
        return total
    counted = (to_whole(local_target) != ignore_index).sum()
    torch.distributed.all_reduce(counted, group=logits.axis.group)
    return total / counted


GATHER, ALL_TO_ALL, RING = "all_gather", "all_to_all", "ring"
KEY_EXCHANGE: ContextVar[str] = ContextVar("key_exchange", default=GATHER)
"""How keys meet the queries of all contexts in the module that runs: "all_gather", "ring" or "all_to_all"."""

_HEADS, _POSITIONS = -3, -2
"""Dimensions of the operands, counted from the right."""


def note_key_exchanges(module: torch.nn.Module, exchanges: Mapping[str, str]) -> None:
    """Let the attention inside of each module that is named here exchange its keys as it says; others gather them."""

    def before_forward(_: torch.nn.Module, __: object, *, way: str) -> None:
        KEY_EXCHANGE.set(way)

    def after_forward(*_: object) -> None:
        KEY_EXCHANGE.set(GATHER)

    known = dict(module.named_modules())
    for path, way in exchanges.items():
        if path in known:
            known[path].register_forward_pre_hook(partial(before_forward, way=way))
            known[path].register_forward_hook(after_forward, always_call=True)


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
    if attn_mask is None:
        operands, kwargs["enable_gqa"] = _before_repetition(operands, enable_gqa=bool(kwargs.get("enable_gqa")))
    parts = _parts_of_device(operands)
    if KEY_EXCHANGE.get() == ALL_TO_ALL and parts and _can_exchange(parts, query.axis, attn_mask):
        return _by_exchange(func, operands, attn_mask, {**kwargs, "is_causal": is_causal})
    if KEY_EXCHANGE.get() == RING and parts and _can_go_around(operands, parts, attn_mask, is_causal, kwargs):
        return _by_ring(query, parts, is_causal, kwargs.get("scale"))
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


def _before_repetition(
    operands: tuple[torch.Tensor, ...], *, enable_gqa: bool
) -> tuple[tuple[torch.Tensor, ...], bool]:
    """Keys and values as they were before they were repeated for the heads of queries, and whether heads share them."""
    query, *repeated = operands
    known = [source for operand in repeated if (source := _source_of_heads(operand)) is not None]
    heads = {source.shape[_HEADS] for source in known}
    if enable_gqa or len(known) != len(repeated) or len(heads) != 1 or query.shape[_HEADS] % heads.pop():
        return operands, enable_gqa
    return (query, *known), True


def _source_of_heads(value: torch.Tensor) -> SplitTensor | None:
    """The tensor that has each of a split tensor's heads once, where only heads are repeated."""
    source = value.unrepeated if is_split(value) else None
    if source is None or len(source.shape) != len(value.shape) or source.split_dim != value.split_dim:
        return None
    differing = [dim - len(value.shape) for dim, size in enumerate(value.shape) if size != source.shape[dim]]
    return source if differing == [_HEADS] else None


def _parts_of_device(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What this device holds of queries, keys and values that are split over positions; empty where it is otherwise.

    Another axis splits nothing of them, or the heads of all three evenly.
    """
    parts, over_heads = [], set()
    for operand in operands:
        if not is_split(operand) or operand.split_dim - len(operand.shape) != _POSITIONS or operand.outer != 1:
            return []
        local = operand.local
        over_heads.add(isinstance(local, SplitTensor))
        if isinstance(local, SplitTensor):
            if (local.split_dim - len(local.shape), local.outer) != (_HEADS, 1) or not local.is_even:
                return []
            local = local.local
        parts.append(local)
    return parts if len(over_heads) == 1 else []


def _can_exchange(parts: Sequence[torch.Tensor], axis: Axis, attn_mask: torch.Tensor | None) -> bool:
    """Whether contexts divide the heads that a device holds of every operand."""
    if attn_mask is not None and len(attn_mask.shape) >= 3 and attn_mask.shape[_HEADS] != 1:
        return False
    return not any(part.shape[_HEADS] % axis.size for part in parts)


def _by_exchange(
    func: TorchFunction, operands: tuple[torch.Tensor, ...], attn_mask: torch.Tensor | None, kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Every device computes some heads with all positions of queries, keys and values."""
    query = operands[0]
    assert is_split(query)
    axis = query.axis
    exchange = partial(_exchange_heads, axis=axis, rank=len(query.shape))
    inside = [exchange(operand.local) for operand in operands if is_split(operand)]
    whole_mask = None if attn_mask is None else copied(to_whole(attn_mask), axis)
    if isinstance(whole_mask, SplitTensor):
        raise NoRule
    result = exchange(func(*inside, whole_mask, **kwargs), is_back=True)
    return _with_result(query, result)


def _with_result(query: SplitTensor, result: torch.Tensor) -> SplitTensor:
    """What this device has of the results, split as the queries are."""
    local, width = query.local, result.shape[-1]
    if isinstance(local, SplitTensor):
        result = local.with_part(result, (*local.shape[:-1], width))
    return query.with_part(result, (*query.shape[:-1], width))


def _exchange_heads(local: torch.Tensor, axis: Axis, rank: int, *, is_back: bool = False) -> torch.Tensor:
    """Some heads of all positions for all heads of some positions, of what this device holds."""
    plain = local.local if isinstance(local, SplitTensor) else local
    return exchanged(plain, axis, gathered=rank + _POSITIONS, divided=rank + _HEADS, is_back=is_back)


def _can_go_around(
    operands: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    kwargs: Mapping[str, Any],
) -> bool:
    """Whether `ring_attention` computes it: no mask, no dropout, and equal positions where it is causal."""
    if attn_mask is not None or kwargs.get("dropout_p") or not ring_attention.can_run(*parts):
        return False
    query, key, _ = operands
    if query.shape[_HEADS] != key.shape[_HEADS] and not kwargs.get("enable_gqa"):
        return False
    return not is_causal or query.shape[_POSITIONS] == key.shape[_POSITIONS]


def _by_ring(query: SplitTensor, parts: Sequence[torch.Tensor], is_causal: bool, scale: float | None) -> torch.Tensor:
    """Keys and values go around the devices, each of which computes its own queries block by block."""
    queries, keys, values = parts
    result = ring_attention.ring_attention(queries, keys, values, query.axis, is_causal=is_causal, scale=scale)
    return _with_result(query, result)
