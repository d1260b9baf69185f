"""The table of ZeRO stages, against the sentences of the paper that introduced them."""

import numpy as np
import pytest

from phaze.hardware import precision_recipe
from phaze.place.model.zero_sharding import ZeroSharding

RECIPE = precision_recipe("bf16-adam")  # 2 bytes of parameter, 4 of gradient, 12 of master copy and state; sums in 4


@pytest.mark.parametrize(("zero", "held_bytes"), [(0, 18.0), (1, 2 + 4 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)])
def test_each_zero_stage_divides_one_more_item_over_the_copies(zero: int, held_bytes: float) -> None:
    assert float(ZeroSharding(RECIPE, zero, 8).held_bytes_per_parameter) == held_bytes


@pytest.mark.parametrize(("zero", "held_bytes"), [(0, 18.0), (1, 2 + 4 + 12 / 8), (2, 2 + 16 / 8), (3, 16 / 8)])
def test_weights_that_are_cast_when_gathered_have_no_copy_under_zero_3(zero: int, held_bytes: float) -> None:
    sharding = ZeroSharding(precision_recipe("bf16-cast-adam"), zero, 8)
    assert float(sharding.held_bytes_per_parameter) == held_bytes
    assert float(sharding.gathered_bytes_per_pass) == (2.0 if zero == 3 else 0.0)
    assert float(sharding.of_frozen().held_bytes_per_parameter) == (2 / 8 if zero == 3 else 2.0)


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
    ways = (sharding.reduced_bytes_per_batch, sharding.scattered_bytes_per_backward)
    assert sorted(float(size) for size in ways) == [0.0, 4.0]
    is_gathered_once = zero in (1, 2)
    assert float(sharding.gathered_bytes_per_batch) == (2.0 if is_gathered_once else 0.0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_parameters_are_held_and_gathered_and_nothing_else(zero: int) -> None:
    sharding = ZeroSharding(RECIPE, zero, 8).of_frozen()
    assert float(sharding.held_bytes_per_parameter) == (2 / 8 if zero == 3 else 2.0)
    assert float(sharding.gathered_bytes_per_pass) == (2.0 if zero == 3 else 0.0)
    for name in ("scattered_bytes_per_backward", "reduced_bytes_per_batch", "gathered_bytes_per_batch"):
        assert float(getattr(sharding, name)) == 0.0


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_hold_what_their_devices_share_and_reduce_between_them_after_the_last_backward(zero: int) -> None:
    sharding = ZeroSharding(RECIPE, zero, 8, 16)
    assert sharding.held_bytes_per_parameter == ZeroSharding(RECIPE, zero, 8).held_bytes_per_parameter
    assert float(sharding.reduced_bytes_per_batch) == 4.0


@pytest.mark.parametrize(
    ("shard", "groups", "ep", "expert_shard", "expert_groups"),
    [(64, 1, 8, 8, 1), (8, 8, 8, 1, 8), (8, 8, 16, 1, 4), (16, 4, 8, 2, 4), (4, 16, 8, 1, 8)],
)
def test_a_group_holds_one_copy_of_every_expert_and_experts_have_fewer_copies(
    shard: int, groups: int, ep: int, expert_shard: int, expert_groups: int
) -> None:
    experts = ZeroSharding(RECIPE, 1, shard, groups).of_experts(ep)
    assert (int(experts.shard), int(experts.groups)) == (expert_shard, expert_groups)
    assert ep * expert_shard * expert_groups == shard * groups


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("shard", "groups"), [(1, 12), (2, 6), (4, 3), (12, 1)])
def test_what_is_sent_after_the_last_backward_is_the_sum_of_its_collectives(zero: int, shard: int, groups: int) -> None:
    within, between = 1 - 1 / shard, 2 * (1 - 1 / groups) / shard
    expected = 2 * (1 - 1 / 12) if zero == 0 else (within if zero == 1 else 0.0) + between
    share = ZeroSharding(RECIPE, zero, shard, groups).least_reduced_share(np.array([12]))
    assert float(share[0]) == pytest.approx(expected)


def test_a_single_copy_needs_no_buffers_for_collectives() -> None:
    zero = np.array([0, 1, 2, 3])
    assert ZeroSharding(RECIPE, zero, 1).buffer_bytes.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert ZeroSharding(RECIPE, zero, 2).buffer_bytes.tolist() == [0.0, 0.0, 4.0, 4.0 + 2 * 2.0]


def test_arrays_of_strategies_get_what_each_of_them_gets() -> None:
    zero, dp = (grid.ravel() for grid in np.meshgrid([0, 1, 2, 3], [1, 2, 7]))
    together = ZeroSharding(RECIPE, zero, dp)
    names = [name for name in dir(ZeroSharding) if isinstance(getattr(ZeroSharding, name), property)]
    for index in range(len(zero)):
        alone = ZeroSharding(RECIPE, int(zero[index]), int(dp[index]))
        for name in names:
            assert getattr(together, name)[index] == getattr(alone, name)
