"""Contexts: the devices that every sequence is split over, and how batches enter them.

The integer tensors [batch, positions] of a batch (ids, labels, masks, positions) become split tensors before the model
sees them. The model's own code then runs on parts, by the rules of split tensors: what it makes of whole positions
(rotary tables, position embeddings, masks) is cut where it meets a part, shifted labels are gathered first, and losses
are summed over the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from phaze.backends.torch.split_collectives import Axis, local_part
from phaze.backends.torch.split_tensor import ContextTensor
from phaze.errors import PlanError

__all__ = ["Contexts"]


@dataclass(frozen=True, slots=True)
class Contexts:
    """The devices of one context, and which of them this process has."""

    group: dist.ProcessGroup
    size: int
    index: int

    def axis(self, length: int) -> Axis:
        """The axis that splits sequences of this length: balanced wherever twice as many parts divide it."""
        is_balanced = length % (2 * self.size) == 0
        return Axis(self.group, self.size, self.index, is_context=True, is_balanced=is_balanced)

    def divides(self, shape: Sequence[int]) -> bool:
        """Whether a tensor between layers of this shape is split along its dimension 1."""
        return len(shape) >= 3 and shape[1] % self.size == 0

    def split_batch(self, batch: Any) -> Any:
        """A batch whose sequences are split; raises PlanError for sequences that the devices do not divide."""
        return tree_map(self._split, batch)

    def _split(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() != 2 or leaf.is_floating_point():
            return leaf
        length = leaf.shape[1]
        if length % self.size:
            raise PlanError(
                f"the batch has sequences of {length} positions, which cp {self.size} does not divide; pad them to a "
                f"multiple of {self.size} (of {2 * self.size} to balance causal attention), or plan with cp=1."
            )
        axis = self.axis(length)
        return ContextTensor(local_part(leaf, axis, 1, 1).contiguous(), axis, leaf.shape, 1)
