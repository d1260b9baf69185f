import math

import pytest

from phaze.cost import LIBRARY_STACK, Binding, price_works, update_work
from phaze.errors import CostError
from phaze.hardware import OPTIMIZERS, precision_recipe, preset, recipe_of

RECIPE = precision_recipe("bf16-adam")
CHIP = preset("a100-80gb").accelerator


def test_the_update_reads_and_writes_local_state_over_hbm() -> None:
    estimate = price_works([update_work(RECIPE, 10**9)], CHIP)
    assert estimate.binding() is Binding.MEMORY
    assert estimate.spread_s[0, 0] == 30 * 10**9 / CHIP.hbm_bandwidth_bytes_per_s


def test_muon_also_multiplies_matrices_and_the_others_do_not() -> None:
    """Five steps of 2 n m^2 + m^3 + .. multiply-accumulates on matrices of m x 4m: 9 m^3 a step, 4 m^2 parameters."""
    side = 4096
    work = update_work(recipe_of("bf16", "muon"), 3 * 4 * side * side)
    assert work.macs == 3 * 5 * 9 * side**3
    assert not any(update_work(recipe_of("bf16", name), 10**6).products for name in OPTIMIZERS if name != "muon")
    assert update_work(recipe_of("bf16", "muon"), 1).macs > 0


def test_an_optimizer_with_less_state_is_never_slower() -> None:
    times = {
        name: price_works([update_work(recipe_of("bf16", name), 10**9)], CHIP).spread_s[0, 0] for name in OPTIMIZERS
    }
    assert times["sgd"] < times["adam8bit"] < times["momentum-sgd"] == times["lion"] < times["adam"] == times["adamw"]
    assert times["muon"] > times["momentum-sgd"]


@pytest.mark.parametrize("parameters", [0, -5, math.nan, 2.5, math.inf])
def test_an_update_of_nothing_is_refused(parameters: int) -> None:
    with pytest.raises(CostError, match="update"):
        update_work(RECIPE, parameters)


def test_a_stack_that_does_not_fuse_the_update_passes_over_gradients_before_it() -> None:
    fused, apart = (update_work(RECIPE, 1000, **how).streamed_bytes for how in ({}, {"stack": LIBRARY_STACK}))
    assert apart - fused == 1000 * (RECIPE.gradient_bytes + 4 * RECIPE.master_bytes)
