"""Collectives over the data and pipeline axes on arrays whose tensor axis is left to the compiler.

The partitioner cannot divide a gather or a scatter that it did not write itself: it would first make the array whole
along the tensor axis. So both run with the tensor axis laid open as well, each device on its own part.
"""

from __future__ import annotations

from typing import Any

from phaze.backends.jax.stored import Stored

__all__ = ["gathered", "scattered"]


def gathered(how: Stored, value: Any, axis: str = "dp", *, is_layer: bool = False) -> Any:
    """All shards of an axis, side by side."""
    import jax

    dim = how.dim_of(axis)
    if dim is None:
        return value
    at = dim - (1 if is_layer else 0)
    return _open(how, value, lambda part: jax.lax.all_gather(part, axis, axis=at, tiled=True), is_layer)


def scattered(how: Stored, value: Any, axis: str = "dp") -> Any:
    """The sum over an axis, of which each device keeps its shard (all of it where there are no shards)."""
    import jax

    dim = how.dim_of(axis)
    if dim is None:
        return jax.lax.psum(value, axis)
    return _open(how, value, lambda part: jax.lax.psum_scatter(part, axis, scatter_dimension=dim, tiled=True), False)


def _open(how: Stored, value: Any, work: Any, is_layer: bool) -> Any:
    import jax

    if how.split_dim is None:
        return work(value)
    spec = how.spec(tensor="tp", is_layer=is_layer)
    return jax.shard_map(work, in_specs=spec, out_specs=spec, axis_names={"tp"}, check_vma=False)(value)
