import math

import pytest
from hardware_strategies import clusters
from hypothesis import given
from hypothesis import strategies as st

from phaze.errors import HardwareError
from phaze.hardware import Cluster, InterconnectLevel, Links, preset

CHIP = preset("a100-80gb").accelerator
FAST, SLOW = InterconnectLevel(8, 300e9, 1e-6), InterconnectLevel(8, 25e9, 5e-6)
NODES = Cluster(CHIP, 64, (FAST, SLOW))


def spans(size: int, stride: int = 1, cluster: Cluster = NODES) -> list[tuple[int, float]]:
    return [(level.size, level.bandwidth_bytes_per_s) for level in cluster.axis_levels(size, stride)]


def test_an_axis_inside_a_node_uses_the_inner_links_only() -> None:
    assert spans(4) == [(4, 300e9)]
    assert spans(4, 2) == [(4, 300e9)]


def test_an_axis_between_nodes_uses_the_outer_links_only() -> None:
    assert spans(8, 8) == [(8, 25e9)]


def test_an_axis_over_both_levels_is_split_between_them() -> None:
    assert spans(16) == [(8, 300e9), (2, 25e9)]
    assert spans(16, 2) == [(4, 300e9), (4, 25e9)]
    assert spans(64) == [(8, 300e9), (8, 25e9)]


def test_an_axis_that_does_not_line_up_with_nodes_is_charged_to_the_outer_links() -> None:
    assert spans(6) == [(6, 25e9)]
    assert spans(3, 8) == [(3, 25e9)]


def test_an_axis_of_one_device_uses_no_links() -> None:
    assert spans(1) == spans(1, 64) == []


def test_one_block_that_holds_all_devices_is_the_outermost() -> None:
    assert spans(6, cluster=Cluster(CHIP, 6, (FAST, SLOW))) == [(6, 300e9)]


def test_the_same_level_twice_is_two_levels() -> None:
    assert spans(64, cluster=Cluster(CHIP, 64, (FAST, FAST))) == [(8, 300e9), (8, 300e9)]


@given(clusters(), st.integers(1, 20), st.integers(1, 20))
def test_the_parts_of_an_axis_multiply_to_its_size(cluster: Cluster, size: int, stride: int) -> None:
    if size * stride > cluster.device_count:
        with pytest.raises(HardwareError, match="mesh axis"):
            cluster.axis_levels(size, stride)
        return
    assert math.prod(level.size for level in cluster.axis_levels(size, stride)) == size


ROW = InterconnectLevel(8, 45e9, 1e-6, Links.RING)
TORUS = Cluster(CHIP, 128, (ROW, ROW, InterconnectLevel(2, 6e9, 1e-5)))


def test_a_whole_dimension_of_a_torus_is_a_ring_and_a_part_of_one_a_line() -> None:
    assert TORUS.axis_levels(8) == (ROW,)
    assert TORUS.axis_levels(4) == (InterconnectLevel(4, 45e9, 1e-6, Links.LINE),)


def test_an_axis_between_others_on_a_row_has_its_share_of_the_links() -> None:
    assert TORUS.axis_levels(4, 2) == (InterconnectLevel(4, 45e9 / 2, 2e-6, Links.RING),)
    assert TORUS.axis_levels(2, 2) == (InterconnectLevel(2, 45e9 / 2, 2e-6, Links.LINE),)
    assert TORUS.axis_levels(16, 4) == (InterconnectLevel(2, 45e9 / 4, 4e-6, Links.RING), ROW)


def test_links_of_a_node_and_a_torus_are_inner_and_those_between_slices_are_not() -> None:
    assert TORUS.inner_levels == (True, True, False)
    assert [span.is_inner for span in TORUS.axis_spans(128)] == [True, True, False]
    assert NODES.inner_levels == (True, False)


def test_links_of_another_kind_are_refused() -> None:
    with pytest.raises(HardwareError, match="links is 'mesh'; expected one of switch, ring, line"):
        InterconnectLevel(4, 1e9, 0.0, "mesh")  # type: ignore[arg-type]


def test_a_mesh_axis_that_does_not_fit_is_refused() -> None:
    with pytest.raises(HardwareError, match="16 devices at stride 8 needs 128 devices; the cluster has 64"):
        NODES.axis_levels(16, 8)


@pytest.mark.parametrize(("size", "stride"), [(0, 1), (-1, 1), (2, 0), (1.5, 1)])
def test_a_mesh_axis_has_whole_positive_sizes(size: int, stride: int) -> None:
    with pytest.raises(HardwareError, match="mesh axis"):
        NODES.axis_levels(size, stride)


@pytest.mark.parametrize("fields", [(0, 1e9, 0.0), (2, 0.0, 0.0), (2, -1.0, 0.0), (2, 1e9, -1e-6), (2, math.nan, 0.0)])
def test_a_level_that_cannot_exist_is_refused(fields: tuple[int, float, float]) -> None:
    with pytest.raises(HardwareError, match="interconnect level"):
        InterconnectLevel(*fields)


@pytest.mark.parametrize("count", [0, -4, 2.5, True])
def test_a_cluster_has_a_whole_number_of_devices(count: int) -> None:
    with pytest.raises(HardwareError, match="device_count"):
        Cluster(CHIP, count, (FAST,))


def test_levels_that_join_too_few_devices_are_refused() -> None:
    with pytest.raises(HardwareError, match=r"\(8\) join 8 devices"):
        Cluster(CHIP, 9, (FAST,))
    with pytest.raises(HardwareError, match="no levels"):
        Cluster(CHIP, 2)


def test_a_single_device_needs_no_levels() -> None:
    assert Cluster(CHIP, 1).axis_levels(1) == ()


@pytest.mark.parametrize("levels", [None, 3, (3,), "ab", [None]])
def test_levels_of_another_type_are_refused(levels: object) -> None:
    with pytest.raises(HardwareError, match=r"cluster: levels is .*expected InterconnectLevels"):
        Cluster(preset("h100").accelerator, 1, levels)  # type: ignore[arg-type]


def test_a_chips_name_is_not_a_chip() -> None:
    with pytest.raises(HardwareError, match="accelerator is 'a100'; expected an Accelerator"):
        Cluster("a100", 1)  # type: ignore[arg-type]
