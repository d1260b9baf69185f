"""No slicing of a model, and no schedule of one, takes less than the bound that needs neither."""

from dataclasses import replace

import pytest
from graphs import TINY_CONFIGS, graphs, tiny_graph
from hypothesis import given, reject
from hypothesis import strategies as st
from property_examples import examples, one_of_each

import phaze
from phaze.cost import IDEAL, Calibration, calibration_of
from phaze.errors import ShardError
from phaze.hardware import parse_cluster
from phaze.ir import Graph, RecomputeMode
from phaze.profile.layer_passes import ProfileOptions, profile_and_report
from phaze.shard import Axis, SequenceParallel, ShardedLayer, ShardOptions, least_model_seconds, shard_model

LARGE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama3-70b", "gpt3-175b", "t5-large")]
CLUSTERS = ("a100-80gb:8", "tpuv4:8", "h100:8", "tpuv4-paper:8")


def assert_bounded(graph: Graph, axis: Axis, mode: SequenceParallel, *, is_fused: bool = True) -> None:
    """Neither the sharding's own seconds nor the least of any schedule of it lies below the bound."""
    model, options = shard_model(graph, axis, ShardOptions(sequence_parallel=mode)), ProfileOptions(is_fused=is_fused)
    least_s = least_model_seconds(graph, axis)
    assert least_s <= model.seconds * (1 + 1e-12)
    once = {id(layer): least_pass_seconds(layer, replace(options, is_quick=True)) for layer in model.layers}
    assert least_s <= sum(once[id(layer)] for layer in model.layers) * (1 + 1e-12)


def least_pass_seconds(layer: ShardedLayer, options: ProfileOptions) -> float:
    """What forward and backward of a layer take at least."""
    _, report = profile_and_report(layer, (RecomputeMode.NONE,), options)[RecomputeMode.NONE]
    return report.forward.bound_s + report.backward.bound_s


def calibrations(cluster: str) -> tuple[Calibration, Calibration]:
    return IDEAL, calibration_of(parse_cluster(cluster).accelerator)


CALIBRATED = [(cluster, calibration) for calibration in (0, 1) for cluster in ("a100-80gb:8", "tpuv4:8")]
"""Clusters, each with no calibration and with its own."""


@pytest.mark.parametrize(("family", "calibrated"), one_of_each(TINY_CONFIGS, CALIBRATED))
def test_every_family_at_toy_size_is_bounded(family: str, calibrated: tuple[str, int]) -> None:
    graph, tp = tiny_graph(family), 2 if "num_key_value_heads" in TINY_CONFIGS[family] else 3
    cluster, calibration = calibrated
    axis = Axis(parse_cluster(cluster), tp, calibrations(cluster)[calibration])
    assert_bounded(graph, axis, SequenceParallel.FREE)


@pytest.mark.parametrize("name", ["mixtral-8x7b", *LARGE])
def test_real_models_are_bounded_within_reach(name: str) -> None:
    graph = phaze.import_graph(name, sequence_length=512).with_micro_batch(2)
    cluster = parse_cluster("a100-80gb:8")
    for tp in (2, 8):
        axis = Axis(cluster, tp)
        assert_bounded(graph, axis, SequenceParallel.ON)
        # A bound that is far away would hold and be of no use.
        model = shard_model(graph, axis, ShardOptions(sequence_parallel=SequenceParallel.ON))
        assert least_model_seconds(graph, axis) > 0.3 * sum(layer.compute_s for layer in model.layers)


@examples(40)
@given(
    graphs(),
    st.integers(2, 3),
    st.sampled_from(CLUSTERS),
    st.sampled_from(SequenceParallel),
    st.booleans(),
)
def test_random_graphs_are_bounded(graph: Graph, tp: int, cluster: str, mode: SequenceParallel, fuses: bool) -> None:
    for calibration in calibrations(cluster):
        try:
            assert_bounded(graph, Axis(parse_cluster(cluster), tp, calibration), mode, is_fused=fuses)
        except ShardError:
            reject()


def test_what_plugins_price_counts_as_nothing() -> None:
    graph, axis = tiny_graph("gpt2"), Axis(parse_cluster("a100-80gb:8"), 3)
    assert least_model_seconds(graph, axis, priced_elsewhere=("contraction",)) == 0.0
    assert least_model_seconds(graph, axis, priced_elsewhere=("gelu",)) == least_model_seconds(graph, axis)
