"""`phaze models`: every known model with its family and size."""

import json

import pytest

import phaze
from phaze.cli import main
from phaze.frontends.named_models import NAMED_CONFIGS


def test_the_list_has_one_line_for_every_built_in_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name in NAMED_CONFIGS:
        assert sum(line[:1] == [name] for line in lines) == 1


def test_a_line_has_family_parameters_active_ones_and_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "deepseek-v3"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "deepseek-v3 " in line)
    assert line.split() == ["deepseek-v3", "deepseek_v3", "671B", "37.6B", "4,096"]


def test_json_has_the_counts_of_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "gpt2-medium", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    graph = phaze.import_graph("gpt2-medium")
    assert model["parameters"] == model["active_parameters"] == graph.parameter_count
    assert model["sequence_length"] == graph.tensors["input_ids"].shape[1]


def test_a_text_that_no_model_has_offers_near_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "lllama3.1-405"]) == 1
    assert "Did you mean llama3.1-405b" in capsys.readouterr().err
