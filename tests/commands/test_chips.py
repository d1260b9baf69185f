"""`phaze chips`: every preset with its numbers and sources."""

import json

import pytest

from phaze.cli import main
from phaze.hardware import preset_names


def test_the_list_has_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chips"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in preset_names())
    assert "275.3" in out
    assert "278.8" in out


def test_one_chip_shows_the_source_of_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chips", "tpuv4"]) == 0
    out = capsys.readouterr().out
    assert "published 275 TF/s at bf16 (Google TPU documentation)" in out
    assert "fact" in out
    assert "estimate" in out


def test_json_holds_fields_peak_area_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chips", "--json"]) == 0
    chips = {chip["name"]: chip for chip in json.loads(capsys.readouterr().out)["chips"]}
    assert set(chips) == set(preset_names())
    assert chips["tpuv4-paper"]["model_area_mm2"] == pytest.approx(278.827, abs=1e-3)
    assert chips["h100"]["sources"]["clock_hz"]["is_verified"] is True
    assert chips["cpu"]["published_peak_flops_per_s"] is None


def test_an_unknown_chip_lists_near_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chips", "h10"]) == 1
    assert "Did you mean h100" in capsys.readouterr().err
