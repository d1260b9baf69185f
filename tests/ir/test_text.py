"""The text form of a graph, against a golden dump."""

from pathlib import Path

from graphs import tiny_graph

from phaze.ir import Phase
from phaze.ir.text import format_graph, format_ops

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
