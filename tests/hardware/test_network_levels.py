import math

import pytest
from plugins import manager_of, plugin_with

from phaze.hardware import Fact, Links, Network, NetworkLevel, Torus, network_names, networks, parse_cluster
from phaze.hardware.cluster import torus_shape

BANDWIDTH, LATENCY = Fact(1e9, "made up", False), Fact(1e-6, "made up", False)


@pytest.mark.parametrize(
    ("members", "dimensions", "shape"),
    [
        (4, 3, (1, 2, 2)),
        (16, 3, (2, 2, 4)),
        (64, 3, (4, 4, 4)),
        (128, 3, (4, 4, 8)),
        (1024, 3, (8, 8, 16)),
        (8960, 3, (16, 20, 28)),
        (8, 2, (2, 4)),
        (128, 2, (8, 16)),
        (256, 2, (16, 16)),
        (7, 2, (1, 7)),
        (5, 1, (5,)),
    ],
)
def test_a_torus_has_the_most_even_shape_as_slices_of_pods_do(
    members: int, dimensions: int, shape: tuple[int, ...]
) -> None:
    assert torus_shape(members, dimensions) == shape


@pytest.mark.parametrize("members", range(1, 200))
def test_a_torus_holds_exactly_its_members(members: int) -> None:
    assert math.prod(torus_shape(members, 2)) == math.prod(torus_shape(members, 3)) == members


def test_a_dimension_is_a_ring_where_its_links_close() -> None:
    level = NetworkLevel(128, BANDWIDTH, LATENCY, Torus(2, 16))
    assert [(row.size, row.links) for row in level.joining(128)] == [(8, Links.LINE), (16, Links.RING)]


def test_racks_of_which_a_power_of_two_divides_the_devices_are_used_in_part() -> None:
    racks = Network(
        "racks", "racks of 72", (NetworkLevel(72, BANDWIDTH, LATENCY), NetworkLevel(None, BANDWIDTH, LATENCY))
    )
    assert [level.size for level in racks.joining(576)] == [72, 8]
    assert [level.size for level in racks.joining(256)] == [64, 4]
    assert [level.size for level in racks.joining(100)] == [72, 2]
    assert [level.size for level in racks.joining(48)] == [48]


def test_every_shipped_network_has_sources() -> None:
    assert tuple(entry.name for entry in networks()) == network_names()
    for entry in networks():
        for level in entry.levels:
            assert level.bandwidth_bytes_per_s.value > 0
            assert len(level.bandwidth_bytes_per_s.source) > 5
            assert len(level.latency_s.source) > 5


def test_the_papers_artifact_ran_a_thousand_times_faster_than_the_paper_says() -> None:
    (paper,), (artifact,) = (parse_cluster(f"tpuv4-paper:64@{name}").levels for name in ("paper", "paper-artifact"))
    assert artifact.bandwidth_bytes_per_s == 4 * 2**30 / 1e-3 == 1000 * paper.bandwidth_bytes_per_s


def test_a_plugins_network_is_known_by_its_name() -> None:
    mine = Network("my-fabric", "one switch", (NetworkLevel(None, BANDWIDTH, LATENCY),))
    plugin = plugin_with(
        phaze_networks=lambda: [mine], phaze_accelerators=lambda: {"h100": parse_cluster("h100:1").accelerator}
    )
    (level,) = parse_cluster("h100:16@my-fabric", manager_of(mine=plugin)).levels
    assert (level.size, level.bandwidth_bytes_per_s) == (16, 1e9)
