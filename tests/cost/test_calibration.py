import math

import pytest

from phaze.cost import IDEAL, LIBRARY_STACK, Calibration, Stack, calibration_of
from phaze.cost.calibration import TERMS
from phaze.cost.fitted import fitted_families, why_ideal
from phaze.errors import HardwareError
from phaze.hardware import preset, presets

FITTED = {chip for family in fitted_families().values() for chip in family["chips"]}


def test_chips_that_were_fitted_say_so_and_all_others_are_ideal() -> None:
    assert {"a100-40gb", "a100-80gb"} <= FITTED
    assert not {"tpuv4-paper", "cpu"} & FITTED
    for chip in (one.accelerator for one in presets()):
        calibration = calibration_of(chip)
        assert calibration.is_ideal == (chip.name not in FITTED)
        assert ("fitted to published runs" in calibration.name) == (chip.name in FITTED)
    assert (IDEAL.name, IDEAL.matrix, IDEAL.overhead_s, IDEAL.overlap) == ("ideal", 1.0, 0.0, 1.0)


@pytest.mark.parametrize("name", fitted_families())
def test_a_family_has_at_most_six_fitted_terms_their_origin_and_their_errors(name: str) -> None:
    family = fitted_families()[name]
    assert 1 <= len(family["fitted"]) <= 6
    assert set(family["fitted"]) <= {*TERMS, "reserve", "margin"}
    assert family["origin"]
    for errors in family["errors"].values():
        assert errors["rows"] > 0
        assert 0 < errors["in_sample"] < 0.2


def test_another_chip_under_a_fitted_name_is_ideal() -> None:
    from dataclasses import replace

    chip = preset("a100-80gb").accelerator
    quicker = replace(chip, clock_hz=2e9, hbm_bandwidth_bytes_per_s=3e12)
    assert calibration_of(quicker) == IDEAL
    assert "another hbm_bandwidth_bytes_per_s and clock_hz than the chip of that name" in str(why_ideal(quicker))
    assert why_ideal(chip) is why_ideal(replace(chip, name="mine")) is None


def test_a_fitted_chip_with_another_memory_keeps_its_calibration() -> None:
    from dataclasses import replace

    chip = preset("a100-80gb").accelerator
    assert calibration_of(replace(chip, hbm_bytes=chip.hbm_bytes // 4)) == calibration_of(chip) != IDEAL


@pytest.mark.parametrize("field", ["matrix", "vector", "memory", "link", "network", "overlap", "margin"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_an_efficiency_outside_zero_to_one_is_refused(field: str, value: float) -> None:
    with pytest.raises(HardwareError, match=field):
        Calibration(**{field: value})


@pytest.mark.parametrize("field", ["overhead_s", "reserve"])
def test_overhead_and_reserve_are_not_negative(field: str) -> None:
    with pytest.raises(HardwareError, match=field):
        Calibration(**{field: -1e-6})


def test_nothing_overlaps_only_by_choice() -> None:
    assert Calibration(overlap=0.0).together_s(3.0, 2.0) == 5.0
    assert IDEAL.together_s(3.0, 2.0) == 3.0
    assert Calibration(overlap=0.5).together_s(3.0, 2.0) == 4.0


def test_a_stack_knows_fusions_by_name_only() -> None:
    assert Stack(fusion="chains").fusion == LIBRARY_STACK.fusion
    with pytest.raises(ValueError, match="everything"):
        Stack(fusion="everything")
