"""`phaze chips`: every preset with its numbers and sources."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phaze.cli import main
from phaze.hardware import preset, preset_names, save_accelerator


def test_the_list_has_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chips"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in preset_names())
    assert "275.3" in out
    assert "278.8" in out


def test_the_list_has_one_line_a_chip_and_a_source_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chips"]) == 0
    table, sources = capsys.readouterr().out.split("sources (of every field")
    for name in preset_names():
        assert sum(line.split()[:1] == [name] for line in table.splitlines()) == 1
        assert f"  {name}: " in sources
    assert "9 of 9" in table


def test_chips_stand_under_their_maker_and_say_how_they_are_priced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chips"]) == 0
    out = capsys.readouterr().out
    nvidia, amd = out.split("\nAMD")[0], out.split("\nAMD")[1].split("\nGoogle")[0]
    lines = {line.split()[0]: line for line in (nvidia + amd).splitlines() if line.split()}
    assert "mi355x" in amd
    assert "gb200" in nvidia
    assert " calibrated " in lines["h100"]
    assert " calibrated " in lines["b200"]
    assert " ideal " in lines["v100"]


def test_another_chip_under_a_presets_name_has_none_of_its_facts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    save_accelerator(replace(preset("h100").accelerator, clock_hz=1e9), path)
    assert main(["chips", str(path)]) == 0
    out = capsys.readouterr().out
    assert "h100: added by a plugin or read from a file" in out
    assert "published" not in out
    assert main(["chips", str(path), "--json"]) == 0
    assert "sources" not in json.loads(capsys.readouterr().out)["chips"][0]


def test_one_chip_shows_its_network_and_what_of_it_is_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chips", "a100-80gb"]) == 0
    out = capsys.readouterr().out
    assert "network dgx-a100: 8 by NVLink3, then InfiniBand" in out
    links = out.split("network dgx-a100")[1]
    assert links.count("fact") == 2
    assert links.count("estimate") == 2
    assert main(["chips", "a100-80gb", "--json"]) == 0
    (inner, _) = json.loads(capsys.readouterr().out)["chips"][0]["network"]["levels"]
    assert inner["latency_s"]["is_verified"] is False


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
