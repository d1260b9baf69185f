from dataclasses import replace

import numpy as np
import pytest
from graphs import tiny_graph
from hypothesis import given
from hypothesis import strategies as st

import phaze.cost.work_prices
from phaze.cost import (
    IDEAL,
    VIEW,
    Binding,
    Calibration,
    CoreKind,
    PriceTable,
    PriceTables,
    Stack,
    calibration_of,
    explain,
    matmul_work,
    op_work,
    price_works,
    vector_work,
)
from phaze.cost.estimate import stack_estimates
from phaze.cost.work_prices import distinct_accelerators, distinct_rows
from phaze.errors import CostError
from phaze.hardware import AcceleratorArray, preset
from phaze.hardware.accelerator import energy_model

TPU = preset("tpuv4").accelerator
GPT2 = tiny_graph("gpt2")


def peak_share(size: int) -> float:
    seconds = price_works([matmul_work(1, size, size, size)], TPU).spread_s[0, 0]
    return float(2 * size**3 / seconds / TPU.peak_flops_per_s("bf16"))


def test_a_large_square_product_comes_near_to_peak_and_says_that_compute_binds() -> None:
    assert 0.85 <= peak_share(8192) <= 1
    sentence = explain(matmul_work(1, 8192, 8192, 8192), TPU, calibration=IDEAL)
    assert "on tpuv4 (ideal)" in sentence
    assert "compute binds: the tensor cores are busy throughout" in sentence


def test_a_small_product_stays_far_below_peak_and_says_that_fill_binds() -> None:
    assert peak_share(128) < 0.1
    assert "fill binds: arrays of 128x128" in explain(matmul_work(1, 128, 128, 128), TPU)


def test_vector_work_is_bound_by_memory_or_by_lanes() -> None:
    light, heavy = price_works([vector_work(1e6, 4e6)], TPU), price_works([vector_work(1e9, 4e6)], TPU)
    assert (light.binding(), light.spread_s[0, 0]) == (Binding.MEMORY, 4e6 / 1.2e12)
    assert (heavy.binding(), heavy.core_s[0, 0]) == (Binding.COMPUTE, pytest.approx(1e9 / 1024 / 1.05e9, rel=1e-5))
    assert heavy.core_s[0, 0] == pytest.approx(2 * heavy.spread_s[0, 0], rel=1e-5)
    assert "memory binds" in explain(vector_work(1e6, 4e6), TPU)


def test_the_reason_names_the_cores_that_decide_and_what_they_do() -> None:
    assert "compute binds: the vector cores are busy with 1e+09 lane operations." in explain(vector_work(1e9, 4e6), TPU)
    padded = matmul_work(1, 2**18, 129, 129)
    many = replace(TPU, hbm_bandwidth_bytes_per_s=1e15)
    assert "compute binds: the tensor cores need" in explain(padded, many)
    assert "the rest is padding the shape to 8 arrays of 128x128" in explain(padded, many)
    both = replace(matmul_work(1, 8192, 8192, 8192), vector_operations=1e13)
    assert "lane operations; the tensor cores wait" in explain(both, TPU)


def test_a_view_has_nothing_to_explain() -> None:
    with pytest.raises(CostError, match="a view costs nothing"):
        explain(VIEW, TPU)


def test_overhead_binds_when_it_exceeds_the_work() -> None:
    calibration = Calibration(name="fitted", overhead_s=1e-3, stack=Stack(launches_ahead=False))
    estimate = price_works([vector_work(10, 40)], TPU, calibration=calibration)
    assert estimate.binding() is Binding.OVERHEAD
    assert estimate.spread_s[0, 0] == pytest.approx(1e-3)
    assert "overhead binds: 1 ms" in explain(vector_work(10, 40), TPU, calibration=calibration)


def test_slower_types_take_longer_at_the_chips_own_rate() -> None:
    half, single = (price_works([matmul_work(1, 4096, 4096, 4096, dtype=d)], TPU) for d in ("bf16", "fp32"))
    assert single.spread_s[0, 0] == pytest.approx(4 * half.spread_s[0, 0])


def test_one_core_owns_its_share_of_the_buffer() -> None:
    work = matmul_work(1, 8192, 8192, 8192)
    alone = replace(TPU, tensor_cores=1, buffer_bytes=TPU.buffer_bytes // TPU.tensor_cores)
    estimate = price_works([work], TPU)
    assert estimate.core_bytes[0, 0] == price_works([work], alone).spread_bytes[0, 0] > estimate.spread_bytes[0, 0]


def test_energy_is_at_least_that_of_arithmetic_and_off_chip_bytes() -> None:
    model = energy_model()
    estimate = price_works([matmul_work(1, 512, 512, 512), vector_work(1e6, 4e6)], TPU)
    for row, arithmetic in enumerate((512**3 * model.mac_energy_j("bf16"), 1e6 * model.vector_operation_j)):
        for joules, moved in (
            (estimate.core_energy_j, estimate.core_bytes),
            (estimate.spread_energy_j, estimate.spread_bytes),
        ):
            assert joules[row, 0] > arithmetic + moved[row, 0] * model.hbm_j_per_byte


def test_a_view_costs_nothing_beside_others_that_do() -> None:
    estimate = price_works([VIEW, vector_work(1, 4), VIEW], TPU)
    assert estimate.kinds == (CoreKind.NONE, CoreKind.VECTOR, CoreKind.NONE)
    assert (estimate.spread_s[:, 0] > 0).tolist() == [False, True, False]


WORKS = [
    matmul_work(1, 4096, 1024, 1024),
    vector_work(3e6, 1e6),
    VIEW,
    matmul_work(12, 100, 200, 300, dtype="float32"),
    *(op_work(op, GPT2.tensors) for op in (*GPT2.layers[1].forward, *GPT2.layers[1].backward)),
]


@pytest.mark.parametrize("chip", ["tpuv4", "a100-80gb"])
def test_works_are_priced_together_as_each_is_alone(chip: str) -> None:
    accelerator = preset(chip).accelerator
    calibration = calibration_of(accelerator)
    table = PriceTable(accelerator, calibration)
    table.prices(WORKS[3:5])  # what is known already is not worked out again
    for together in (price_works(WORKS, accelerator, calibration=calibration), table.prices(WORKS)):
        alone = stack_estimates([price_works([work], accelerator, calibration=calibration) for work in WORKS])
        assert together.kinds == alone.kinds
        for name in ("core_s", "spread_s", "core_bytes", "spread_bytes", "core_energy_j", "spread_energy_j"):
            np.testing.assert_allclose(getattr(together, name), getattr(alone, name), rtol=1e-13)
        for name in ("core_binding", "spread_binding"):
            np.testing.assert_array_equal(getattr(together, name), getattr(alone, name))


def test_tables_are_kept_for_each_accelerator_and_calibration() -> None:
    tables, slower = PriceTables(), replace(IDEAL, name="slower", matrix=0.5)
    assert tables.on(TPU, IDEAL) is tables.on(TPU, IDEAL)
    (quick,), (slow,) = (tables.on(TPU, given).prices(WORKS[:1]).spread_s for given in (IDEAL, slower))
    assert slow[0] == pytest.approx(2 * quick[0])


def test_nothing_to_price_is_an_empty_estimate() -> None:
    assert price_works([], TPU).spread_s.shape == (0, 1)
    assert price_works([vector_work(1, 4)], AcceleratorArray.of([])).spread_s.shape == (1, 0)


def test_a_work_is_evaluated_once_for_accelerators_that_it_cannot_tell_apart() -> None:
    wider = replace(TPU, name="wider", vector_lanes=2 * TPU.vector_lanes)
    larger = replace(TPU, name="larger", hbm_bytes=2 * TPU.hbm_bytes)
    chips = AcceleratorArray.of([TPU, wider, larger])
    evaluated = [
        len(distinct_accelerators(kind, chips)[0]) for kind in (CoreKind.TENSOR, CoreKind.VECTOR, CoreKind.BOTH)
    ]
    assert evaluated == [1, 2, 2]


@pytest.mark.parametrize("largest", [1, 2**24])
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2), st.floats(0, 1)), min_size=1))
def test_rows_are_equal_exactly_where_their_numbers_are(largest: int, rows: list[tuple[int, int, float]]) -> None:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phaze.cost.work_prices, "_LARGEST_TABLE", largest)
        first, numbers = distinct_rows(columns)
    assert [rows[first[number]] for number in numbers] == rows
    assert len({rows[index] for index in first}) == len(first)
