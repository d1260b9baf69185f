"""Frozen parameters and adapters of low rank: what is trained, what is differentiated, and what a text asks for."""

from dataclasses import replace

import pytest
from graphs import TINY_CONFIGS, argument_values, tiny_graph
from oracles.numpy_reference import evaluate_graph

import phaze
from phaze.errors import GraphError, ImportModelError
from phaze.ir import Graph, Phase
from phaze.ir.backward import derive_backward, without_backward
from phaze.ir.graph_json import graph_from_json, graph_to_json
from phaze.ir.low_rank_adapters import LowRankAdapters, add_adapters, split_adapter_text


def training_only(graph: Graph, *trained: str) -> Graph:
    """The graph with all parameters frozen but those whose names begin so."""
    forward = without_backward(graph)
    tensors = {
        name: replace(tensor, is_frozen=tensor.role == "parameter" and not name.startswith(trained))
        for name, tensor in forward.tensors.items()
    }
    return derive_backward(replace(forward, tensors=tensors))


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_what_is_trained_keeps_its_gradient_and_what_is_frozen_has_none(family: str) -> None:
    graph = tiny_graph(family)
    chosen = [tensor.id for tensor in graph.parameters][1::3]
    frozen = training_only(graph, *chosen)
    is_chosen = {tensor.id for tensor in frozen.parameters if not tensor.is_frozen}
    assert {parameter for parameter, _ in frozen.gradients} == is_chosen
    values = argument_values(graph)
    results, expected = evaluate_graph(frozen, values), evaluate_graph(graph, values)
    for name, gradient, whole in _by_parameter(frozen, graph):
        assert results[gradient] == pytest.approx(expected[whole], rel=1e-12, abs=1e-12), name
    assert len(frozen.ops) < len(graph.ops)


def _by_parameter(frozen: Graph, graph: Graph) -> list[tuple[str, str, str]]:
    """Each trained parameter that one layer uses, with the tensors of its gradient in both graphs."""
    tied = graph.layer_graph.tied_parameters
    whole = dict(graph.gradients)
    return [(name, gradient, whole[name]) for name, gradient in frozen.gradients if name not in tied]


def test_backward_begins_behind_the_last_parameter_that_is_trained() -> None:
    graph = training_only(tiny_graph("llama"), "model.layers.1.mlp")
    backward = [len(layer.backward) for layer in graph.layers]
    assert backward[:2] == [0, 0]
    assert all(backward[2:])
    assert not any("self_attn" in op.module for op in graph.ops_of(Phase.BACKWARD))
    assert graph.layers[1].kind == graph.layers[2].kind, "blocks of one kind, although only one of them is trained"
    assert graph.layers[1].key != graph.layers[2].key


def test_frozen_parameters_come_back_from_a_saved_graph() -> None:
    graph = training_only(tiny_graph("llama"), "model.layers.1")
    assert graph_from_json(graph_to_json(graph)) == graph
    assert graph.with_micro_batch(5).frozen_parameter_count == graph.frozen_parameter_count > 0
    assert "frozen parameter model.layers.0.mlp.down_proj.weight" in str(graph)


def test_a_gradient_of_a_frozen_parameter_is_refused() -> None:
    graph = tiny_graph("llama")
    name = graph.gradients[0][0]
    tensors = {**graph.tensors, name: replace(graph.tensors[name], is_frozen=True)}
    with pytest.raises(GraphError, match="which is frozen and has none"):
        replace(graph, tensors=tensors)
    tensors = {**graph.tensors, "input_ids": replace(graph.tensors["input_ids"], is_frozen=True)}
    with pytest.raises(GraphError, match="only parameters can be"):
        replace(graph, tensors=tensors)


def test_adapters_of_llama_8b_are_those_that_peft_counts() -> None:
    graph = phaze.import_graph("llama3.1-8b+lora16", sequence_length=64)
    assert graph.name == "llama3.1-8b+lora16"
    assert graph.parameter_count == 8_072_204_288  # "all params" that peft prints
    assert graph.parameter_count - graph.frozen_parameter_count == 41_943_040  # "trainable params"
    assert len(graph.layers) == 34
    assert {layer.kind for layer in graph.layers[1:-1]} == {graph.layers[1].kind}


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bert", "mixtral"])
def test_an_adapter_adds_its_two_products_and_backward_leaves_out_those_of_weights(family: str) -> None:
    base = tiny_graph(family)
    rank = 2
    graph = add_adapters(base, LowRankAdapters(rank))
    pairs = [tensor for tensor in graph.parameters if ".lora_" in tensor.id]
    assert {tensor.id for tensor in graph.parameters if not tensor.is_frozen} == {tensor.id for tensor in pairs}
    assert {parameter for parameter, _ in graph.gradients} == {tensor.id for tensor in pairs}
    added = graph.matmul_flops("forward") - base.matmul_flops("forward")
    products = [op for op in graph.ops_of(Phase.FORWARD) if op.id.endswith((".lora_A.matmul", ".lora_B.matmul"))]
    assert len(products) == len(pairs)
    assert added == sum(op.matmul_flops for op in products)
    assert graph.matmul_flops("backward") < 2 * graph.matmul_flops("forward")
    assert not any("lora" in tensor.id for tensor in pairs if tensor.elements % rank)


def test_adapters_compute_what_they_say() -> None:
    base = tiny_graph("llama")
    graph = add_adapters(base, LowRankAdapters(2, ("q_proj",)))
    values = argument_values(graph)
    without = {name: value * (not name.endswith("lora_B.weight")) for name, value in values.items()}
    loss = graph.outputs[0]
    assert evaluate_graph(graph, without)[loss] == pytest.approx(evaluate_graph(base, values)[loss], rel=1e-12)
    assert evaluate_graph(graph, values)[loss] != pytest.approx(evaluate_graph(base, values)[loss], rel=1e-6)


def test_a_text_names_a_rank_and_modules() -> None:
    assert split_adapter_text("llama3.1-8b") == ("llama3.1-8b", None)
    assert split_adapter_text("a/config.json+lora8") == ("a/config.json", LowRankAdapters(8))
    adapters = LowRankAdapters(8, ("q_proj", "v_proj"))
    assert split_adapter_text(f"llama3.1-8b+{adapters}") == ("llama3.1-8b", adapters)
    graph = phaze.import_graph("gpt2+lora4:c_attn", sequence_length=8)
    assert graph.parameter_count - graph.frozen_parameter_count == 12 * 4 * (768 + 3 * 768)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt2+lora", "expected MODEL\\+loraRANK"),
        ("gpt2+lora0", "rank 0 is not possible; expected 1 to"),
        ("gpt2+lora16:q_proj", "its modules with linear layers are c_attn, c_fc, c_proj"),
    ],
)
def test_adapters_that_cannot_be_are_refused_with_what_can(text: str, message: str) -> None:
    with pytest.raises(ImportModelError, match=message):
        phaze.import_graph(text)
