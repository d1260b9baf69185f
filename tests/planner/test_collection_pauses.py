"""How often the garbage collector looks while a plan is searched for, and afterwards."""

import gc

import pytest
from plans import QUESTION, small_cluster, small_graph

import phaze
from phaze.planner import Progress
from phaze.planner.progress import rare_collections


def fail_inside() -> None:
    with rare_collections():
        raise ValueError("inside")


def test_the_collector_looks_rarely_while_planning_and_as_often_as_before_afterwards() -> None:
    before, inside = gc.get_threshold(), []

    def listen(progress: Progress) -> None:
        inside.append(gc.get_threshold())

    phaze.optimize(small_graph(), cluster=small_cluster(), progress=listen, **QUESTION)
    assert {threshold[0] for threshold in inside} == {50_000}
    assert gc.get_threshold() == before
    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert gc.get_threshold() == before


@pytest.mark.parametrize("rarely", [0, 100_000])
def test_a_collector_that_looks_never_or_more_rarely_is_left_alone(rarely: int) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(rarely, 10, 10)
        with rare_collections():
            assert gc.get_threshold() == (rarely, 10, 10)
        assert gc.get_threshold() == (rarely, 10, 10)
    finally:
        gc.set_threshold(*before)
