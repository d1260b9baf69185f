"""`phaze.fit`: whether a model fits, what takes the memory, and changes that really make it fit."""

import pytest
from plans import QUESTION, small_cluster, small_graph

import phaze

ROOMY, TIGHT_MIB = 80 * 2**30, 150


def test_a_model_with_room_fits_and_its_items_add_up() -> None:
    answer = phaze.fit(small_graph(), cluster=small_cluster(ROOMY), strategy={"dp": 8}, **QUESTION)
    assert answer.fit == "fits"
    assert sum(answer.items_gib.values()) == pytest.approx(answer.total_gib)
    assert answer.capacity_gib == 80
    assert answer.changes == ()
    assert str(answer).startswith("FITS: small-gpt on 8 x ideal-a100")


def test_a_strategy_that_does_not_fit_is_told_with_the_changes_that_do() -> None:
    question = {**QUESTION, "cluster": small_cluster(TIGHT_MIB * 2**20)}
    strategy = {"dp": 8, "zero": 0, "recompute": "none", "micro_batch_size": 2}
    answer = phaze.fit(small_graph(), strategy=strategy, **question)
    assert answer.fit == "over"
    assert answer.total_gib > answer.capacity_gib
    assert 0 < len(answer.changes) <= 3
    times = [change.step_time_s for change in answer.changes]
    assert times == sorted(times)  # type: ignore[type-var]
    assert "DOES NOT FIT" in str(answer)
    named = {change.text: change for change in answer.changes}
    sharded = [int(text.removeprefix("ZeRO-")) for text in named if text.startswith("ZeRO-")]
    assert sharded
    changed = phaze.evaluate(small_graph(), strategy={**strategy, "zero": sharded[0]}, compares=False, **question).plan
    assert changed.is_feasible
    assert changed.step_time_s == named[f"ZeRO-{sharded[0]}"].step_time_s


def test_without_a_strategy_the_question_is_whether_any_plan_fits() -> None:
    assert phaze.fit(small_graph(), cluster=small_cluster(ROOMY), **QUESTION).fit == "fits"
    answer = phaze.fit(small_graph(), cluster=small_cluster(10 * 2**20), **QUESTION)
    assert answer.fit == "over"
    assert [change.text for change in answer.changes] == [remedy.text for remedy in answer.plan.remedies[:3]]
