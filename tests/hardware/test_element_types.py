import pytest

from phaze.errors import HardwareError
from phaze.hardware import MatrixRates
from phaze.hardware.precision import RATE_NAMES, dtype_bytes, element_type, rate_name
from phaze.ir import DType


def test_every_type_of_a_graph_is_known_under_its_name() -> None:
    for dtype in DType:
        assert element_type(dtype.value) is dtype
        assert dtype_bytes(dtype) == dtype.size_bytes


def test_short_and_long_names_mean_the_same() -> None:
    assert rate_name("bf16") == rate_name("bfloat16") == "bf16"
    assert dtype_bytes("fp32") == dtype_bytes("float32") == 4
    assert rate_name("uint8") == rate_name("int8") == "int8"


def test_types_that_matrix_units_do_not_know_run_as_fp32() -> None:
    assert rate_name("int32") == rate_name("bool") == "fp32"


def test_types_that_products_round_to_have_a_rate_and_no_tensor() -> None:
    assert [rate_name(dtype) for dtype in ("tf32", "fp6", "fp4")] == ["tf32", "fp6", "fp4"]
    assert [dtype_bytes(dtype) for dtype in ("tf32", "fp6", "fp4")] == [4, 1, 1]
    with pytest.raises(HardwareError, match="unknown element type 'fp4'"):
        element_type("fp4")


def test_rates_have_a_column_per_field() -> None:
    assert tuple(MatrixRates.__slots__) == RATE_NAMES


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(HardwareError, match="unknown element type 'bf61'"):
        rate_name("bf61")


@pytest.mark.parametrize("dtype", [None, [], 7])
def test_what_is_no_text_is_refused(dtype: object) -> None:
    with pytest.raises(HardwareError, match="unknown element type"):
        rate_name(dtype)  # type: ignore[arg-type]
