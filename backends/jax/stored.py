"""How one parameter is stored on the mesh: what of it the tensor, data and pipeline axes cut.

A parameter keeps its own shape wherever a mesh can cut that shape. A dimension of which the tensor axis cuts every one
of several parts (query, key and value side by side) is seen as two, (parts, part). One that the tensor axis does not
divide is padded, and one that both the tensor and the data axis cut is seen as two, (ways, chunk): then the stored
shape differs from the user's, and `seen` and `stored` lead from one to the other. Data-parallel shards (ZeRO) take the
longest dimension that they divide; a parameter without one stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phaze.errors import PlanError
from phaze.plan.plan import SplitDim

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

__all__ = ["Stored", "store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One parameter on a mesh.

    Attributes:
        name: dotted path.
        shape: as the user has it, or a view of that; a stacked one has the layers first.
        parts: how many equal parts of a dimension the view sets side by side, in front of `split_dim`; 1 for no view.
        is_stacked: whether a scan over layers takes it apart.
        split_dim: the dimension of `shape` (after merging) that the tensor axis cuts; None for none.
        merged: whether `split_dim` and the one behind it are stored as one.
        is_expanded: whether `split_dim` is stored as (ways, chunk).
        chunk: elements of the split dimension on one device.
        ways: how many devices the tensor axis has.
        shard_dim: the stored dimension that data-parallel shards cut; None for none.
        stage_dim: the stored dimension that stages cut: the layers of a stack; of a parameter outside of it one that
            they divide, for all stages run one program and hold equal parts; None for none. Where it is also
            `shard_dim`, shards are parts of a stage's part.
    """

    name: str
    shape: tuple[int, ...]
    is_stacked: bool = False
    split_dim: int | None = None
    merged: bool = False
    parts: int = 1
    is_expanded: bool = False
    chunk: int = 0
    ways: int = 1
    shard_dim: int | None = None
    stage_dim: int | None = None

    def dim_of(self, axis: str) -> int | None:
        """The stored dimension whose shards an axis holds."""
        return self.shard_dim if axis == "dp" else self.stage_dim

    @property
    def user_shape(self) -> tuple[int, ...]:
        """The shape that the user's function sees."""
        if self.parts == 1:
            return self.shape
        assert self.split_dim is not None
        at = self.split_dim
        return (*self.shape[: at - 1], self.parts * self.shape[at], *self.shape[at + 1 :])

    def unviewed(self, value: Any, *, is_layer: bool = False) -> Any:
        """What `seen` gave, in the user's shape."""
        return value.reshape(self.user_shape[1 if is_layer else 0 :])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array that lies on the mesh."""
        return self._shape_of(self.shape, 0)

    def _shape_of(self, shape: Sequence[int], shift: int) -> tuple[int, ...]:
        sizes = list(shape)
        if self.split_dim is None:
            return tuple(sizes)
        at = self.split_dim - shift
        if self.merged:
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        if self.is_expanded:
            sizes[at : at + 1] = [self.ways, self.chunk]
        return tuple(sizes)

    def stored(self, value: Any) -> Any:
        """The user's array as it is stored."""
        import jax.numpy as jnp

        value = jnp.reshape(value, self.shape)
        if self.stored_shape == self.shape:
            return value
        assert self.split_dim is not None
        merged = replace(self, is_expanded=False).stored_shape
        missing = self.chunk * self.ways - merged[self.split_dim]
        padding = [(0, missing if dim == self.split_dim else 0) for dim in range(len(merged))]
        return jnp.pad(jnp.reshape(value, merged), padding).reshape(self.stored_shape)

    def seen(self, value: Any, *, is_layer: bool = False) -> Any:
        """A stored array, or one layer of a stacked one, in its shape."""
        import jax
        import jax.numpy as jnp

        if self.stored_shape == self.shape:
            return value
        assert self.split_dim is not None
        shift = 1 if is_layer else 0
        shape, at = self.shape[shift:], self.split_dim - shift
        merged = replace(self, is_expanded=False)._shape_of(shape, shift)
        padded = [self.chunk * self.ways if dim == at else size for dim, size in enumerate(merged)]
        whole = jnp.reshape(value, padded)
        if padded[at] != merged[at]:
            whole = jax.lax.slice_in_dim(whole, 0, merged[at], axis=at)
        return whole.reshape(shape)

    def spec(self, *, data: str = "", stages: str = "", tensor: str = "", is_layer: bool = False) -> PartitionSpec:
        """The dimensions that some axes cut; an axis without a name cuts none."""
        from jax.sharding import PartitionSpec

        names: list[tuple[str, ...]] = [()] * len(self.stored_shape)
        for dim, axis in ((self.split_dim, tensor), (self.stage_dim, stages), (self.shard_dim, data)):
            if dim is not None and axis:
                names[dim] = (*names[dim], axis)
        found = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in names]
        return PartitionSpec(*(found[1:] if is_layer else found))


def store(
    name: str,
    shape: tuple[int, ...],
    splits: Sequence[SplitDim],
    *,
    is_stacked: bool,
    tensor: int,
    data: int,
    stages: int = 1,
) -> Stored:
    """How a parameter with these splits is stored where `data` copies share its state (1: each has all of it).

    Raises PlanError for splits that no named sharding expresses.
    """
    found = _split(Stored(name=name, shape=shape, is_stacked=is_stacked, ways=tensor), splits)
    if data > 1:
        dim = _longest(found, data, {found.split_dim})
        if dim is not None:
            found = replace(found, shard_dim=dim)
        elif found.split_dim is not None and not found.is_expanded and found.chunk % data == 0:
            found = replace(found, is_expanded=True, shard_dim=found.split_dim + 1)
    if stages > 1:
        dim = 0 if is_stacked else _longest(found, stages, {found.split_dim, found.shard_dim})
        if dim is None and found.shard_dim is not None and found.stored_shape[found.shard_dim] % (data * stages) == 0:
            dim = found.shard_dim
        found = replace(found, stage_dim=dim)
    return found


def _longest(found: Stored, parts: int, taken: set[int | None]) -> int | None:
    """The longest free dimension that so many parts divide; the layers of a stack are not free."""
    first = 1 if found.is_stacked else 0
    sizes = enumerate(found.stored_shape)
    usable = [(size, -dim) for dim, size in sizes if dim >= first and dim not in taken and size and size % parts == 0]
    return -max(usable)[1] if usable else None


def _split(whole: Stored, splits: Sequence[SplitDim]) -> Stored:
    """The tensor axis' part."""
    shift = 1 if whole.is_stacked else 0
    if not splits:
        return whole
    first, *rest = sorted(splits, key=lambda split: (split.dim, split.outer))
    dim, ways = first.dim + shift, math.prod(split.ways for split in splits)
    is_plain = not rest and first.outer == 1
    is_whole_major = len(rest) == 1 and first.outer == 1 and rest[0].ways * rest[0].chunk > 0
    if not rest and first.outer > 1 and ways == whole.ways:
        return _viewed(whole, dim, first, splits)
    if ways != whole.ways or not (is_plain or is_whole_major):
        raise _inexpressible(whole, splits)
    if is_plain:
        is_even = whole.shape[dim] == first.chunk * ways
        return replace(whole, split_dim=dim, chunk=first.chunk, is_expanded=not is_even)
    (second,) = rest
    is_inside = second.dim == first.dim and second.outer == first.ways
    if is_inside and whole.shape[dim] == second.chunk * ways:
        return replace(whole, split_dim=dim, chunk=second.chunk)
    is_behind = second.dim == first.dim + 1 and second.outer == 1 and first.ways == whole.shape[dim]
    if is_behind and whole.shape[dim + 1] == second.chunk * second.ways and first.stride == second.ways:
        return replace(whole, split_dim=dim, merged=True, chunk=second.chunk)
    raise _inexpressible(whole, splits)


def _viewed(whole: Stored, dim: int, split: SplitDim, splits: Sequence[SplitDim]) -> Stored:
    """Every one of `outer` parts of a dimension is cut."""
    part, rest = divmod(whole.shape[dim], split.outer)
    if rest or part != split.chunk * split.ways:
        raise _inexpressible(whole, splits)
    shape = (*whole.shape[:dim], split.outer, part, *whole.shape[dim + 1 :])
    return replace(whole, shape=shape, parts=split.outer, split_dim=dim + 1, chunk=split.chunk)


def _inexpressible(whole: Stored, splits: Sequence[SplitDim]) -> PlanError:
    listed = ", ".join(f"dim {s.dim} in {s.outer} runs / {s.ways}" for s in splits)
    return PlanError(
        f"parameter {whole.name!r} of shape {list(whole.shape)} is split as {listed}, which no NamedSharding on a "
        f"tensor axis of {whole.ways} expresses; plan with another tensor width, or constrain that parameter."
    )
