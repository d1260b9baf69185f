import pytest

from phaze.hardware import AcceleratorArray, preset
from phaze.hardware.dtypes import RATE_NAMES
from phaze.hardware.energy import energy_model

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
