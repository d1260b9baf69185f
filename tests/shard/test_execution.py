"""Any sharding computes what the whole model computes: forward, backward and every gradient, on simulated devices."""

import numpy as np
import pytest
from devices import run_sharded
from graphs import TINY_CONFIGS, argument_values, graphs, tiny_graph
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from oracles.numpy_reference import evaluate_graph
from sharding import whole_task

from phaze.errors import ShardError
from phaze.frontends.transformer_config import graph_from_config
from phaze.ir import Graph
from phaze.shard import LayerTask, ShardedLayer, shard_layer
from phaze.shard.candidates import layer_strategies
from phaze.shard.program import ShardingProgram

WIDTHS = {name: 2 if "num_key_value_heads" in config else 3 for name, config in TINY_CONFIGS.items()}


def assert_equal_to_whole(graph: Graph, sharded: ShardedLayer) -> None:
    values = argument_values(graph)
    expected, found = evaluate_graph(graph, values), run_sharded(sharded, values)
    assert found.keys() == {name for op in graph.ops for name in op.outputs}
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_the_best_sharding_of_every_family_computes_the_same(family: str) -> None:
    graph = tiny_graph(family)
    assert_equal_to_whole(graph, shard_layer(whole_task(graph, WIDTHS[family])))


@pytest.mark.parametrize("options", [{"may_split_norms": True}, {"may_split_sequence": False}], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "t5"])
def test_other_freedoms_compute_the_same(family: str, options: dict[str, bool]) -> None:
    graph = tiny_graph(family)
    assert_equal_to_whole(graph, shard_layer(whole_task(graph, WIDTHS[family], **options)))


def test_fewer_key_heads_than_devices_compute_the_same() -> None:
    graph = tiny_graph("llama")
    sharded = shard_layer(whole_task(graph, 4))
    assert_equal_to_whole(graph, sharded)
    ways = {strategy.ways for strategy in sharded.strategies.values()}
    assert (("g", 2), ("r", 2)) in ways


def test_an_uneven_vocabulary_computes_the_same() -> None:
    config = {**TINY_CONFIGS["megatron-gpt"], "vocab_size": 13, "num_attention_heads": 4}
    graph = graph_from_config(config, name="uneven")
    sharded = shard_layer(whole_task(graph, 4))
    assert_equal_to_whole(graph, sharded)


def random_sharding(task: LayerTask, seed: int) -> ShardedLayer:
    """A sharding that obeys every rule and is otherwise arbitrary: the best at random prices."""
    ops = (*task.layer.forward, *task.layer.backward)
    strategies = layer_strategies(task, ops)
    generator = np.random.default_rng(seed)
    seconds = {op.id: generator.random(len(strategies[op.id])).tolist() for op in ops}
    return ShardingProgram(task, ops, strategies, seconds).solve()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "opt narrow and post-norm"])
def test_arbitrary_shardings_compute_the_same(family: str, seed: int) -> None:
    graph = tiny_graph(family)
    sharded = random_sharding(whole_task(graph, WIDTHS[family], may_split_norms=True), seed)
    assert_equal_to_whole(graph, sharded)


@settings(max_examples=40)
@given(graphs(), st.integers(2, 3), st.integers(0, 5))
def test_arbitrary_shardings_of_random_graphs_compute_the_same(graph: Graph, width: int, seed: int) -> None:
    task = whole_task(graph, width, may_split_norms=True)
    try:
        sharded = random_sharding(task, seed)
    except ShardError:
        reject()
    assert_equal_to_whole(graph, sharded)
