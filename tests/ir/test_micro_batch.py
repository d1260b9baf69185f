"""Rescaling to another microbatch equals building at it."""

import pytest
from graphs import TINY_CONFIGS, graphs, tiny_graph
from hypothesis import given
from hypothesis import strategies as st

from phaze.errors import GraphError
from phaze.ir import Graph, GraphBuilder, OpKind, Role, Rule


@given(st.sampled_from(sorted(TINY_CONFIGS)), st.integers(1, 7), st.integers(1, 7))
def test_a_rescaled_graph_equals_one_built_at_that_size(family: str, built: int, wanted: int) -> None:
    assert tiny_graph(family, built).with_micro_batch(wanted) == tiny_graph(family, wanted)


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
