"""A damaged plan or search gives a page or a clear error, whatever is wrong in it."""

import copy
import json
from contextlib import suppress
from functools import cache
from typing import Any

from designs import SMALL, some_points, tiny_model
from forgeries import forged
from hypothesis import given
from hypothesis import strategies as st
from plans import QUESTION, small_cluster, small_graph

import phaze
from phaze.errors import FormatError, HardwareError, PlacementError
from phaze.explore.saved_search import search_from_document
from phaze.plan.plan import plan_from_document

WRONG = st.sampled_from([None, -1, 0, 1, 3, 1e300, -2.5, 0.5, "x", "", True, [], {}, [0], {"x": 1}])


@cache
def plan_text() -> str:
    strategy = {"dp": 4, "pp": 2, "schedule": "1f1b"}
    return phaze.evaluate(
        small_graph(), cluster=small_cluster(), strategy=strategy, compares=False, **QUESTION
    ).plan.to_json()


@cache
def search_text() -> str:
    return phaze.search(tiny_model(), space=some_points(3), executor="serial", **SMALL).to_json()


def damaged(document: Any, data: st.DataObject) -> Any:
    """The document with one value, drawn at random depth, changed or removed."""
    document = copy.deepcopy(document)
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and data.draw(st.integers(0, 5)):
            place = inner
            continue
        if data.draw(st.booleans()) and len(place) > 1:
            del place[key]
        else:
            place[key] = data.draw(WRONG)
        return document


@given(st.data())
def test_a_damaged_plan_is_refused_or_drawn(data: st.DataObject) -> None:
    document = damaged(json.loads(plan_text()), data)
    with suppress(FormatError, HardwareError, PlacementError):
        assert plan_from_document(forged(document)).to_html().startswith("<!doctype html>")


@given(st.data())
def test_a_damaged_search_is_refused_or_drawn(data: st.DataObject) -> None:
    document = damaged(json.loads(search_text()), data)
    with suppress(FormatError, HardwareError):
        assert search_from_document(forged(document)).to_html().startswith("<!doctype html>")
