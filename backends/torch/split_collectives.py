"""Collectives of tensor and context parallelism with their gradients: copies, sums, gathers, scatters, exchanges.

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
| all-to-all of one dimension for another | all-to-all back | `exchanged` |

Parameters are whole on the axis of contexts, and their gradients are averaged over its devices afterwards, with those
of data-parallel copies. A parameter that is read there therefore needs no sum of its own: `copied` hands on this
device's share of the gradient, multiplied by the number of devices.

On a balanced axis every device has an early and a late part of a dimension: of 2 n parts device k has parts k and
2 n - 1 - k, so that all devices do equal work where attention is causal (Llama 3, arXiv:2407.21783, section 3.3.2).

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
    "exchanged",
    "gather_parts",
    "local_part",
    "reduce_scattered",
    "scaled_gradient",
    "scattered",
    "shared_gradient_sums",
]

_COPIES: ContextVar[dict[tuple[int, int, bool], tuple[torch.Tensor, torch.Tensor]] | None] = ContextVar(
    "copies", default=None
)
"""Copies that `copied` made since `shared_gradient_sums` was entered, by the original's id, its version and the axis.

The original is kept beside its copy, so that no other tensor gets its id meanwhile.
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """The devices that a tensor is split over, and which of them this process has.

    Where the axis `splits_sequences`, sums of partial results are scattered along the sequence (sequence parallelism)
    instead of being whole on every device. The axis of context parallelism `is_context`; where it `is_balanced`, every
    device has an early and a late part of what is split.
    """

    group: dist.ProcessGroup
    size: int
    index: int
    splits_sequences: bool = False
    is_context: bool = False
    is_balanced: bool = False

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Where the elements of this device lie in a dimension of so many: start and count of each stretch, in order.

        A balanced axis divides the dimension evenly.
        """
        if not self.is_balanced:
            sizes = chunk_sizes(length, self.size)
            return [(sum(sizes[: self.index]), sizes[self.index])]
        part = length // (2 * self.size)
        return [(self.index * part, part), ((2 * self.size - 1 - self.index) * part, part)]


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
    """Take this device's part of each of the `outer` equal runs of a dimension; autograd knows nothing of it."""
    run = value.shape[dim] // outer
    runs = value.unflatten(dim, (outer, run))
    stretches = [runs.narrow(dim + 1, start, count) for start, count in axis.spans(run)]
    part = stretches[0] if len(stretches) == 1 else torch.cat(stretches, dim + 1)
    return part.flatten(dim, dim + 1)


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
    return _in_own_order(joined, axis).movedim(0, dim + 1).flatten(dim, dim + 1)


def _in_order_of_devices(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The elements of dimension 0 in the order in which devices hold them."""
    if not axis.is_balanced:
        return value
    parts = value.unflatten(0, (2 * axis.size, -1))
    return torch.stack((parts[: axis.size], parts[axis.size :].flip(0)), 1).flatten(0, 2)


def _in_own_order(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Undo `_in_order_of_devices`."""
    if not axis.is_balanced:
        return value
    early, late = value.unflatten(0, (axis.size, 2, -1)).unbind(1)
    return torch.cat((early, late.flip(0))).flatten(0, 1)


def _reduce_scatter(value: torch.Tensor, axis: Axis, dim: int, outer: int) -> torch.Tensor:
    """This device's part of the sum over devices. Unequal parts are summed whole first: no collective takes them."""
    run, rest = divmod(value.shape[dim], outer * axis.size)
    if rest:
        return local_part(_all_reduce(value, axis), axis, dim, outer).contiguous()
    ordered = _in_order_of_devices(value.unflatten(dim, (outer, -1)).movedim(dim + 1, 0), axis)
    parts = ordered.unflatten(0, (axis.size, run)).contiguous()
    local_sum = torch.empty_like(parts[:1])
    dist.reduce_scatter_single(local_sum, parts, group=axis.group)
    return local_sum[0].movedim(0, dim + 1).flatten(dim, dim + 1)


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


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient * ctx.factor, None


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


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, axis: Axis, gathered: int, divided: int) -> torch.Tensor:
        ctx.axis, ctx.gathered, ctx.divided = axis, gathered, divided
        return _exchange(value, axis, gathered, divided)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange_back(gradient, ctx.axis, ctx.gathered, ctx.divided), None, None, None


class _ExchangedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor, axis: Axis, gathered: int, divided: int) -> torch.Tensor:
        ctx.axis, ctx.gathered, ctx.divided = axis, gathered, divided
        return _exchange_back(value, axis, gathered, divided)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(gradient, ctx.axis, ctx.gathered, ctx.divided), None, None, None


def _exchange(value: torch.Tensor, axis: Axis, gathered: int, divided: int) -> torch.Tensor:
    """From a part of dimension `gathered` to all of it, and from all of dimension `divided` to a part of it."""
    sent = value.unflatten(divided, (axis.size, -1)).movedim(divided, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    joined = received.movedim(gathered + 1, 1).flatten(0, 1)  # positions lie before all other dimensions now
    return _in_own_order(joined, axis).movedim(0, gathered).contiguous()


def _exchange_back(value: torch.Tensor, axis: Axis, gathered: int, divided: int) -> torch.Tensor:
    """Undo `_exchange`."""
    ordered = _in_order_of_devices(value.movedim(gathered, 0), axis).unflatten(0, (axis.size, -1))
    sent = ordered.movedim(1, gathered + 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return received.movedim(0, divided).flatten(divided, divided + 1).contiguous()


def copied(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A whole tensor for an operator that works on parts: its gradient is summed over the devices.

    Inside `shared_gradient_sums` all readers of one tensor get the same copy, so that the sum is taken once.
    """
    if not value.requires_grad or not torch.is_grad_enabled():
        return value
    copies, key = _COPIES.get(), (id(value), value._version, axis.is_context)
    if copies is not None and key in copies:
        return copies[key][1]
    is_averaged_later = axis.is_context and _is_made_of_parameters(value)
    copy: torch.Tensor = scaled_gradient(value, axis.size) if is_averaged_later else _Copied.apply(value, axis)
    if copies is not None:
        copies[key] = (value, copy)
    return copy


def scaled_gradient(value: torch.Tensor, factor: float) -> torch.Tensor:
    """A tensor as it is, whose gradient is multiplied by `factor`."""
    scaled: torch.Tensor = _ScaledGradient.apply(value, factor)
    return scaled


MOST_STEPS_FROM_PARAMETER = 12
"""How many functions lie at most between a parameter and what an operator reads of it (a transpose, a cast, a view of a
DTensor). What is made in more steps gets its gradient summed at once, which is right as well and sends more."""


def _is_made_of_parameters(value: torch.Tensor) -> bool:
    """Whether nothing that requires a gradient but parameters went into a tensor."""
    if value.grad_fn is None:
        return isinstance(value, torch.nn.Parameter)
    waiting, seen = [value.grad_fn], 0
    while waiting:
        node, seen = waiting.pop(), seen + 1
        variable = getattr(node, "variable", None)  # of the node that collects the gradient of a leaf
        if seen > MOST_STEPS_FROM_PARAMETER or (variable is not None and not isinstance(variable, torch.nn.Parameter)):
            return False
        is_written_in_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        if is_written_in_python and type(node).__name__ not in _VIEWS_OF_PARAMETERS:
            return False
        waiting.extend(before for before, _ in node.next_functions if before is not None)
    return True


_VIEWS_OF_PARAMETERS = ("_ToTorchTensorBackward", "_FromTorchTensorBackward")
"""Functions of DTensor; all other functions that are written in Python may be collectives."""


def all_reduced(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of what every device has, whole on every device."""
    total: torch.Tensor = _AllReduced.apply(value, axis)
    return total


def scattered(value: torch.Tensor, axis: Axis, dim: int, outer: int = 1) -> torch.Tensor:
    """This device's part of a whole tensor; the gradient of what is made of parameters is averaged later (`copied`)."""
    if axis.is_context and value.requires_grad and torch.is_grad_enabled() and _is_made_of_parameters(value):
        return local_part(scaled_gradient(value, axis.size), axis, dim, outer).contiguous()
    local: torch.Tensor = _Scattered.apply(value, axis, dim, outer)
    return local


def all_gathered(
    local: torch.Tensor, axis: Axis, dim: int, outer: int, length: int, *, sums_gradient: bool = False
) -> torch.Tensor:
    """The whole of a split tensor; its gradient is summed over devices where what reads it works on parts.

    Ids and masks, which have no gradient, are gathered outside of autograd: models read them inside of torch.vmap.
    """
    if not local.requires_grad:
        return gather_parts(local, axis, dim, outer, length)
    whole: torch.Tensor = _AllGathered.apply(local, axis, dim, outer, length, sums_gradient)
    return whole


def reduce_scattered(value: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This device's part of the sum of what every device has."""
    local_sum: torch.Tensor = _ReduceScattered.apply(value, axis, dim)
    return local_sum


def exchanged(value: torch.Tensor, axis: Axis, *, gathered: int, divided: int, is_back: bool = False) -> torch.Tensor:
    """All of dimension `gathered` for a part of dimension `divided`, by an all-to-all; `is_back` undoes it."""
    result: torch.Tensor = (_ExchangedBack if is_back else _Exchanged).apply(value, axis, gathered, divided)
    return result
