"""The batch: found in every dimension that is made of it, checked by a second trace, or left fixed and said so."""

import pytest
import torch
import torch_models as models

import phaze
import phaze.ir
from phaze.errors import GraphError


@pytest.mark.parametrize("size", [1, 3])
def test_a_rescaled_graph_is_the_graph_captured_at_that_size(size: int) -> None:
    model = models.gpt2(n_layer=2)
    captured = phaze.import_graph(model, {"input_ids": models.ids(size), "labels": models.ids(size)})
    rescaled = phaze.import_graph(model, {"input_ids": models.ids(2), "labels": models.ids(2)}).with_micro_batch(size)
    assert rescaled == captured
    assert captured.tensors["input_ids"].shape == (size, models.LENGTH)


def test_heads_and_batch_are_factors_of_their_own() -> None:
    model = models.gpt2(n_layer=2)
    graph = phaze.import_graph(model, {"input_ids": models.ids(2), "labels": models.ids(2)})
    (linear,) = [op for op in graph.layers[1].forward if "c_attn" in op.module and op.function == "einsum"]
    assert str(linear.rule) == "(b0 d0) d1, d1 (d2 d3 d4) -> (b0 d0) (d2 d3 d4) | b0=2* d0=16^ d1=48 d2=3 d3=3 d4=16"


def test_a_micro_batch_size_may_be_asked_for() -> None:
    graph = phaze.import_graph(models.Tower(), (2, 8), micro_batch_size=6)
    assert graph.micro_batch_size == 6
    assert graph.tensors["input_0"].shape == (6, 8)


class Rigid(torch.nn.Module):
    """Reshapes to sizes that only fit one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).reshape(2, 3, 8).square().mean()


class Mixing(torch.nn.Module):
    """Compares every sample with every other: work grows with the square of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.cat([y @ y.T, y], dim=1).square().mean()


@pytest.mark.parametrize("model", [Rigid(), Mixing()])
def test_a_model_that_is_tied_to_its_batch_stays_fixed_and_says_so(model: torch.nn.Module) -> None:
    graph = phaze.import_graph(model, (6, 8))
    assert any(note.startswith("fixed to the microbatch of 6") for note in graph.notes)
    with pytest.raises(GraphError, match="fixed to the microbatch it was captured with, 6"):
        graph.with_micro_batch(2)


class Captioned(torch.nn.Module):
    """Puts features of images in the places of some words, in one of the ways in which people write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.words, self.look = way, torch.nn.Embedding(9, 8), torch.nn.Linear(6, 8)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        words, features, mask = self.words(ids), self.look(images), ids == 0
        torch._check_tensor_all_with(ValueError, mask.sum() == features[..., 0].numel(), lambda: "other images")
        if self.way == "masked_scatter":
            words = words.masked_scatter(mask.unsqueeze(-1), torch.cat(list(features)))
        elif self.way == "rows":
            words[mask] = features.flatten(0, 1)
        else:
            words[mask] = features.mean((0, 1))
        return words.square().mean()


@pytest.mark.parametrize("way", ["masked_scatter", "rows", "one row"])
def test_images_between_words_follow_the_batch(way: str) -> None:
    def inputs(size: int) -> tuple[torch.Tensor, ...]:
        return torch.empty(size, 5, dtype=torch.int64, device="meta"), torch.empty(size, 2, 6, device="meta")

    graph = phaze.import_graph(Captioned(way), inputs(4))
    assert graph.with_micro_batch(2) == phaze.import_graph(Captioned(way), inputs(2))
    functions = {op.function for op in graph.ops}
    assert ("masked_scatter" in functions) == (way != "one row")
    assert not any(op.kind is phaze.ir.OpKind.OPAQUE for op in graph.ops)


class Balanced(torch.nn.Module):
    """Adds how often experts are chosen, weighted by their scores, to its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        chosen = torch.bincount(scores.argmax(-1).flatten(), minlength=4)
        return (scores.mean((0, 1)) * chosen).sum() / chosen.sum()


def test_counts_of_chosen_experts_follow_the_batch() -> None:
    graph = phaze.import_graph(Balanced(), (6, 5, 8))
    assert not any("fixed" in note for note in graph.notes)
    assert graph.with_micro_batch(2) == phaze.import_graph(Balanced(), (2, 5, 8))
