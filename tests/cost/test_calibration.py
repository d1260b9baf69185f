import math

import pytest

from phaze.cost import IDEAL, Calibration, calibration_of
from phaze.errors import HardwareError
from phaze.hardware import Accelerator, presets


@pytest.mark.parametrize("chip", [preset.accelerator for preset in presets()], ids=lambda chip: chip.name)
def test_no_preset_is_fitted_yet_and_says_so(chip: Accelerator) -> None:
    calibration = calibration_of(chip)
    assert calibration == IDEAL
    assert (calibration.name, calibration.is_ideal) == ("ideal", True)
    assert (calibration.matrix, calibration.vector, calibration.memory, calibration.link) == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("field", ["matrix", "vector", "memory", "link"])
@pytest.mark.parametrize("value", [0, -0.1, 1.1, math.nan])
def test_an_efficiency_outside_zero_to_one_is_refused(field: str, value: float) -> None:
    with pytest.raises(HardwareError, match=field):
        Calibration(**{field: value})


def test_overhead_is_not_negative() -> None:
    with pytest.raises(HardwareError, match="overhead_s"):
        Calibration(overhead_s=-1e-6)
