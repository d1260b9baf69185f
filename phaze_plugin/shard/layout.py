"""Layouts: where the elements of a tensor lie on the tensor-parallel devices, and which layouts users pin or forbid.

A tensor is *whole* (every device has all of it), *partial* (every device has a summand of the same shape) or *split*.
A split cuts a dimension, seen as `outer` runs of equal length, inside each run into chunks of `chunk` elements: with
outer = 1 device k holds one block; with outer = 3, as for the fused columns (3 h d) cut by heads, it holds its part of
each third. Device k of the axis holds chunk (k // stride) % ways. The last chunk may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from phaze.errors import ShardError
from phaze.ir import Dims, Rule

__all__ = ["PARTIAL", "WHOLE", "Layout", "LayoutConstraint", "Split", "admits", "check_constraints", "layout_of"]


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """One dimension that is cut into chunks."""

    dim: int
    outer: int
    chunk: int
    ways: int
    stride: int = 1

    def local_size(self, size: int, kept: int | None = None) -> int:
        """The part of a dimension on the device that holds most of it.

        `kept` is what earlier splits of the same dimension leave of it, in whole runs of this split; None stands for
        all of it.
        """
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

    def joined(self) -> Layout:
        """The same layout, with splits of factors that lie side by side in a dimension as one split."""
        splits: list[Split] = []
        for split in sorted(self.splits):
            last = splits[-1] if splits else None
            is_inside_last = last is not None and (last.dim, last.outer * last.ways) == (split.dim, split.outer)
            if last is not None and is_inside_last and last.stride == split.ways * split.stride:
                splits[-1] = Split(last.dim, last.outer, split.chunk, last.ways * split.ways, split.stride)
            else:
                splits.append(split)
        return Layout(tuple(splits), self.is_partial)

    def is_one_cut(self, shape: Sequence[int]) -> bool:
        """Whether all devices together cut one dimension, or two neighbours that could as well be one dimension."""
        splits = self.joined().splits
        if len(splits) < 2:
            return True
        first, second = splits[0], splits[1]
        is_used_up = (first.outer, first.chunk, first.ways) == (1, 1, shape[first.dim])
        is_even = second.outer == 1 and second.chunk * second.ways == shape[second.dim]
        is_next = second.dim == first.dim + 1 and first.stride == second.ways * second.stride
        return len(splits) == 2 and is_used_up and is_even and is_next

    def __str__(self) -> str:
        if self.is_partial:
            return "partial"
        return " and ".join(str(split) for split in self.splits) or "whole"


WHOLE = Layout()
PARTIAL = Layout(is_partial=True)


def layout_of(rule: Rule, dims: Dims, ways: Mapping[str, int]) -> Layout:
    """The layout of a tensor with these dimensions when an op splits each named factor so many ways.

    The order of `ways` matters: from one device to the next, the part of the last factor changes first.
    """
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


@dataclass(frozen=True, slots=True)
class LayoutConstraint:
    """A user's wish: pin (or, with `is_forbidden`, rule out) the layout of tensors whose names match a pattern.

    The layout meant is whole for `dim=None`, else split along that dimension.
    """

    pattern: str
    dim: int | None
    is_forbidden: bool = False

    def __str__(self) -> str:
        layout = "whole" if self.dim is None else f"split along dim {self.dim}"
        return f"{'forbid' if self.is_forbidden else 'pin'} {self.pattern!r} {layout}"

    def matches(self, name: str) -> bool:
        """Whether the pattern (shell style: * ? [...]) matches a parameter's or tensor's name."""
        return fnmatchcase(name, self.pattern)

    def admits(self, layout: Layout) -> bool:
        """Whether the constraint allows this layout."""
        is_meant = layout.is_whole if self.dim is None else {split.dim for split in layout.splits} == {self.dim}
        return is_meant is not self.is_forbidden


def admits(constraints: Sequence[LayoutConstraint], name: str, layout: Layout) -> bool:
    """Whether every constraint on a name allows a layout."""
    return all(constraint.admits(layout) for constraint in constraints if constraint.matches(name))


def check_constraints(constraints: Sequence[LayoutConstraint], names: Iterable[str]) -> None:
    """Raise ShardError for a pattern that matches none of the names, or for constraints that contradict each other."""
    known = tuple(names)
    pinned: dict[str, LayoutConstraint] = {}
    for constraint in constraints:
        matched = [name for name in known if constraint.matches(name)]
        if not matched:
            raise ShardError(f"the constraint to {constraint} matches no parameter or tensor; check its pattern.")
        if constraint.is_forbidden:
            continue
        for name in matched:
            earlier_pin = pinned.get(name)
            if earlier_pin is not None and earlier_pin.dim != constraint.dim:
                raise ShardError(f"constraints contradict each other on {name!r}: {earlier_pin}, and {constraint}.")
            pinned[name] = constraint
    for constraint in constraints:
        for name, pin in pinned.items():
            if constraint.is_forbidden and constraint.matches(name) and constraint.dim == pin.dim:
                raise ShardError(f"constraints contradict each other on {name!r}: {pin}, and {constraint}.")
