import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hardware_strategies import clusters
from hypothesis import given
from hypothesis import strategies as st

from phaze.cost import Calibration, Collective, broadcast_fill_s, price_collective
from phaze.cost.collective_prices import collective_lines
from phaze.errors import CostError, HardwareError
from phaze.hardware import Cluster, InterconnectLevel, Links, parse_cluster, preset

CHIP = preset("h100").accelerator
A, B = 2e-6, 50e9
FLAT = Cluster(CHIP, 16, (InterconnectLevel(16, B, A),))
A1, B1, A2, B2 = 1e-6, 400e9, 5e-6, 25e9
LEVELS = Cluster(CHIP, 32, (InterconnectLevel(8, B1, A1), InterconnectLevel(4, B2, A2)))
S = 1e9


def seconds(collective: str, cluster: Cluster, size: int, stride: int = 1, tensor_bytes: float = S) -> float:
    return float(price_collective(collective, tensor_bytes, cluster, size, stride).seconds)


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_rings_equal_their_textbook_formulas(n: int) -> None:
    once = (n - 1) * A + (n - 1) / n * S / B
    assert seconds("all_gather", FLAT, n) == pytest.approx(once, rel=1e-12)
    assert seconds("reduce_scatter", FLAT, n) == pytest.approx(once, rel=1e-12)
    assert seconds("all_to_all", FLAT, n) == pytest.approx(once, rel=1e-12)
    assert seconds("all_reduce", FLAT, n) == pytest.approx(2 * once, rel=1e-12)
    assert seconds("point_to_point", FLAT, n) == pytest.approx(A + S / B, rel=1e-12)


def test_hierarchical_forms_equal_their_textbook_formulas() -> None:
    inner, outer = 7 * A1 + 7 / 8 * S / B1, 3 * A2 + 3 / 4 * (S / 8) / B2
    assert seconds("reduce_scatter", LEVELS, 32) == pytest.approx(inner + outer, rel=1e-12)
    assert seconds("all_gather", LEVELS, 32) == pytest.approx(inner + outer, rel=1e-12)
    assert seconds("all_reduce", LEVELS, 32) == pytest.approx(2 * (inner + outer), rel=1e-12)
    both_whole = inner + 3 * A2 + 3 / 4 * S / B2
    assert seconds("all_to_all", LEVELS, 32) == pytest.approx(both_whole, rel=1e-12)
    assert seconds("point_to_point", LEVELS, 32) == pytest.approx(A2 + S / B2, rel=1e-12)


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_a_token_goes_once_to_each_node_and_once_to_each_device_that_its_experts_are_on(copies: int) -> None:
    def share(groups: int) -> float:
        chosen = list(product(range(groups), repeat=copies))
        return sum(len(set(groups_of_one)) for groups_of_one in chosen) / (len(chosen) * copies)

    cluster = Cluster(CHIP, 16, (InterconnectLevel(4, B1, A1), InterconnectLevel(4, B2, A2)))
    (line,) = collective_lines(Collective.ALL_TO_ALL, cluster, 16, copies=copies)
    expected = 3 / 4 / B1 * share(16) + 3 / 4 / B2 * share(4)
    assert line.s_per_byte == pytest.approx(expected, rel=1e-12)


def test_an_axis_uses_the_levels_that_it_spans() -> None:
    assert seconds("all_gather", LEVELS, 8) == pytest.approx(7 * A1 + 7 / 8 * S / B1)
    assert seconds("all_gather", LEVELS, 4, 8) == pytest.approx(3 * A2 + 3 / 4 * S / B2)


def test_hierarchy_is_never_slower_than_one_ring_on_the_outer_links() -> None:
    flat = Cluster(CHIP, 32, (InterconnectLevel(32, B2, A2),))
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        assert seconds(collective, LEVELS, 32) < seconds(collective, flat, 32)


W, AH = 45e9, 1e-6


def torus(*sizes: int, links: Links = Links.RING) -> Cluster:
    rows = tuple(InterconnectLevel(size, W, AH, links) for size in sizes)
    return Cluster(CHIP, math.prod(sizes), rows)


@pytest.mark.parametrize("n", [2, 3, 4, 16])
def test_a_closed_ring_of_a_torus_sends_both_ways(n: int) -> None:
    once = n // 2 * AH + (n - 1) / n * S / (2 * W)
    assert seconds("all_gather", torus(n), n) == pytest.approx(once, rel=1e-12)
    assert seconds("all_reduce", torus(n), n) == pytest.approx(2 * once, rel=1e-12)
    assert seconds("point_to_point", torus(n), n) == pytest.approx(AH + S / W, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 16])
def test_a_line_of_a_torus_has_one_way_in_and_one_out_at_its_ends(n: int) -> None:
    once = (n - 1) * AH + (n - 1) / n * S / W
    assert seconds("reduce_scatter", torus(n, links=Links.LINE), n) == pytest.approx(once, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 16])
def test_an_all_to_all_on_a_ring_moves_every_byte_as_far_as_it_has_to_go(n: int) -> None:
    """Bytes times links passed, over the links of one device: the nearer way round."""
    distance = sum(min(step, n - step) for step in range(1, n))
    expected = n // 2 * AH + distance * (S / n) / (2 * W)
    assert seconds("all_to_all", torus(n), n) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 16])
def test_an_all_to_all_on_a_line_takes_as_long_as_its_middle_link(n: int) -> None:
    across = (n // 2) * (n - n // 2) * S / n
    expected = (n - 1) * AH + across / W
    assert seconds("all_to_all", torus(n, links=Links.LINE), n) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("n", "dims"), [(4, 2), (16, 2), (4, 3), (8, 3)])
def test_an_axis_over_equal_dimensions_of_a_torus_uses_the_links_of_all(n: int, dims: int) -> None:
    cluster, members = torus(*[n] * dims), n**dims
    once = dims * (n // 2) * AH + (1 - 1 / members) * S / (2 * W * dims)
    assert seconds("all_gather", cluster, members) == pytest.approx(once, rel=1e-12)
    assert seconds("all_reduce", cluster, members) == pytest.approx(2 * once, rel=1e-12)
    assert seconds("all_to_all", cluster, members) == pytest.approx(
        dims * (n // 2) * AH + (n * n // 4) / n * S / (2 * W), rel=1e-12
    )


def test_a_part_of_a_ring_is_a_line_and_groups_between_each_other_share_it() -> None:
    ring = torus(16)
    assert seconds("all_gather", ring, 4) == pytest.approx(3 * AH + 3 / 4 * S / W, rel=1e-12)
    every_fourth = 2 * (4 * AH) + 3 / 4 * S / (2 * W / 4)
    assert seconds("all_gather", ring, 4, 4) == pytest.approx(every_fourth, rel=1e-12)


def test_slices_over_the_data_centre_network_exchange_what_the_torus_leaves_to_each_device() -> None:
    rows = (InterconnectLevel(4, W, AH, Links.RING), InterconnectLevel(4, W, AH, Links.RING))
    cluster = Cluster(CHIP, 32, (*rows, InterconnectLevel(2, B2, A2)))
    inner = 4 * AH + 15 / 16 * S / (4 * W)
    assert seconds("reduce_scatter", cluster, 32) == pytest.approx(inner + A2 + S / 16 / 2 / B2, rel=1e-12)


def test_the_papers_network_reduces_as_the_paper_counts() -> None:
    cluster = parse_cluster("tpuv4-paper:64@paper")
    assert seconds("all_reduce", cluster, 64) == pytest.approx(2 * 63 / 64 * S / (4 * 2**30), rel=1e-12)


def test_many_sizes_are_priced_at_once() -> None:
    estimate = price_collective("all_reduce", np.array([[1e6, 2e6], [0.0, S]]), LEVELS, 32)
    assert estimate.seconds.shape == estimate.sent_bytes.shape == estimate.energy_j.shape == (2, 2)
    assert estimate.seconds[1, 1] == seconds("all_reduce", LEVELS, 32)
    assert estimate.sent_bytes[0, 1] == 2 * estimate.sent_bytes[0, 0]
    assert estimate.energy_j[0, 0] > 0


def test_a_device_sends_what_the_formulas_say() -> None:
    sent = price_collective("all_reduce", S, LEVELS, 32).sent_bytes
    assert sent == pytest.approx(2 * 31 / 32 * S)


def test_one_device_talks_to_nobody() -> None:
    assert seconds("all_reduce", LEVELS, 1) == 0


def test_efficiency_slows_bandwidth_and_leaves_latency() -> None:
    estimate = price_collective("point_to_point", S, FLAT, 2, calibration=Calibration(name="half", link=0.5))
    assert estimate.seconds == pytest.approx(A + 2 * S / B)


@given(clusters(), st.sampled_from(Collective), st.floats(0, 1e12), st.floats(0, 1e12), st.integers(1, 8))
def test_more_bytes_never_take_less_time(
    cluster: Cluster, collective: Collective, few: float, more: float, size: int
) -> None:
    size = min(size, cluster.device_count)
    estimate = price_collective(collective, np.sort([few, more]), cluster, size).seconds
    assert estimate[0] <= estimate[1]


@given(clusters(), st.sampled_from(Collective), st.integers(1, 64), st.integers(0, 2), st.floats(1, 10))
def test_more_bandwidth_or_less_latency_never_costs_time(
    cluster: Cluster, collective: Collective, size: int, index: int, times: float
) -> None:
    size, index = min(size, cluster.device_count), index % len(cluster.levels)
    level = cluster.levels[index]
    faster = replace(
        level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * times, latency_s=level.latency_s / times
    )
    better = replace(cluster, levels=(*cluster.levels[:index], faster, *cluster.levels[index + 1 :]))
    assert seconds(collective, better, size) <= seconds(collective, cluster, size) * (1 + 1e-12)


@given(clusters(), st.sampled_from(Collective), st.integers(1, 64), st.floats(1, 1e9))
def test_a_price_is_latency_plus_bytes_times_a_rate(
    cluster: Cluster, collective: Collective, size: int, more: float
) -> None:
    size = min(size, cluster.device_count)
    start, one, many = price_collective(collective, [0.0, 1e6, 1e6 * more], cluster, size).seconds
    assert many == pytest.approx(start + (one - start) * more, rel=1e-6)


def test_the_first_chunk_of_a_broadcast_passes_every_device_of_a_ring_once() -> None:
    chunk = 256 * 1024
    inner_s, outer_s = A1 + chunk / B1, A2 + chunk / B2
    assert broadcast_fill_s(FLAT, 16) == pytest.approx(15 * (A + chunk / B))
    assert broadcast_fill_s(LEVELS, 32) == pytest.approx(28 * inner_s + 3 * outer_s)
    assert broadcast_fill_s(LEVELS, 16, 2) == pytest.approx(12 * inner_s + 3 * outer_s)
    assert broadcast_fill_s(LEVELS, 4, 8) == pytest.approx(3 * outer_s)
    assert broadcast_fill_s(LEVELS, 1) == 0


@pytest.mark.parametrize("tensor_bytes", [-1.0, np.nan, np.inf, "much", None, 10**400, [[1], [2, 3]]])
def test_impossible_sizes_are_refused(tensor_bytes: Any) -> None:
    with pytest.raises(CostError, match="bytes"):
        price_collective("all_reduce", tensor_bytes, FLAT, 2)


@pytest.mark.parametrize("collective", [[], None, 3, {}])
def test_what_is_no_collective_is_refused(collective: Any) -> None:
    with pytest.raises(CostError, match="unknown collective"):
        price_collective(collective, S, FLAT, 2)


def test_an_unknown_collective_lists_the_known() -> None:
    with pytest.raises(CostError, match="'broadcast'; known are all_reduce"):
        price_collective("broadcast", S, FLAT, 2)


def test_an_axis_that_does_not_fit_is_refused() -> None:
    with pytest.raises(HardwareError, match="needs 64 devices"):
        price_collective("all_reduce", S, LEVELS, 64)
