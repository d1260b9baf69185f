"""Small pictures for terminals: as long as what they stand for, and legible without colours."""

import re

import pytest
from plans import QUESTION, small_cluster, small_graph, small_plan

import phaze
from phaze.place.simulation.timeline import KINDS, EventKind
from phaze.report.terminal_pictures import memory_picture, timeline_picture


def test_a_memory_bar_is_as_long_as_its_share_of_the_device() -> None:
    plan = small_plan(600)
    bar = memory_picture(plan).plain.splitlines()[0]
    memory = plan.stages[0].memory_bytes
    drawn = re.fullmatch(r" +0 ([pgoawbr]+)(·*) [\d.]+ of \d+ GiB, (fits|marginal)", bar)
    assert drawn is not None
    assert len(drawn[1]) == pytest.approx(50 * memory["total"] / memory["capacity"], abs=0.51)
    assert len(drawn[1] + drawn[2]) == 50


def test_the_timelines_letters_take_as_much_of_a_row_as_their_events_of_the_step() -> None:
    strategy = {"dp": 4, "pp": 2, "schedule": "1f1b"}
    plan = phaze.evaluate(
        small_graph(), cluster=small_cluster(), strategy=strategy, compares=False, **{**QUESTION, "micro_batch_size": 1}
    ).plan
    rows = timeline_picture(plan).plain.splitlines()
    assert len(rows) == 3
    table = plan.timeline().table
    backward = (table.device == 1) & (table.kind == KINDS.index(EventKind.BACKWARD))
    share = float((table.end_s - table.start_s)[backward].sum()) / plan.step_time_s
    row = rows[1].split()[1]
    assert len(row) == 50
    assert row.count("B") / 50 == pytest.approx(share, abs=0.15)
    assert row[0] == "."  # the second place waits for the first
    assert "backward" in rows[2]
