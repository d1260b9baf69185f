"""Without a solver the same optimum is found as with one, for every combination of layouts at the layer's ends."""

from dataclasses import replace

import pytest
from graphs import TINY_CONFIGS, graphs, tiny_graph
from hypothesis import given, reject
from hypothesis import strategies as st
from property_examples import examples, one_of_each
from sharding import A100S, whole_problem

import phaze
from phaze.errors import ShardError
from phaze.hardware import parse_cluster
from phaze.ir import Graph
from phaze.shard import Axis, SequenceParallel, ShardingProblem, ShardingTables, ShardOptions, shard_layer, shard_model
from phaze.shard.device_graph import device_graph
from phaze.shard.layer_sharding import NO_SOLVER, ShardingProgram
from phaze.shard.sharding_problem import seconds_of_splits, splits_of_layer
from phaze.solvers import AUTOMATIC_SOLVERS, SolverChain

HIGHS = SolverChain(AUTOMATIC_SOLVERS.solvers[:1])
MODELS = ["gpt2", "bert-large", "llama3-8b", "mixtral-8x7b", "opt-350m"]
CLUSTERS = ("a100-80gb:8", "tpuv4:8")
LARGE = [pytest.param("t5-large", cluster, marks=pytest.mark.exhaustive) for cluster in CLUSTERS]


def assert_as_good_as_a_solver(problem: ShardingProblem) -> None:
    """Elimination and HiGHS have the same optimum; HiGHS' is one to its tolerance."""
    splits = splits_of_layer(problem, problem.ops)
    try:
        solved = ShardingProgram(problem, splits, seconds_of_splits(problem, problem.ops, splits)).solve()
    except ShardError:
        with pytest.raises(ShardError, match="has no sharding"):
            shard_layer(problem)
        return
    answer = shard_layer(problem)
    assert answer.method == NO_SOLVER
    assert solved.method == "integer program on highs"
    assert answer.seconds <= solved.seconds * (1 + 1e-9)
    assert answer.seconds == pytest.approx(solved.seconds, rel=1e-4)


@pytest.mark.parametrize(("family", "norms"), one_of_each(TINY_CONFIGS, (False, True)))
def test_whole_toy_models_are_as_cheap_as_a_solver_finds(family: str, norms: bool) -> None:
    tp = 2 if "num_key_value_heads" in TINY_CONFIGS[family] else 3
    assert_as_good_as_a_solver(whole_problem(tiny_graph(family), tp, may_split_norms=norms))


@examples(50)
@given(graphs(), st.integers(2, 4), st.booleans(), st.booleans())
def test_random_graphs_are_as_cheap_as_a_solver_finds(graph: Graph, tp: int, norms: bool, sequence: bool) -> None:
    problem = whole_problem(graph, tp, may_split_norms=norms, may_split_sequence=sequence)
    try:
        splits_of_layer(problem, problem.ops)
    except ShardError:
        reject()
    assert_as_good_as_a_solver(problem)


@pytest.mark.parametrize(("name", "cluster"), [*one_of_each(MODELS, CLUSTERS), *LARGE])
def test_models_are_as_cheap_as_a_solver_finds_and_no_layer_needs_one(name: str, cluster: str) -> None:
    graph, axis = phaze.import_graph(name, sequence_length=256), Axis(parse_cluster(cluster), 2)
    options = ShardOptions(sequence_parallel=SequenceParallel.FREE)
    answer = shard_model(graph, axis, options)
    assert {layer.method for layer in answer.layers} == {NO_SOLVER}
    solved = shard_model(graph, axis, replace(options, solver=HIGHS))
    assert {layer.method for layer in solved.layers} == {"integer program on highs"}
    assert answer.seconds <= solved.seconds * (1 + 1e-9)
    assert answer.seconds == pytest.approx(solved.seconds, rel=1e-4)


@pytest.mark.parametrize("mode", SequenceParallel)
@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b"])
def test_tables_of_one_microbatch_size_serve_all_others(name: str, mode: SequenceParallel) -> None:
    graph, tables = phaze.import_graph(name, sequence_length=256), ShardingTables()
    for size in (1, 4, 3):
        scaled, options = graph.with_micro_batch(size), ShardOptions(sequence_parallel=mode)
        shared = shard_model(scaled, Axis(A100S, 4), options, tables)
        alone = shard_model(scaled, Axis(A100S, 4), options)
        assert [layer.splits for layer in shared.layers] == [layer.splits for layer in alone.layers]
        assert shared.seconds == alone.seconds
        assert shared.parameters == alone.parameters


def test_tables_of_one_ep_serve_all_others() -> None:
    graph, tables = phaze.import_graph("mixtral-8x7b", sequence_length=256), ShardingTables()
    for ep, size in ((1, 1), (2, 1), (4, 2), (2, 2)):
        local, axis = device_graph(graph, ep=ep).with_micro_batch(size), Axis(A100S, 2, ep=ep)
        shared, alone = shard_model(local, axis, None, tables), shard_model(local, axis)
        assert [layer.splits for layer in shared.layers] == [layer.splits for layer in alone.layers]
        assert shared.seconds == alone.seconds
        assert shared.parameters == alone.parameters


def test_tables_of_another_model_are_not_used() -> None:
    tables = ShardingTables()
    for length in (256, 128):
        graph = phaze.import_graph("gpt2", sequence_length=length)
        assert shard_model(graph, Axis(A100S, 4), None, tables).seconds == shard_model(graph, Axis(A100S, 4)).seconds
