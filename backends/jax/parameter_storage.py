"""How one parameter is stored on the mesh: which dimension each axis cuts, and how shards are gathered and reduced.

A parameter keeps its own shape wherever a mesh can cut that shape. There are three exceptions:

fused       a dimension of which the tensor axis cuts every one of several parts (query, key and value side by side) is
            seen as two, (parts, part)
padded      a dimension that the tensor axis does not divide is padded and stored as two, (tp, chunk)
expanded    a dimension that both the tensor and another axis cut is stored as two, (tp, chunk)

Then the stored shape differs from the user's; `to_stored`, `from_stored` and `to_user_shape` lead from one to the
other. Data-parallel shards (ZeRO) cut the longest dimension that they divide; a parameter without one stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from phaze.errors import PlanError
from phaze.plan.plan import SplitDim
from phaze.shard import Layout, Split

__all__ = ["STAGES", "ParameterStorage", "choose_storage", "gather_shards", "reduce_to_shards"]

STAGES = ("pp",)
"""The mesh axis of pipeline stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterStorage:
    """How one parameter lies on a mesh.

    Attributes:
        name: dotted path.
        shape: the user's shape, or the fused view of it; a stacked parameter has its layers first.
        is_stacked: whether a scan over layers takes it apart.
        split_dim: the dimension of `shape` (after merging) that the tensor axis cuts; None for none.
        is_merged: whether `split_dim` and the dimension behind it are stored as one.
        parts: how many equal parts are fused in the user's dimension; they stand in front of `split_dim`. 1 for none.
        is_expanded: whether `split_dim` is stored as (tp, chunk).
        chunk: the elements of the split dimension on one device.
        tp: how many devices the tensor axis has.
        shard_dim: the stored dimension that ZeRO's shards cut; None for none.
        shard_axes: the mesh axes over which these shards lie.
        stage_dim: the stored dimension that stages cut; None for none. In a stack these are the layers. All stages run
            one program and hold equal parts of the other parameters, for which it is a dimension that they divide.
            Where it is also `shard_dim`, shards are parts of a stage's part.
        expert_dim: the dimension of `shape` that counts experts, where these are divided over devices; None for none.
        ep: how many devices experts are divided over.
    """

    name: str
    shape: tuple[int, ...]
    is_stacked: bool = False
    split_dim: int | None = None
    is_merged: bool = False
    parts: int = 1
    is_expanded: bool = False
    chunk: int = 0
    tp: int = 1
    shard_dim: int | None = None
    shard_axes: tuple[str, ...] = ("dp",)
    stage_dim: int | None = None
    expert_dim: int | None = None
    ep: int = 1

    def dim_cut_by(self, axes: tuple[str, ...]) -> int | None:
        """The stored dimension whose shards the pipeline axis or the axes of ZeRO's shards hold."""
        return self.stage_dim if axes == STAGES else self.shard_dim

    @property
    def user_shape(self) -> tuple[int, ...]:
        """The shape that the user's function sees."""
        if self.parts == 1:
            return self.shape
        assert self.split_dim is not None
        parts_dim = self.split_dim - 1
        return (*self.shape[:parts_dim], self.parts * self.shape[self.split_dim], *self.shape[self.split_dim + 1 :])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array that lies on the mesh."""
        return self._stored_shape_of(self.shape, 0)

    def _stored_shape_of(self, shape: Sequence[int], shift: int) -> tuple[int, ...]:
        """The stored form of a shape of which `shift` leading dimensions are missing."""
        sizes = list(shape)
        if self.split_dim is None:
            return tuple(sizes)
        dim = self.split_dim - shift
        if self.is_merged:
            sizes[dim : dim + 2] = [sizes[dim] * sizes[dim + 1]]
        if self.is_expanded:
            sizes[dim : dim + 1] = [self.tp, self.chunk]
        return tuple(sizes)

    @property
    def stored_expert_dim(self) -> int | None:
        """The stored dimension along which experts are divided: that of a chunk, where the tensor axis cuts it."""
        is_behind = self.is_expanded and self.expert_dim == self.split_dim
        return None if self.expert_dim is None else self.expert_dim + is_behind

    def to_stored(self, value: jax.Array) -> jax.Array:
        """The user's array in its stored shape."""
        value = jnp.reshape(value, self.shape)
        if self.stored_shape == self.shape:
            return value
        assert self.split_dim is not None
        merged = replace(self, is_expanded=False).stored_shape
        missing = self.chunk * self.tp - merged[self.split_dim]
        padding = [(0, missing if dim == self.split_dim else 0) for dim in range(len(merged))]
        return jnp.pad(jnp.reshape(value, merged), padding).reshape(self.stored_shape)

    def from_stored(self, value: jax.Array, *, is_layer: bool = False, is_on_device: bool = False) -> jax.Array:
        """A stored array, or one layer of a stacked one, in the form of `shape`: the user's, or its fused view.

        What `is_on_device` has the experts of one device.
        """
        if self.stored_shape == self.shape:
            return value
        assert self.split_dim is not None
        shift = 1 if is_layer else 0
        experts = self.expert_dim if is_on_device else None
        sizes = [size // self.ep if dim == experts else size for dim, size in enumerate(self.shape)]
        shape, split_dim = tuple(sizes[shift:]), self.split_dim - shift
        merged = replace(self, is_expanded=False)._stored_shape_of(shape, shift)
        chunk = self.chunk // self.ep if experts == self.split_dim else self.chunk
        padded = [chunk * self.tp if dim == split_dim else size for dim, size in enumerate(merged)]
        whole = jnp.reshape(value, padded)
        if padded[split_dim] != merged[split_dim]:
            whole = jax.lax.slice_in_dim(whole, 0, merged[split_dim], axis=split_dim)
        return whole.reshape(shape)

    def to_user_shape(self, value: jax.Array) -> jax.Array:
        """What `from_stored` gave, in the user's shape."""
        return value.reshape(self.user_shape)

    def partition_spec(self, *axes: str, is_layer: bool = False, has_shards: bool = True) -> PartitionSpec:
        """The dimensions that these axes cut, of the stored array or of one layer of it, with ZeRO's shards or not."""
        shards = ((self.shard_dim, axis) for axis in self.shard_axes if has_shards)
        cuts = ((self.split_dim, "tp"), (self.stored_expert_dim, "ep"), (self.stage_dim, "pp"), *shards)
        axes_of_dims: list[tuple[str, ...]] = [()] * len(self.stored_shape)
        for dim, axis in cuts:
            if dim is not None and axis in axes:
                axes_of_dims[dim] = (*axes_of_dims[dim], axis)
        entries = [None if not names else names[0] if len(names) == 1 else names for names in axes_of_dims]
        return PartitionSpec(*(entries[1:] if is_layer else entries))


def gather_shards(
    storage: ParameterStorage, value: jax.Array, axes: tuple[str, ...], *, is_layer: bool = False
) -> jax.Array:
    """All shards of a parameter, or of one layer of it, along the axes of stages or of ZeRO's shards, side by side."""
    dim = storage.dim_cut_by(axes)
    if dim is None:
        return value
    gathered_dim = dim - (1 if is_layer else 0)

    def gather(shard: jax.Array) -> jax.Array:
        return jax.lax.all_gather(shard, axes, axis=gathered_dim, tiled=True)

    return _on_tensor_parts(storage, value, gather, is_layer=is_layer)


def reduce_to_shards(storage: ParameterStorage, value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over some axes, of which each device keeps its shard (all of it where there are no shards)."""
    dim = storage.dim_cut_by(axes)
    if dim is None:
        return jax.lax.psum(value, axes) if axes else value

    def scatter(summand: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(summand, axes, scatter_dimension=dim, tiled=True)

    return _on_tensor_parts(storage, value, scatter, is_layer=False)


def _on_tensor_parts(
    storage: ParameterStorage, value: jax.Array, collective: Callable[[jax.Array], jax.Array], *, is_layer: bool
) -> jax.Array:
    """Run a collective on each device's part along the tensor axis.

    The compiler's partitioner cannot divide a gather or a scatter that it did not write itself: it would first make the
    array whole along the tensor axis. So this axis is made manual for the collective.
    """
    if storage.split_dim is None:
        return collective(value)
    spec = storage.partition_spec("tp", is_layer=is_layer)
    return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names={"tp"}, check_vma=False)(value)


def choose_storage(
    name: str,
    shape: tuple[int, ...],
    splits: Sequence[SplitDim],
    *,
    is_stacked: bool,
    tp: int,
    shards: int,
    shard_axes: tuple[str, ...] = ("dp",),
    pp: int = 1,
    keeps_shape: bool = False,
    expert_dim: int | None = None,
    ep: int = 1,
) -> ParameterStorage:
    """How a parameter with these splits is stored.

    Args:
        name: dotted path.
        shape: the user's shape.
        splits: how the plan splits it over the tensor axis; those of one layer for a stacked parameter.
        is_stacked: whether a scan over layers takes it apart.
        tp: how many devices the tensor axis has.
        shards: how many copies share its state (1: each has all of it).
        shard_axes: the mesh axes over which these copies lie.
        pp: how many stages the pipeline has.
        keeps_shape: whether it must have the user's shape. Then a split that this shape has no spec for becomes a
            split into equal blocks of the same dimension, or none where the tensor axis does not divide it.
        expert_dim: the dimension of the user's shape that counts experts, where these are divided over devices.
        ep: how many devices experts are divided over; the plan's splits are those of one device's experts.

    Raises PlanError for splits that no named sharding expresses.
    """
    whole = ParameterStorage(name=name, shape=shape, is_stacked=is_stacked, tp=tp, shard_axes=shard_axes)
    if expert_dim is not None:
        on_device = tuple(size // ep if dim == expert_dim else size for dim, size in enumerate(shape))
        whole = replace(whole, shape=on_device)
    storage = _split_in_blocks(whole, splits) if keeps_shape else _split(whole, splits)
    if expert_dim is not None:
        storage = _with_all_experts(storage, expert_dim, ep, splits, keeps_shape=keeps_shape)
    if shards > 1:
        shard_dim = _longest_free_dim(storage, shards, {storage.split_dim, storage.stored_expert_dim})
        if shard_dim is not None:
            storage = replace(storage, shard_dim=shard_dim)
        elif storage.split_dim not in (None, expert_dim) and not storage.is_expanded and storage.chunk % shards == 0:
            assert storage.split_dim is not None
            in_chunk = replace(storage, is_expanded=True, shard_dim=storage.split_dim + 1)
            # The user's dimension may be cut by both axes, too: the tensor axis cuts first.
            storage = replace(storage, shard_dim=storage.split_dim) if keeps_shape else in_chunk
    if pp > 1:
        stage_dim = 0 if is_stacked else _longest_free_dim(storage, pp, _cut_dims(storage))
        if stage_dim is None and storage.shard_dim is not None:
            is_divided_twice = storage.stored_shape[storage.shard_dim] % (shards * pp) == 0
            stage_dim = storage.shard_dim if is_divided_twice else None
        storage = replace(storage, stage_dim=stage_dim)
    return storage


def _cut_dims(storage: ParameterStorage) -> set[int | None]:
    return {storage.split_dim, storage.shard_dim, storage.stored_expert_dim}


def _with_all_experts(
    storage: ParameterStorage, expert_dim: int, ep: int, splits: Sequence[SplitDim], *, keeps_shape: bool
) -> ParameterStorage:
    """The storage of one device's experts as that of all: side by side, in each part that the tensor axis makes."""
    is_reshaped = storage.stored_shape != storage.shape or storage.parts > 1
    if is_reshaped and (storage.split_dim is None or expert_dim >= storage.split_dim - 1):
        raise _inexpressible(storage, splits)
    shape = tuple(size * ep if dim == expert_dim else size for dim, size in enumerate(storage.shape))
    every = replace(storage, shape=shape, expert_dim=expert_dim, ep=ep)
    if storage.split_dim != expert_dim:
        return every
    return replace(every, chunk=storage.chunk * ep, is_expanded=not keeps_shape)


def _longest_free_dim(storage: ParameterStorage, parts: int, taken: set[int | None]) -> int | None:
    """The longest free dimension that so many parts divide, the first of equals; a stack's layers are not free."""
    first = 1 if storage.is_stacked else 0
    free_dims = [
        dim
        for dim, size in enumerate(storage.stored_shape)
        if dim >= first and dim not in taken and size and size % parts == 0
    ]
    return max(free_dims, key=lambda dim: storage.stored_shape[dim], default=None)


def _split(whole: ParameterStorage, splits: Sequence[SplitDim]) -> ParameterStorage:
    """The storage with the plan's split over the tensor axis."""
    shift = 1 if whole.is_stacked else 0
    if not splits:
        return whole
    layout = _layout(splits)
    outer_split, *inner_splits = layout.splits
    dim, ways = outer_split.dim + shift, layout.ways
    if ways != whole.tp or not layout.is_one_cut(whole.shape[shift:]):
        raise _inexpressible(whole, splits)
    if inner_splits:
        return replace(whole, split_dim=dim, is_merged=True, chunk=inner_splits[0].chunk)
    if outer_split.outer > 1:
        return _fused(whole, dim, outer_split, splits)
    is_even = whole.shape[dim] == outer_split.chunk * ways
    return replace(whole, split_dim=dim, chunk=outer_split.chunk, is_expanded=not is_even)


def _split_in_blocks(whole: ParameterStorage, splits: Sequence[SplitDim]) -> ParameterStorage:
    """The storage in the user's own shape, with the last split dimension that the tensor axis divides in blocks."""
    shift = 1 if whole.is_stacked else 0
    dims = [split.dim + shift for split in splits if whole.shape[split.dim + shift] % whole.tp == 0]
    if not dims:
        return whole
    return replace(whole, split_dim=max(dims), chunk=whole.shape[max(dims)] // whole.tp)


def _layout(splits: Sequence[SplitDim]) -> Layout:
    """A plan's splits of a parameter as a layout, with those of factors side by side as one."""
    return Layout(
        tuple(Split(split.dim, split.outer, split.chunk, split.ways, split.stride) for split in splits)
    ).joined()


def _fused(whole: ParameterStorage, dim: int, split: Split, splits: Sequence[SplitDim]) -> ParameterStorage:
    """The storage of a parameter of which every one of `split.outer` fused parts of a dimension is cut."""
    part_size, remainder = divmod(whole.shape[dim], split.outer)
    if remainder or part_size != split.chunk * split.ways:
        raise _inexpressible(whole, splits)
    shape = (*whole.shape[:dim], split.outer, part_size, *whole.shape[dim + 1 :])
    return replace(whole, shape=shape, parts=split.outer, split_dim=dim + 1, chunk=split.chunk)


def _inexpressible(whole: ParameterStorage, splits: Sequence[SplitDim]) -> PlanError:
    listed = ", ".join(f"dim {split.dim} in {split.outer} runs / {split.ways}" for split in splits)
    return PlanError(
        f"parameter {whole.name!r} of shape {list(whole.shape)} is split as {listed}, which no NamedSharding on a "
        f"tensor axis of {whole.tp} expresses; plan with another tp, or constrain that parameter."
    )
