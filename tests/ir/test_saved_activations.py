"""Backward by rule reads what the software of a captured model keeps, where the graph says what that is."""

from dataclasses import replace

import pytest

from phaze.ir import DType, Graph, GraphBuilder, OpKind, Phase, Role, stashed_tensors
from phaze.ir.graph_builder import elementwise_rule, reduction_rule
from phaze.ir.graph_json import graph_from_json, graph_to_json


@pytest.fixture
def forward() -> Graph:
    """A product, a function with a second result beside the first, another product, and a loss."""
    builder = GraphBuilder("mlp", dtype=DType.FLOAT32)
    builder.argument("x", (4, 8), Role.BATCH)
    up, down = builder.parameter("up", 8, 16), builder.parameter("down", 16, 8)
    sizes = {"b": 4, "i": 8, "o": 16}
    product = builder.rule("b i, i o -> b o", sizes)
    (hidden,) = builder.add("hidden", OpKind.CONTRACTION, "einsum", product, ("x", up))
    same = elementwise_rule((4, 16), (4, 16))
    (active,) = builder.add("active", OpKind.ELEMENTWISE, "tanh", same, (hidden,))
    builder.add("slope", OpKind.ELEMENTWISE, "fused", same, (hidden,))
    (out,) = builder.add("out", OpKind.CONTRACTION, "einsum", builder.rule("b o, o i -> b i", sizes), (active, down))
    (loss,) = builder.add("loss", OpKind.REDUCTION, "sum", reduction_rule((4, 8), (0, 1)), (out,))
    return builder.build((loss,))


def backward_reads(graph: Graph) -> dict[str, tuple[str, ...]]:
    return {op.id: op.inputs for op in graph.ops_of(Phase.BACKWARD) if op.kind is OpKind.ELEMENTWISE}


def stash(graph: Graph) -> set[str]:
    return {name for layer in graph.layers for name in stashed_tensors(graph, layer)}


def test_backward_reads_what_is_saved_beside_what_it_needs(forward: Graph) -> None:
    assert backward_reads(forward.with_backward()) == {"hidden.gradient": ("active.gradient", "active")}
    saving = replace(forward, saved=("active", "slope")).with_backward()
    assert backward_reads(saving) == {"hidden.gradient": ("active.gradient", "active", "slope")}
    assert stash(saving) == {"x", "active", "slope"}


def test_backward_no_longer_reads_what_is_not_saved_but_products_do(forward: Graph) -> None:
    saving = replace(forward, saved=("slope",)).with_backward()
    assert backward_reads(saving) == {"hidden.gradient": ("active.gradient", "slope")}
    assert stash(saving) == {"x", "active", "slope"}


def test_saved_tensors_that_are_no_more_are_passed_over(forward: Graph) -> None:
    assert replace(forward, saved=("gone",)).with_backward().ops == forward.with_backward().ops


def test_what_is_saved_is_saved_with_the_graph(forward: Graph) -> None:
    saving = replace(forward, saved=("active", "slope"))
    assert graph_from_json(graph_to_json(saving)) == saving
