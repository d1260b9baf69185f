import dataclasses

import pytest

from phaze.hardware import preset
from phaze.hardware.area import area_mm2

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
