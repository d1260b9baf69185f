"""Dropout and batch norms under a plan: random numbers and statistics, which depend on the samples that a device sees.

Batch norms. A batch norm divides by statistics of the samples that it sees at once. One process sees the whole batch; a
copy of the model sees one microbatch of its share. Training then differs from one process, silently, and
`settle_batch_norms` asks what to do about it, or refuses:

    "synchronized"   the sums behind mean and variance run over all copies. This equals one process where every copy
                     runs its share as one microbatch, and is refused elsewhere: a microbatch cannot know later ones.
    "local"          each microbatch is normalised by itself, as torch's DistributedDataParallel does.

Dropout draws from torch's default generators. Devices that share samples (of the tensor-parallel axis, of a context)
must draw the same numbers, or tensors that are whole on all of them would differ. Copies of the model must draw
different ones, or each would drop the same elements of different samples. A run therefore draws from a stream of its
own, seeded by the first process's seed and the index of the copy (`RandomStream`); what a training loop draws between
steps stays as it was, so that processes that were seeded equally go on making equal batches. With dropout a plan trains
as one process does on average, not number by number: one process draws for the whole batch.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from phaze.errors import PlanError, shown

__all__ = ["RandomStream", "settle_batch_norms"]

_WAYS = ("synchronized", "local")


def settle_batch_norms(
    model: torch.nn.Module, way: object, *, copies: Sequence[dist.ProcessGroup], micro_batches: int
) -> None:
    """Synchronise the batch norms of a model in place, leave them as they are, or refuse.

    `copies` are the groups over which a sum reaches every copy of the model (none where there is one copy only), and
    `micro_batches` are those that each copy runs in a step. Raises PlanError where training would differ from one
    process and nobody said so, or where it cannot be as it was asked.
    """
    if way is not None and way not in _WAYS:
        raise PlanError(f"batch_norm is {shown(way)}; expected one of {', '.join(map(repr, _WAYS))}, or nothing.")
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if way == "local" or not norms or not (copies or micro_batches > 1):
        return
    first = next(iter(norms))
    if micro_batches > 1:
        why = f"each copy runs {micro_batches} microbatches, of which an early one cannot know the later ones"
        advice = "plan with one microbatch for each copy (strategy micro_batch_size = global batch / dp, pp = 1)"
        if way == "synchronized":
            raise PlanError(f"batch norms such as {first!r} cannot be synchronized: {why}; {advice}.")
        raise PlanError(
            f"{first!r} is a batch norm, and its statistics would differ from those of one process: {why}. To train "
            f"as one process does, {advice} and pass batch_norm='synchronized'. Pass batch_norm='local' to normalise "
            "each microbatch by itself."
        )
    if way is None:
        raise PlanError(
            f"{first!r} is a batch norm, and each copy of the model would normalise its own samples. Pass "
            "batch_norm='synchronized' to sum its statistics over all copies, which trains as one process does, or "
            "batch_norm='local' to keep them apart, as torch's DistributedDataParallel does."
        )
    for norm in norms.values():
        norm.forward = types.MethodType(_forward_over(type(norm).forward, tuple(copies)), norm)


def _forward_over(
    own_forward: Callable[[_BatchNorm, torch.Tensor], torch.Tensor], copies: tuple[dist.ProcessGroup, ...]
) -> Callable[[_BatchNorm, torch.Tensor], torch.Tensor]:
    """The forward of a batch norm whose statistics run over all copies while it trains."""

    def forward(norm: _BatchNorm, samples: torch.Tensor) -> torch.Tensor:
        if not (norm.training or norm.running_mean is None):
            return own_forward(norm, samples)
        norm._check_input_dim(samples)
        dims = [dim for dim in range(samples.dim()) if dim != 1]
        count = float(samples.numel() / samples.shape[1])
        totals = torch.cat([samples.float().sum(dims), samples.new_full((1,), count, dtype=torch.float32)])
        totals = _summed(totals, copies)
        mean, count_of_all = totals[:-1] / totals[-1], float(totals[-1])
        shape = [1, -1, *(1 for _ in dims[1:])]
        centred = samples.float() - mean.view(shape)
        variance = _summed(centred.square().sum(dims), copies) / count_of_all
        _track(norm, mean.detach(), variance.detach() * count_of_all / max(1.0, count_of_all - 1))
        normal = centred * torch.rsqrt(variance + norm.eps).view(shape)
        if norm.affine:
            normal = normal * norm.weight.view(shape) + norm.bias.view(shape)
        return normal.to(samples.dtype)

    return forward


def _summed(value: torch.Tensor, copies: tuple[dist.ProcessGroup, ...]) -> torch.Tensor:
    """The sum over all copies; its gradient is summed over them, too."""
    for group in copies:
        value = all_reduce(value, group=group)
    return value


def _track(norm: _BatchNorm, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
    """Update the running statistics as torch's own batch norm does."""
    if not norm.track_running_stats or norm.running_mean is None:
        return
    norm.num_batches_tracked.add_(1)
    rate = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), rate)
    norm.running_var.lerp_(unbiased_variance.to(norm.running_var.dtype), rate)


_SEEDS = 2**31
"""Seeds lie below it, so that the sum of a seed and the index of a copy is one that every generator takes."""


class RandomStream:
    """The states of torch's default generators as the model left them."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._states: list[torch.Tensor] = []

    @classmethod
    def of_copy(cls, mesh: DeviceMesh, copy: int) -> RandomStream:
        """The stream of a copy of the model; every process of the mesh calls this."""
        seed = torch.tensor(torch.initial_seed() % _SEEDS, device=mesh.device_type)
        for name in mesh.mesh_dim_names or ():  # after the last axis, all have the seed of the first process
            dist.broadcast(seed, group=mesh[name].get_group(), group_src=0)
        return cls(int(seed) + copy)

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """While this is entered, torch draws from this stream; afterwards its generators are as they were before."""
        outside = _states()
        if self._seed is not None:
            torch.manual_seed(self._seed)
            self._seed = None
        else:
            _set_states(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(outside)


def _states() -> list[torch.Tensor]:
    """The state of the default generator, and that of this process's CUDA device where it has one."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _set_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
