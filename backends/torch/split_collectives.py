"""Collectives of tensor parallelism with their gradients: copy, all-reduce, scatter, all-gather, reduce-scatter.

Two facts hold everywhere. A whole tensor has the same value on every device of the axis, and its gradient is whole and
the same on every device too. An operator that works on parts sees only its share of a whole operand's gradient, so the
operand is read through `copied`, which sums the gradient over the devices. A split tensor that is gathered for such an
operator gets its gradient summed and scattered instead (`all_gathered` with `sums_gradient=True`).

| forward | backward | function |
|---|---|---|
| nothing | all-reduce | `copied` |
| all-reduce | nothing | `all_reduced` |
| keep this device's part | all-gather | `scattered` |
| all-gather | keep this device's part, or reduce-scatter | `all_gathered` |
| reduce-scatter | all-gather | `reduce_scattered` |

This file needs torch alone: target 'fsdp' exports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

__all__ = [
    "Axis",
    "all_gathered",
    "all_reduced",
    "chunk_sizes",
    "copied",
    "gather_parts",
    "local_part",
    "reduce_scattered",
    "scattered",
    "shared_gradient_sums",
]

_COPIES: ContextVar[dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] | None] = ContextVar(
    "copies", default=None
)
"""Copies that `copied` made since `shared_gradient_sums` was entered, by the original's id and version.

The original is kept beside its copy, so that no other tensor gets its id meanwhile.
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """The devices that a tensor is split over, and which of them this process has.

    Where the axis `splits_sequences`, sums of partial results are scattered along the sequence (sequence parallelism)
    instead of being whole on every device.
    """

    group: dist.ProcessGroup
    size: int
    index: int
    splits_sequences: bool = False


@contextmanager
def shared_gradient_sums() -> Iterator[None]:
    """Let all operators that read one whole tensor share one all-reduce of its gradient while this is entered."""
    token = _COPIES.set({})
    try:
        yield
    finally:
        _COPIES.reset(token)


def chunk_sizes(length: int, ways: int) -> list[int]:
    """How many of `length` elements each device holds: equal chunks, of which the last are shorter or empty."""
    chunk = -(-length // ways)  # rounded up
    return [max(0, min(chunk, length - chunk * index)) for index in range(ways)]


def local_part(value: torch.Tensor, axis: Axis, dim: int, outer: int) -> torch.Tensor:
    """Take this device's chunk of each of the `outer` equal runs of a dimension; autograd knows nothing of it."""
    run = value.shape[dim] // outer
    sizes = chunk_sizes(run, axis.size)
    runs = value.unflatten(dim, (outer, run))
    start = sum(sizes[: axis.index])
    return runs.narrow(dim + 1, start, sizes[axis.index]).flatten(dim, dim + 1)


def gather_parts(local: torch.Tensor, axis: Axis, dim: int, outer: int, length: int) -> torch.Tensor:
    """Gather a dimension of `length` elements from the parts that devices hold; autograd knows nothing of it."""
    sizes = chunk_sizes(length // outer, axis.size)
    runs = local.unflatten(dim, (outer, local.shape[dim] // outer))
    moved = runs.movedim(dim + 1, 0)
    padded = moved.new_zeros((sizes[0], *moved.shape[1:]))  # all_gather takes equal parts only
    padded[: moved.shape[0]] = moved
    parts = [torch.empty_like(padded) for _ in range(axis.size)]
    dist.all_gather(parts, padded.contiguous(), group=axis.group)
    joined = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return joined.movedim(0, dim + 1).flatten(dim, dim + 1)


def _reduce_scatter(value: torch.Tensor, axis: Axis, dim: int, outer: int) -> torch.Tensor:
    """This device's part of the sum over devices. Unequal parts are summed whole first: no collective takes them."""
    run, rest = divmod(value.shape[dim], outer * axis.size)
    if rest:
        return local_part(_all_reduce(value, axis), axis, dim, outer).contiguous()
    parts = value.unflatten(dim, (outer, axis.size, run)).movedim(dim + 1, 0).contiguous()
    local_sum = torch.empty_like(parts[:1])
    dist.reduce_scatter_tensor(local_sum, parts, group=axis.group)
    return local_sum[0].flatten(dim, dim + 1)


def _all_reduce(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    value = value.contiguous().clone()
    dist.all_reduce(value, group=axis.group)
    return value


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_reduce(gradient, ctx.axis), None


class _AllReduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, axis: Axis) -> torch.Tensor:
        return _all_reduce(value, axis)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, axis: Axis, dim: int, outer: int) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.outer, ctx.length = axis, dim, outer, value.shape[dim]
        return local_part(value, axis, dim, outer).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gather_parts(gradient, ctx.axis, ctx.dim, ctx.outer, ctx.length), None, None, None


class _AllGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, local: torch.Tensor, axis: Axis, dim: int, outer: int, length: int, sums_gradient: bool
    ) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.outer, ctx.sums_gradient = axis, dim, outer, sums_gradient
        return gather_parts(local, axis, dim, outer, length)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.sums_gradient:
            local_gradient = _reduce_scatter(gradient, ctx.axis, ctx.dim, ctx.outer)
        else:
            local_gradient = local_part(gradient, ctx.axis, ctx.dim, ctx.outer).contiguous()
        return local_gradient, None, None, None, None, None


class _ReduceScattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.length = axis, dim, value.shape[dim]
        return _reduce_scatter(value, axis, dim, 1).clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gather_parts(gradient, ctx.axis, ctx.dim, 1, ctx.length), None, None


def copied(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A whole tensor for an operator that works on parts: its gradient is summed over the devices.

    Inside `shared_gradient_sums` all readers of one tensor get the same copy, so that the sum is taken once.
    """
    if not value.requires_grad or not torch.is_grad_enabled():
        return value
    copies, key = _COPIES.get(), (id(value), value._version)
    if copies is not None and key in copies:
        return copies[key][1]
    copy: torch.Tensor = _Copied.apply(value, axis)
    if copies is not None:
        copies[key] = (value, copy)
    return copy


def all_reduced(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of what every device has, whole on every device."""
    total: torch.Tensor = _AllReduced.apply(value, axis)
    return total


def scattered(value: torch.Tensor, axis: Axis, dim: int, outer: int = 1) -> torch.Tensor:
    """This device's part of a whole tensor."""
    local: torch.Tensor = _Scattered.apply(value, axis, dim, outer)
    return local


def all_gathered(
    local: torch.Tensor, axis: Axis, dim: int, outer: int, length: int, *, sums_gradient: bool = False
) -> torch.Tensor:
    """The whole of a split tensor; its gradient is summed over devices where what reads it works on parts."""
    whole: torch.Tensor = _AllGathered.apply(local, axis, dim, outer, length, sums_gradient)
    return whole


def reduce_scattered(value: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This device's part of the sum of what every device has."""
    local_sum: torch.Tensor = _ReduceScattered.apply(value, axis, dim)
    return local_sum
