"""How a batch is divided: over the copies of a model, and over the microbatches that a copy runs one after another.

A plan says how many samples a step has, and a training loop gives others now and then: an incomplete last batch, or
several batches' worth at once. All copies run equally many microbatches (`agreed_sizes`), because their collectives
meet; one that has no sample left runs a sample that counts nothing. Weights of losses see to the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from phaze.errors import PlanError

__all__ = ["Division", "agreed_sizes", "divided", "is_number", "micro_batch", "padded", "sample_count", "share_of"]


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
