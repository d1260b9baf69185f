"""Random numbers of an arranged model: the same where devices compute the same, different where samples differ.

Dropout draws from torch's default generators. Devices that share samples (of the tensor-parallel axis, of a context)
must draw the same numbers, or tensors that are whole on all of them would differ. Copies of the model must draw
different ones, or each would drop the same elements of different samples. A run therefore draws from a stream of its
own, seeded by the first process's seed and the index of the copy (`RandomStream`); what a training loop draws between
steps stays as it was, so that processes that were seeded equally go on making equal batches.

With dropout a plan trains as one process does on average, not number by number: one process draws for the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["RandomStream"]

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
