"""How matrix products, attention, embeddings and cross entropy run on split tensors, and where they sum over devices.

Rules by function: `linear`, `addmm`, `matmul` and `baddbmm` (products), `attention`, `embedding` and `cross_entropy`.
A sum over devices is taken where its partial results arise (`sum_over_devices`): it is whole on every device or, under
sequence parallelism, scattered along dimension 1.

This file needs torch alone: target 'fsdp' exports it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from phaze.backends.torch.split_collectives import (
    Axis,
    all_reduced,
    chunk_sizes,
    copied,
    reduce_scattered,
    scattered,
)
from phaze.backends.torch.split_tensor import NoRule, SplitTensor, TorchFunction, rule_for, to_whole

__all__ = ["sum_over_devices"]


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
    return value.whole(sums_gradient=True) if isinstance(value, SplitTensor) else copied(value, axis)


@rule_for("linear")
def linear(
    func: TorchFunction, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x[..., i] weight[o, i] -> [..., o].

    A weight split along o gives a result split along o; one split along i gives partial results, which are summed.
    """
    if not isinstance(weight, SplitTensor):
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
    if not isinstance(x, SplitTensor) or x.split_dim == len(x.shape) - 1:
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
    leader = left if isinstance(left, SplitTensor) else right
    rank = len(left.shape)
    shape = (*torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    if leader.split_dim < rank - 2:  # heads, or whatever the products are batched over
        local_left = leader.matching_part(left, leader.split_dim)
        return leader.with_part(torch.matmul(local_left, leader.matching_part(right, leader.split_dim)), shape)
    if leader is left and left.split_dim == rank - 2:
        return left.with_part(torch.matmul(left.local, copied(to_whole(right), left.axis)), shape)
    if leader is right and right.split_dim == rank - 1:
        return right.with_part(torch.matmul(copied(to_whole(left), right.axis), right.local), shape)
    raise NoRule


@rule_for("baddbmm")
def baddbmm(
    func: TorchFunction,
    added: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """A scaled product, and a scaled sum."""
    product = torch.matmul(left, right) * alpha
    return product if beta == 0 else product + added * beta  # beta=0 ignores even NaN in `added`, as torch does


@rule_for("scaled_dot_product_attention")
def attention(
    func: TorchFunction,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """Attention split over heads, which are dimension 1 of [batch, heads, positions, width]."""
    operands = (query, key, value)
    leader = next(operand for operand in (*operands, attn_mask) if isinstance(operand, SplitTensor))
    if leader.split_dim != len(leader.shape) - 3 or leader.outer != 1:
        raise NoRule
    has_one_rank = len({len(operand.shape) for operand in operands}) == 1
    if any(operand.shape[-3] % leader.axis.size for operand in operands) or not has_one_rank:
        raise NoRule
    local_operands = [_local_heads(operand, leader) for operand in operands]
    if attn_mask is not None:
        has_heads = len(attn_mask.shape) >= 3
        attn_mask = _local_heads(attn_mask, leader) if has_heads else copied(attn_mask, leader.axis)
    local = func(*local_operands, attn_mask, *args, **kwargs)
    shape = (*query.shape[:-1], value.shape[-1])
    return leader.with_part(local, shape, len(shape) - 3)


def _local_heads(value: torch.Tensor, leader: SplitTensor) -> torch.Tensor:
    """This device's heads of an operand; keys and values may have fewer heads than queries, a mask may have one."""
    heads_dim = len(value.shape) - 3
    if isinstance(value, SplitTensor):
        if (value.split_dim, value.outer) == (heads_dim, 1):
            return value.local
        value = value.whole()
    return copied(value, leader.axis) if value.shape[heads_dim] == 1 else scattered(value, leader.axis, heads_dim)


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
    """Rows of a table. Where rows are split, every device looks up those that it holds, and the results are summed."""
    if not isinstance(weight, SplitTensor) or isinstance(ids, SplitTensor):
        raise NoRule
    if (weight.split_dim == 0 and weight.outer > 1) or max_norm or scale_grad_by_freq or sparse:
        raise NoRule
    if weight.split_dim == 1:
        local = F.embedding(ids, weight.local, padding_idx)
        return weight.with_part(local, (*ids.shape, weight.length), len(ids.shape))
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
    """The cross entropy of logits [rows, classes] that are split by class.

    Three numbers per row are reduced over devices: the largest logit, the sum of exponentials and the target's logit.
    """
    is_known = weight is None and label_smoothing == 0.0 and size_average is None and reduce is None
    if not is_known or not isinstance(logits, SplitTensor) or len(logits.shape) != 2 or logits.split_dim != 1:
        raise NoRule
    if logits.outer != 1 or target.is_floating_point() or reduction not in ("mean", "sum", "none"):
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
