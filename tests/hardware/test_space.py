import subprocess
import sys

import numpy as np
import pytest

import phaze.space
from phaze.errors import HardwareError
from phaze.hardware import preset
from phaze.hardware.area import area_mm2, areas_mm2

SPACE = phaze.space.paper()


def test_the_papers_space_has_exactly_its_points() -> None:
    assert len(SPACE) == 29_360
    assert len(set(SPACE.names)) == 29_360


def test_every_point_obeys_the_rule() -> None:
    for values, low, high in (
        (SPACE.tensor_cores, 1, 4096),
        (SPACE.vector_cores, 1, 4096),
        (SPACE.tensor_rows, 2, 256),
        (SPACE.tensor_cols, 2, 256),
        (SPACE.buffer_bytes, 2 * 2**20, 128 * 2**20),
    ):
        assert (values.min(), values.max()) == (low, high)
        assert (values & (values - 1) == 0).all()
    assert (SPACE.vector_lanes == SPACE.tensor_rows).all()
    areas, most = areas_mm2(SPACE), area_mm2(preset("tpuv4-paper").accelerator)
    is_single = (SPACE.tensor_cores == 1) | (SPACE.vector_cores == 1)
    assert (areas <= most).all()
    assert ((areas >= 0.3 * most) | is_single).all()


def test_the_baseline_is_a_point_and_points_inherit_from_it() -> None:
    baseline = preset("tpuv4-paper").accelerator
    found = SPACE.at(SPACE.names.index("t8x128x128-v2x128-b128m"))
    assert [getattr(found, name) for name in found.__slots__[1:]] == [
        getattr(baseline, name) for name in baseline.__slots__[1:]
    ]


def test_points_come_in_the_order_of_their_tuples() -> None:
    keys = (SPACE.buffer_bytes, SPACE.vector_cores, SPACE.tensor_cols, SPACE.tensor_rows, SPACE.tensor_cores)
    assert (np.lexsort(keys) == np.arange(len(SPACE))).all()


def test_hbm_size_is_free_and_changes_nothing_else() -> None:
    larger = phaze.space.paper(80 * 2**30)
    assert set(larger.hbm_bytes.tolist()) == {80 * 2**30}
    assert larger.names == SPACE.names
    assert (larger.hbm_bandwidth_bytes_per_s == SPACE.hbm_bandwidth_bytes_per_s).all()


def test_the_module_is_found_without_importing_it() -> None:
    program = "import sys, phaze; assert 'numpy' not in sys.modules; print(len(phaze.space.PAPER_HBM_BYTES))"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "3\n"


@pytest.mark.parametrize("hbm_bytes", [1.5, 0, -1, 10**400, "80GB"])
def test_memory_that_cannot_be_is_refused(hbm_bytes: object) -> None:
    with pytest.raises(HardwareError, match="hbm_bytes"):
        phaze.space.paper(hbm_bytes)  # type: ignore[arg-type]
