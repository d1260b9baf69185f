"""How products, lookups, attention and losses work on parts: where sums over devices are owed.

A sum is settled where it is made: whole on every device, or, where sequences are split, scattered along dimension 1.

This file needs torch alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from phaze.backends.torch.split_collectives import Axis, chunks, copied, parted, scattered_sum, summed
from phaze.backends.torch.split_tensor import NoRule, SplitTensor, rule_for

__all__ = ["settled"]


def settled(partial: torch.Tensor, axis: Axis) -> Any:
    """The sum over devices of results [batch, sequence, ...]: scattered along the sequence where those are split."""
    is_split = axis.splits_sequences and partial.dim() >= 3 and partial.shape[1] % axis.size == 0
    if not is_split:
        return summed(partial, axis)
    return SplitTensor(scattered_sum(partial, axis, 1), axis, partial.shape, 1)


def _for_parts(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A whole operand of a product that works on parts."""
    return value.whole(sums=True) if isinstance(value, SplitTensor) else copied(value, axis)


@rule_for("linear")
def linear(func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """x[..., i] weight[o, i] -> [..., o]."""
    if not isinstance(weight, SplitTensor):
        return _rows(func, x, weight, bias)
    axis = weight.axis
    if weight.dim_ == 0:
        local_bias = None if bias is None else weight.part(bias, 0)
        made = F.linear(_for_parts(x, axis), weight.local, local_bias)
        return weight.like(made, (*x.shape[:-1], weight.length), len(x.shape) - 1)
    total = settled(F.linear(_contracted(weight, x), weight.local), axis)
    return total if bias is None else total + _plain(bias)


def _plain(value: Any) -> Any:
    return value.whole() if isinstance(value, SplitTensor) else value


def _contracted(weight: SplitTensor, x: Any) -> torch.Tensor:
    """The part of x along its last dimension that meets the weight's."""
    return weight.part(x, len(x.shape) - 1)


def _rows(func: Any, x: Any, weight: Any, bias: Any) -> Any:
    """A whole weight on rows that are split."""
    if not isinstance(x, SplitTensor) or x.dim_ == len(x.shape) - 1:
        raise NoRule
    bias = None if bias is None else copied(_plain(bias), x.axis)
    made = func(x.local, copied(weight, x.axis), bias)
    return x.like(made, (*x.shape[:-1], weight.shape[0]))


@rule_for("addmm")
def addmm(func: Any, bias: Any, x: Any, weight: Any, **kwargs: Any) -> Any:
    """bias[o] + x[r, i] weight[i, o]; the rows r are (batch sequence)."""
    if kwargs or len(bias.shape) != 1:
        raise NoRule
    return linear(F.linear, x, weight.t(), bias)


@rule_for("matmul", "bmm", "mm", "__matmul__")
def matmul(func: Any, left: Any, right: Any) -> Any:
    """Products of the last two dimensions, for every element of equal leading ones."""
    if len(right.shape) == 2:
        return linear(F.linear, left, right.t())
    if len(left.shape) != len(right.shape) or len(left.shape) < 2:
        raise NoRule
    first = left if isinstance(left, SplitTensor) else right
    rank = len(left.shape)
    shape = (*torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    if first.dim_ < rank - 2:  # heads, or whatever the products are batched over
        made = torch.matmul(first.part(left, first.dim_), first.part(right, first.dim_))
        return first.like(made, shape)
    if first is left and left.dim_ == rank - 2:
        made = torch.matmul(left.local, copied(_plain(right), left.axis))
        return left.like(made, shape)
    if first is right and right.dim_ == rank - 1:
        made = torch.matmul(copied(_plain(left), right.axis), right.local)
        return right.like(made, shape)
    raise NoRule


@rule_for("baddbmm")
def baddbmm(func: Any, added: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """A product, scaled, and a sum."""
    product = torch.matmul(left, right) * alpha
    return product if beta == 0 else product + added * beta


@rule_for("scaled_dot_product_attention")
def attention(func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Split over heads: dimension 1 of [batch, heads, positions, width]."""
    first = next(one for one in (query, key, value, attn_mask) if isinstance(one, SplitTensor))
    if first.dim_ != len(first.shape) - 3 or first.outer != 1:
        raise NoRule
    heads = {len(one.shape) - 3: one.shape[-3] for one in (query, key, value)}
    if any(one.shape[-3] % first.axis.size for one in (query, key, value)) or len(heads) > 1:
        raise NoRule
    cut = [_heads(one, first) for one in (query, key, value)]
    if attn_mask is not None:
        attn_mask = _heads(attn_mask, first) if len(attn_mask.shape) >= 3 else copied(attn_mask, first.axis)
    made = func(*cut, attn_mask, *args, **kwargs)
    shape = (*query.shape[:-1], value.shape[-1])
    return first.like(made, shape, len(shape) - 3)


def _heads(value: Any, first: SplitTensor) -> torch.Tensor:
    """The part of some heads, however many there are of them."""
    dim = len(value.shape) - 3
    if isinstance(value, SplitTensor):
        if (value.dim_, value.outer) == (dim, 1):
            return value.local
        value = value.whole()
    return copied(value, first.axis) if value.shape[dim] == 1 else parted(value, first.axis, dim)


@rule_for("embedding")
def embedding(func: Any, ids: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows looked up: of a table split by rows every device finds its own, and the rest is a sum."""
    if not isinstance(weight, SplitTensor) or isinstance(ids, SplitTensor) or (weight.dim_ == 0 and weight.outer > 1):
        raise NoRule
    if any(kwargs.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")) or any(args[1:]):
        raise NoRule
    if weight.dim_ == 1:
        padding = kwargs.get("padding_idx", args[0] if args else None)
        made = F.embedding(ids, weight.local, padding)
        return weight.like(made, (*ids.shape, weight.length), len(ids.shape))
    padding = kwargs.get("padding_idx", args[0] if args else None)
    own, is_own = _own_rows(ids, weight)
    table = weight.local
    found = F.embedding(own, table) * is_own.unsqueeze(-1)
    if padding is not None:
        is_padding = (ids == padding % weight.length).unsqueeze(-1)
        found = torch.where(is_padding, found.detach(), found)
    return settled(found, weight.axis)


def _own_rows(ids: torch.Tensor, table: SplitTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in this device's part each row lies, and whether it does."""
    sizes = chunks(table.length, table.axis.size)
    start, count = sum(sizes[: table.axis.index]), sizes[table.axis.index]
    is_own = (ids >= start) & (ids < start + count)
    return torch.where(is_own, ids - start, 0), is_own


@rule_for("cross_entropy")
def cross_entropy(
    func: Any,
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Of logits [rows, classes] split by class: the largest, the sum of powers and the target's are reduced."""
    is_known = weight is None and label_smoothing == 0.0 and size_average is None and reduce is None
    if not is_known or not isinstance(logits, SplitTensor) or len(logits.shape) != 2 or logits.dim_ != 1:
        raise NoRule
    if logits.outer != 1 or target.is_floating_point() or reduction not in ("mean", "sum", "none"):
        raise NoRule
    axis, local = logits.axis, logits.local.float()
    largest = local.detach().amax(-1)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=axis.group)
    shifted = local - largest.unsqueeze(-1)
    total = summed(shifted.exp().sum(-1), axis)
    is_counted = target != ignore_index
    own, is_own = _own_rows(torch.where(is_counted, target, 0), logits)
    picked = summed(shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1) * is_own, axis)
    losses = torch.where(is_counted, total.log() - picked, 0.0)
    if reduction == "mean":
        losses = losses.sum() / is_counted.sum()
    return (losses.sum() if reduction == "sum" else losses).to(logits.dtype)
