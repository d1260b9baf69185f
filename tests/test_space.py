"""Spaces of one's own: ranges, limits, files, and what is wrong with them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phaze
import phaze.space
from phaze.errors import FormatError, HardwareError, QuestionError
from phaze.hardware import preset
from phaze.hardware.accelerator import area_mm2, areas_mm2
from phaze.space import from_points, powers_w, to_description

GRID: dict[str, Any] = {
    "tensor_cores": (1, 2),
    "tensor_rows": (64, 128),
    "tensor_cols": 128,
    "vector_cores": (1, 4),
    "buffer_mib": (16,),
}
FILE: dict[str, Any] = {
    "format": "phaze-space",
    "version": 1,
    "tensor_cores": {"from": 1, "to": 2, "plus": 1},
    "tensor_rows": {"from": 64, "to": 128, "times": 2},
    "tensor_cols": 128,
    "vector_cores": [1, 4],
    "buffer_mib": [16],
}


def test_a_grid_has_every_combination_in_order_and_lanes_follow_rows() -> None:
    points = phaze.space.grid(**GRID)
    assert len(points) == 8
    assert points.names[0] == "t1x64x128-v1x64-b16m"
    assert (points.vector_lanes == points.tensor_rows).all()
    assert len(phaze.space.grid(**GRID, vector_lanes=(8, 16))) == 16


def test_a_file_describes_the_same_grid(tmp_path: Path) -> None:
    path = tmp_path / "space.json"
    path.write_text(json.dumps(FILE))
    assert phaze.space.load(path).names == phaze.space.grid(**GRID).names


def test_limits_keep_what_is_within_them() -> None:
    points = phaze.space.grid(**GRID)
    areas, powers = areas_mm2(points), powers_w(points)
    middle, most_w = float(np.median(areas)), float(np.median(powers))
    assert set(phaze.space.grid(**GRID, max_area_mm2=middle).names) == set(np.array(points.names)[areas <= middle])
    assert set(phaze.space.grid(**GRID, max_power_w=most_w).names) == set(np.array(points.names)[powers <= most_w])
    assert len(phaze.space.grid(**GRID, where=lambda those: those.tensor_cores == 2)) == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_area_mm2": 0.1}, "max_area_mm2 is 0.1 and leaves nothing"),
        ({"min_area_mm2": 1e9}, r"min_area_mm2 is 1e\+09 and leaves nothing"),
        ({"max_power_w": 1e-9}, "max_power_w is 1e-09 and leaves nothing"),
        ({"where": lambda points: points.tensor_cores > 9}, "where leaves nothing"),
        ({"where": lambda points: True}, "where answered"),
        ({"tensor_rows": ()}, "tensor_rows is empty"),
        ({"tensor_rows": (0,)}, "tensor_rows is 0"),
        ({"tensor_rows": "all"}, "tensor_rows is 'all'"),
        ({"tensor_cores": (10**23,)}, "tensor_cores is 1000.*; expected whole numbers from 1 to"),
        ({"buffer_mib": 10**14}, "buffer_mib is 1000.*; expected whole numbers from 1 to 1073741824"),
        ({"max_area_mm2": "x"}, "max_area_mm2 is 'x'; expected a positive number"),
        ({"max_power_w": -1}, "max_power_w is -1; expected a positive number"),
        ({"tensor_rows": range(1, 2000), "tensor_cols": range(1, 2000)}, "points .* at most 1,000,000"),
        ({"tensor_rows": range(1, 10**12)}, "points .* at most 1,000,000"),
    ],
)
def test_a_space_that_cannot_be_names_what_empties_it(change: dict[str, Any], told: str) -> None:
    with pytest.raises(QuestionError, match=told):
        phaze.space.grid(**{**GRID, **change})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tensor_core": [1]}, "unknown field 'tensor_core'. Did you mean tensor_cores"),
        ({"hbm_bytes": [1]}, "unknown field 'hbm_bytes'. A search crosses a space with memories of its own"),
        ({"format": "other"}, "is not a space"),
        ({"version": 2}, "is not a space"),
        ({"tensor_rows": {"from": 4, "to": 2, "times": 2}}, "from <= to"),
        ({"tensor_rows": {"from": 4, "step": 2}}, "tensor_rows has an unknown field 'step'"),
        ({"tensor_rows": {"from": 1, "to": 10**12, "plus": 1}}, "points .* at most 1,000,000"),
        ({"max_area_mm2": "big"}, "max_area_mm2 is 'big'"),
    ],
)
def test_a_damaged_description_names_the_field(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "space.json"
    path.write_text(json.dumps({**FILE, **change}))
    with pytest.raises((FormatError, QuestionError), match=told):
        phaze.space.load(path)


def test_descriptions_of_points_are_read_back() -> None:
    assert to_description(phaze.space.paper()) == {"name": "paper"}
    points = phaze.space.grid(**GRID)
    again = from_points(json.loads(json.dumps(to_description(points))))
    assert again.names == points.names
    assert np.array_equal(again.rates, points.rates)


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
    chip = SPACE.at(SPACE.names.index("t8x128x128-v2x128-b128m"))
    assert [getattr(chip, name) for name in chip.__slots__[1:]] == [
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


def test_clocks_and_bandwidths_are_axes_and_names_tell_them() -> None:
    points = phaze.space.grid(**GRID, clock_hz=(1e9, 1.05e9), hbm_bandwidth_bytes_per_s=[1.2e12, 2.4e12, 3e12])
    assert len(points) == len(phaze.space.grid(**GRID)) * 6
    assert len(set(points.names)) == len(points)
    assert points.names[0] == "t1x64x128-v1x64-b16m-h1200g-c1000m"
    assert sorted(set(points.clock_hz)) == [1e9, 1.05e9]
    (single,) = {name.count("-") for name in phaze.space.grid(**GRID, clock_hz=9e8).names}
    assert single == 2  # what all have in common is not told


def test_prices_that_are_given_limit_a_space() -> None:
    prices = {"device": 100, "mm2": 2.0, "hbm_gb_per_s": 0.5}
    points = phaze.space.grid(**GRID, prices=prices, hbm_bandwidth_bytes_per_s=(1e12, 2e12))
    costs = phaze.space.device_prices(points, prices)
    assert costs == pytest.approx(100 + 2 * areas_mm2(points) + 0.5 * points.hbm_bandwidth_bytes_per_s / 1e9)
    limit = float(np.median(costs))
    kept = phaze.space.grid(**GRID, prices=prices, max_price=limit, hbm_bandwidth_bytes_per_s=(1e12, 2e12))
    assert list(kept.names) == [name for name, cost in zip(points.names, costs, strict=True) if cost <= limit]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"clock_hz": (0,)}, r"clock_hz(\[0\])? is"),
        ({"hbm_bandwidth_bytes_per_s": ()}, "hbm_bandwidth_bytes_per_s is"),
        ({"max_price": 3}, "max_price is 3 without prices"),
        ({"prices": {"lane": 1}}, "expected numbers for some of device, mm2"),
        ({"prices": {"mm2": 1}, "max_price": 1e-9}, "max_price is 1e-09 and leaves nothing"),
    ],
)
def test_axes_and_prices_that_cannot_be_are_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(QuestionError, match=told):
        phaze.space.grid(**{**GRID, **change})
    path = tmp_path / "space.json"
    path.write_text(
        json.dumps({**FILE, **{name: list(v) if isinstance(v, tuple) else v for name, v in change.items()}})
    )
    with pytest.raises((FormatError, QuestionError), match=told):
        phaze.space.load(path)
