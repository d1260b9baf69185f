import dataclasses
import math

import pytest

from phaze.errors import HardwareError
from phaze.hardware import Accelerator, MatrixRates, preset
from phaze.hardware.accelerator import INTEGER_FIELDS, REAL_FIELDS

FIELDS = {
    "name": "chip",
    "tensor_cores": 2,
    "tensor_rows": 8,
    "tensor_cols": 16,
    "vector_cores": 2,
    "vector_lanes": 4,
    "buffer_bytes": 2**20,
    "hbm_bytes": 2**30,
    "hbm_bandwidth_bytes_per_s": 1e12,
    "clock_hz": 1e9,
}


@pytest.mark.parametrize("field", [*INTEGER_FIELDS, *REAL_FIELDS])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "8", None, True])
def test_a_field_that_cannot_exist_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(HardwareError, match=f"chip: {field} is"):
        Accelerator(**(FIELDS | {field: value}))


@pytest.mark.parametrize("field", INTEGER_FIELDS)
def test_absurd_sizes_are_refused_before_they_overflow(field: str) -> None:
    with pytest.raises(HardwareError, match=f"chip: {field} is"):
        Accelerator(**(FIELDS | {field: 2**62}))


@pytest.mark.parametrize("field", INTEGER_FIELDS)
def test_counts_and_sizes_are_whole_numbers(field: str) -> None:
    with pytest.raises(HardwareError, match="whole number"):
        Accelerator(**(FIELDS | {field: 1.5}))


@pytest.mark.parametrize("name", ["", None, 3])
def test_an_accelerator_has_a_name(name: object) -> None:
    with pytest.raises(HardwareError, match="name"):
        Accelerator(**(FIELDS | {"name": name}))


@pytest.mark.parametrize("rate", [0, -0.5, math.nan])
def test_a_rate_is_above_zero(rate: float) -> None:
    with pytest.raises(HardwareError, match="matrix rates: fp32"):
        MatrixRates(fp32=rate)


def test_peak_is_two_flops_per_unit_and_cycle_times_the_rate_of_the_type() -> None:
    chip = Accelerator(**FIELDS)
    assert chip.peak_flops_per_s() == 2 * 2 * 8 * 16 * 1e9
    assert chip.peak_flops_per_s("bfloat16") == chip.peak_flops_per_s("bf16") == chip.peak_flops_per_s()
    assert chip.peak_flops_per_s("float32") == chip.peak_flops_per_s() / 4


def test_an_accelerator_is_a_value() -> None:
    chip = Accelerator(**FIELDS)
    assert chip == Accelerator(**FIELDS)
    assert hash(chip) == hash(Accelerator(**FIELDS))
    with pytest.raises(dataclasses.FrozenInstanceError):
        chip.clock_hz = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("value", [10**400, 5e-324, 1e308, "fast", None, True])
@pytest.mark.parametrize("field", ["clock_hz", "hbm_bandwidth_bytes_per_s"])
def test_numbers_that_no_chip_has_are_refused(field: str, value: object) -> None:
    with pytest.raises(HardwareError, match=f"h100: {field} is"):
        dataclasses.replace(preset("h100").accelerator, **{field: value})


def test_counts_of_thousands_of_digits_are_refused() -> None:
    with pytest.raises(HardwareError, match="tensor_cores is a int of thousands of digits"):
        dataclasses.replace(preset("h100").accelerator, tensor_cores=10**5000)
