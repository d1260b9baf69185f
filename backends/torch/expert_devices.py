"""Expert parallelism: experts divided over devices, to which tokens travel and from which their answers come back.

An experts module, as Hugging Face writes them, takes tokens [tokens, hidden], the experts that each of them chose and
their weights [tokens, choices], and has parameters whose first dimension counts experts. Under expert parallelism each
device holds some experts (`ExpertDevices`), sends every choice of its tokens to the device that holds the chosen one by
an all-to-all, runs the module's own forward on what it received, each row with one choice of weight 1, and returns the
answers by another all-to-all. The owner of the token weighs and adds them.

Gradients of experts. Losses are means over copies, and the gradients of parameters are averaged over the devices that
hold the same ones: R devices for dense parameters, R / ep for experts, whose gradients hold the tokens of ep devices.
Tokens of a split sequence are counted once, on one of cp devices. Gradients inside are therefore multiplied by cp / ep
(`scaled_gradient`), and what leaves the module backward is multiplied by the inverse.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from phaze.backends.torch.split_collectives import scaled_gradient
from phaze.backends.torch.split_tensor import ContextTensor, rules_see, to_whole
from phaze.errors import PlanError

__all__ = ["ExpertDevices", "answer_with_shapes_only", "expert_modules", "run_experts_on"]


@dataclass(frozen=True, slots=True)
class ExpertDevices:
    """The devices that experts are divided over, which of them this process has, and how many split its sequences.

    The group is None where every device holds all experts.
    """

    group: dist.ProcessGroup | None
    size: int
    index: int
    contexts: int


def expert_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that hold experts as the first dimension of all their parameters, by path."""
    return {path: part for path, part in module.named_modules() if _is_experts(part)}


def _is_experts(module: torch.nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    parameters = list(module.parameters())
    has_inner_ones = any(True for child in module.children() for _ in child.parameters())
    if not isinstance(count, int) or not parameters or has_inner_ones:
        return False
    arguments = inspect.signature(module.forward).parameters
    return len(arguments) == 3 and all(parameter.dim() > 1 and len(parameter) == count for parameter in parameters)


def answer_with_shapes_only(module: torch.nn.Module) -> None:
    """Let an experts module return something of the right shape and type that depends on its parameters."""

    def forward(tokens: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return tokens + sum(parameter.sum() for parameter in module.parameters()).to(tokens.dtype)

    module.forward = forward


def run_experts_on(module: torch.nn.Module, devices: ExpertDevices) -> None:
    """Let an experts module work on the tokens of all devices; its parameters are those of this device's experts.

    Raises PlanError where the devices do not divide its experts.
    """
    count = int(module.num_experts)
    if count % devices.size:
        raise PlanError(f"{type(module).__name__} has {count} experts, which ep {devices.size} does not divide.")
    module.num_experts = count // devices.size
    own_forward, names = module.forward, tuple(inspect.signature(module.forward).parameters)

    def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        tokens, chosen, weights = (*args, *(kwargs[name] for name in names[len(args) :]))
        return _answers_of_all(own_forward, devices, tokens, chosen, weights)

    module.forward = forward


def _answers_of_all(
    own_forward: Callable[..., torch.Tensor],
    devices: ExpertDevices,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted answers of experts for this device's tokens: all of them, or its part of split sequences."""
    if not isinstance(tokens, ContextTensor):
        return _exchanged_answers(own_forward, devices, 1, *map(to_whole, (tokens, chosen, weights)))
    with rules_see(ContextTensor):
        parts = [tokens.local, *(tokens.matching_part(value, tokens.split_dim) for value in (chosen, weights))]
    return tokens.with_part(_exchanged_answers(own_forward, devices, devices.contexts, *map(to_whole, parts)))


def _exchanged_answers(
    own_forward: Callable[..., torch.Tensor],
    devices: ExpertDevices,
    contexts: int,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    scale = contexts / devices.size
    if devices.group is None:
        unscaled = (scaled_gradient(value, 1 / scale) for value in (tokens, weights))
        inside: torch.Tensor = own_forward(next(unscaled), chosen, next(unscaled))
        return scaled_gradient(inside, scale)
    choices = chosen.shape[-1]
    rows = tokens.repeat_interleave(choices, 0)
    sent = _Sending.of(chosen.reshape(-1), devices, own_experts=_experts_on_device(own_forward))
    received = _SentRows.apply(scaled_gradient(rows, 1 / scale)[sent.order], devices, sent.to_each, sent.from_each)
    inside = _answers_of_own(own_forward, received, sent.experts)
    returned = _SentRows.apply(scaled_gradient(inside, scale), devices, sent.from_each, sent.to_each)
    in_place = torch.empty_like(sent.order)
    in_place[sent.order] = torch.arange(len(in_place), device=in_place.device)
    answers: torch.Tensor = returned[in_place].unflatten(0, (-1, choices))
    return (answers * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


def _experts_on_device(own_forward: Callable[..., torch.Tensor]) -> int:
    module = own_forward.__self__  # type: ignore[attr-defined]
    return int(module.num_experts)


def _answers_of_own(
    own_forward: Callable[..., torch.Tensor], rows: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """The answers of this device's experts, each row's with weight 1.

    A device that received nothing runs one row of zeros: its parameters then have gradients, of zeros, as those of
    other devices do that wait for them.
    """
    count = len(rows)
    if not count:
        rows, experts = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), experts.new_zeros(1)
    answers = own_forward(rows, experts.unsqueeze(-1), rows.new_ones(len(rows), 1))
    return answers[:count]


@dataclass(frozen=True, slots=True)
class _Sending:
    """Which rows travel where: `order` sorts them by receiver; rows `to_each` device and `from_each`, and the own
    experts that the received rows are for."""

    order: torch.Tensor
    to_each: list[int]
    from_each: list[int]
    experts: torch.Tensor

    @classmethod
    def of(cls, chosen: torch.Tensor, devices: ExpertDevices, *, own_experts: int) -> _Sending:
        """What is to be sent for the experts that rows chose."""
        receiver = chosen // own_experts
        order = torch.argsort(receiver, stable=True)
        counts = torch.bincount(receiver, minlength=devices.size)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=devices.group)
        to_each, from_each = counts.tolist(), arriving.tolist()
        experts = _send_rows((chosen % own_experts)[order], devices, to_each, from_each)
        return cls(order, to_each, from_each, experts)


def _send_rows(rows: torch.Tensor, devices: ExpertDevices, to_each: list[int], from_each: list[int]) -> torch.Tensor:
    received = rows.new_empty((sum(from_each), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), from_each, to_each, group=devices.group)
    return received


class _SentRows(torch.autograd.Function):
    """Rows sent to other devices; their gradients travel back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: torch.Tensor, devices: ExpertDevices, to_each: list[int], from_each: list[int]
    ) -> torch.Tensor:
        ctx.devices, ctx.to_each, ctx.from_each = devices, to_each, from_each
        return _send_rows(rows, devices, to_each, from_each)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _send_rows(gradient, ctx.devices, ctx.from_each, ctx.to_each), None, None, None
