"""The table of ZeRO stages, against the sentences of the paper that introduced them."""

import numpy as np
import pytest

from phaze.hardware import precision_recipe
from phaze.place.model.zero_sharding import ZeroSharding

RECIPE = precision_recipe("bf16-adam")  # 2 bytes of parameter, 4 of gradient, 12 of master copy and state; sums in 4


@pytest.mark.parametrize(("zero", "held_bytes"), [(0, 18.0), (1, 2 + 4 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)])
def test_each_zero_stage_divides_one_more_item_over_the_copies(zero: int, held_bytes: float) -> None:
    assert float(ZeroSharding(RECIPE, zero, 8).held_bytes_per_parameter) == held_bytes


@pytest.mark.parametrize(
    ("zero", "gathered", "scattered"), [(0, 0.0, 0.0), (1, 0.0, 0.0), (2, 0.0, 4.0), (3, 2.0, 4.0)]
)
def test_only_zero_3_gathers_parameters_in_every_pass(zero: int, gathered: float, scattered: float) -> None:
    sharding = ZeroSharding(RECIPE, zero, 8)
    assert float(sharding.gathered_bytes_per_pass) == gathered
    assert float(sharding.scattered_bytes_per_backward) == scattered


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_reduced_once_either_per_batch_or_per_backward(zero: int) -> None:
    sharding = ZeroSharding(RECIPE, zero, 8)
    ways = (
        sharding.all_reduced_bytes_per_batch,
        sharding.scattered_bytes_per_batch,
        sharding.scattered_bytes_per_backward,
    )
    assert sorted(float(size) for size in ways) == [0.0, 0.0, 4.0]
    is_gathered_once = zero in (1, 2)
    assert float(sharding.gathered_bytes_per_batch) == (2.0 if is_gathered_once else 0.0)


def test_a_single_copy_needs_no_buffers_for_collectives() -> None:
    zero = np.array([0, 1, 2, 3])
    assert ZeroSharding(RECIPE, zero, 1).buffer_bytes.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert ZeroSharding(RECIPE, zero, 2).buffer_bytes.tolist() == [0.0, 0.0, 4.0, 4.0 + 2 * 2.0]


def test_arrays_of_strategies_get_what_each_of_them_gets() -> None:
    zero, dp = (grid.ravel() for grid in np.meshgrid([0, 1, 2, 3], [1, 2, 7]))
    together = ZeroSharding(RECIPE, zero, dp)
    names = [name for name in dir(ZeroSharding) if not name.startswith("_") and name not in ("recipe", "zero", "dp")]
    for index in range(len(zero)):
        alone = ZeroSharding(RECIPE, int(zero[index]), int(dp[index]))
        for name in names:
            assert getattr(together, name)[index] == getattr(alone, name)
