"""Worlds: what a process sees of others and of devices, without a launch."""

import pytest

from phaze.backends.worlds import JaxWorld, TorchWorld, chip_of_device
from phaze.hooks import PluginManager


@pytest.mark.parametrize(
    ("device", "chip"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("TPU v4", "tpuv4"),
        ("TPU v6 lite", "tpuv6e"),
        ("TPU7x", "tpu7x"),
        ("TPU v5 lite", "tpuv5e"),
        ("AMD Instinct MI300X", "mi300x"),
        ("cpu", None),
        ("some card", None),
    ],
)
def test_a_driver_s_name_is_a_known_chip_or_none(device: str, chip: str | None) -> None:
    assert chip_of_device(device) == chip


@pytest.mark.parametrize("world", [TorchWorld(), JaxWorld()])
def test_a_process_without_a_launch_is_alone(world: TorchWorld | JaxWorld) -> None:
    assert (world.size(), world.rank(), world.gather("text")) == (1, 0, ["text"])
    assert world.visible_devices() is None


def test_both_worlds_are_plugins() -> None:
    assert set(PluginManager.load().worlds().names) == {"torch", "jax"}
