"""A graph's text, against a golden dump; rescaling to another microbatch equals building at it."""

from pathlib import Path

import pytest
from graphs import TINY_CONFIGS, graphs, tiny_graph
from hypothesis import given
from hypothesis import strategies as st

from phaze.errors import GraphError
from phaze.frontends.transformer_config import graph_from_config
from phaze.ir import Graph, GraphBuilder, OpKind, Phase, Role, Rule
from phaze.ir.graph import format_graph, format_ops

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def test_a_tiny_gpt_reads_as_its_golden_dump() -> None:
    assert format_graph(tiny_graph("gpt2", 1)) == (GOLDEN / "tiny_gpt2_graph.txt").read_text()


def test_a_tiny_mixture_of_experts_reads_as_its_golden_dump() -> None:
    assert format_graph(tiny_graph("mixtral", 1)) == (GOLDEN / "tiny_mixtral_graph.txt").read_text()


def test_there_is_one_line_an_op() -> None:
    graph = tiny_graph("t5")
    assert len(format_ops(graph, graph.ops)) == len(graph.ops)
    assert len(format_ops(graph, graph.ops_of(Phase.FORWARD))) < len(graph.ops)


def test_a_graph_and_a_layer_are_one_line_in_a_session() -> None:
    graph = tiny_graph("gpt2")
    assert repr(graph) == "<Graph gpt2: 4,020 parameters, 109 ops, microbatch 2>"
    assert repr(graph.layers[1]) == "<Layer 1 transformer.h.0: 20 + 26 ops>"


@given(st.sampled_from(sorted(TINY_CONFIGS)), st.integers(1, 7), st.integers(1, 7))
def test_a_rescaled_graph_equals_one_built_at_that_size(family: str, built: int, wanted: int) -> None:
    assert tiny_graph(family, built).with_micro_batch(wanted) == tiny_graph(family, wanted)


@pytest.mark.parametrize("family", sorted(TINY_CONFIGS))
def test_the_layers_of_a_rescaled_graph_are_those_of_one_built_at_that_size(family: str) -> None:
    rescaled, built = tiny_graph(family, 2).with_micro_batch(6), tiny_graph(family, 6)
    assert rescaled.layers == built.layers
    assert rescaled.distinct_layers == built.distinct_layers
    assert rescaled.layer_graph.tied_parameters == built.layer_graph.tied_parameters
    assert rescaled.producer(rescaled.ops[-1].outputs[0]) is rescaled.ops[-1]


def test_a_size_at_which_tensors_are_too_large_is_refused() -> None:
    with pytest.raises(GraphError, match="at most 36028797018963968 are supported"):
        graph_from_config(TINY_CONFIGS["llama"], name="llama", sequence_length=128).with_micro_batch(2**40)


@given(graphs(), st.integers(1, 9))
def test_a_random_graph_comes_back_from_another_size(graph: Graph, size: int) -> None:
    rescaled = graph.with_micro_batch(size)
    assert rescaled.micro_batch_size == size
    assert rescaled.matmul_flops("forward") * graph.micro_batch_size == graph.matmul_flops("forward") * size
    assert rescaled.with_micro_batch(graph.micro_batch_size) == graph


def test_parameters_do_not_grow_with_the_microbatch() -> None:
    assert tiny_graph("mixtral").with_micro_batch(64).parameters == tiny_graph("mixtral").parameters


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_an_impossible_microbatch_is_refused(size: object) -> None:
    with pytest.raises(GraphError, match=f"a microbatch of {size!r} is not possible"):
        tiny_graph("gpt2").with_micro_batch(size)  # type: ignore[arg-type]


def test_a_graph_without_batch_factors_is_fixed_and_says_so() -> None:
    builder = GraphBuilder("fixed")
    x = builder.argument("x", (3,), Role.BATCH)
    (y,) = builder.add("y", OpKind.ELEMENTWISE, "exp", Rule.parse("n -> n | n=3"), (x,))
    with pytest.raises(GraphError, match=r"fixed to the microbatch it was captured with, 1\. Capture it again"):
        builder.build((y,)).with_micro_batch(2)


def test_a_batch_factor_that_does_not_scale_is_refused() -> None:
    builder = GraphBuilder("odd", micro_batch_size=2)
    x = builder.argument("x", (3,), Role.BATCH)
    (y,) = builder.add("y", OpKind.ELEMENTWISE, "exp", Rule.parse("n -> n | n=3*"), (x,))
    with pytest.raises(GraphError, match=r"batch factor n=3[*] is not a multiple of the microbatch 2"):
        builder.build((y,)).with_micro_batch(4)
