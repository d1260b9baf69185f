"""Profiles of sharded layers: times from schedules with bounds, bytes from the slice."""

import pytest
from graphs import tiny_graph
from sharding import A100S

import phaze
from phaze.ir import Graph
from phaze.profile.layer_passes import ProfileOptions, placement_graph, profile_layer
from phaze.profile.layer_profile import LayerProfile, RecomputeMode
from phaze.shard import Axis, SequenceParallel, ShardedLayer, ShardingProblem, ShardOptions, shard_model, unsharded

LENGTH, HIDDEN, HEADS = 1024, 1536, 16


@pytest.fixture(scope="module")
def gpt() -> Graph:
    return phaze.import_graph("megatron-gpt2-xl")


def layers(graph: Graph, width: int, mode: str = "on") -> list[ShardedLayer]:
    """The first layer of each kind, sharded."""
    if width == 1:
        return [
            unsharded(ShardingProblem(graph=graph, layer=layer, axis=Axis(A100S, 1))) for layer in graph.distinct_layers
        ]
    options = ShardOptions(sequence_parallel=SequenceParallel(mode))
    model = shard_model(graph, Axis(A100S, width), options)
    return [model.layers[layer.index] for layer in graph.distinct_layers]


def profiles(graph: Graph, width: int, recompute: RecomputeMode, mode: str = "on") -> list[LayerProfile]:
    options = ProfileOptions()
    return [profile_layer(layer, recompute, options) for layer in layers(graph, width, mode)]


def seconds(profile: LayerProfile) -> float:
    parts = (profile.forward_s, profile.backward_input_s, profile.backward_weight_s)
    return float(sum(part.value[0] for part in parts))


@pytest.mark.parametrize("width", [1, 2])
def test_stashed_bytes_are_those_of_the_slice(gpt: Graph, width: int) -> None:
    unit, square = LENGTH * HIDDEN, 5 * HEADS * LENGTH**2
    expected = {
        RecomputeMode.NONE: (34 * unit + square) // width,
        RecomputeMode.SELECTIVE: 34 * unit // width,
        RecomputeMode.FULL: 2 * unit // width,
    }
    for recompute, size in expected.items():
        assert profiles(gpt, width, recompute)[1].stashed_bytes == size


@pytest.mark.parametrize("width", [1, 4])
def test_every_bound_lies_within_one_percent_under_its_time(gpt: Graph, width: int) -> None:
    for profile in profiles(gpt, width, RecomputeMode.FULL):
        for part in (profile.forward_s, profile.backward_input_s, profile.recompute_s):
            assert 0.99 * part.value[0] <= part.bound[0] <= part.value[0]
        assert profile.backward_weight_s.bound[0] <= profile.backward_weight_s.value[0]


def test_wider_slices_are_quicker_and_smaller(gpt: Graph) -> None:
    one, eight = (profiles(gpt, width, RecomputeMode.NONE)[1] for width in (1, 8))
    assert seconds(one) / 8 < seconds(eight) < seconds(one)
    assert sum(eight.parameter_bytes.values()) < sum(one.parameter_bytes.values()) / 7
    assert (one.is_tensor_parallel, eight.is_tensor_parallel) == (False, True)
    assert eight.outputs[0].size_bytes == one.outputs[0].size_bytes / 8
    assert eight.outputs[0].layout == "dim 1 / 8"


def test_full_recomputation_takes_the_forward_again_and_needs_room_for_what_it_makes(gpt: Graph) -> None:
    none, full = (profiles(gpt, 1, mode)[1] for mode in (RecomputeMode.NONE, RecomputeMode.FULL))
    assert none.recompute_s.value[0] == 0
    assert full.recompute_s.value[0] == full.forward_s.value[0]
    again = none.stashed_bytes - full.stashed_bytes
    assert again < full.peak_working_bytes < again + none.peak_working_bytes


def test_the_loss_needs_room_for_the_gradient_of_its_logits_beside_them(gpt: Graph) -> None:
    """Logits in single precision are kept; their gradient is as large and replaces them."""
    last = profiles(gpt, 1, RecomputeMode.NONE)[-1]
    logits = 4 * LENGTH * 50304
    assert logits <= last.stashed_bytes < 1.1 * logits
    assert logits <= last.peak_working_bytes < 1.1 * logits


def test_every_other_product_kept_needs_less_room_than_all_and_less_time_than_none(gpt: Graph) -> None:
    none, products, full = (
        profiles(gpt, 1, mode)[1] for mode in (RecomputeMode.NONE, RecomputeMode.PRODUCTS, RecomputeMode.FULL)
    )
    assert full.stashed_bytes < products.stashed_bytes < none.stashed_bytes
    assert 0 < products.recompute_s.value[0] < full.recompute_s.value[0]


def test_the_first_layer_makes_only_gradients_of_parameters(gpt: Graph) -> None:
    first, block, _ = profiles(gpt, 1, RecomputeMode.NONE)
    assert first.backward_input_s.value[0] == 0
    assert first.backward_weight_s.value[0] > 0
    assert block.backward_input_s.value[0] > 0


def test_tied_parameters_are_counted_on_both_ends(gpt: Graph) -> None:
    first, block, last = profiles(gpt, 2, RecomputeMode.NONE)
    table = "language_model.embedding.word_embeddings.weight"
    assert first.tied_parameters == last.tied_parameters == {table: 50304 * HIDDEN / 2}
    assert block.tied_parameters == {}


def test_the_placement_graph_has_the_flows_and_ties_of_the_layers() -> None:
    graph = tiny_graph("t5")
    placed = placement_graph(graph)
    assert [layer.key for layer in placed.layers] == [layer.key for layer in graph.layers]
    assert {(flow.producer, flow.consumers) for flow in placed.flows} == {
        (boundary.producer, boundary.consumers) for boundary in graph.layer_graph.boundaries
    }
    assert placed.ties == {"shared.weight": (0, 4, 7)}
