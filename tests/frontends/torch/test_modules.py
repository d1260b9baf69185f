"""Modules that nobody adapted: what they may hold, and that they stay as they are."""

import random
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch_models as models
from torch.utils.checkpoint import checkpoint

import phaze
from phaze.frontends.torch.capture import CAPTURE_METHODS, CaptureMethod, preserved_torch_state
from phaze.frontends.torch.example_inputs import read_inputs
from phaze.frontends.torch.fake_model import LossCall, Objective, make_fake_model
from phaze.frontends.torch.translate import translate_capture
from phaze.ir import Graph, OpKind, Phase
from phaze.ir.backward import derive_backward

X = (5, 6, 8)


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def names(graph: Graph) -> list[str]:
    return [layer.name for layer in graph.layers]


@cache
def plain_tower() -> Graph:
    """The graph that changed towers are compared with."""
    return phaze.import_graph(models.Tower(), X)


def test_a_tower_has_its_blocks_and_its_ends_as_layers() -> None:
    graph = plain_tower()
    assert names(graph) == ["first", "blocks.0", "blocks.1", "blocks.2", "last .. mean"]
    assert len(graph.distinct_layers) == 3
    assert {parameter for parameter, _ in graph.gradients} == {name for name, _ in models.Tower().named_parameters()}


@pytest.mark.parametrize(
    "inputs",
    [X, [X], (X,), {"x": X}, torch.zeros(X), torch.empty(X, device="meta"), ((X,), {}), ((), {"x": X})],
    ids=str,
)
def test_inputs_are_taken_as_tensors_meta_tensors_and_shapes(inputs: object) -> None:
    assert phaze.import_graph(models.Tower(1), inputs).matmul_flops("forward") == 2 * 30 * (64 + 512 + 64)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_real_and_meta_weights_give_the_same_graph(device: str) -> None:
    model = models.Tower().to(device)
    if device == "cpu":
        model.blocks[1].to("meta")
    assert phaze.import_graph(model, X).ops == plain_tower().ops


def test_the_model_and_everything_around_it_is_left_as_found() -> None:
    model = models.Tower()
    model.blocks[1].eval()
    model.last.weight.requires_grad_(False)
    before = {name: (value.clone(), value.requires_grad) for name, value in model.named_parameters()}
    training = [part.training for part in model.modules()]
    torch.manual_seed(3)
    random.seed(3)
    states = torch.get_rng_state(), random.getstate()
    with torch.no_grad():
        phaze.import_graph(model, X)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert [part.training for part in model.modules()] == training
    assert all(torch.equal(value, before[name][0]) for name, value in model.named_parameters())
    assert all(value.requires_grad == before[name][1] for name, value in model.named_parameters())
    assert all(value.grad is None for value in model.parameters())


def test_a_frozen_parameter_is_a_parameter_without_gradient() -> None:
    model = models.Tower()
    model.last.weight.requires_grad_(False)
    graph = phaze.import_graph(model, X)
    assert graph.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    assert "last.weight" not in dict(graph.gradients)


def test_an_unused_parameter_is_counted_and_noted() -> None:
    model = models.Tower()
    model.spare = torch.nn.Linear(3, 3)
    graph = phaze.import_graph(model, X)
    assert graph.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    assert "2 trainable parameters have no gradient (unused by the loss): spare.weight, spare.bias" in graph.notes


def test_dropout_is_a_dropout_with_its_mask() -> None:
    graph = plain_tower()
    assert sum(op.kind is OpKind.DROPOUT and op.phase is Phase.FORWARD for op in graph.ops) == 3


def test_evaluation_mode_is_captured_as_found_and_said() -> None:
    graph = phaze.import_graph(models.Tower().eval(), X)
    assert not any(op.kind is OpKind.DROPOUT for op in graph.ops)
    assert "captured in evaluation mode, as the model was: without dropout" in graph.notes


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.sin(gradient) + ctx.saved_tensors[0]


def test_a_custom_autograd_function_brings_its_own_backward() -> None:
    graph = phaze.import_graph(models.Tower(1, run=lambda block, x: Doubling.apply(block(x))), X)
    assert [op.phase for op in graph.ops if op.function == "sin"] == [Phase.BACKWARD]


@pytest.mark.parametrize(
    ("use_reentrant", "note"), [(False, "captured from torch by joint"), (True, "captured from torch by export")]
)
def test_checkpointing_inside_the_model_is_left_to_phaze(use_reentrant: bool, note: str) -> None:
    graph = phaze.import_graph(models.Tower(run=partial(checkpoint, use_reentrant=use_reentrant)), X)
    plain = plain_tower()
    assert graph.matmul_flops("forward") == plain.matmul_flops("forward")
    assert graph.matmul_flops("backward") == plain.matmul_flops("backward")
    assert note in graph.notes


class Shared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = models.Block(), torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.last.weight = self.block.up.weight.__class__(torch.zeros(8, 8))

    def forward(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        x = batch["x"]
        for _ in range(3):
            x = self.block(x)
        return {"loss": (self.last(x) * self.scale - batch["target"]["y"]).square().mean()}


def test_a_shared_module_is_a_layer_for_each_call_with_tied_parameters() -> None:
    graph = phaze.import_graph(Shared(), {"batch": {"x": X, "target": {"y": X}}})
    assert names(graph) == ["block@0", "block@1", "block@2", "last .. mean"]
    assert graph.layer_graph.tied_parameters["block.up.weight"] == (0, 1, 2)
    assert sum(parameter == "block.up.weight" for parameter, _ in graph.gradients) == 3
    assert graph.parameter_count == sum(parameter.numel() for parameter in Shared().parameters())


def test_buffers_and_nested_inputs_keep_their_names() -> None:
    graph = phaze.import_graph(Shared(), {"batch": {"x": X, "target": {"y": X}}})
    assert graph.tensors["scale"].role == "other"
    assert {tensor.id for tensor in graph.tensors.values() if tensor.role == "batch"} == {
        "batch.x",
        "batch.target.y",
    }


@pytest.mark.parametrize("method", CaptureMethod)
def test_every_way_of_capturing_finds_the_same_products_arguments_and_gradients(method: CaptureMethod) -> None:
    model, inputs = Shared(), {"batch": {"x": X, "target": {"y": X}}}
    with preserved_torch_state():
        fake = make_fake_model(model)
        examples = fake.fake_inputs(read_inputs(model, inputs, {}))
        objective = Objective(fake.module, None, is_flat=False)
        capture = CAPTURE_METHODS[method](LossCall(fake=fake, objective=objective, inputs=examples))
        graph = translate_capture(capture, fake.module, name="Shared", batch_size=1).with_backward()
    plain = phaze.import_graph(model, inputs)
    assert capture.has_backward == (method is not CaptureMethod.EXPORT)
    assert {"batch.x", "batch.target.y", "scale"} < set(graph.tensors)
    assert {parameter for parameter, _ in graph.gradients} == {parameter for parameter, _ in plain.gradients}
    for phase in ("forward", "backward"):
        assert graph.matmul_flops(phase) == plain.matmul_flops(phase)


def test_tied_weights_are_one_parameter_with_a_gradient_a_layer() -> None:
    model = models.Tower()
    model.last.weight = model.first.weight
    graph = phaze.import_graph(model, X)
    assert graph.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    assert "last.weight" not in graph.tensors
    assert graph.layer_graph.tied_parameters == {"first.weight": (0, 4)}
    gradients = [gradient for parameter, gradient in graph.gradients if parameter == "first.weight"]
    assert [graph.layer_graph.layer_of[graph.producer(gradient).id] for gradient in gradients] == [0, 4]  # type: ignore[union-attr]


class Resized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.nn.functional.interpolate(torch.relu(self.first(x)), scale_factor=2, mode="nearest"))


def test_a_resized_image_has_a_backward_by_rule() -> None:
    graph = phaze.import_graph(Resized(), (2, 3, 8, 8), loss_fn=mean)
    derived = derive_backward(graph)
    assert derived.is_backward_derived
    assert {name for name, _ in derived.gradients} == {name for name, _ in Resized().named_parameters()}
    assert derived.coverage().unknown == ()


class LogitsFirst(models.Tower):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return x, super().forward(x)


def test_a_loss_is_found_behind_the_logits() -> None:
    assert phaze.import_graph(LogitsFirst(), X).gradients == plain_tower().gradients


def test_a_sequential_has_a_layer_for_each_child_with_parameters() -> None:
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    model = torch.nn.Sequential(linear(8, 16), relu(), linear(16, 16), relu(), linear(16, 2))
    assert names(phaze.import_graph(model, X, loss_fn=mean)) == ["0", "2", "4"]


def test_encoder_and_decoder_are_two_stacks() -> None:
    model = torch.nn.Transformer(32, 4, 2, 2, dim_feedforward=64, batch_first=True)
    graph = phaze.import_graph(model, ((2, 5, 32), (2, 7, 32)), loss_fn=mean)
    assert [name for name in names(graph) if "layers" in name] == [
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.1",
    ]


def test_a_loss_function_takes_targets() -> None:
    graph = phaze.import_graph(torch.nn.Linear(8, 4), (5, 8), loss_fn=torch.nn.functional.mse_loss, targets=(5, 4))
    assert graph.tensors["targets"].shape == (5, 4)
    assert graph.outputs


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_a_model_is_captured_in_the_dtype_asked_for(dtype: object) -> None:
    graph = phaze.import_graph(models.Tower(1), X, dtype=dtype)
    assert {str(tensor.dtype) for tensor in graph.parameters} == {"bfloat16"}


def test_a_bare_shape_is_of_integers_where_an_embedding_comes_first() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8))
    assert str(phaze.import_graph(model, (5, 6), loss_fn=mean).tensors["input_0"].dtype) == "int64"


def test_a_recurrent_layer_is_captured_as_the_products_it_is_made_of() -> None:
    model = torch.nn.LSTM(8, 16, batch_first=True)
    graph = phaze.import_graph(model, (2, 6, 8), loss_fn=lambda output: output[0].mean())
    assert graph.matmul_flops("forward") == 2 * 2 * 6 * 64 * (8 + 16)


def test_resnet_is_counted_to_the_unit() -> None:
    model = models.on_meta(lambda: models.ResNet((1, 2, 1, 1), 8, 10))
    graph = phaze.import_graph(model, (2, 3, 64, 64), loss_fn=torch.nn.functional.cross_entropy, targets=_labels(2))
    assert graph.parameter_count == sum(parameter.numel() for parameter in model.parameters())
    assert graph.matmul_flops("forward") == models.counted_flops(model, (2, 3, 64, 64))
    assert len(graph.layers) == 7
    assert graph.coverage().unknown == ()


def test_frozen_parameters_have_no_gradients() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False).requires_grad_(False), torch.nn.Linear(8, 8, bias=False)
    )
    graph = phaze.import_graph(model, (4, 8), loss_fn=torch.nn.functional.cross_entropy, targets=_labels(4))
    assert any(note.startswith("50.0% of the parameters are frozen") for note in graph.notes)
    assert [tensor.id for tensor in graph.parameters if tensor.is_frozen] == ["0.weight"]
    derived = derive_backward(graph)
    assert [parameter for parameter, _ in derived.gradients] == ["1.weight"]
    assert derived.matmul_flops("backward") == graph.matmul_flops("backward") == 2 * 4 * 8 * 8


@pytest.mark.exhaustive
def test_resnet_50_has_sixteen_blocks_of_eight_kinds() -> None:
    model = models.on_meta(models.ResNet)
    inputs = (4, 3, 224, 224)
    graph = phaze.import_graph(model, inputs, loss_fn=torch.nn.functional.cross_entropy, targets=_labels(4))
    assert graph.parameter_count == 25_557_032
    assert graph.matmul_flops("forward") == models.counted_flops(model, inputs)
    assert len(graph.layers) == 18
    assert len(graph.distinct_layers) == 10


def _labels(batch: int) -> torch.Tensor:
    return torch.empty(batch, dtype=torch.int64, device="meta")
