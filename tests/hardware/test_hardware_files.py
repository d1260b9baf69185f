import json
from dataclasses import replace
from pathlib import Path

import pytest
from hardware_strategies import accelerators, clusters
from hypothesis import given
from plugins import manager_of, plugin_with

from phaze.errors import FormatError, HardwareError, UnknownNameError
from phaze.hardware import (
    Accelerator,
    Cluster,
    find_accelerator,
    load_accelerator,
    load_cluster,
    parse_cluster,
    preset,
    save_accelerator,
    save_cluster,
)
from phaze.hardware.hardware_files import accelerator_from_json, accelerator_to_json, cluster_from_json, cluster_to_json

CHIP = accelerator_to_json(preset("h100").accelerator)


def through_json(document: dict[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(document))


@given(accelerators())
def test_an_accelerator_survives_json_exactly(chip: Accelerator) -> None:
    assert accelerator_from_json(through_json(accelerator_to_json(chip))) == chip


@given(clusters())
def test_a_cluster_survives_json_exactly(cluster: Cluster) -> None:
    assert cluster_from_json(through_json(cluster_to_json(cluster))) == cluster


def test_a_cluster_may_name_its_chip() -> None:
    document = through_json(cluster_to_json(parse_cluster("h100:8")) | {"accelerator": "h100"})
    assert cluster_from_json(document) == parse_cluster("h100:8")
    with pytest.raises(UnknownNameError, match="Did you mean h100"):
        cluster_from_json(document | {"accelerator": "h10"})


def test_a_cluster_may_name_a_plugins_chip() -> None:
    chip = replace(preset("h100").accelerator, name="mine")
    manager = manager_of(mine=plugin_with(phaze_accelerators=lambda: {"mine": chip}))
    document = {"accelerator": "mine", "device_count": 1}
    assert cluster_from_json(document, manager) == Cluster(chip, 1)
    assert find_accelerator("mine", manager) == chip
    assert parse_cluster("mine:2", manager).accelerator == chip


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"cannot write .*none.chip\.json: No such file or directory"):
        save_accelerator(preset("h100").accelerator, tmp_path / "none" / "chip.json")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "kind is not there; expected 'accelerator'"),
        ("{}", "kind is None"),
        ('{"kind": "cluster", "version": 1}', "kind is 'cluster'; expected 'accelerator'"),
        ('{"kind": "accelerator", "version": 2}', "version is 2"),
        ('{"kind": "accelerator", "version": 1}', "lacks 'accelerator'"),
        ('{"kind": "accelerator", "version": 1, "accelerator": {"name": "x"}}', "accelerator lacks 'tensor_cores'"),
        ('{"kind": "accelerator", "version": 1, "accelerator": {"colour": "red"}}', "unknown field 'colour'"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_with_its_reason(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "chip.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=complaint):
        load_accelerator(path)


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="no text in UTF-8"):
        load_accelerator(path)


def test_a_value_that_cannot_exist_is_refused_as_hardware() -> None:
    with pytest.raises(HardwareError, match="clock_hz is -1"):
        accelerator_from_json(CHIP | {"clock_hz": -1})
    with pytest.raises(HardwareError, match="matrix rates: fp8"):
        accelerator_from_json(CHIP | {"rates": {"fp8": 0}})


@pytest.mark.parametrize("levels", [3, [3], [{"size": 2}], [{"size": 2, "bandwidth_bytes_per_s": 1e9, "colour": 1}]])
def test_malformed_levels_are_refused(levels: object) -> None:
    with pytest.raises(FormatError, match="level"):
        cluster_from_json({"accelerator": CHIP, "device_count": 2, "levels": levels})


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    save_cluster(parse_cluster("mi300x:32"), tmp_path / "cluster.json")
    assert load_cluster(tmp_path / "cluster.json") == parse_cluster("mi300x:32")
