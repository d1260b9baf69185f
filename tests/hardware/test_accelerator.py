import dataclasses
import math

import numpy as np
import pytest
from hardware_strategies import accelerators
from hypothesis import given
from hypothesis import strategies as st

from phaze.errors import HardwareError
from phaze.hardware import Accelerator, AcceleratorArray, MatrixRates, preset, presets
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


CHIPS = [preset.accelerator for preset in presets()]


@given(st.lists(accelerators(), max_size=5))
def test_an_array_gives_back_the_accelerators_it_was_made_of(chips: list[Accelerator]) -> None:
    array = AcceleratorArray.of(chips)
    assert [array.at(index) for index in range(len(array))] == chips


def test_rates_of_an_array_are_those_of_its_accelerators() -> None:
    array = AcceleratorArray.of(CHIPS)
    for dtype in ("bf16", "float32", "int8"):
        assert array.rate(dtype).tolist() == [chip.rates.of(dtype) for chip in CHIPS]


def test_taking_keeps_order_and_names() -> None:
    taken = AcceleratorArray.of(CHIPS).take([3, 0])
    assert [taken.at(0), taken.at(1)] == [CHIPS[3], CHIPS[0]]


def test_an_entry_that_cannot_exist_is_refused_with_its_index() -> None:
    array = AcceleratorArray.of(CHIPS[:3])
    with pytest.raises(HardwareError, match=r"clock_hz\[1\] is"):
        dataclasses.replace(array, clock_hz=np.array([1e9, 0.0, 1e9]))
    with pytest.raises(HardwareError, match=r"tensor_rows\[2\] is"):
        dataclasses.replace(array, tensor_rows=np.array([1, 1, -1]))


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(HardwareError, match="buffer_bytes has 2 entries; expected 3"):
        dataclasses.replace(AcceleratorArray.of(CHIPS[:3]), buffer_bytes=np.array([1, 1]))


def test_the_arrays_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        AcceleratorArray.of(CHIPS).clock_hz[0] = 1.0


def test_the_callers_arrays_stay_the_callers() -> None:
    clocks = np.array([1e9, 2e9, 3e9])
    array = dataclasses.replace(AcceleratorArray.of(CHIPS[:3]), clock_hz=clocks)
    clocks[0] = 5.0
    assert array.clock_hz.tolist() == [1e9, 2e9, 3e9]


@pytest.mark.parametrize(
    ("field", "values", "complaint"),
    [
        (
            "tensor_rows",
            np.array([1.5, 2.0]),
            r"tensor_rows is an array of shape \(2,\) and type float64; expected whole",
        ),
        ("clock_hz", np.array(["fast", "slow"]), "clock_hz is an array of shape .* and type <U4; expected numbers"),
        ("tensor_cores", np.array([1, 2**21]), r"tensor_cores\[1\] is 2097152; expected 1 to"),
        ("clock_hz", np.array([1e308, 1e9]), r"clock_hz\[0\] is 1e\+308"),
        ("clock_hz", np.array([1e9, 5e-324]), r"clock_hz\[1\] is 5e-324"),
        ("clock_hz", np.array([1e9, np.nan]), r"clock_hz\[1\] is nan"),
        ("rates", np.ones((2, 5)), r"rates is an array of shape \(2, 5\).* of shape \(2, 9\)"),
        ("rates", np.ones(2), r"rates is an array of shape \(2,\)"),
        ("buffer_bytes", np.array(3), "buffer_bytes has no entries"),
        ("names", ("a", ""), "a name is empty"),
    ],
)
def test_what_an_accelerator_refuses_an_array_refuses(field: str, values: object, complaint: str) -> None:
    with pytest.raises(HardwareError, match=complaint):
        dataclasses.replace(AcceleratorArray.of(CHIPS[:2]), **{field: values})


@given(accelerators())
def test_private_memories_follow_the_width_of_their_cores(chip: Accelerator) -> None:
    array = AcceleratorArray.of([chip])
    assert array.tensor_l2_bytes.tolist() == [max(1024, 16 * chip.tensor_rows * chip.tensor_cols)]
    assert array.vector_l2_bytes.tolist() == [max(1024, 16 * chip.vector_lanes)]
