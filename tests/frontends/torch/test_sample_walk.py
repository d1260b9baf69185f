"""Losses that mix the samples of a batch, or number them, are told from those that treat them apart."""

import pytest
import torch
import transformers
from torch_losses import APART, MIXING, Scored, scored_batch
from torch_training import batch_of, build_model

import phaze
from phaze.frontends.torch.example_inputs import read_model
from phaze.frontends.torch.fake_model import make_fake_model
from phaze.frontends.torch.importing import _Import, loss_over_samples

WEIGHED = ("balanced_experts", "masked_mean", "smoothed_labels_and_ignored_ones")
"""Losses in which a statistic of the batch weighs another one."""


def seen_in(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[str, bool]:
    source = read_model(model, batch, {})
    return loss_over_samples(_Import(source, make_fake_model(source.module, None), None, {}))


def mixing_in(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> str:
    return seen_in(model, batch)[0]


@pytest.mark.parametrize("name", APART)
def test_a_loss_of_each_sample_by_itself_mixes_nothing(name: str) -> None:
    assert seen_in(Scored(APART[name]), scored_batch()) == ("", name not in WEIGHED)


@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_reads_other_samples_or_their_numbers_is_seen(name: str) -> None:
    assert mixing_in(Scored(MIXING[name]), scored_batch()) != ""


@pytest.mark.parametrize("kind", ["llama", "t5", "bert", "captioned", "mixtral-balanced", "gpt-oss", "batch-normed"])
def test_models_as_they_come_mix_nothing(kind: str) -> None:
    assert mixing_in(build_model(kind), batch_of(kind)) == ""


def test_padded_batches_and_the_last_token_of_each_sample_mix_nothing() -> None:
    config = transformers.LlamaConfig(**{**build_model("llama").config.to_dict(), "num_labels": 3})
    batch = {"input_ids": batch_of("llama")["input_ids"], "labels": torch.zeros(8, dtype=torch.int64)}
    batch["attention_mask"] = (torch.arange(16) < torch.arange(8, 16).unsqueeze(1)).long()
    assert mixing_in(transformers.LlamaForSequenceClassification(config), batch) == ""


def test_a_graph_keeps_how_its_loss_mixes_samples() -> None:
    graph = phaze.import_graph(Scored(MIXING["rolled"]), scored_batch())
    assert graph.mixes_samples == "`roll` runs along samples"
    assert any(note.startswith("the loss does not treat samples apart") for note in graph.notes)
    assert graph.with_micro_batch(2).with_backward().mixes_samples == graph.mixes_samples
    question = {"cluster": "cpu:2", "global_batch_size": 8, "compares": False, "gap": 0.9}
    assert phaze.evaluate(graph, strategy={"dp": 2}, **question).plan.model.mixes_samples == graph.mixes_samples
