"""Where the elements of a tensor lie on the devices of one mesh axis.

A tensor is *whole* (every device has all of it), *partial* (every device has a summand of the same shape) or *split*.
A split cuts a dimension, seen as `outer` runs of equal length, inside each run into chunks of `chunk` elements: with
outer = 1 device k holds one block; with outer = 3, as for the fused columns (3 h d) cut by heads, it holds its part of
each third. Device k of the axis holds chunk (k // stride) % ways. The last chunk may be shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phaze.ir import Dims, Rule

__all__ = ["PARTIAL", "WHOLE", "Layout", "Split", "layout_of"]


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """One dimension cut into chunks."""

    dim: int
    outer: int
    chunk: int
    ways: int
    stride: int = 1

    def local_size(self, size: int, kept: int | None = None) -> int:
        """The part of a dimension on the device that holds most of it; earlier splits `kept` whole runs of it."""
        run = size // self.outer
        return (size if kept is None else kept) // run * min(self.chunk, run)

    def __str__(self) -> str:
        run = "" if self.outer == 1 else f" in {self.outer} runs"
        return f"dim {self.dim}{run} / {self.ways}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Whole, partial, or split along one or more dimensions."""

    splits: tuple[Split, ...] = ()
    is_partial: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every device has the final value of every element."""
        return not self.splits and not self.is_partial

    @property
    def is_strided(self) -> bool:
        """Whether a device's part of some dimension is not one block."""
        return any(split.outer > 1 for split in self.splits)

    @property
    def ways(self) -> int:
        """Into how many different parts the tensor is cut."""
        product = 1
        for split in self.splits:
            product *= split.ways
        return product

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape on the device that holds most."""
        sizes = list(shape)
        for split in sorted(self.splits):
            sizes[split.dim] = split.local_size(shape[split.dim], sizes[split.dim])
        return tuple(sizes)

    def __str__(self) -> str:
        if self.is_partial:
            return "partial"
        return " and ".join(str(split) for split in self.splits) or "whole"


WHOLE = Layout()
PARTIAL = Layout(is_partial=True)


def layout_of(rule: Rule, dims: Dims, ways: Mapping[str, int]) -> Layout:
    """The layout of a tensor when an op splits factors so many ways; later factors vary fastest over devices."""
    names = list(ways)
    splits = []
    for index, dim in enumerate(dims):
        outer, inner = 1, rule.dim_size(dim)
        for name in dim.factors:
            size = rule.size(name)
            inner //= size
            if name in ways:
                stride = 1
                for later in names[names.index(name) + 1 :]:
                    stride *= ways[later]
                splits.append(Split(index, outer, -(-size // ways[name]) * inner, ways[name], stride))
            outer *= size
    return Layout(tuple(sorted(splits)))
