import numpy as np

from phaze.cost import CoreKind, matmul_work, price_works, stack_estimates, total_estimate, vector_work
from phaze.hardware import AcceleratorArray, preset

CHIPS = AcceleratorArray.of([preset("tpuv4").accelerator, preset("a100-80gb").accelerator])
PRICED = price_works([matmul_work(1, 512, 512, 512), vector_work(1e9, 1e6), vector_work(1, 1e9)], CHIPS)


def test_rows_and_stacking_are_inverse() -> None:
    again = stack_estimates([PRICED.rows([0]), PRICED.rows([1, 2])])
    assert again.kinds == PRICED.kinds
    np.testing.assert_array_equal(again.spread_s, PRICED.spread_s)
    np.testing.assert_array_equal(again.core_binding, PRICED.core_binding)


def test_a_total_adds_up_and_is_bound_by_its_longest_part() -> None:
    total = total_estimate(PRICED)
    assert total.kinds == (CoreKind.BOTH,)
    np.testing.assert_allclose(total.spread_s[0], PRICED.spread_s.sum(axis=0))
    np.testing.assert_allclose(total.core_energy_j[0], PRICED.core_energy_j.sum(axis=0))
    longest = PRICED.spread_s.argmax(axis=0)
    assert [total.binding(0, chip) for chip in range(2)] == [PRICED.binding(longest[chip], chip) for chip in range(2)]


def test_a_total_of_one_kind_keeps_it() -> None:
    assert total_estimate(PRICED.rows([1, 2])).kinds == (CoreKind.VECTOR,)
