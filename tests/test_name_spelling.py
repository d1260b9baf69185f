"""Spellings of names: what counts as another spelling of a known one, and what does not."""

import pytest

from phaze.frontends.named_models import NAMED_CONFIGS, OTHER_NAMES
from phaze.hardware import network_names
from phaze.name_spelling import folded_name, hub_spellings, spelled_alike


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("llama2-7b", "llama2-7b"),
        ("Llama-2-7B", "llama2-7b"),
        ("llama 2 7b", "llama2-7b"),
        ("LLAMA_2.7b", "llama2-7b"),
        ("llama-27b", None),
        ("llama2-7", None),
        ("", None),
    ],
)
def test_case_and_separators_do_not_count_but_between_digits(name: str, meant: str | None) -> None:
    assert spelled_alike(name, ["llama2-7b", "llama2-70b"]) == meant


def test_a_name_that_two_known_ones_are_spelled_like_is_neither() -> None:
    assert spelled_alike("CHIP", ["Chip", "chip-"]) is None
    assert spelled_alike("Chip", ["Chip", "chip-"]) == "Chip"


def test_organization_and_words_of_training_are_left_out_one_after_another() -> None:
    spellings = list(hub_spellings("meta-llama/Meta-Llama-3.1-8B-Instruct-hf"))
    assert spellings[1:] == ["Llama-3.1-8B-Instruct-hf", "Llama-3.1-8B-Instruct", "Llama-3.1-8B"]
    assert list(hub_spellings("Qwen/Qwen3-4B-2507"))[-1] == "Qwen3-4B"
    assert list(hub_spellings("mistralai/Mistral-7B-v0.3"))[-1] == "Mistral-7B-v0.3"


MODELS = (*NAMED_CONFIGS, *(other for others in OTHER_NAMES.values() for other in others))


@pytest.mark.parametrize("known", [MODELS, network_names()], ids=["models", "networks"])
def test_no_two_known_names_share_a_spelling(known: tuple[str, ...]) -> None:
    assert len({folded_name(name) for name in known}) == len(known)


def test_further_names_are_of_models_that_are_known() -> None:
    assert set(OTHER_NAMES) <= set(NAMED_CONFIGS)
