"""Graph modules and exported programs: the same graph as the module they came from."""

import pytest
import torch
import torch_models as models
from torch.fx.passes.shape_prop import ShapeProp

import phaze

X = (5, 6, 8)
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")


def test_a_symbolic_trace_with_inputs_is_imported() -> None:
    graph = phaze.import_graph(torch.fx.symbolic_trace(models.Tower()), X)
    assert graph.matmul_flops("backward") == phaze.import_graph(models.Tower(), X).matmul_flops("backward")
    assert [layer.name for layer in graph.layers][1:4] == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_symbolic_trace_with_shapes_needs_no_inputs() -> None:
    traced = torch.fx.symbolic_trace(models.Tower())
    ShapeProp(traced).propagate(torch.zeros(X))
    graph = phaze.import_graph(traced)
    assert "inputs were found, not given: [5, 6, 8]" in graph.notes
    assert graph.matmul_flops("forward") == phaze.import_graph(models.Tower(), X).matmul_flops("forward")


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_its_layers(strict: bool) -> None:
    exported = torch.export.export(models.Tower(), (torch.zeros(X),), strict=strict)
    graph, plain = phaze.import_graph(exported), phaze.import_graph(models.Tower(), X)
    assert [layer.name for layer in graph.layers] == [layer.name for layer in plain.layers]
    assert len(graph.distinct_layers) == 3
    assert set(graph.parameters) == set(plain.parameters)
    assert graph.matmul_flops("backward") == plain.matmul_flops("backward")


def test_an_exported_model_takes_a_loss_function() -> None:
    exported = torch.export.export(torch.nn.Linear(8, 4), (torch.zeros(X),))
    assert phaze.import_graph(exported, loss_fn=torch.mean).matmul_flops("forward") == 2 * 30 * 32


def test_an_exported_hugging_face_model_keeps_its_blocks() -> None:
    inputs = {"input_ids": torch.zeros(2, 16, dtype=torch.int64), "labels": torch.zeros(2, 16, dtype=torch.int64)}
    model = models.gpt2(n_layer=2, use_cache=False).to_empty(device="cpu")
    exported = torch.export.export(model, (), inputs, strict=False)
    graph = phaze.import_graph(exported, loss_fn=lambda output: output["loss"])
    assert [layer.name for layer in graph.layers][1:-1] == ["transformer.h.0", "transformer.h.1"]
