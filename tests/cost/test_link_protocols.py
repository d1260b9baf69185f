"""Collectives on a GPU's own links: the protocols' formula, its laws, and the links that it holds for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaze.cost import IDEAL, Calibration, Collective, calibration_of, price_collective
from phaze.cost.collective_prices import collective_lines
from phaze.cost.measured_kernels import LinkProtocol, LinkProtocols, link_protocols_of, linked_chips
from phaze.errors import HardwareError
from phaze.hardware import Cluster, parse_cluster, preset
from phaze.hardware.hardware_numbers import packaged_table
from phaze.hooks import PluginManager
from phaze.place.model.network_prices import Network
from phaze.shard import Axis

PLUGINS = PluginManager.load()
QUICK = LinkProtocol(start_s=5e-6, step_s=1e-6, share=0.25)
LARGE = LinkProtocol(start_s=3e-5, step_s=2e-6, share=0.75)
LINKS = LinkProtocols(bandwidth_bytes_per_s=450e9, protocols=(QUICK, LARGE), exchanged=0.8)
MEASURED = Calibration(name="protocols", link=0.9, network=0.7, links=LINKS)
SIZES = st.floats(0, 1e11)


def h100(text: str = "h100:8") -> Cluster:
    return parse_cluster(text, PLUGINS)


def seconds(collective: Collective, size: float, cluster: Cluster, members: int, **options: object) -> float:
    return float(price_collective(collective, size, cluster, members, **options).seconds)  # type: ignore[arg-type]


@given(SIZES, st.sampled_from([2, 4, 8]))
def test_a_collective_takes_the_quickest_protocol_and_starts_once(size: float, members: int) -> None:
    sent, steps = (members - 1) / members, members - 1
    for collective, rounds, share, reached in (
        (Collective.ALL_GATHER, steps, sent, 1.0),
        (Collective.REDUCE_SCATTER, steps, sent, 1.0),
        (Collective.ALL_REDUCE, 2 * steps, 2 * sent, 1.0),
        (Collective.ALL_TO_ALL, 1, sent, 0.8),
        (Collective.POINT_TO_POINT, 1, 1.0, 1.0),
    ):
        expected = min(
            protocol.start_s + rounds * protocol.step_s + size * share / (450e9 * 0.9 * protocol.share * reached)
            for protocol in (QUICK, LARGE)
        )
        assert seconds(collective, size, h100(), members, calibration=MEASURED) == pytest.approx(expected, rel=1e-9)


@given(SIZES, SIZES, st.sampled_from(list(Collective)), st.sampled_from(linked_chips()))
def test_prices_grow_with_size_and_count_and_rates_grow_with_size(
    first: float, second: float, collective: Collective, chip: str
) -> None:
    small, large = sorted((first, second))
    cluster, calibration = h100(f"{chip}:8"), calibration_of(preset(chip).accelerator)
    costs = [seconds(collective, size, cluster, 8, calibration=calibration) for size in (small, large)]
    assert costs[0] <= costs[1]
    assert costs[1] * small <= costs[0] * large * (1 + 1e-9)
    if collective is not Collective.POINT_TO_POINT:
        assert seconds(collective, large, cluster, 4, calibration=calibration) <= costs[1]


@given(SIZES, st.sampled_from(list(Collective)), st.sampled_from([2, 4, 8, 16]))
def test_bulk_prices_are_one_straight_line_that_is_never_below_the_price(
    size: float, collective: Collective, members: int
) -> None:
    cluster = h100("h100:16")
    bulk = [
        seconds(collective, each, cluster, members, calibration=MEASURED, is_bulk=True) for each in (0, size, 2 * size)
    ]
    assert bulk[2] - bulk[1] == pytest.approx(bulk[1] - bulk[0], rel=1e-6, abs=1e-12)
    assert bulk[1] >= seconds(collective, size, cluster, members, calibration=MEASURED)


@given(SIZES, st.sampled_from(list(Collective)), st.sampled_from([2, 4, 8]))
def test_slices_of_layers_and_placements_have_the_same_prices(
    size: float, collective: Collective, members: int
) -> None:
    cluster = h100()
    axis = Axis(cluster, members, MEASURED)
    lines = collective_lines(collective, cluster, members, calibration=MEASURED)
    held = size * members if collective is Collective.ALL_TO_ALL else size
    expected = seconds(collective, size, cluster, members, calibration=MEASURED)
    assert axis.seconds(collective, held) == pytest.approx(expected, rel=1e-9)
    assert axis.seconds_of_many(collective, np.array([held]))[0] == pytest.approx(expected, rel=1e-9)
    assert min(line.latency_s + line.s_per_byte * size for line in lines) == pytest.approx(expected, rel=1e-9)
    price = Network(cluster, MEASURED).collective(collective, members, 1, members)
    bulk = seconds(collective, size, cluster, members, calibration=MEASURED, is_bulk=True)
    assert price.latency_s + price.s_per_byte * size == pytest.approx(bulk, rel=1e-6)


def test_no_placement_pays_less_for_a_byte_than_the_bound_of_its_network_says() -> None:
    for text in ("h100:8", "h100:16", "h100:64"):
        network = Network(h100(text), MEASURED)
        used = network.cluster.device_count
        least = network.least_s_per_byte
        for members in (2, 4, 8, used):
            gather = network.collective(Collective.ALL_GATHER, members, 1, used)
            assert gather.s_per_byte * members / (members - 1) >= least * (1 - 1e-9)
        message = network.between_stages(Collective.POINT_TO_POINT, 2, 2, used // 2, used)
        assert message.s_per_byte >= least * (1 - 1e-9)


@pytest.mark.parametrize("text", ["h100:8@paper", "tpuv4:8", "h100:16@nvlink8+ib400"])
def test_links_that_were_not_measured_keep_the_closed_forms(text: str) -> None:
    cluster = h100(text)
    members = 16 if "+" in text else 8
    plain = replace(MEASURED, links=None)
    stride = 8 if "+" in text else 1  # between the nodes only
    size = members // stride
    for collective in Collective:
        with_links, without = (
            float(price_collective(collective, 1e8, cluster, size, stride, calibration=calibration).seconds)
            for calibration in (MEASURED, plain)
        )
        assert with_links == without


def test_ideal_prices_know_no_protocol() -> None:
    assert IDEAL.links is None
    assert seconds(Collective.ALL_GATHER, 8e8, h100(), 8) == pytest.approx(7 * 1e-6 + 7 / 8 * 8e8 / 450e9)


@pytest.mark.parametrize("name", packaged_table("kernels")["collectives"])
def test_shipped_protocols_miss_measured_collectives_by_at_most_twelve_percent(name: str) -> None:
    entry = packaged_table("kernels")["collectives"][name]
    assert entry["rows"] > 100
    assert entry["mean_error"] <= 0.12
    assert entry["left_out"] <= 0.15
    links = link_protocols_of(preset(name).accelerator)
    assert links is not None
    assert links.bulk.share == max(protocol.share for protocol in links.protocols)
    assert links.hold_for(h100(f"{name}:8").levels[0])


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(HardwareError, match="share"):
        replace(QUICK, share=1.5)
    with pytest.raises(HardwareError, match="start_s"):
        replace(QUICK, start_s=-1.0)
    with pytest.raises(HardwareError, match="number of protocols"):
        replace(LINKS, protocols=())
