"""Ring attention: keys and values of a split sequence go around the devices of a context, and meet the queries of each.

Every device holds some positions of queries, keys and values [batch, heads, positions, width]. In n - 1 steps each of
them hands the keys and values that it has to the next device, behind the kernel of the block that it computes with them
(arXiv:2310.01889). Blocks are merged by the logarithms of their sums of exponentials: with results o_b and l_b = log of
the sum over the keys of block b,

    l = log(sum over b of exp(l_b)),    o = sum over b of exp(l_b - l) o_b.

Backward, keys and values go around again. Block b's share of all gradients follows from o and l (`_backward_of_block`);
those of its keys and values are added up on the way: they start on the device behind the owner and are at home after
n - 1 steps. Nothing of other devices is kept between forward and backward.

Causal attention between parts is all or nothing, but on the diagonal. On a balanced axis (see `split_collectives`) a
device has an early and a late part: all of its queries meet the early keys of devices before it, and its late queries
all keys of devices behind it, so that every device does equal work in every step. On other axes devices skip the blocks
of those behind them.

`can_run` says which attentions it computes: no mask, no dropout, equal widths, and a fused kernel of torch that returns
sums of exponentials. This file needs torch alone: target 'fsdp' exports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from phaze.backends.torch.split_collectives import Axis

__all__ = ["can_run", "ring_attention"]

_HEADS, _POSITIONS = -3, -2
"""Dimensions of the operands, counted from the right."""

_WIDTHS = 8
"""torch's fused kernel for CUDA takes widths of heads that are multiples of this."""


def can_run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether these parts have four dimensions, equal widths and types, and a kernel on their device."""
    if query.dim() != 4 or not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return False
    if key.shape[:-1] != value.shape[:-1] or len(query) != len(key) or query.shape[_HEADS] % key.shape[_HEADS]:
        return False
    if query.device.type == "cpu":
        return True
    has_kernel = query.device.type == "cuda" and query.shape[-1] % _WIDTHS == 0
    return has_kernel and _kernel_dtype(query) in (torch.float16, torch.bfloat16)


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    axis: Axis,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """The attention of this device's queries to the keys of all devices of the axis, each of which gives its part.

    Keys and values may have fewer heads than queries. Causal attention takes queries and keys of equal positions.
    """
    dtype = _kernel_dtype(query)
    operands = (operand.to(dtype) for operand in (query, key, value))
    result: torch.Tensor = _RingAttention.apply(*operands, axis, is_causal, scale)
    return result


def _kernel_dtype(query: torch.Tensor) -> torch.dtype:
    """The type in which torch's own attention would compute."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


class _Block(NamedTuple):
    """The queries and the keys of a block that meet, and whether they do so causally."""

    rows: slice
    columns: slice
    is_causal: bool


_ALL = slice(None)


def _block(axis: Axis, owner: int, length: int, is_causal: bool) -> _Block | None:
    """What of this device's queries meets the keys of another one; None where nothing does.

    `length` is that of a device's part.
    """
    if not is_causal or owner == axis.index:
        return _Block(_ALL, _ALL, is_causal)  # positions of a part stand in order, also where it has two stretches
    if not axis.is_balanced:
        return _Block(_ALL, _ALL, False) if owner < axis.index else None
    half = length // 2
    return _Block(_ALL, slice(half), False) if owner < axis.index else _Block(slice(half, None), _ALL, False)


class _Sent:
    """Tensors of one shape and type on their way to the next device, and those of the one before on theirs to this."""

    def __init__(self, tensors: Sequence[torch.Tensor], axis: Axis) -> None:
        self._sent = torch.stack(tuple(tensors))
        self._received = torch.empty_like(self._sent)
        following, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=axis.group, group_peer=following),
                dist.P2POp(dist.irecv, self._received, group=axis.group, group_peer=before),
            ]
        )

    def arrived(self) -> Iterator[torch.Tensor]:
        """What the device before sent, once it is here."""
        for work in self._works:
            work.wait()
        return iter(self._received.unbind())


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        axis: Axis,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        result = torch.zeros_like(query, dtype=wide)
        sums = torch.full(query.shape[:-1], float("-inf"), dtype=wide, device=query.device)
        keys, values = key, value
        for step in range(axis.size):
            is_last = step == axis.size - 1
            sent = None if is_last else _Sent((keys, values), axis)
            block = _block(axis, (axis.index - step) % axis.size, query.shape[_POSITIONS], is_causal)
            if block is not None:
                rows = query[:, :, block.rows]
                part, part_sums = _forward_of_block(rows, keys, values, block, scale)
                _merge(result[:, :, block.rows], sums[:, :, block.rows], part.to(wide), part_sums.to(wide))
            if sent is not None:
                keys, values = sent.arrived()
        result = result.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.axis, ctx.is_causal, ctx.scale = axis, is_causal, scale
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, sums = ctx.saved_tensors
        axis: Axis = ctx.axis
        of_query = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        keys, values = key, value
        at_home: tuple[torch.Tensor, ...] = ()
        coming: _Sent | None = None
        for step in range(axis.size):
            sent = _Sent((keys, values), axis) if step < axis.size - 1 else None
            block = _block(axis, (axis.index - step) % axis.size, query.shape[_POSITIONS], ctx.is_causal)
            of_keys = torch.zeros_like(keys), torch.zeros_like(values)
            if block is not None:
                of_rows = of_query[:, :, block.rows]
                operands = (part[:, :, block.rows].contiguous() for part in (gradient, query, result, sums))
                _backward_of_block(of_rows, of_keys, tuple(operands), (keys, values), block, ctx.scale)
            if step == 0:
                at_home = of_keys
            else:
                if coming is not None:
                    of_keys = tuple(map(torch.add, of_keys, coming.arrived()))
                coming = _Sent(of_keys, axis)
            if sent is not None:
                keys, values = sent.arrived()
        if coming is not None:
            at_home = tuple(map(torch.add, at_home, coming.arrived()))
        return of_query.to(query.dtype), *at_home, None, None, None


def _merge(result: torch.Tensor, sums: torch.Tensor, part: torch.Tensor, part_sums: torch.Tensor) -> None:
    """Add a block to a result in place; sums of exponentials are given by their logarithms."""
    total = torch.logaddexp(sums, part_sums)
    result.mul_((sums - total).exp().unsqueeze(-1)).add_(part * (part_sums - total).exp().unsqueeze(-1))
    sums.copy_(total)


# ------------------------------------------------------------------------------------------------ torch's kernels


def _forward_of_block(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: _Block, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a block, and the logarithms of its sums of exponentials."""
    aten, heads = torch.ops.aten, rows.shape[_HEADS]
    columns = [_repeated(tensor[:, :, block.columns], heads) for tensor in (keys, values)]
    if rows.is_cuda:
        answers = aten._scaled_dot_product_flash_attention(rows, *columns, 0.0, block.is_causal, False, scale=scale)
    else:
        answers = aten._scaled_dot_product_flash_attention_for_cpu(rows, *columns, 0.0, block.is_causal, scale=scale)
    return answers[0], answers[1]


def _backward_of_block(
    of_rows: torch.Tensor,
    of_keys: tuple[torch.Tensor, torch.Tensor],
    operands: tuple[torch.Tensor, ...],
    keys: tuple[torch.Tensor, torch.Tensor],
    block: _Block,
    scale: float | None,
) -> None:
    """Add a block's share of all gradients in place, where they lie in those of the block's rows and of all its keys.

    `operands` are what the rows have: gradients of results, queries, results and sums of all blocks.
    """
    gradient, rows, result, sums = operands
    aten, heads = torch.ops.aten, rows.shape[_HEADS]
    columns = [_repeated(tensor[:, :, block.columns], heads) for tensor in keys]
    if rows.is_cuda:
        places = [torch.zeros((), dtype=torch.int64, device=rows.device)] * 2  # of random numbers, which nothing draws
        lengths = (None, None, rows.shape[_POSITIONS], columns[0].shape[_POSITIONS])
        settings = (*lengths, 0.0, block.is_causal, *places)
        answers = aten._scaled_dot_product_flash_attention_backward(
            gradient, rows, *columns, result, sums, *settings, scale=scale
        )
    else:
        answers = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, rows, *columns, result, sums, 0.0, block.is_causal, scale=scale
        )
    of_rows.add_(answers[0])
    for total, share in zip(of_keys, answers[1:3], strict=True):
        total[:, :, block.columns].add_(share.unflatten(_HEADS, (total.shape[_HEADS], -1)).sum(_HEADS))


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values with as many heads as queries have: each is repeated for those that it serves."""
    ways = heads // tensor.shape[_HEADS]
    return tensor.repeat_interleave(ways, _HEADS) if ways > 1 else tensor
