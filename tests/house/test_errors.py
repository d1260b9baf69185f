"""One tree of errors, drawn where it is defined, with messages that help."""

import inspect
import re
from collections.abc import Callable

import pytest

import phaze
from phaze import errors
from phaze.errors import ImportModelError, PhazeError, QuestionError, UnknownNameError

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and value.__module__ == errors.__name__
}


def test_the_docstring_draws_the_whole_tree() -> None:
    drawn = set(re.findall(r"^[├└─│ ]*(\w+(?:Error|Warning))\b", errors.__doc__ or "", re.MULTILINE))
    assert drawn == set(CLASSES) == set(errors.__all__)


def test_every_error_is_a_phaze_error_and_every_warning_a_user_warning() -> None:
    for name, value in CLASSES.items():
        assert issubclass(value, UserWarning if name.endswith("Warning") else PhazeError)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a100", "unknown accelerator 'a100'. Did you mean a100-40gb or a100-80gb? Known: a100-40gb, a100-80gb, h100."),
        ("H100", "unknown accelerator 'H100'. Did you mean h100? Known: a100-40gb, a100-80gb, h100."),
        ("h10O", "unknown accelerator 'h10O'. Did you mean h100? Known: a100-40gb, a100-80gb, h100."),
        ("tpu", "unknown accelerator 'tpu'. Known: a100-40gb, a100-80gb, h100."),
        ("", "unknown accelerator ''. Known: a100-40gb, a100-80gb, h100."),
    ],
)
def test_an_unknown_name_offers_near_ones_and_lists_the_known(name: str, message: str) -> None:
    assert str(UnknownNameError("accelerator", name, ["h100", "a100-80gb", "a100-40gb"])) == message


def test_an_unknown_name_among_none_says_so() -> None:
    assert str(UnknownNameError("target", "torch", [])) == "unknown target 'torch'. Known: none."


class _Model:
    """A class where a model is expected."""


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        (lambda: phaze.optimize("gpt2", "h100:8"), QuestionError, "a cluster is given by name: cluster='h100:8'"),
        (
            lambda: phaze.optimize("gpt2", cluster="h100:8", global_batch=8),
            TypeError,
            r"Did you mean global_batch_size\?",
        ),
        (lambda: phaze.search("gpt2", devices=8, hbm=[32]), TypeError, r"Did you mean hbm_gib\?"),
        (lambda: phaze.import_graph(_Model), ImportModelError, r"pass an instance, _Model\(...\)"),
        (lambda: phaze.import_graph(__file__), ImportModelError, r"write python:.*test_errors.py:NAME"),
        (lambda: phaze.optimise, AttributeError, r"Did you mean optimize\?"),
    ],
)
def test_what_people_give_by_mistake_is_answered_with_what_they_meant(
    asked: Callable[[], object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        asked()
