from typing import Any

import numpy as np
import pytest
from hardware_strategies import clusters
from hypothesis import given
from hypothesis import strategies as st

from phaze.cost import Calibration, Collective, price_collective
from phaze.errors import CostError, HardwareError
from phaze.hardware import Cluster, InterconnectLevel, parse_cluster, preset

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


def test_an_axis_uses_the_levels_that_it_spans() -> None:
    assert seconds("all_gather", LEVELS, 8) == pytest.approx(7 * A1 + 7 / 8 * S / B1)
    assert seconds("all_gather", LEVELS, 4, 8) == pytest.approx(3 * A2 + 3 / 4 * S / B2)


def test_hierarchy_is_never_slower_than_one_ring_on_the_outer_links() -> None:
    flat = Cluster(CHIP, 32, (InterconnectLevel(32, B2, A2),))
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        assert seconds(collective, LEVELS, 32) < seconds(collective, flat, 32)


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
