"""Names of locations and of pytree paths, as JAX and HLO write them, become module paths."""

import pytest

from phaze.frontends.stablehlo.name_scopes import Scope, Trip, path_keys, scope_words, split_number


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ("jit(f)/jvp(layer_0)/attn/dot_general", ["layer", "0", "attn"]),
        ("jit(f)/transpose(jvp(layer_0))/attn/dot_general", ["layer", "0", "attn"]),
        (
            "jit(f)/transpose(jvp(GPT))/Block_12/checkpoint/rematted_computation/Dense_0/add",
            [*["GPT", "Block", "12", "Dense", "0"]],
        ),
        ("jit(f)/jvp()/bshd,bthd->bhst/dot_general", []),
        ("jit(f)/jvp(jit(log_softmax))/sub", []),
        ("add.7", []),
        ("", []),
    ],
)
def test_scopes_are_modules_without_transformations_and_control_flow(scope: str, words: list[object]) -> None:
    assert list(scope_words(Scope(location=scope))) == words


def test_a_scope_inside_a_function_continues_that_of_its_call() -> None:
    call = Scope(location="jit(f)/jvp(layer_0)/closed_call")
    assert list(scope_words(call.inside("mlp/dot_general"))) == ["layer", "0", "mlp"]
    assert Scope().inside("jit(f)/add") == Scope((), "jit(f)/add")


def test_a_whole_scope_keeps_the_trips_that_it_is_in() -> None:
    body = Scope(location="jit(f)/jvp(h)/while").at_trip(Trip(3, 7))
    assert list(scope_words(body.inside("norm/mul"))) == ["h", Trip(3, 7), "norm"]
    assert body.inside("jit(f)/while/body/add") == Scope((Trip(3, 7),), "jit(f)/while/body/add")


@pytest.mark.parametrize("path", ["params['h'][0]['ln_1'].w", "params__h___0___ln_1____w__.1", "params.h.0.ln_1.w"])
def test_paths_of_every_spelling_have_the_same_keys(path: str) -> None:
    assert path_keys(path) == ("params", "h", "0", "ln_1", "w")


def test_a_number_at_the_end_of_a_word_is_a_child_s() -> None:
    assert split_number("Block_3") == ("Block", "3")
    assert split_number("argument3") == ("argument3",)
