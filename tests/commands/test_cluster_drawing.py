"""`phaze cluster`: what is understood of a text."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phaze.cli import main
from phaze.cost import price_collective
from phaze.hardware import fabric_names, load_cluster, network_names, parse_cluster


def test_levels_are_drawn_with_sizes_bandwidth_latency_and_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "h100:512@nvlink8+ib400/2"]) == 0
    out = capsys.readouterr().out
    assert "512 x h100: 506.6 PF/s, 40,960 GiB of HBM" in out
    assert "level 2: [8 devices]  [8 devices]  [8 devices]  [8 devices] .. 64 of them, each to all" in out
    assert "level 1: [h100]  [h100]  [h100]  [h100] .. 8 of them, each to all" in out
    row = next(line.split() for line in out.splitlines() if line.split()[:2] == ["2", "switch"])
    seconds = float(price_collective("all_reduce", 2**30, parse_cluster("h100:512@nvlink8+ib400/2"), 512).seconds)
    assert row == ["2", "switch", "64", "512", "25", "5", f"{seconds * 1e3:.4g}"]


def test_a_torus_is_drawn_as_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "tpuv6e:128"]) == 0
    out = capsys.readouterr().out
    assert "level 1: [tpuv6e]--[tpuv6e]--[tpuv6e]--[tpuv6e] .. 8 of them, in a line" in out
    assert "[8 devices]--[8 devices]--[8 devices]--[8 devices] .. 16 of them, in a ring" in out


def test_json_has_the_cluster_and_the_seconds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    assert main(["cluster", "gb200:576", "--json", "--price-per-hour", "3.5", "--out", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [level["size"] for level in document["cluster"]["levels"]] == [72, 8]
    assert document["price_per_hour"] == 576 * 3.5
    assert len(document["all_reduce_s"]) == 2
    assert load_cluster(path) == replace(parse_cluster("gb200:576"), price_per_device_hour=3.5)


def test_a_host_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "h100:16/host=55GB/s,256GiB"]) == 0
    assert "each device has 55 GB/s per direction to 256 GiB of its host" in capsys.readouterr().out


def test_without_a_text_the_known_networks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*network_names(), "ib400", "ndr"))
    assert main(["cluster", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in document["networks"]] == list(network_names())
    assert document["fabrics"] == list(fabric_names())


def test_groups_that_are_not_full_and_single_devices_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "h100:12"]) == 0
    assert "the levels could join 16 devices" in capsys.readouterr().out
    assert main(["cluster", "h100:1"]) == 0
    assert "one device, no links" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "complaint"), [("h100:64@nvlnk8", "Did you mean nvlink8"), ("h10:64", "Did you mean h100")]
)
def test_what_is_not_understood_is_said(text: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", text]) == 1
    assert complaint in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("price", ["0", "-1", "much", "inf"])
def test_a_price_that_is_none_is_refused(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cluster", "h100:8", "--price-per-hour", price])
    assert "is not a price above 0" in capsys.readouterr().err
