"""Gradients that a framework summed over layers, taken apart again."""

import pytest
from graphs import TINY_CONFIGS, tiny_graph

from phaze.ir import Graph, GraphBuilder, OpKind, Phase
from phaze.ir.shape_rules import elementwise_rule
from phaze.ir.ties import split_tied_gradients


def with_summed_gradients(graph: Graph) -> Graph:
    """The graph as a framework would give it: one gradient a parameter."""
    builder = GraphBuilder.from_graph(graph)
    builder.gradients.clear()
    summed: dict[str, str] = {}
    for parameter, gradient in graph.gradients:
        if parameter in summed:
            shape, dtype = graph.tensors[gradient].shape, graph.tensors[gradient].dtype
            rule, inputs = elementwise_rule(shape, shape, shape), (summed[parameter], gradient)
            kind, phase = OpKind.ELEMENTWISE, Phase.BACKWARD
            (gradient,) = builder.add(f"{parameter}.sum", kind, "add", rule, inputs, dtypes=(dtype,), phase=phase)
        summed[parameter] = gradient
    builder.gradients.extend(summed.items())
    return builder.build(graph.outputs, graph.notes)


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_one_gradient_a_layer_is_found_again(name: str) -> None:
    graph = tiny_graph(name)
    split = split_tied_gradients(with_summed_gradients(graph))
    assert sorted(split.gradients) == sorted(graph.gradients)
    assert split.ops == graph.ops
    assert split.tensors == graph.tensors


def test_a_graph_without_ties_is_itself() -> None:
    graph = tiny_graph("llama")
    assert split_tied_gradients(graph) is graph
