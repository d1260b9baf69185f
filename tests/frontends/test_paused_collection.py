"""The pause of the garbage collector while a model is imported."""

import gc

import pytest

from phaze.frontends.paused_collection import paused_collection


def fail_while_paused() -> None:
    with paused_collection():
        assert not gc.isenabled()
        raise ValueError("inside")


def test_the_collector_is_off_inside_and_on_again_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"):
        fail_while_paused()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
