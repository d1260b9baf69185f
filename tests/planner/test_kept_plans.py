"""A plan that was kept for the next start is used only for the very question, and only as long as it holds."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forgeries import forged
from launches import OneProcess
from plans import QUESTION, small_cluster, small_graph

from phaze.cost import Estimate
from phaze.hardware import AcceleratorArray
from phaze.hooks import PluginManager
from phaze.ir import Graph, Op
from phaze.plan.plan import Plan
from phaze.planner.launch import cache_path, plan_together
from phaze.planner.planning import plan_for
from phaze.planner.progress import Watch
from phaze.question import Question, ask


@pytest.fixture
def question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Question:
    """A question whose answers are kept in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options: Any = {"cluster": small_cluster(), **QUESTION}
    return ask(small_graph(), None, options, PluginManager.load())


def planned(question: Question, answer: Callable[[Question], Plan] | None = None) -> Plan:
    return plan_together(OneProcess(), lambda: question, answer or (lambda asked: plan_for(asked, Watch())))


def test_a_kept_plan_is_used_for_the_same_question(question: Question) -> None:
    first, second = planned(question), planned(question)
    assert [plan.run.is_cached for plan in (first, second)] == [False, True]
    assert replace(second, run=first.run) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["layouts"]["parameters"].update({"x": []}),
        lambda document: document["hashes"].update(graph="0" * 64),
        lambda document: document["energy"].update(
            compute_j=document["energy"]["compute_j"] * 2, total_j=document["energy"]["total_j"] * 2
        ),
        lambda document: document["question"].update(gap=0.5),
    ],
)
def test_a_kept_plan_that_was_forged_is_made_anew(question: Question, change: Callable[[Any], object]) -> None:
    first = planned(question)
    path = cache_path(question)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(forged(document)))
    again = planned(question)
    assert not again.run.is_cached
    assert replace(again, run=first.run) == first


def test_a_plan_of_another_model_under_the_name_of_this_question_is_not_used(question: Question) -> None:
    other = replace(question, graph=small_graph(num_layers=3).with_backward())
    plan_for(other, Watch()).save(_made(cache_path(question)))
    assert planned(question).model.layers == 6


def test_prices_of_plugins_are_part_of_the_question(question: Question) -> None:
    def dear(graph: Graph, op: Op, chips: AcceleratorArray) -> Estimate:
        raise NotImplementedError

    assert cache_path(replace(question, prices={"softmax": dear})) != cache_path(question)


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
