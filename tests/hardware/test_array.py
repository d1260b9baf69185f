import dataclasses

import numpy as np
import pytest
from hardware_strategies import accelerators
from hypothesis import given
from hypothesis import strategies as st

from phaze.errors import HardwareError
from phaze.hardware import Accelerator, AcceleratorArray, presets

CHIPS = [preset.accelerator for preset in presets()]


@given(st.lists(accelerators(), max_size=5))
def test_an_array_gives_back_the_accelerators_it_was_made_of(chips: list[Accelerator]) -> None:
    array = AcceleratorArray.of(chips)
    assert [array.at(index) for index in range(len(array))] == chips


def test_peak_of_an_array_is_that_of_its_accelerators() -> None:
    array = AcceleratorArray.of(CHIPS)
    for dtype in (None, "bf16", "float32", "int8"):
        assert array.peak_flops_per_s(dtype).tolist() == [chip.peak_flops_per_s(dtype) for chip in CHIPS]


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
