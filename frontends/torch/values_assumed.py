"""What a model asks of values while it is captured without any, and what is assumed of them (`ValuesAssumed`).

Models that read images between words check that as many words stand for parts of images as there are parts, and put
the parts in the places of those words. Which places these are is in the values alone, and nothing that is planned
depends on it:

- checks by `torch._check_tensor_all_with`, such as Hugging Face's of placeholders, are taken as passed;
- `bincount` of indices below `minlength`, such as of the experts that tokens chose, has so many counts;
- `x[mask] = values` becomes a `masked_scatter`, whose shapes are known; where every place gets the same, a `where`.

Features of images are also made a list of samples and joined again, which is a view of the whole (`_joined_again`):
a trace would hold as many tensors as the batch has samples.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["ValuesAssumed"]


class _Holds:
    """Stands for a tensor of one truth value, which is assumed to hold."""

    def item(self) -> bool:
        """True."""
        return True


class ValuesAssumed(TorchFunctionMode):
    """While this is entered, functions that need values are replaced as the module's docstring says."""

    def __init__(self) -> None:
        super().__init__()
        self._lists: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor._is_all_true:
            return _Holds()
        if func is torch.Tensor.__setitem__ and _is_mask(args[1]):
            target, mask, values = args
            target.copy_(_placed(target, mask, values))
            return None
        if func in (torch.bincount, torch.Tensor.bincount) and (kwargs or {}).get("minlength"):
            return _counted(*args, **(kwargs or {}))
        if func in (torch.cat, torch.stack) and len(args) == 1:
            joined = self._joined_again(func, args[0], (kwargs or {}).get("dim", 0))
            if joined is not None:
                return joined
        result = func(*args, **(kwargs or {}))
        if func in (torch.unbind, torch.Tensor.unbind) and args[1:] in ((), (0,)) and not kwargs:
            self._lists.append((args[0], tuple(result)))
        return result

    def _joined_again(self, func: Any, tensors: object, dim: object) -> torch.Tensor | None:
        """The tensor whose samples these are, all of them in their order; None where they are anything else."""
        if dim != 0 or not isinstance(tensors, list | tuple):
            return None
        for whole, samples in self._lists:
            if len(samples) == len(tensors) and all(map(operator.is_, samples, tensors)):
                is_flat = func is torch.cat and whole.dim() > 1
                return whole.flatten(0, 1) if is_flat else whole
        return None


def _counted(indices: torch.Tensor, weights: torch.Tensor | None = None, *, minlength: int) -> torch.Tensor:
    """How often each index occurs, or the sum of its weights."""
    added = torch.ones_like(indices) if weights is None else weights
    return added.new_zeros(minlength).scatter_add(0, indices, added)


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.dim() > 0


def _placed(target: torch.Tensor, mask: torch.Tensor, values: Any) -> torch.Tensor:
    """A tensor in which the values stand where the mask is true, each row of them once or the only one everywhere."""
    rows = torch.as_tensor(values, dtype=target.dtype, device=target.device)
    features = target.dim() - mask.dim()
    has_rows = rows.dim() == features + 1 and rows.shape[0] > 1
    mask = mask.reshape(*mask.shape, *(1 for _ in range(features)))
    return target.masked_scatter(mask, rows) if has_rows else torch.where(mask, rows, target)
