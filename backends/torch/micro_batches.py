"""Microbatches: how a batch is divided into them, the loss of each, and how much it counts for that of the whole batch.

Division. A batch is divided over the copies of a model, and over the microbatches that a copy runs one after another
(`share_of`, `divided`). A plan says how many samples a step has, and a training loop gives others now and then: an
incomplete last batch, or several batches' worth at once. All copies run equally many microbatches (`agreed_sizes`),
because their collectives meet; one that has no sample left runs a sample that counts nothing.

Losses. One process takes the mean over all targets of a batch that count. A microbatch knows its own ones only: with
padded sequences the mean of the microbatches' means is another number. With loss l_i and weight w_i of microbatch i,
over all microbatches of all copies of the model,

    loss of the batch = sum of w_i l_i / sum of w_i        (`settled_loss`)

and its gradient is the same mean of gradients, which therefore equal one process's. The weights are

    counted targets   where the loss is a mean over targets that are not ignored (cross entropy of class indices): they
                      are counted in the call itself (`_CountsTargets`)
    samples           everywhere else
    what the user's `loss_weight=` says: "samples", or a function of the microbatch, which returns its weight

A loss that the model divides by a number that it is given is summed instead: Hugging Face's `num_items_in_batch`, or
`loss_weight="sum"`. Gradients are those of w_i l_i; they are divided by the sum of weights in the end, because an early
microbatch does not know the later ones.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from phaze.backends.torch.process_groups import Contexts
from phaze.backends.torch.split_collectives import shared_gradient_sums
from phaze.backends.torch.split_tensor import TorchFunction, to_whole
from phaze.errors import PlanError, shown
from phaze.model_import import loss_candidates

__all__ = [
    "BatchLosses",
    "Division",
    "LossFunction",
    "LossWeight",
    "agreed_sizes",
    "check_equal_counts",
    "checked_weight",
    "divided",
    "is_number",
    "loss_function",
    "loss_of_output",
    "micro_batch",
    "padded",
    "sample_count",
    "scale_gradients",
    "settled_loss",
    "share_of",
]


@dataclass(frozen=True, slots=True)
class Division:
    """The microbatches of this process's share: the rows of each, and how many of them are samples that count."""

    rows: tuple[int, ...]
    samples: tuple[int, ...]


def _is_batched(leaf: object) -> bool:
    """Whether a leaf of a batch has a dimension of samples; numbers, also those in tensors, belong to all samples."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def is_number(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether a leaf of a batch is a tensor of one number, such as how many items a whole batch has."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0


def share_of(batch: Any, copies: int, index: int) -> Any:
    """One copy's part of a global batch: dimension 0 of every tensor; the first copies have one sample more if any."""
    sample_count(batch)

    def cut(leaf: Any) -> object:
        if not _is_batched(leaf):
            return leaf
        each, more = divmod(len(leaf), copies)
        start = index * each + min(index, more)
        return leaf[start : start + each + (index < more)]

    return tree_map(cut, batch)


def sample_count(batch: object) -> int:
    """The samples of a batch; raises PlanError where its tensors do not have equally many."""
    sizes = {len(leaf) for leaf in tree_leaves(batch) if _is_batched(leaf)}
    if len(sizes) != 1:
        listed = f"tensors of {', '.join(map(str, sorted(sizes)))} samples" if sizes else "no tensor"
        raise PlanError(
            f"the batch has {listed}; expected equally many in each: dimension 0 counts samples. Give what has no "
            "samples as a number, or make it inside of the model."
        )
    return sizes.pop()


def agreed_sizes(local: int, groups: Iterable[dist.ProcessGroup], device: torch.device) -> tuple[int, int]:
    """The fewest and the most samples that any copy has; all of them take part."""
    sizes = torch.tensor([-local, local], device=device)
    for group in groups:
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=group)
    fewest, most = sizes.tolist()
    return -fewest, most


def divided(local: int, fewest: int, most: int, micro_batch_size: int, *, keeps_shape: bool) -> Division:
    """The microbatches of a share of `local` samples, where copies have `fewest` to `most`.

    With `keeps_shape`, for pipelines, all microbatches of all copies have equally many rows: the largest size up to the
    planned one that divides all shares.
    """
    if not most:
        raise PlanError("the batch has no samples on any process.")
    if keeps_shape:
        size = next(size for size in range(min(micro_batch_size, most), 0, -1) if most % size == 0)
        size = size if fewest == most else 1
        count = most // size
        return Division((size,) * count, tuple(min(size, max(0, local - index * size)) for index in range(count)))
    count = -(-most // micro_batch_size)
    samples = [min(micro_batch_size, max(0, local - index * micro_batch_size)) for index in range(count)]
    return Division(tuple(max(1, size) for size in samples), tuple(samples))


def padded(batch: Any, rows: int) -> Any:
    """A batch of at least so many rows; those that are added repeat the last one, or are zeros where there is none."""

    def extended(leaf: Any) -> object:
        if not _is_batched(leaf) or len(leaf) >= rows:
            return leaf
        last = leaf[-1:] if len(leaf) else leaf.new_zeros((1, *leaf.shape[1:]))
        return torch.cat([leaf, last.expand(rows - len(leaf), *leaf.shape[1:])])

    return tree_map(extended, batch)


def micro_batch(
    args: Sequence[object], kwargs: Mapping[str, object], start: int, rows: int
) -> tuple[Sequence[object], dict[str, object]]:
    """Some rows of a batch as the model takes it."""

    def sliced(leaf: Any) -> object:
        return leaf[start : start + rows] if _is_batched(leaf) else leaf

    sliced_args, sliced_kwargs = tree_map(sliced, (tuple(args), dict(kwargs)))
    return sliced_args, sliced_kwargs


LossFunction: TypeAlias = Callable[..., torch.Tensor]
"""Calls a module (first argument) with a batch (the others), and returns the scalar loss."""

LossWeight: TypeAlias = "str | Callable[..., Any] | None"
"""`"samples"`, `"sum"`, a function of a microbatch (as the model takes it), or None: found out from the loss itself."""

_WAYS = ("samples", "sum")
_ITEMS = "num_items_in_batch"
"""The argument by which Hugging Face's models are told what to divide their loss by."""

_SAME_LOSS = 1e-3
"""Relative difference below which a loss is taken for the plain mean of its cross entropies: rounding of bfloat16 is
below it, a masked mean of padded sequences is rarely."""


def checked_weight(way: object) -> LossWeight:
    """The option `loss_weight`; raises PlanError where it is something else."""
    if way is None or way in _WAYS or callable(way):
        return way
    listed = ", ".join(map(repr, _WAYS))
    raise PlanError(f"loss_weight is {shown(way)}; expected {listed}, a function of a microbatch, or nothing.")


class _CountsTargets(TorchFunctionMode):
    """Counts the targets over which cross entropies take their means, and lets a mean over none be zero.

    `means` are the counts of the calls that returned means, `separate` the results of those that returned one number
    for each target, of which the model then makes its loss itself, and `sums` those of losses that were summed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.means: list[torch.Tensor] = []
        self.separate: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _LOSSES:
            return func(*args, **(kwargs or {}))
        call = _arguments_of(func).bind(*args, **(kwargs or {}))
        call.apply_defaults()
        given = call.arguments
        is_counted = func in (F.cross_entropy, F.nll_loss) and not given["target"].is_floating_point()
        is_plain = given.get("size_average") is None and given.get("reduce") is None
        if not is_counted or not is_plain or given["reduction"] != "mean":
            result = func(*args, **(kwargs or {}))
            if given["reduction"] == "sum":
                self.sums.append(result)
            elif given["reduction"] == "none" and is_counted:
                self.separate.append(result)
            return result
        count = _counted(given["target"], given["ignore_index"], given["weight"])
        self.means.append(count)
        if given["input"].dtype == torch.float16:
            given["input"] = given["input"].float()  # a sum of many losses leaves the range of float16
        return func(**{**given, "reduction": "sum"}) / torch.where(count > 0, count, 1)


_LOSSES = frozenset(
    getattr(F, name)
    for name in [
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "kl_div",
        "ctc_loss",
        "binary_cross_entropy_with_logits",
        "poisson_nll_loss",
        "gaussian_nll_loss",
        "soft_margin_loss",
    ]
)
"""Losses of torch that say how they are reduced."""


@functools.cache
def _arguments_of(func: TorchFunction) -> inspect.Signature:
    return inspect.signature(func)


def _counted(target: torch.Tensor, ignored: int, class_weights: torch.Tensor | None) -> torch.Tensor:
    """What a mean of cross entropies divides by: the targets that count, each with the weight of its class."""
    is_counted = target != ignored
    if class_weights is None:
        count = to_whole(is_counted.sum())
    else:
        whole_target, whole_counted = to_whole(target), to_whole(is_counted)
        weights = to_whole(class_weights).detach()[torch.where(whole_counted, whole_target, 0)]
        count = (weights * whole_counted).sum()
    counted: torch.Tensor = count.detach()
    return counted


@dataclass(slots=True, kw_only=True)
class BatchLosses:
    """The losses of one batch on this process, microbatch after microbatch.

    Attributes:
        way: the option `loss_weight`.
        samples: how many samples each microbatch has; 0 for one that only keeps other processes company.
        unit: samples of a whole batch on this process; weights are divided by it (and by the targets of a sample), so
            that gradients have about the size that they have in the end.
        targets_of_sample: how many targets a sample has as it was planned.
        copies: copies of the model, which have different samples.
        checks_means: whether a mean that the model takes itself is looked at.
        averages_samples: whether the planned loss is known for one in which samples count alike.
        values: weighted losses.
        weights: their weights.
        counts: what each cross entropy of each microbatch counted.
    """

    way: LossWeight
    samples: Sequence[int]
    unit: float
    targets_of_sample: int
    copies: int
    checks_means: bool = False
    averages_samples: bool = False
    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[float | torch.Tensor] = field(default_factory=list)
    counts: list[torch.Tensor] = field(default_factory=list)

    def weighted(self, run: Callable[[], torch.Tensor], batch: Mapping[str, object]) -> torch.Tensor:
        """Run the next microbatch; its loss times its weight, which is what to differentiate."""
        counter = _CountsTargets()
        with counter:
            loss = run()
        samples = self.samples[len(self.values)]
        if self.way == "sum" or (self.way is None and batch.get(_ITEMS) is not None):
            factor, weight = float(self.copies), 1.0 / len(self.samples)
        else:
            factor = weight = self._weight(loss, samples, counter, batch)
        value = loss * factor if samples else loss.nan_to_num() * 0
        self.values.append(value.detach())
        self.weights.append(weight)
        return value

    def _weight(
        self, loss: torch.Tensor, samples: int, counter: _CountsTargets, batch: Mapping[str, object]
    ) -> float | torch.Tensor:
        is_counted = self.way is None and bool(counter.means)
        if is_counted != bool(self.counts) and self.values:
            raise PlanError("the loss takes a mean of cross entropies in some microbatches only; pass loss_weight=.")
        if is_counted:
            counts = torch.stack([count.double() for count in counter.means])
            self.counts.append(counts if samples else torch.zeros_like(counts))
            return self.counts[-1][0] / (self.unit * self.targets_of_sample)
        if not samples:
            return 0.0
        if callable(self.way):
            weight = self.way(**batch)
            return (weight.detach().double() if isinstance(weight, torch.Tensor) else float(weight)) / self.unit
        if self.way is None and self.checks_means and counter.sums:
            _check_sum(loss, counter.sums)
        elif self.way is None and self.checks_means and counter.separate and not self.averages_samples:
            _check_mean(loss, samples, counter.separate)
        return samples / self.unit


def _check_mean(loss: torch.Tensor, samples: int, separate: Sequence[torch.Tensor]) -> None:
    """Raise PlanError for a loss that is no plain mean of the cross entropies that a model took one by one."""
    value, losses = float(to_whole(loss).detach()), [to_whole(result).detach().double() for result in separate]
    means = (sum(float(result.mean()) for result in losses), sum(float(result.sum()) / samples for result in losses))
    if not any(math.isclose(value, mean, rel_tol=_SAME_LOSS) for mean in means):
        raise PlanError(
            f"the loss is {value:.6g} and the mean of its cross entropies {means[0]:.6g}: it is a masked or weighted "
            "mean that the model takes itself, of which a microbatch does not know how much it counts in the batch. "
            "Pass loss_weight= to apply: a function of the microbatch, with the model's own argument names, that "
            "returns what the mean divides by (such as the sum of a mask), or 'samples' for the mean of microbatches."
        )


def _check_sum(loss: torch.Tensor, sums: Sequence[torch.Tensor]) -> None:
    """Raise PlanError for a loss that is a sum, of which the mean over microbatches and copies would be taken."""
    value, total = float(to_whole(loss).detach()), sum(float(to_whole(result).detach()) for result in sums)
    if math.isclose(value, total, rel_tol=_SAME_LOSS):
        raise PlanError(
            f"the loss ({value:.6g}) is a sum over what a microbatch has. Pass loss_weight='sum' to apply, so that "
            "losses of microbatches and copies are added as one process adds them, or loss_weight='samples' for their "
            "mean."
        )


def settled_loss(
    losses: BatchLosses, groups: Iterable[dist.ProcessGroup], *, replicas: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the batch on every process, and the factor that makes summed gradients those of this loss.

    `groups` are those over which a sum reaches all copies of the model, and all stages: those that have no loss take
    part with zeros. Gradients were averaged over `replicas` devices.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for value, weight in zip(losses.values, losses.weights, strict=True):
        totals[0] += value.double().to(device)
        totals[1] += weight.to(device) if isinstance(weight, torch.Tensor) else weight
    for group in groups:
        dist.all_reduce(totals, group=group)
    return (totals[0] / totals[1]).float(), replicas / totals[1]


def check_equal_counts(losses: BatchLosses, groups: Iterable[dist.ProcessGroup]) -> None:
    """Raise PlanError where a loss adds means over different targets, so that no weight is right for all of them.

    `groups` are those over which a sum reaches all copies of this process's stage.
    """
    if not losses.counts or len(losses.counts[0]) == 1:
        return
    counts = torch.stack(losses.counts)
    totals = counts.sum(0)
    for group in groups:
        dist.all_reduce(totals, group=group)
    shares = counts / totals
    if not torch.allclose(shares, shares[:, :1].expand_as(shares)):
        raise PlanError(
            f"the loss adds {counts.shape[1]} means of cross entropies over different targets "
            f"({', '.join(f'{total:g}' for total in totals.tolist())} count in this batch), and a microbatch has "
            "another share of each, so that it would train otherwise than one process does. Pass loss_weight='samples' "
            "to apply to take the mean of microbatches, or plan with one microbatch for each copy."
        )


def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply the gradients of this process's parameters by a factor."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in local:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    for dtype, of_type in by_type.items():
        torch._foreach_mul_(of_type, factor.to(dtype))


# ------------------------------------------------------------------------------------------- the loss of a microbatch


def loss_function(
    loss_fn: Callable[..., torch.Tensor] | None, model: torch.nn.Module, contexts: Contexts | None
) -> LossFunction:
    """A function that calls a module and returns the scalar loss; with contexts, on sequences that are split.

    The batch's `targets` go to whoever declares them: to the model, to `loss_fn`, or to both.
    """
    model_takes_targets = loss_fn is None or "targets" in inspect.signature(model.forward).parameters
    loss_takes_targets = loss_fn is not None and (not model_takes_targets or _declares_targets(loss_fn))

    def loss(module: Callable[..., object], *args: object, **kwargs: object) -> torch.Tensor:
        if contexts is not None:
            args, kwargs = contexts.split_batch((args, kwargs))
        targets = kwargs.get("targets")
        if not model_takes_targets:
            kwargs.pop("targets", None)
        with shared_gradient_sums():
            output = module(*args, **kwargs)
            if loss_fn is None:
                return to_whole(loss_of_output(output))
            is_given = loss_takes_targets and targets is not None
            return to_whole(loss_fn(output, targets) if is_given else loss_fn(output))

    return loss


def _declares_targets(loss_fn: Callable[..., torch.Tensor]) -> bool:
    """Whether a function of the output takes a second argument: one without a default, or one named `targets`."""
    called = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [value for value in inspect.signature(called).parameters.values() if value.kind in positional]
    second = parameters[1] if len(parameters) > 1 else None
    return second is not None and (second.default is inspect.Parameter.empty or second.name == "targets")


def loss_of_output(output: object) -> torch.Tensor:
    """The scalar with a gradient that a model returns: itself, under `loss`, or in a tuple; raises PlanError."""
    tensors = [candidate for candidate in loss_candidates(output) if isinstance(candidate, torch.Tensor)]
    scalars = [tensor for tensor in tensors if tensor.numel() == 1 and tensor.is_floating_point()]
    for scalar in scalars:
        if scalar.requires_grad:
            return scalar
    if scalars:
        return scalars[0]
    raise PlanError(
        f"the model returned a {type(output).__name__} without a scalar loss; pass labels in the batch, or loss_fn= to "
        "apply (a function of the output, and of targets= where those are in the batch)."
    )
