from pathlib import Path

import pytest

from phaze.errors import FormatError, HardwareError, UnknownNameError
from phaze.hardware import (
    Cluster,
    find_accelerator,
    network_names,
    parse_cluster,
    preset,
    save_accelerator,
    save_cluster,
)


def sizes(text: str) -> list[int]:
    return [level.size for level in parse_cluster(text).levels]


def test_a_chip_brings_its_own_network() -> None:
    cluster = parse_cluster("a100-80gb:64")
    assert (cluster.accelerator, cluster.device_count) == (preset("a100-80gb").accelerator, 64)
    assert [(level.size, level.bandwidth_bytes_per_s) for level in cluster.levels] == [(8, 300e9), (8, 25e9)]


def test_the_paper_network_is_one_flat_level_without_latency() -> None:
    (level,) = parse_cluster("tpuv4-paper:1024@paper").levels
    assert (level.size, level.bandwidth_bytes_per_s, level.latency_s) == (1024, 4 * 2**30, 0.0)
    assert parse_cluster("tpuv4-paper:1024") == parse_cluster("tpuv4-paper:1024@paper")


def test_levels_follow_the_number_of_devices() -> None:
    assert sizes("a100-80gb:1") == []
    assert sizes("a100-80gb:4") == [4]
    assert sizes("a100-80gb:12") == [8, 2]
    assert sizes("tpuv5e:512") == [16, 16, 2]


@pytest.mark.parametrize("network", network_names())
def test_every_network_joins_any_number_of_devices(network: str) -> None:
    for count in (1, 2, 7, 8, 100, 20_000):
        assert parse_cluster(f"h100:{count}@{network}").device_count == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a100-80gb",
        "a100-80gb:",
        ":8",
        "a100-80gb:x",
        "a100-80gb:-8",
        "a100-80gb:8@",
        "a100-80gb:8.5",
        "a100-80gb:²",
    ],
)
def test_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(HardwareError, match="CHIP:COUNT"):
        parse_cluster(text)


def test_a_cluster_without_devices_is_refused() -> None:
    with pytest.raises(HardwareError, match="has 0 devices"):
        parse_cluster("h100:0")


@pytest.mark.parametrize("count", ["9" * 5000, "9" * 20])
def test_a_count_that_no_cluster_has_is_refused(count: str) -> None:
    with pytest.raises(HardwareError, match="devices; expected 1 to"):
        parse_cluster(f"h100:{count}")


def test_unknown_chips_and_networks_list_near_names() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown accelerator 'a100'.*Did you mean a100-"):
        parse_cluster("a100:8")
    with pytest.raises(UnknownNameError, match=r"unknown network 'dgx-a10'.*Did you mean dgx-a100"):
        parse_cluster("a100-80gb:8@dgx-a10")


def test_files_stand_for_chips_and_for_clusters(tmp_path: Path) -> None:
    chip, cluster = tmp_path / "chip.json", tmp_path / "cluster.json"
    save_accelerator(preset("h100").accelerator, chip)
    assert find_accelerator(str(chip)) == preset("h100").accelerator
    assert sizes(f"{chip}:16") == [16]
    assert sizes(f"{chip}:16@dgx-h100") == [8, 2]
    save_cluster(parse_cluster("h100:16"), cluster)
    assert parse_cluster(str(cluster)) == parse_cluster("h100:16")
    assert isinstance(parse_cluster(str(cluster)), Cluster)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"none\.json"):
        parse_cluster(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("spelled", "text"),
    [
        ("H100:64", "h100:64"),
        ("8xH100", "h100:8"),
        ("512 x h100@NVLink8 + IB400", "h100:512@nvlink8+ib400"),
        ("TPU v5p:512@8x8x8", "tpuv5p:512@8x8x8"),
        ("h100:64@DGX-H100", "h100:64@dgx-h100"),
        ("2xmi300x/host=25GB/s,200GiB", "mi300x:2/host=25GB/s,200GiB"),
    ],
)
def test_a_cluster_may_be_spelled_as_people_spell_it(spelled: str, text: str) -> None:
    assert parse_cluster(spelled) == parse_cluster(text)


def test_the_sides_of_a_slice_may_stand_in_the_place_of_the_count() -> None:
    assert parse_cluster("tpuv5p:4x4x8") == parse_cluster("tpuv5p:128@4x4x8")
    assert parse_cluster("tpuv6e:16x16").device_count == 256
    assert sizes("tpuv4:4x4x4@dcn25") == [4, 4, 4]
    with pytest.raises(HardwareError, match="h100 has no links that form a torus"):
        parse_cluster("h100:2x4")
    with pytest.raises(HardwareError, match="not of the form"):
        parse_cluster("tpuv4:4x4x4x4")
