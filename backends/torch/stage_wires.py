"""What stages of a pipeline send each other: parts of sequences where sequences are split, whole tensors elsewhere.

A tensor [batch, positions, ...] that crosses a cut is sent in parts over the devices of a context, and each part in
parts over the tensor-parallel axis under sequence parallelism. Both sides of a cut decide so by the shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phaze.backends.torch.contexts import Contexts
from phaze.backends.torch.split_collectives import Axis
from phaze.backends.torch.split_tensor import ContextTensor, SplitTensor, scattered, to_whole
from phaze.backends.torch.stage_cuts import Boundary

__all__ = ["Wires"]


@dataclass(frozen=True, slots=True)
class Wires:
    """The axes over which tensors that cross a cut may be split; None where there is no such axis."""

    contexts: Contexts | None
    axis: Axis | None

    def shapes(self, boundary: Boundary) -> tuple[torch.Tensor, ...]:
        """Shapes and types of what one process sends over a cut, as tensors without storage."""
        return tuple(
            torch.empty(self._sent_shape(tensor), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
            for tensor in boundary.tensors
        )

    def _sent_shape(self, tensor: torch.Tensor) -> list[int]:
        shape = self._context_shape(list(tensor.shape))
        if self._is_cut_further(shape):
            assert self.axis is not None
            shape[1] //= self.axis.size
        return shape

    def _context_shape(self, shape: list[int]) -> list[int]:
        if self.contexts is None or not self.contexts.divides(shape):
            return shape
        return [shape[0], shape[1] // self.contexts.size, *shape[2:]]

    def _is_cut_further(self, shape: list[int]) -> bool:
        """Whether devices of the tensor-parallel axis each send their part of dimension 1."""
        axis = self.axis
        return bool(axis and axis.splits_sequences and len(shape) >= 3 and shape[1] % axis.size == 0)

    def send(self, value: torch.Tensor) -> torch.Tensor:
        """What this process sends of a tensor to the next stage."""
        if self.contexts is not None and self.contexts.divides(value.shape):
            if isinstance(value, ContextTensor) and (value.split_dim, value.outer) == (1, 1):
                value = value.local
            else:
                whole = value.whole() if isinstance(value, ContextTensor) else value
                value = scattered(whole, self.contexts.axis(whole.shape[1]), 1)
        elif isinstance(value, ContextTensor):
            value = value.whole()
        if self.axis is None or not self._is_cut_further(list(value.shape)):
            return to_whole(value).contiguous()
        if isinstance(value, SplitTensor) and (value.split_dim, value.outer) == (1, 1):
            return value.local.contiguous()
        return scattered(to_whole(value), self.axis, 1)

    def receive(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A tensor that arrived as the model sees it; `like` has the shape of the whole."""
        shape = self._context_shape(list(like.shape))
        if self.axis is not None and self._is_cut_further(shape):
            value = SplitTensor(value, self.axis, shape, 1)
        if self.contexts is not None and self.contexts.divides(like.shape):
            return ContextTensor(value, self.contexts.axis(like.shape[1]), like.shape, 1)
        return value
