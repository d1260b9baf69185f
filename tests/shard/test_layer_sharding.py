"""The sharding of a layer is as good as brute force finds, and any sharding computes what the whole layer computes."""

import itertools
import math

import numpy as np
import pytest
from devices import run_sharded
from graphs import TINY_CONFIGS, argument_values, graphs, tiny_graph
from hypothesis import given, reject
from hypothesis import strategies as st
from oracles.numpy_reference import evaluate_graph
from property_examples import examples
from sharding import whole_problem

from phaze.errors import ShardError
from phaze.frontends.transformer_config import graph_from_config
from phaze.ir import DType, Graph, GraphBuilder, Op, OpKind, Phase, Role
from phaze.shard import Layout, OpSplit, ShardedLayer, ShardingProblem, shard_layer
from phaze.shard.layer_sharding import ShardingProgram, add_up
from phaze.shard.mesh_axes import is_possible
from phaze.shard.sharding_problem import chooses_its_split, seconds_of_splits, settle_s, splits_of_layer

DEGREES = {name: 2 if "num_key_value_heads" in config else 3 for name, config in TINY_CONFIGS.items()}


def assert_equal_to_whole(graph: Graph, sharded: ShardedLayer) -> None:
    values = argument_values(graph)
    expected, found = evaluate_graph(graph, values), run_sharded(sharded, values)
    assert found.keys() == {name for op in graph.ops for name in op.outputs}
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_the_best_sharding_of_every_family_computes_the_same(family: str) -> None:
    graph = tiny_graph(family)
    assert_equal_to_whole(graph, shard_layer(whole_problem(graph, DEGREES[family])))


@pytest.mark.parametrize("options", [{"may_split_norms": True}, {"may_split_sequence": False}], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "t5"])
def test_other_freedoms_compute_the_same(family: str, options: dict[str, bool]) -> None:
    graph = tiny_graph(family)
    assert_equal_to_whole(graph, shard_layer(whole_problem(graph, DEGREES[family], **options)))


def test_fewer_key_heads_than_devices_compute_the_same() -> None:
    # Long enough for the work of attention to be worth a split by heads.
    graph = graph_from_config(TINY_CONFIGS["llama"], name="llama", sequence_length=512, micro_batch_size=1)
    sharded = shard_layer(whole_problem(graph, 4))
    assert_equal_to_whole(graph, sharded)
    ways = {split.ways for split in sharded.splits.values()}
    assert (("g", 2), ("r", 2)) in ways


def test_an_uneven_vocabulary_computes_the_same() -> None:
    config = {**TINY_CONFIGS["megatron-gpt"], "vocab_size": 13, "num_attention_heads": 4}
    graph = graph_from_config(config, name="uneven")
    sharded = shard_layer(whole_problem(graph, 4))
    assert_equal_to_whole(graph, sharded)


def random_sharding(problem: ShardingProblem, seed: int) -> ShardedLayer:
    """A sharding that obeys every rule and is otherwise arbitrary: the best at random prices."""
    ops = problem.ops
    splits = splits_of_layer(problem, ops)
    generator = np.random.default_rng(seed)
    seconds = {op.id: generator.random(len(splits[op.id])).tolist() for op in ops}
    return ShardingProgram(problem, splits, seconds).solve()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "opt narrow and post-norm"])
def test_arbitrary_shardings_compute_the_same(family: str, seed: int) -> None:
    graph = tiny_graph(family)
    sharded = random_sharding(whole_problem(graph, DEGREES[family], may_split_norms=True), seed)
    assert_equal_to_whole(graph, sharded)


@examples(40)
@given(graphs(), st.integers(2, 3), st.integers(0, 5))
def test_arbitrary_shardings_of_random_graphs_compute_the_same(graph: Graph, tp: int, seed: int) -> None:
    problem = whole_problem(graph, tp, may_split_norms=True)
    try:
        sharded = random_sharding(problem, seed)
    except ShardError:
        reject()
    assert_equal_to_whole(graph, sharded)


def two_linear_maps(first: int, second: int, *, has_residual: bool) -> Graph:
    """x -> linear -> (gelu) -> linear (-> + x) -> mean."""
    builder = GraphBuilder("two", dtype=DType.BFLOAT16)
    sizes = {"b": 1, "s": 64, "i": first, "o": second}
    x = builder.argument("x", (1, 64, first), Role.BATCH)
    up, down = builder.parameter("up", second, first), builder.parameter("down", first, second)
    (y,) = builder.add("first", OpKind.CONTRACTION, "einsum", builder.rule("b s i, o i -> b s o", sizes), (x, up))
    (y,) = builder.add("second", OpKind.CONTRACTION, "einsum", builder.rule("b s o, i o -> b s i", sizes), (y, down))
    if has_residual:
        (y,) = builder.add("sum", OpKind.ELEMENTWISE, "add", builder.rule("b s i, b s i -> b s i", sizes), (x, y))
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", builder.rule("b s i -> .", sizes), (y,))
    return builder.build((loss,)).with_backward()


def brute_force(problem: ShardingProblem) -> float:
    """The least seconds over every combination of splits that obeys the rules, each added up plainly."""
    ops = problem.ops
    splits = splits_of_layer(problem, ops)
    seconds = seconds_of_splits(problem, ops, splits)
    best = math.inf
    for choice in itertools.product(*(range(len(splits[op.id])) for op in ops)):
        chosen = {op.id: splits[op.id][index] for op, index in zip(ops, choice, strict=True)}
        if not obeys(problem, ops, chosen):
            continue
        work = sum(
            seconds[op.id][index] - settle_s(problem, op, chosen[op.id]) for op, index in zip(ops, choice, strict=True)
        )
        best = min(best, add_up(problem, chosen, work).seconds)
    return best


def obeys(problem: ShardingProblem, ops: tuple[Op, ...], chosen: dict[str, OpSplit]) -> bool:
    made = {name: layout for op in ops for name, layout in zip(op.outputs, chosen[op.id].results, strict=True)}
    parameters: dict[str, Layout] = {}
    for op in ops:
        if op.phase is Phase.BACKWARD and not chooses_its_split(op):
            names = {factor.name for factor in op.rule.factors}
            asked = tuple(pair for pair in chosen[op.gradient_of].ways if pair[0] in names)
            if chosen[op.id].ways != asked:
                return False
        for name, layout in zip(op.inputs, chosen[op.id].operands, strict=True):
            if problem.graph.tensors[name].role is Role.PARAMETER and parameters.setdefault(name, layout) != layout:
                return False
            if name in made and not is_possible(made[name], layout):
                return False
    leaves_whole = all(is_possible(made[name], Layout()) for name in problem.layer.outputs)
    return leaves_whole and all(made[gradient] == parameters[name] for name, gradient in problem.graph.gradients)


CASES = [(2, 64, 256, False), (4, 1024, 64, False), (4, 48, 48, False), (2, 48, 48, True)]
MORE = [(w, f, s, r) for w in (2, 4) for f, s in ((64, 256), (1024, 64), (48, 48)) for r in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "first", "second", "has_residual"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE if case not in CASES)],
)
def test_no_combination_of_splits_is_cheaper(tp: int, first: int, second: int, has_residual: bool) -> None:
    problem = whole_problem(two_linear_maps(first, second, has_residual=has_residual), tp)
    assert shard_layer(problem).seconds == pytest.approx(brute_force(problem), rel=1e-6)
