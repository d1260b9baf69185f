"""Hugging Face language models: equal to what torch counts and to what their configs say."""

import torch_models as models

import phaze


def test_gpt2_is_captured_whole() -> None:
    model, inputs = models.gpt2(), {"input_ids": models.ids(), "labels": models.ids()}
    graph = phaze.import_graph(model, inputs)
    assert graph.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    assert graph.matmul_flops("forward") == models.counted_flops(model, inputs)
    assert [layer.name for layer in graph.layers][1:-1] == [f"transformer.h.{index}" for index in range(3)]
    assert len(graph.distinct_layers) == 3
    assert graph.coverage().unknown == ()
    assert "captured from torch by joint" in graph.notes
