"""Moves between whole and split tensors on one mesh axis, each with its own way back for gradients.

Two facts hold everywhere: a whole tensor has the same value on every device, and so has its gradient, in full. An
operator that works on parts therefore owes its whole operands a sum over devices on the way back (`copied`), and a
tensor that is gathered for such an operator gets its gradient summed and scattered (`gathered` with `sums=True`).

This file needs torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "Axis",
    "chunks",
    "copied",
    "gathered",
    "part_of",
    "parted",
    "scattered_sum",
    "sharing",
    "summed",
    "whole_of",
]

_COPIES: ContextVar[dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] | None] = ContextVar(
    "copies", default=None
)


@dataclass(frozen=True, slots=True)
class Axis:
    """The devices that share a tensor, and which of them this one is.

    Where it `splits_sequences`, sums of partial results are scattered along the sequence instead of being whole.
    """

    group: Any
    size: int
    index: int
    splits_sequences: bool = False


@contextmanager
def sharing() -> Iterator[None]:
    """Inside, operators that read one whole tensor share one sum of its gradients."""
    token = _COPIES.set({})
    try:
        yield
    finally:
        _COPIES.reset(token)


def chunks(length: int, ways: int) -> list[int]:
    """How many of `length` elements each device holds: equal chunks, the last ones shorter or empty."""
    chunk = -(-length // ways)
    return [max(0, min(chunk, length - chunk * index)) for index in range(ways)]


def part_of(value: torch.Tensor, axis: Axis, dim: int, outer: int) -> torch.Tensor:
    """This device's part: its chunk of each of `outer` runs of a dimension. No gradient of its own."""
    run = value.shape[dim] // outer
    sizes = chunks(run, axis.size)
    runs = value.unflatten(dim, (outer, run))
    start = sum(sizes[: axis.index])
    return runs.narrow(dim + 1, start, sizes[axis.index]).flatten(dim, dim + 1)


def whole_of(local: torch.Tensor, axis: Axis, dim: int, outer: int, length: int) -> torch.Tensor:
    """The whole of a dimension of `length` elements, of which every device holds its part. No gradient of its own."""
    sizes = chunks(length // outer, axis.size)
    runs = local.unflatten(dim, (outer, local.shape[dim] // outer))
    moved = runs.movedim(dim + 1, 0)
    padded = moved.new_zeros((sizes[0], *moved.shape[1:]))
    padded[: moved.shape[0]] = moved
    parts = [torch.empty_like(padded) for _ in range(axis.size)]
    dist.all_gather(parts, padded.contiguous(), group=axis.group)
    joined = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return joined.movedim(0, dim + 1).flatten(dim, dim + 1)


def _part_of_sum(value: torch.Tensor, axis: Axis, dim: int, outer: int) -> torch.Tensor:
    """This device's part of the sum over devices; one scatter where parts are equal."""
    run, rest = divmod(value.shape[dim], outer * axis.size)
    if rest:
        return part_of(_reduced(value, axis), axis, dim, outer).contiguous()
    parts = value.unflatten(dim, (outer, axis.size, run)).movedim(dim + 1, 0).contiguous()
    own = torch.empty_like(parts[:1])
    dist.reduce_scatter_tensor(own, parts, group=axis.group)
    return own[0].flatten(dim, dim + 1)


def _reduced(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    value = value.contiguous().clone()
    dist.all_reduce(value, group=axis.group)
    return value


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _reduced(gradient, ctx.axis), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: Axis) -> torch.Tensor:
        return _reduced(value, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: Axis, dim: int, outer: int) -> torch.Tensor:
        ctx.how = (axis, dim, outer, value.shape[dim])
        return part_of(value, axis, dim, outer).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return whole_of(gradient, *ctx.how), None, None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, axis: Axis, dim: int, outer: int, length: int, sums: bool) -> Any:
        ctx.how, ctx.sums = (axis, dim, outer), sums
        return whole_of(local, axis, dim, outer, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        own = _part_of_sum(gradient, *ctx.how) if ctx.sums else part_of(gradient, *ctx.how).contiguous()
        return own, None, None, None, None, None


class _ScatteredSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.how = (axis, dim, 1, value.shape[dim])
        return _part_of_sum(value, axis, dim, 1).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return whole_of(gradient, *ctx.how), None, None


def copied(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A whole tensor for an operator that works on parts: its gradient is summed over devices."""
    if not value.requires_grad or not torch.is_grad_enabled():
        return value
    known, key = _COPIES.get(), (id(value), value._version)
    if known is not None and key in known:
        return known[key][1]
    made: torch.Tensor = _Copied.apply(value, axis)
    if known is not None:
        known[key] = (value, made)
    return made


def summed(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of what every device has."""
    made: torch.Tensor = _Summed.apply(value, axis)
    return made


def parted(value: torch.Tensor, axis: Axis, dim: int, outer: int = 1) -> torch.Tensor:
    """This device's part of a whole tensor."""
    made: torch.Tensor = _Parted.apply(value, axis, dim, outer)
    return made


def gathered(local: torch.Tensor, axis: Axis, dim: int, outer: int, length: int, *, sums: bool = False) -> torch.Tensor:
    """The whole of a split tensor; `sums` where what reads it works on parts."""
    made: torch.Tensor = _Gathered.apply(local, axis, dim, outer, length, sums)
    return made


def scattered_sum(value: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This device's part of the sum of what every device has."""
    made: torch.Tensor = _ScatteredSum.apply(value, axis, dim)
    return made
