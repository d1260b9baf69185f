"""The backward of graphs captured from torch and JAX is replaced by one derived by rule."""

from dataclasses import replace
from functools import cache

import jax_models
import pytest
import torch_models

import phaze
from phaze.ir import Graph, Phase
from phaze.ir.backward import derive_backward


@cache
def captured(name: str) -> Graph:
    if name == "torch":
        return phaze.import_graph(torch_models.gpt2(), torch_models.FAMILIES["gpt2"].inputs())
    stacked = name == "scan"
    model = jax_models.gpt_scan if stacked else jax_models.gpt_loss
    return phaze.import_graph(model, (jax_models.gpt_parameters(stacked=stacked), jax_models.tokens()))


@pytest.mark.parametrize("name", ["torch", "jax", "scan"])
def test_a_derived_backward_has_the_products_and_gradients_of_the_captured_one(name: str) -> None:
    graph = captured(name)
    derived = derive_backward(graph)
    assert derived.is_backward_derived
    assert "backward derived by rule" in derived.notes
    assert derived.matmul_flops(Phase.FORWARD) == graph.matmul_flops(Phase.FORWARD)
    assert derived.matmul_flops(Phase.BACKWARD) == graph.matmul_flops(Phase.BACKWARD)
    assert {name for name, _ in derived.gradients} == {name for name, _ in graph.gradients}
    assert len(derived.layers) == len(graph.layers)
    assert len(derived.distinct_layers) == len(graph.distinct_layers)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_derived_backward_ops_belong_to_forward_ops_of_their_layer(name: str) -> None:
    derived = derive_backward(captured(name))
    layer_of = derived.layer_graph.layer_of
    for op in derived.ops_of(Phase.BACKWARD):
        assert layer_of[op.gradient_of] == layer_of[op.id]


def test_a_captured_backward_that_is_kept_says_why() -> None:
    graph = captured("torch")
    lossless = replace(graph, outputs=tuple(name for name in graph.outputs if graph.tensors[name].elements > 1))
    kept = derive_backward(lossless)
    assert kept.ops == graph.ops
    assert not kept.is_backward_derived
    assert "no scalar float output" in kept.why_backward_kept
    assert any("backward kept as captured" in note and "no scalar float output" in note for note in kept.notes)
