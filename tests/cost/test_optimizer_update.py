import math

import pytest

from phaze.cost import LIBRARY_STACK, Binding, price_works, update_work
from phaze.errors import CostError
from phaze.hardware import precision_recipe, preset

RECIPE = precision_recipe("bf16-adam")
CHIP = preset("a100-80gb").accelerator


def test_the_update_reads_and_writes_local_state_over_hbm() -> None:
    estimate = price_works([update_work(RECIPE, 10**9)], CHIP)
    assert estimate.binding() is Binding.MEMORY
    assert estimate.spread_s[0, 0] == 30 * 10**9 / CHIP.hbm_bandwidth_bytes_per_s


@pytest.mark.parametrize("parameters", [0, -5, math.nan, 2.5, math.inf])
def test_an_update_of_nothing_is_refused(parameters: int) -> None:
    with pytest.raises(CostError, match="update"):
        update_work(RECIPE, parameters)


def test_a_stack_that_does_not_fuse_the_update_passes_over_gradients_before_it() -> None:
    fused, apart = (update_work(RECIPE, 1000, **how).streamed_bytes for how in ({}, {"stack": LIBRARY_STACK}))
    assert apart - fused == 1000 * (RECIPE.gradient_bytes + 4 * RECIPE.master_bytes)
