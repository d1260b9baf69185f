"""A parameter is stored in a shape that a mesh can cut, and comes back in the shape that the user has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from phaze.backends.jax.parameter_storage import choose_storage
from phaze.backends.jax.stacked_layers import LayerStacks
from phaze.backends.jax.train_state import Adam, asks_for_shapes
from phaze.errors import PlanError
from phaze.plan.plan import SplitDim


def split(dim: int, chunk: int, ways: int, outer: int = 1, stride: int = 1) -> SplitDim:
    return SplitDim(dim=dim, outer=outer, chunk=chunk, ways=ways, stride=stride)


@pytest.mark.parametrize(
    ("shape", "splits", "shards", "stored", "spec"),
    [
        ((64, 32), (split(0, 16, 4),), 1, (64, 32), ("tp", None)),
        ((64, 32), (split(0, 16, 4),), 2, (64, 32), ("tp", "dp")),
        ((61, 32), (split(0, 16, 4),), 1, (4, 16, 32), ("tp", None, None)),
        ((128,), (split(0, 32, 4),), 2, (4, 32), ("tp", "dp")),
        ((8, 2, 8), (split(1, 1, 2, stride=2), split(2, 4, 2)), 1, (8, 16), (None, "tp")),
        ((8, 16), (split(1, 8, 2, stride=2), split(1, 4, 2, outer=2)), 1, (8, 16), (None, "tp")),
        ((7, 5), (), 2, (7, 5), (None, None)),
        ((8, 24), (split(1, 2, 4, outer=3),), 1, (8, 3, 8), (None, None, "tp")),
        ((8, 24), (split(1, 2, 4, outer=3),), 2, (8, 3, 8), ("dp", None, "tp")),
    ],
)
def test_a_parameter_is_stored_as_a_mesh_can_cut_it(
    shape: tuple[int, ...], splits: tuple[SplitDim, ...], shards: int, stored: tuple[int, ...], spec: tuple[Any, ...]
) -> None:
    storage = choose_storage("w", shape, splits, is_stacked=False, tp=4, shards=shards)
    assert storage.stored_shape == stored
    assert storage.partition_spec("dp", "tp") == PartitionSpec(*spec)
    whole = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    np.testing.assert_array_equal(storage.to_user_shape(storage.from_stored(storage.to_stored(whole))), whole)


def test_a_split_that_no_sharding_expresses_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"'w' of shape \[8, 24\] is split as dim 1 in 3 runs / 4"):
        choose_storage("w", (8, 24), (split(1, 3, 4, outer=3),), is_stacked=False, tp=4, shards=1)


def test_stages_cut_the_layers_of_a_stack_and_shards_another_dimension() -> None:
    storage = choose_storage("w", (4, 64, 32), (split(0, 16, 4),), is_stacked=True, tp=4, shards=2, pp=2)
    assert storage.partition_spec("pp", "dp", "tp") == PartitionSpec("pp", "tp", "dp")
    assert storage.partition_spec("tp", is_layer=True) == PartitionSpec("tp", None)


def test_stages_and_shards_share_the_only_dimension_of_a_vector() -> None:
    storage = choose_storage("w", (12,), (), is_stacked=False, tp=4, shards=2, pp=3)
    assert storage.partition_spec("pp", "dp", "tp") == PartitionSpec(("pp", "dp"))
    assert choose_storage("w", (10,), (), is_stacked=False, tp=4, shards=2, pp=3).stage_dim is None


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS = {
    "adam": (optax.adam(1e-3), False),
    "clipped": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), False),
    "scheduled": (optax.sgd(optax.linear_schedule(1.0, 0.0, 10), momentum=0.9), False),
    "ours": (Adam(), False),
    "decay of matrices": (optax.adamw(1e-3, mask=is_matrix), True),
    "factored": (optax.adafactor(1e-3, min_dim_size_to_factor=2), True),
    "norms by a reshape": (optax.lamb(1e-3), True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_sees_stored_shapes_only_where_it_does_not_ask_for_them(name: str) -> None:
    fused = split(dim=0, outer=3, chunk=2, ways=4)
    bias = choose_storage("bias", (24,), (fused,), is_stacked=False, tp=4, shards=1)
    whole = choose_storage("whole", (24,), (), is_stacked=False, tp=4, shards=1)
    structure = jax.tree.structure({"bias": 0, "other": 0})
    optimizer, asks = OPTIMIZERS[name]
    assert bias.stored_shape == (3, 8)
    assert asks_for_shapes(optimizer, [bias, whole], [bias, whole], LayerStacks(), structure) is asks
    assert not asks_for_shapes(optimizer, [whole, whole], [whole, whole], LayerStacks(), structure)
