import dataclasses

import pytest

from phaze.hardware import AcceleratorArray, preset
from phaze.hardware.accelerator import area_mm2, energy_model, log_log
from phaze.hardware.precision import RATE_NAMES

BASELINE = preset("tpuv4-paper").accelerator


def test_the_papers_baseline_has_the_papers_area() -> None:
    assert area_mm2(BASELINE) == pytest.approx(278.827, abs=5e-4)


def test_area_is_the_sum_of_units_lanes_and_memories() -> None:
    expected = 760.041386 * 8 * 128 * 128 + 759.823853 * 2 * 128 + 8 * 446565.0 + 2 * 8248.43 + 175423000.0
    assert area_mm2(BASELINE) == pytest.approx(expected / 1e6, rel=1e-12)


def test_a_core_has_at_least_the_smallest_private_memory() -> None:
    small = dataclasses.replace(BASELINE, tensor_rows=2, tensor_cols=2, vector_lanes=2, buffer_bytes=2 * 2**20)
    expected = 760.041386 * 8 * 4 + 759.823853 * 2 * 2 + 8 * 6133.98 + 2 * 6133.98 + 3338220.0
    assert area_mm2(small) == pytest.approx(expected / 1e6, rel=1e-12)


def test_memories_between_the_points_of_the_table_lie_between_them() -> None:
    sizes = [2, 3, 4, 40, 64, 128, 256]
    areas = [area_mm2(dataclasses.replace(BASELINE, buffer_bytes=size * 2**20)) for size in sizes]
    assert areas == sorted(set(areas))


MODEL = energy_model()


def test_every_coefficient_states_its_source() -> None:
    named = {"vector_operation_j", "hbm_j_per_byte", "link_j_per_byte", "static_w_per_mm2", "sram_j_per_byte"}
    assert set(MODEL.sources) == named | {f"mac_j.{name}" for name in RATE_NAMES}
    assert all(MODEL.sources.values())


def test_farther_memories_cost_more_per_byte() -> None:
    l2, buffer = MODEL.sram_j_per_byte([2**14, 2**27])
    assert 0 < l2 < buffer < MODEL.hbm_j_per_byte


def test_wider_types_cost_more_per_operation() -> None:
    costs = [MODEL.mac_energy_j(dtype) for dtype in ("int8", "bf16", "fp32", "fp64")]
    assert costs == sorted(costs)
    assert MODEL.mac_energy_j("bfloat16") == MODEL.mac_energy_j("bf16")


def test_static_power_follows_area_and_is_the_measured_one_at_the_baseline() -> None:
    (power,) = MODEL.static_power_w(AcceleratorArray.of([preset("tpuv4-paper").accelerator]))
    assert power == pytest.approx(90.0, rel=1e-3)


POINTS = ((1.0, 3.0), (10.0, 7.0), (1000.0, 700.0))


def test_a_curve_goes_through_its_points_without_rounding() -> None:
    assert log_log(POINTS, [1.0, 10.0, 1000.0]).tolist() == [3.0, 7.0, 700.0]


def test_between_points_it_is_a_power_law() -> None:
    assert log_log(POINTS, 100.0) == pytest.approx(70.0)


def test_beyond_the_ends_the_last_power_law_goes_on() -> None:
    assert log_log(POINTS, 10_000.0) == pytest.approx(7000.0)
    assert log_log(POINTS, 0.1) == pytest.approx(9.0 / 7.0)
